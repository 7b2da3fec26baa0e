"""``rose demo``: one GRPO job on real engines, with and without borrowed devices, beside a live serving model.

What runs: an FSDP2 or Megatron-Core learner (two processes), environments (processes), dedicated and borrowed engines, serving
engines of another model with their clients in a process of their own, and a relay that carries sparse deltas. Engines are vLLM's or
SGLang's, on either side. Devices are paced: engines, tokens and weights are real and tiny, step times are those of a named GPU and model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from rose.errors import BackendUnavailableError, ConfigError, EngineLostError
from rose.observe.latency import Slo
from rose.observe.live import LiveState, LiveView
from rose.observe.metrics import MetricsLog
from rose.observe.report import write_report
from rose.policies.admission import Mode
from rose.reference.arms import ArmResult, Job
from rose.reference.demo_config import DemoConfig
from rose.reference.demo_models import make_serving_model, policy_models
from rose.reference.demo_report import FleetLogs, RunRecord, build_figures, build_report, build_timeline
from rose.reference.engines import check_engines
from rose.reference.env_workers import EnvironmentPool
from rose.reference.environment import load_environment
from rose.reference.fleet import SERVING_MAX_MODEL_LEN, SERVING_VOCAB, Fleet, check_profiles
from rose.reference.learner_config import GrpoConfig, LearnerConfig, WarmStartConfig
from rose.reference.learner_group import LearnerGroup
from rose.reference.load import ServingLoad, plan_load
from rose.reference.progress import Progress
from rose.reference.serving_site import ServingSite

_MAX_OUTPUT_TOKENS = 2048
_LIBRARIES = ("torch", "transformers", "gymnasium", "matplotlib")
_CLIENT_NICENESS = 5  # engines go before their clients; for this thread alone


@attrs.frozen(kw_only=True)
class DemoResult:
    """What a demo leaves: the object of ``summary.json``, and the folder with all its files."""

    summary: Mapping[str, Any]
    out: Path


async def run_demo(config: DemoConfig, *, view: LiveView) -> DemoResult:
    """Run the demo and write ``summary.json``, ``metrics.jsonl``, ``timeline.json`` and ``report.html``.

    Raises:
        ConfigError: Something in the configuration cannot be used; raised before anything heavy starts.
        TransportError: The relay's port is taken.
        BackendUnavailableError: An engine's library, torch or matplotlib is not installed.
    """
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")  # a dozen processes; their arenas would be gigabytes
    check_libraries(config.trainer)
    check_engines(config.engines, sglang_python=config.sglang_python)
    check_profiles(config)
    environment = load_environment(config.env)
    load = _plan_load(config)
    out = _make_folder(config.out)
    async with contextlib.AsyncExitStack() as stack:
        metrics = stack.enter_context(MetricsLog(out / "metrics.jsonl"))
        fleet = Fleet.prepare(config)
        stack.push_async_callback(fleet.close)
        slo = Slo(ttft_ms=config.slo_ttft_ms, tpot_ms=config.slo_tpot_ms)
        progress = Progress(view, fleet.clock, _blank_state(config, slo))
        learner = await stack.enter_async_context(LearnerGroup(_learner_config(config)))
        episodes = await stack.enter_async_context(EnvironmentPool(config.env, num_processes=config.num_env_processes))
        site = await _start_engines(stack, config, fleet=fleet, learner=learner, load=load, progress=progress)
        job = Job(
            config=config,
            environment=environment,
            fleet=fleet,
            learner=learner,
            episodes=episodes,
            site=site,
            metrics=metrics,
            progress=progress,
            slo=slo,
        )
        os.nice(_CLIENT_NICENESS)
        record = await _run_watched(job, load)
    return _write(record, out)


def check_libraries(trainer: str = "fsdp") -> None:
    """Refuse to start without a library that some process of the demo will need.

    Args:
        trainer: What trains the policy.

    Raises:
        BackendUnavailableError: Names what is missing and the extra that brings it.
    """
    wanted = (*_LIBRARIES, "megatron") if trainer == "megatron" else _LIBRARIES
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        message = f"the demo needs {', '.join(missing)}, not installed here; run: pip install 'rose-rl[demo]'"
        raise BackendUnavailableError(message)


def _plan_load(config: DemoConfig) -> ServingLoad:
    return plan_load(
        config.trace,
        rate_rps=config.rate_rps,
        offset_s=config.trace_offset_s,
        num_devices=config.num_borrowed,
        seed=config.seed,
        max_prompt_tokens=SERVING_MAX_MODEL_LEN - _MAX_OUTPUT_TOKENS,
        max_output_tokens=_MAX_OUTPUT_TOKENS,
    )


def _make_folder(path: str) -> Path:
    out = Path(path)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.jsonl").write_text("", encoding="utf-8")
    except OSError as error:
        message = f"out = {path!r} cannot be written ({error.strerror}); choose a folder that you may write to"
        raise ConfigError(message) from error
    return out


def _learner_config(config: DemoConfig) -> LearnerConfig:
    return LearnerConfig(
        environment=config.env,
        seed=config.seed,
        trainer=config.trainer,
        num_ranks=config.num_learner_ranks,
        warm_start=WarmStartConfig(num_steps=config.warm_start_steps),
        grpo=GrpoConfig(lr=config.learn_lr, num_minibatches=config.learn_minibatches),
    )


def _blank_state(config: DemoConfig, slo: Slo) -> LiveState:
    return LiveState(
        arm="set-up",
        step=0,
        num_steps=config.steps,
        phase="starting",
        slo_ttft_ms=slo.ttft_ms,
        slo_tpot_ms=slo.tpot_ms,
    )


async def _start_engines(
    stack: contextlib.AsyncExitStack,
    config: DemoConfig,
    *,
    fleet: Fleet,
    learner: LearnerGroup,
    load: ServingLoad,
    progress: Progress,
) -> ServingSite:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rose-models-")))
    progress.phase("warm start of the policy")
    if config.warm_start_steps:
        await learner.warm_start()
    await learner.save_checkpoint(folder / "policy")
    serving_model = await asyncio.to_thread(make_serving_model, folder / "serving", seed=config.seed)
    models = policy_models(folder / "policy", serving_model, load_environment(config.env))
    progress.phase("starting serving engines")
    site = await ServingSite.start(
        fleet.serving_specs(config, models), load, clock_path=Path(fleet.clock.path), vocab_size=SERVING_VOCAB
    )
    stack.push_async_callback(site.close)
    fleet.clock.unfreeze()
    await site.warm_up()
    fleet.clock.freeze()
    progress.phase("starting rollout engines")
    await fleet.start(config, models)
    return site


async def _run_watched(job: Job, load: ServingLoad) -> RunRecord:
    """Run the arms beside the live view; the loss of a dedicated engine ends the run instead of hanging it."""
    async with asyncio.TaskGroup() as group:
        watches = [group.create_task(job.progress.run(job.site)), group.create_task(job.raise_on_loss())]
        record = await _run_arms(job, load)
        for watch in watches:
            watch.cancel()
    return record


async def _run_arms(job: Job, load: ServingLoad) -> RunRecord:
    """Run fixed, uncapped, rose and ungated, and take each arm's step logs."""
    config, began_s = job.config, time.monotonic()
    arms: dict[str, ArmResult] = {}
    logs: dict[str, FleetLogs] = {}

    async def keep(result: ArmResult) -> None:
        arms[result.name] = result
        logs[result.name] = taken = await _take_logs(job, result.started_s)
        for engine, log in taken.engines.items():
            job.metrics.write("pacing", arm=result.name, engine=engine, **attrs.asdict(log.pacing()))

    await keep(await job.train_arm("fixed", has_borrowed=False))
    if config.uncapped_steps:
        await keep(await job.rollout_arm("uncapped", config.uncapped_steps, has_borrowed=False, is_capped=False))
    await keep(await job.train_arm("rose", has_borrowed=True))
    if config.ungated_steps:
        job.fleet.lender.set_mode(Mode.UNGATED)
        await keep(await job.rollout_arm("ungated", config.ungated_steps, has_borrowed=True))
    job.metrics.write("end", wall_s=time.monotonic() - began_s)
    return RunRecord(
        config=config,
        slo=job.slo,
        load_source=load.source,
        shared_devices=tuple(job.fleet.ledgers),
        arms=arms,
        logs=logs,
    )


async def _take_logs(job: Job, since_s: float) -> FleetLogs:
    own = {}
    for engine in job.fleet.engines:
        with contextlib.suppress(EngineLostError):  # the report says whose turns are missing
            own[engine.engine_id] = await engine.step_log(since_s)
    return FleetLogs.read({**own, **await job.site.step_logs(since_s)}, job.fleet.devices)


def _write(record: RunRecord, out: Path) -> DemoResult:
    summary, timeline = build_figures(record), build_timeline(record)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    timeline.write(out / "timeline.json")
    write_report(out / "report.html", build_report(record, summary, timeline))
    return DemoResult(summary=summary, out=out)
