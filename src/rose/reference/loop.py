"""The reference loop: roll out, train, publish, in the order that an algorithm allows.

On policy (``grpo``, ``dapo``)
    1. [LOOP] asks for the groups of step n at exactly version n - 1, while the sync of that version still goes on: engines that have it
       begin, borrowed ones that still fetch it join.
    2. [LOOP] trains on them, publishes version n and begins its sync.
Asynchronous (``async``)
    1. [LOOP] has the groups of step n, and at once asks for those of step n + 1, at no version that would be too old once they are trained on.
    2. [LOOP] drops what is too old by its oldest token, trains on the rest, publishes and begins the sync, while the engines go on.

Invariants: no trajectory is trained on whose oldest token lies more than the bound behind the weights that are trained; versions are
published in order, each synced before the next; a step of which nothing came back ends the run with what the last engine or
environment said.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from rose.errors import EngineError, RoseError, TurnFailedError
from rose.interfaces import Clock
from rose.reference.algorithms import Algorithm
from rose.reference.environment import Environment
from rose.reference.groups import (
    GroupBook,
    GroupRules,
    StepGroups,
    oldest_version,
    split_stale,
    without_groups_of,
)
from rose.reference.learner_group import TrainReport
from rose.reference.rollout import Episodes, RolloutContext, rollout_groups
from rose.reference.trajectory import Trajectory, TrajectoryPlan, derive_seed, plan_groups
from rose.types import AtLeast, Exactly, TransportAddress, Turn, TurnResult, VersionConstraint

_SYNC_RETRY_S = 0.5
_NUM_TRAINING_SEEDS = 1 << 30


class Pool(Protocol):
    """What the loop needs of a pool, in this process or behind a URL."""

    async def generate(self, turn: Turn) -> TurnResult:
        """Run one turn."""

    async def sync_weights(self, source: Any) -> Any:
        """Bring the engines to the newest weights; the answer has ``activations``, ``unchanged`` and ``errors`` by engine."""


@runtime_checkable
class SupportsExpect(Protocol):
    """A pool that can be told of a rollout before it begins, so that borrowed engines are there then."""

    def expect(self, num_trajectories: int, *, at_s: float | None = None) -> None:
        """Announce demand."""


class Learner(Protocol):
    """What the loop needs of a learner."""

    async def train(self, trajectories: Sequence[Trajectory]) -> TrainReport:
        """Do one training step."""

    async def publish(self, *, run: str, address: TransportAddress, is_anchor: bool = False) -> Mapping[str, Any]:
        """Publish the next version."""


@attrs.frozen(kw_only=True)
class LoopSettings:
    """What a run of the loop does; see ``rose.reference.loop_config.LoopConfig``."""

    run: str
    seed: int
    num_steps: int
    group_size: int
    rules: GroupRules
    algorithm: Algorithm
    max_staleness: int
    first_sync_timeout_s: float = 60.0


@attrs.frozen(kw_only=True)
class StepReport:
    """One step. Times are seconds on the loop's clock.

    Attributes:
        reward: Mean over the trajectories that came back whole.
        groups: What the groups came to, without the trajectories.
        num_tokens: Tokens that the policy made in them.
        num_turns: Turns in them.
        num_stale: Trajectories dropped because their oldest token was too old.
        num_trained: Trajectories that the learner was given.
        staleness: How many of those lie how many versions behind, by their oldest token.
        rollout_s: From the first request to the last answer.
        train_s: Of training and publishing.
        sync_s: Of the sync of the version that this step began with.
        sync_overlap_s: Part of that in which turns of the step were answered already.
        train_overlap_s: Part of the training in which the next rollout was under way.
        train: The learner's own report.
    """

    step: int
    reward: float
    groups: Mapping[str, Any]
    num_tokens: int
    num_turns: int
    num_stale: int
    num_trained: int
    staleness: Mapping[int, int]
    rollout_s: float
    train_s: float
    sync_s: float
    sync_overlap_s: float
    train_overlap_s: float
    train: TrainReport


@attrs.define
class _Span:
    """When something went on; ``first_s`` is when it gave its first result."""

    start_s: float = 0.0
    first_s: float = float("inf")
    end_s: float = float("inf")

    def overlap_s(self, other: _Span, *, since_first: bool = False) -> float:
        start_s = self.first_s if since_first else self.start_s
        return max(0.0, min(self.end_s, other.end_s) - max(start_s, other.start_s))


@attrs.define
class _Rollout:
    groups: StepGroups
    span: _Span


@attrs.define
class _Work:
    """What is known of one step until it is reported. ``sync`` brought the weights that it began with."""

    rollout: _Rollout
    trained: Sequence[Trajectory]
    sync: _Span
    num_stale: int = 0
    training: _Span = attrs.field(factory=_Span)
    next_rollout: _Span | None = None
    train: TrainReport | None = None


class Loop:
    """Runs one job. All methods from one event loop.

    Args:
        settings: What it does.
        pool: Where turns run.
        learner: What trains.
        episodes: Where episodes are played.
        environment: Whose they are.
        source: What ``pool.sync_weights`` is given: the transport, or another source of updates.
        address: Where the learner publishes.
        clock: For what is reported.
        context: Changes what ``RolloutContext.of`` gives, for limits and temperature.
        on_step: Called with each step's report.
        on_phase: Called with the step and what begins.
    """

    def __init__(
        self,
        settings: LoopSettings,
        *,
        pool: Pool,
        learner: Learner,
        episodes: Episodes,
        environment: type[Environment],
        source: Any,
        address: TransportAddress,
        clock: Clock,
        context: Mapping[str, Any] | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        on_phase: Callable[[int, str], None] | None = None,
    ) -> None:
        self._settings = settings
        self._pool, self._learner = pool, learner
        self._source, self._address, self._clock = source, address, clock
        self._on_step, self._on_phase = on_step, on_phase
        self._base = attrs.evolve(
            RolloutContext.of(environment, generate=pool.generate, episodes=episodes, clock=clock), **(context or {})
        )
        self._sync_span = _Span()
        self._syncing: asyncio.Task[None] | None = None

    async def run(self) -> list[StepReport]:
        """Run every step; returns their reports.

        Raises:
            EngineError: No engine took new weights.
            TurnFailedError: A step brought back nothing.
        """
        async with asyncio.TaskGroup() as group:
            self._tell(0, "first weights")
            self._announce(0.0)
            await self._learner.publish(run=self._settings.run, address=self._address, is_anchor=True)
            await self._first_sync()
            steps = self._run_async if self._settings.algorithm.is_async else self._run_on_policy
            reports = await steps(group)
            await self._synced()
            return reports

    async def _run_on_policy(self, group: asyncio.TaskGroup) -> list[StepReport]:
        reports: list[StepReport] = []
        for step in range(1, self._settings.num_steps + 1):
            self._tell(step, "rollout")
            rollout = await self._roll_out(step, Exactly(step - 1))
            work = _Work(rollout, list(rollout.groups.trajectories), self._sync_span)
            self._tell(step, "training")
            if step < self._settings.num_steps:
                self._announce(reports[-1].train_s if reports else 0.0)
            await self._train(work)
            self._begin_sync(group)
            reports.append(self._report(step, work))
        return reports

    async def _run_async(self, group: asyncio.TaskGroup) -> list[StepReport]:
        settings, reports = self._settings, []
        rollout = group.create_task(self._roll_out(1, AtLeast(0)))
        for step in range(1, settings.num_steps + 1):
            self._tell(step, "rollout")
            done, began = await rollout, self._sync_span
            whole = done.groups.trajectories
            fresh, stale = split_stale(whole, newest=step - 1, max_staleness=settings.max_staleness)
            work = _Work(done, without_groups_of(fresh, stale, settings.rules.lost), began, num_stale=len(stale))
            if step < settings.num_steps:
                oldest = AtLeast(max(0, step - settings.max_staleness))
                work.next_rollout = _Span(self._clock.now())
                rollout = group.create_task(self._roll_out(step + 1, oldest, work.next_rollout))
            self._tell(step, "training, and the next rollout")
            await self._train(work)
            self._begin_sync(group)
            reports.append(self._report(step, work))
        return reports

    async def _roll_out(self, step: int, versions: VersionConstraint, span: _Span | None = None) -> _Rollout:
        settings, span = self._settings, span or _Span(self._clock.now())
        book = GroupBook(settings.rules, lambda number: self._plan(step, number))

        async def generate(turn: Turn) -> TurnResult:
            result = await self._pool.generate(turn)
            span.first_s = min(span.first_s, self._clock.now())
            return result

        groups = await rollout_groups(attrs.evolve(self._base, generate=generate, versions=versions), book)
        span.end_s = self._clock.now()
        if not groups.trajectories and not groups.num_flat:
            message = (
                f"step {step} brought back no group: {groups.num_lost} trajectories failed in {groups.num_started} groups; "
                f"the last one: {groups.last_failure}"
            )
            raise TurnFailedError(message)
        return _Rollout(groups, span)

    def _plan(self, step: int, number: int) -> list[TrajectoryPlan]:
        """Plan a step's n-th group; the same episodes and samples wherever, whenever and by whatever they are run."""
        settings = self._settings
        seed = (derive_seed(settings.seed, "episodes", step) + number) % _NUM_TRAINING_SEEDS
        return plan_groups(f"step{step}/{number}", [seed], group_size=settings.group_size, run_seed=settings.seed)

    async def _train(self, work: _Work) -> None:
        work.training.start_s = self._clock.now()
        work.train = await self._learner.train(work.trained)
        await self._synced()
        await self._learner.publish(run=self._settings.run, address=self._address)
        work.training.end_s = self._clock.now()

    def _announce(self, after_s: float) -> None:
        """Tell the pool of the next rollout, which begins about as long after this as the last training took."""
        if isinstance(self._pool, SupportsExpect):
            num = self._settings.rules.num_groups * self._settings.group_size
            self._pool.expect(num, at_s=self._clock.now() + after_s)

    async def _synced(self) -> None:
        """Wait until the version that was published last has reached the engines."""
        if self._syncing is not None:
            await self._syncing

    async def _first_sync(self) -> None:
        """Bring the first weights to the engines; a relay that has yet to come up is waited for."""
        ends_s = self._clock.now() + self._settings.first_sync_timeout_s
        for _ in itertools.count():
            self._sync_span = _Span(self._clock.now())
            try:
                await self._sync(self._sync_span)
            except RoseError:
                if self._clock.now() >= ends_s:
                    raise
                await self._clock.sleep(_SYNC_RETRY_S)
            else:
                return

    def _begin_sync(self, group: asyncio.TaskGroup) -> None:
        self._sync_span = _Span(self._clock.now())
        self._syncing = group.create_task(self._sync(self._sync_span))

    async def _sync(self, span: _Span) -> None:
        """Bring the engines to the newest weights.

        Raises:
            EngineError: None took them, so that turns would wait for ever.
        """
        report = await self._pool.sync_weights(self._source)
        span.end_s = self._clock.now()
        if not report.activations and not report.unchanged:
            errors = "; ".join(f"{engine}: {error}" for engine, error in report.errors.items())
            message = f"no engine took the new weights: {errors or 'there is none'}"
            raise EngineError(message)

    def _report(self, step: int, work: _Work) -> StepReport:
        groups, rollout, newest = work.rollout.groups, work.rollout.span, step - 1
        whole = groups.trajectories
        ages = Counter(newest - oldest for each in work.trained if (oldest := oldest_version(each)) is not None)
        assert work.train is not None  # noqa: S101 - it was trained just now
        report = StepReport(
            step=step,
            reward=sum(each.reward for each in whole) / max(1, len(whole)),
            groups=attrs.asdict(groups, filter=lambda field, _: field.name != "trajectories"),
            num_tokens=sum(each.num_tokens for each in whole),
            num_turns=sum(len(each.turns) for each in whole),
            num_stale=work.num_stale,
            num_trained=len(work.trained),
            staleness=dict(sorted(ages.items())),
            rollout_s=rollout.end_s - rollout.start_s,
            train_s=work.training.end_s - work.training.start_s,
            sync_s=work.sync.end_s - work.sync.start_s,
            sync_overlap_s=rollout.overlap_s(work.sync, since_first=True),
            train_overlap_s=0.0 if work.next_rollout is None else work.training.overlap_s(work.next_rollout),
            train=work.train,
        )
        if self._on_step is not None:
            self._on_step(report)
        return report

    def _tell(self, step: int, phase: str) -> None:
        if self._on_phase is not None:
            self._on_phase(step, phase)
