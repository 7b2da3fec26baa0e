"""The arms of the demo: the same job with and without borrowed engines, and what each gave.

Life cycle of a step: the modelled clock runs while trajectories roll out and serving answers its load; it stands still while
the learner really trains, publishes and the engines take the new weights in. Training costs one modelled constant instead.

Invariants: an arm begins from the warm start's weights and seeds, whatever ran before; the serving load begins anew with
each arm; weights are compared with the learner's own after every sync, engine by engine, tensor by tensor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import attrs

from rose.errors import EngineError, EngineLostError
from rose.observe.latency import Slo
from rose.observe.metrics import MetricsLog
from rose.observe.rollout import TrajectoryTime, completion_s
from rose.observe.summary import VersionRecord
from rose.policies.routing import RoutingConfig
from rose.pool import (
    EngineAccount,
    EngineState,
    EngineStateChanged,
    PoolConfig,
    PoolEvent,
    RolloutPool,
    SyncReport,
)
from rose.reference.demo_config import DemoConfig
from rose.reference.env_workers import EnvironmentPool
from rose.reference.environment import Environment
from rose.reference.fleet import Fleet
from rose.reference.lake import held_out_seeds, training_seed
from rose.reference.learner_group import LearnerGroup
from rose.reference.progress import Progress
from rose.reference.rollout import RolloutContext, rollout_step
from rose.reference.serving_site import ServingArm, ServingSite
from rose.reference.trajectory import Trajectory, account, derive_seed, plan_groups
from rose.types import EngineId, EngineKind, Exactly

_UNCAPPED = 1_000_000
_DOMINANT = 0.9


@attrs.frozen(kw_only=True)
class StepResult:
    """One RL step. ``times`` are of its trajectories, on the modelled clock; ``version`` is what the step published."""

    step: int
    phase: str
    reward: float
    times: tuple[TrajectoryTime, ...]
    is_whole: bool
    version: VersionRecord | None


@attrs.frozen(kw_only=True)
class ArmResult:
    """What an arm gave. Success is ``None`` where it was not measured.

    Accounts are the pool's, by engine, of the steps alone: evaluations run on every engine and take no modelled time.
    """

    name: str
    started_s: float
    ended_s: float
    steps: tuple[StepResult, ...]
    serving: ServingArm
    success_first: float | None
    success_last: float | None
    is_bit_exact: bool
    accounts: Mapping[EngineId, EngineAccount]


@attrs.define(kw_only=True)
class Job:
    """One RL job on a fleet: everything that its arms share."""

    config: DemoConfig
    environment: type[Environment]
    fleet: Fleet
    learner: LearnerGroup
    episodes: EnvironmentPool
    site: ServingSite
    metrics: MetricsLog
    progress: Progress
    slo: Slo
    _lost: asyncio.Queue[EngineStateChanged] = attrs.field(factory=asyncio.Queue, init=False)

    async def raise_on_loss(self) -> None:
        """Wait until a dedicated engine is lost, which no arm survives.

        Raises:
            EngineLostError: It says which one, and why.
        """
        event = await self._lost.get()
        message = f"engine {event.engine_id} was lost in the middle of the demo: {event.why}"
        raise EngineLostError(message)

    def _hear(self, event: PoolEvent) -> None:
        if not isinstance(event, EngineStateChanged) or event.new is not EngineState.LOST:
            return
        self.metrics.write("engine lost", engine=event.engine_id, why=event.why)
        if event.kind is EngineKind.DEDICATED:
            self._lost.put_nowait(event)

    @contextlib.asynccontextmanager
    async def pool(self, *, has_borrowed: bool, is_capped: bool = True) -> AsyncIterator[RolloutPool]:
        """Open a pool over the job's own engines and, if asked, those beside serving."""
        cap = self.config.cap_per_engine if is_capped else _UNCAPPED
        pool = RolloutPool(
            self.fleet.dedicated,
            config=PoolConfig(routing=RoutingConfig(cap_per_engine=cap)),
            clock=self.fleet.clock,
            on_event=self._hear,
            seed=self.config.seed,
        )
        async with pool, contextlib.AsyncExitStack() as stack:
            if has_borrowed:
                await stack.enter_async_context(self.fleet.lend_to(pool))
            with self.progress.watching(pool):
                yield pool

    async def train_arm(self, name: str, *, has_borrowed: bool) -> ArmResult:
        """Run the whole job once from the warm start."""
        config = self.config
        self.progress.begin_arm(name, config.steps)
        await self.learner.reset()
        async with self.pool(has_borrowed=has_borrowed) as pool:
            exact = [await self._publish(pool, name, 0, "learn", config.learn_lr) is not None]
            success_first = await self._evaluate(pool, f"{name}-before")
            before, started_s = pool.accounts(), self.fleet.clock.now()
            await self.site.begin(name)
            steps = []
            for step in range(1, config.steps + 1):
                steps.append(await self._step(pool, name, step))
                exact.append(steps[-1].version is not None)
            serving = await self.site.end(self.slo)
            accounts, ended_s = accounts_since(before, pool.accounts()), self.fleet.clock.now()
            success_last = await self._evaluate(pool, f"{name}-after")
            return ArmResult(
                name=name,
                started_s=started_s,
                ended_s=ended_s,
                steps=tuple(steps),
                serving=serving,
                success_first=success_first,
                success_last=success_last,
                is_bit_exact=all(exact),
                accounts=accounts,
            )

    async def rollout_arm(self, name: str, num_steps: int, *, has_borrowed: bool, is_capped: bool = True) -> ArmResult:
        """Run rollout steps alone, at the weights that the engines hold."""
        self.progress.begin_arm(name, num_steps)
        async with self.pool(has_borrowed=has_borrowed, is_capped=is_capped) as pool:
            await self._sync(pool)
            started_s = self.fleet.clock.now()
            await self.site.begin(name)
            steps = []
            for step in range(1, num_steps + 1):
                self.progress.at(step, "rollout")
                trajectories, is_whole = await self._roll_out(pool, step)
                steps.append(_result(step, "rollout", trajectories, None, is_whole=is_whole))
                self.metrics.write("step", arm=name, step=step, phase="rollout", reward=steps[-1].reward)
            serving = await self.site.end(self.slo)
            return ArmResult(
                name=name,
                started_s=started_s,
                ended_s=self.fleet.clock.now(),
                steps=tuple(steps),
                serving=serving,
                success_first=None,
                success_last=None,
                is_bit_exact=True,
                accounts=pool.accounts(),
            )

    async def _step(self, pool: RolloutPool, arm: str, step: int) -> StepResult:
        config = self.config
        is_learning = step <= config.learn_steps
        phase = "learn" if is_learning else "sparse"
        lr = config.learn_lr if is_learning else config.sparse_lr
        self.progress.at(step, "rollout")
        trajectories, is_whole = await self._roll_out(pool, step, version=step - 1)
        self.progress.at(step, "training")
        report = await self.learner.train(
            trajectories,
            lr=lr,
            num_minibatches=config.learn_minibatches if is_learning else config.sparse_minibatches,
        )
        self.progress.at(step, "weight sync")
        version = await self._publish(pool, arm, step, phase, lr)
        result = _result(step, phase, trajectories, version, is_whole=is_whole)
        self.progress.step_done(result.reward, version)
        self.metrics.write(
            "step",
            arm=arm,
            step=step,
            phase=phase,
            reward=result.reward,
            num_turns=sum(len(trajectory.turns) for trajectory in trajectories),
            num_tokens=sum(time.num_tokens for time in result.times),
            rollout_s=completion_s(result.times)[-1],
            is_whole=is_whole,
            train=attrs.asdict(report),
            version=None if version is None else attrs.asdict(version),
        )
        return result

    async def _roll_out(
        self, pool: RolloutPool, step: int, *, version: int | None = None
    ) -> tuple[list[Trajectory], bool]:
        """Let the modelled clock run for one rollout. Seeds depend on the step alone, so that arms draw the same samples."""
        config = self.config
        first = training_seed(derive_seed(config.seed, "maps", step))
        seeds = [training_seed(first + group) for group in range(config.num_groups)]
        plans = plan_groups(f"step{step}", seeds, group_size=config.group_size, run_seed=config.seed)
        context = self._context(pool)
        if version is not None:
            context = attrs.evolve(context, versions=Exactly(version))
        self.fleet.clock.unfreeze()
        try:
            trajectories = await rollout_step(context, plans)
        finally:
            self.fleet.clock.freeze()
        return trajectories, account(plans, trajectories).is_whole

    async def _evaluate(self, pool: RolloutPool, label: str) -> float:
        """Return the success on the held-out maps at temperature 1; the clock stands still, so it costs no modelled time."""
        self.progress.phase("evaluation")
        plans = plan_groups(
            "held-out",
            held_out_seeds(self.config.num_eval_maps),
            group_size=self.config.num_eval_episodes,
            run_seed=self.config.seed,
        )
        trajectories = await rollout_step(self._context(pool), plans)
        success = sum(trajectory.reward for trajectory in trajectories) / len(trajectories)
        self.progress.evaluated(success)
        self.metrics.write("evaluation", label=label, success=success, num_episodes=len(trajectories))
        return success

    def _context(self, pool: RolloutPool) -> RolloutContext:
        return RolloutContext.of(
            self.environment, generate=pool.generate, episodes=self.episodes, clock=self.fleet.clock
        )

    async def _publish(self, pool: RolloutPool, run: str, step: int, phase: str, lr: float) -> VersionRecord | None:
        """Publish the learner's weights and bring every engine to them; ``None`` if any engine's bits differ."""
        published = await self.learner.publish(run=run, address=self.fleet.relay.address(), is_anchor=step == 0)
        report = await self._sync(pool)
        is_exact = not report.errors and await self._engines_match(report)
        record = _version_record(published, report, n=step, phase=phase, lr=lr)
        self.metrics.write(
            "sync",
            run=run,
            is_bit_exact=is_exact,
            errors={engine: str(error) for engine, error in report.errors.items()},
            **attrs.asdict(record),
        )
        return record if is_exact else None

    async def _sync(self, pool: RolloutPool) -> SyncReport:
        """Bring the engines to the newest weights.

        Raises:
            EngineError: No dedicated engine took them, so that turns would wait for ever.
        """
        report = await pool.sync_weights(self.fleet.relay)
        failures = [report.errors.get(engine.engine_id) for engine in self.fleet.dedicated]
        if all(failure is not None for failure in failures):
            message = f"no dedicated engine took the new weights: {failures[0]}"
            raise EngineError(message)
        return report

    async def _engines_match(self, report: SyncReport) -> bool:
        wanted = await self.learner.state_checksums()
        engines = [engine for engine in self.fleet.engines if engine.engine_id in report.activations]
        return bool(engines) and all([await engine.weight_checksums() == wanted for engine in engines])


def _result(
    step: int, phase: str, trajectories: Sequence[Trajectory], version: VersionRecord | None, *, is_whole: bool
) -> StepResult:
    times = tuple(
        TrajectoryTime(started_s=t.started_s, ended_s=t.ended_s, num_tokens=t.num_tokens) for t in trajectories
    )
    reward = sum(trajectory.reward for trajectory in trajectories) / len(trajectories)
    return StepResult(step=step, phase=phase, reward=reward, times=times, is_whole=is_whole, version=version)


def _version_record(
    published: Mapping[str, Any], report: SyncReport, *, n: int, phase: str, lr: float
) -> VersionRecord:
    elements = {codec: count for codec, count in published["codec_elements"].items() if count and codec != "none"}
    total = sum(elements.values())
    codec = max(elements, key=lambda name: elements[name]) if elements else "none"
    activations = report.activations.values()
    return VersionRecord(
        n=n,
        phase=phase,
        lr=lr,
        changed_fraction=published["num_changed"] / published["num_elements"],
        codec=codec if not total or elements[codec] > _DOMINANT * total else "mixed",
        bytes_dense=published["bytes_dense"],
        bytes_sent=published["bytes_sent"],
        stage_s=max((activation.stage_s for activation in activations), default=0.0),
        pause_s=max((activation.pause_s for activation in activations), default=0.0),
    )


def accounts_since(
    before: Mapping[EngineId, EngineAccount], now: Mapping[EngineId, EngineAccount]
) -> dict[EngineId, EngineAccount]:
    """Return what each engine did between two readings of a pool's accounts."""
    return {
        engine_id: later if (earlier := before.get(engine_id)) is None else _difference(later, earlier)
        for engine_id, later in now.items()
    }


def _difference(later: EngineAccount, earlier: EngineAccount) -> EngineAccount:
    return EngineAccount(
        kind=later.kind,
        num_attempts=later.num_attempts - earlier.num_attempts,
        num_tokens=later.num_tokens - earlier.num_tokens,
        num_ended={end: count - earlier.num_ended[end] for end, count in later.num_ended.items()},
        num_rerouted=later.num_rerouted - earlier.num_rerouted,
        busy_s=later.busy_s - earlier.busy_s,
    )


def borrowed_accounts(result: ArmResult) -> list[EngineAccount]:
    """Return the accounts of the arm's borrowed engines."""
    return [account_ for account_ in result.accounts.values() if account_.kind is EngineKind.BORROWED]
