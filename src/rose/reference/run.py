"""``rose run``: the reference loop on the pool that a job file describes, or on one that runs already.

Life cycle:

1. [RUN] starts the learner, warms it up, writes the policy's checkpoint where the job file wants one and there is none.
2. [RUN] opens the store that it publishes to, the environments and the pool; engines start from the checkpoint.
3. [RUN] runs the loop, writing ``metrics.jsonl`` as it goes, then ``summary.json``.
4. [RUN] ends all of it: borrowed devices are given back, engines that it started are ended.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from rose.clocks import MonotonicClock
from rose.errors import ConfigError
from rose.frameworks import PoolPlace
from rose.hosts.job import OpenJob, open_job, open_store
from rose.interfaces import Transport
from rose.observe.metrics import MetricsLog, plain
from rose.pool import EngineAccount
from rose.reference.alfworld import check_alfworld
from rose.reference.env_workers import EnvironmentPool
from rose.reference.environment import Environment, SupportsDemonstrations, load_environment, longest_episode
from rose.reference.learner_config import WarmStartConfig
from rose.reference.learner_group import LearnerGroup
from rose.reference.loop import Loop, StepReport
from rose.reference.loop_config import RunConfig
from rose.types import EngineId

_MOST_RESTARTS = 16

Say = Callable[[str], None]


def check_run(config: RunConfig) -> type[Environment]:
    """Check what would else fail late; returns the environment.

    Raises:
        ConfigError: The environment cannot be used, or its episodes do not fit into the policy's context.
    """
    environment = load_environment(config.loop.environment)
    if config.loop.env == "alfworld":
        check_alfworld()
    longest, most = longest_episode(environment), config.learner.policy.max_positions
    if longest > most:
        message = (
            f"learner.policy.max_positions = {most} is less than the {longest} tokens that an episode of {config.loop.env} may "
            f"take; set it to {longest} or more"
        )
        raise ConfigError(message)
    return environment


async def save_model(config: RunConfig, *, say: Say) -> None:
    """Write the policy's first checkpoint to ``model.path`` and end; executors can start from it.

    Raises:
        TrainerError: A rank of the learner failed.
    """
    environment = check_run(config)
    async with LearnerGroup(config.learner_config) as learner:
        await _warm_start(learner, environment, config.learner.warm_start, say)
        await learner.save_checkpoint(config.model.path)
    say(f"wrote the policy to {config.model.path}")


async def run_job(config: RunConfig, *, say: Say) -> Mapping[str, Any]:
    """Run the whole job; returns what ``summary.json`` holds.

    Args:
        config: The checked job file.
        say: Told what goes on, one line each.

    Raises:
        ConfigError: Something in it cannot be used.
        RoseError: A part could not be started, no engine took new weights, or a step brought back nothing.
    """
    environment, out, began_s = check_run(config), _make_folder(config.loop.out), time.monotonic()
    reports: list[StepReport] = []
    async with contextlib.AsyncExitStack() as stack:
        metrics = stack.enter_context(MetricsLog(out / "metrics.jsonl"))
        store = stack.enter_context(_open_store(config))
        say("starting the learner")
        learner = await stack.enter_async_context(LearnerGroup(config.learner_config))
        await _warm_start(learner, environment, config.learner.warm_start, say)
        if not (config.model.path / "config.json").is_file():
            await learner.save_checkpoint(config.model.path)
        episodes = EnvironmentPool(
            config.loop.environment,
            num_processes=config.loop.num_env_processes,
            timeout_s=config.loop.env_timeout_s,
            max_restarts=_MOST_RESTARTS,
        )
        await stack.enter_async_context(episodes)
        say("opening the pool")
        pool, job = await _open_pool(stack, config)

        def note(report: StepReport) -> None:
            reports.append(report)
            metrics.write("step", **attrs.asdict(report))
            say(_line(report, config.loop.steps))

        loop = Loop(
            config.settings,
            pool=pool,
            learner=learner,
            episodes=episodes,
            environment=environment,
            source=store,
            address=store.address(),
            clock=MonotonicClock(),
            context={
                "temperature": config.loop.temperature,
                "deadline_s": config.loop.turn_timeout_s,
                "trajectory_timeout_s": config.loop.trajectory_timeout_s,
            },
            on_step=note,
            on_phase=lambda step, phase: say(f"step {step}/{config.loop.steps}: {phase}"),
        )
        await loop.run()
        accounts = await pool.accounts() if job is None else job.pool.accounts()
        most = None if job is None or job.lender is None else job.lender.most_held
        summary = summarise(config, reports, accounts, most_leases=most, wall_s=time.monotonic() - began_s)
        (out / "summary.json").write_text(json.dumps(plain(summary), indent=2) + "\n", encoding="utf-8")
        return summary


async def _open_pool(stack: contextlib.AsyncExitStack, config: RunConfig) -> tuple[Any, OpenJob | None]:
    if config.loop.pool is None:
        job = await stack.enter_async_context(open_job(config))
        return job.pool, job
    return await stack.enter_async_context(_place(config, config.loop.pool).connect()), None


def _open_store(config: RunConfig) -> contextlib.AbstractContextManager[Transport]:
    """Open the store of the job file; one that the pool keeps is asked for there."""
    if config.transport.keeper == "pool" and config.loop.pool is not None:
        return contextlib.closing(_place(config, config.loop.pool).open_store()[0])
    return open_store(config.transport)


def _place(config: RunConfig, url: str) -> PoolPlace:
    return PoolPlace.of(url, config.loop.pool_token_file, option="loop.pool", environ={})


async def _warm_start(
    learner: LearnerGroup, environment: type[Environment], settings: WarmStartConfig, say: Say
) -> None:
    if settings.num_steps and isinstance(environment(), SupportsDemonstrations):
        say(f"warm start of the policy: {settings.num_steps} steps")
        losses = await learner.warm_start()
        say(f"warm start: loss {losses[0]:.3f} to {losses[-1]:.3f}")


def _make_folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"loop.out: {out} cannot be made ({error.strerror}); choose a folder that you may write to"
        raise ConfigError(message) from error
    return out


def _line(report: StepReport, num_steps: int) -> str:
    groups = report.groups
    return (
        f"step {report.step}/{num_steps}: reward {report.reward:.3f}, {groups['num_groups']} of {groups['num_started']} groups, "
        f"{report.num_tokens} tokens in {report.num_turns} turns, rollout {report.rollout_s:.2f} s, training {report.train_s:.2f} s, "
        f"sync {report.sync_s:.2f} s ({report.sync_overlap_s:.2f} s of it beside turns), stale {report.num_stale}"
    )


def summarise(
    config: RunConfig,
    reports: list[StepReport],
    accounts: Mapping[EngineId, EngineAccount],
    *,
    most_leases: int | None,
    wall_s: float,
) -> Mapping[str, Any]:
    """Return the object of ``summary.json``: totals, one entry a step, and what each engine did.

    ``most_leases`` is ``None`` where nothing is borrowed, or another process borrows.
    """
    engines: dict[str, dict[str, Any]] = {
        name: {"kind": account.kind.value, "num_tokens": account.num_tokens, "num_attempts": account.num_attempts}
        for name, account in accounts.items()
    }
    num_tokens = sum(engine["num_tokens"] for engine in engines.values())
    borrowed = sum(engine["num_tokens"] for engine in engines.values() if engine["kind"] == "borrowed")
    return {
        "job": config.job.name,
        "env": config.loop.env,
        "algorithm": config.loop.algorithm,
        "wall_s": wall_s,
        "num_steps": len(reports),
        "rewards": [report.reward for report in reports],
        "num_tokens": sum(report.num_tokens for report in reports),
        "num_stale": sum(report.num_stale for report in reports),
        "sync_overlap_s": sum(report.sync_overlap_s for report in reports),
        "train_overlap_s": sum(report.train_overlap_s for report in reports),
        "borrowed_token_fraction": borrowed / num_tokens if num_tokens else 0.0,
        "n_serving": config.resources.n_serving,
        "most_leases": most_leases,
        "engines": engines,
        "steps": [attrs.asdict(report) for report in reports],
    }
