"""The outer loops of RL against the live pool: GRPO step by step, DAPO with dynamic sampling, asynchronous with bounded staleness.

Training takes a stated time on GPUs of its own; a version is published, crosses the links and is activated by the live weight
sync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import attrs

from rose.observe.latency import percentile
from rose.policies.weight_pull import ClusterSnapshot, PullAction, PullCandidate, estimate_loan, plan_pulls
from rose.pool import EngineAccount, RolloutPool, WeightPull
from rose.simulation.outcome import StepOutcome
from rose.simulation.rollouts import TrajectoryRecord, TrajectoryRunner
from rose.simulation.scenario import DapoMode
from rose.simulation.strategies import Strategy
from rose.simulation.supply import Supply
from rose.simulation.trajectories import GroupPlan, TrajectoryPlan, TrajectorySource
from rose.simulation.world import World
from rose.types import EngineId, EngineKind

_MAX_CURVE_POINTS = 64
_P75 = 75.0


@attrs.define(eq=False, kw_only=True)
class Job:
    """One RL job in a world: what its loops share, and what they found.

    Attributes:
        steps, records, floors_s: What is found, step by step; ``floors_s`` is the longest trajectory alone.
        completion: Of the first step.
    """

    world: World
    strategy: Strategy
    supply: Supply
    pool: RolloutPool
    source: TrajectorySource
    runner: TrajectoryRunner
    train_s: float
    alone_s: Callable[[TrajectoryPlan], float]
    steps: list[StepOutcome] = attrs.field(factory=list)
    records: list[TrajectoryRecord] = attrs.field(factory=list)
    floors_s: list[float] = attrs.field(factory=list)
    completion: tuple[tuple[float, float], ...] = ()
    _was_pushed: bool | None = None

    @property
    def num_groups(self) -> int:
        """Groups of one batch."""
        config = self.world.scenario.rollout
        return config.num_trajectories // config.group_size

    def now(self) -> float:
        """Return the virtual time."""
        return self.world.loop.time()

    def is_pushed(self) -> bool:
        """Tell whether the next version crosses to the other cluster before it is visible, or once an engine there asks.

        Under ``economic`` it does when it would pay for the engines that were lent so far.
        """
        is_wanted = self.supply.is_remote and self.world.num_lent > 0
        if is_wanted and self.pool.config.weight_pull is WeightPull.ECONOMIC:
            self._was_pushed = is_wanted = self._pays()
        return is_wanted

    def _pays(self) -> bool:
        accounts = self.pool.accounts().values()
        own = [_rate(account) for account in accounts if account.kind is EngineKind.DEDICATED]
        lent = [_rate(account) for account in accounts if account.kind is EngineKind.BORROWED and account.num_tokens]
        config, cost = self.pool.config.pull, self.world.relay.next_cost()
        engine = PullCandidate(
            engine_id=EngineId("any"),
            is_dedicated=False,
            pieces=cost.pieces,
            versions_behind=None,
            loan=estimate_loan(config, ended_s=self.pool.ended_loans_s, running_s=(), age_s=0.0),
            tokens_per_s=self.world.num_lent * sum(lent) / len(lent) if lent else None,
            stage_s=cost.stage_s,
            was_pulling=self._was_pushed,
        )
        cluster = ClusterSnapshot(
            candidates=[engine], link_bytes_per_s=cost.link_bytes_per_s, job_tokens_per_s=sum(own) or None
        )
        return plan_pulls(config, cluster)[engine.engine_id].action is PullAction.PULL

    async def train_and_sync(self) -> tuple[float, float]:
        """Train, publish, bring the engines up to date; returns how long either took."""
        begun_s = self.now()
        await asyncio.sleep(self.train_s)
        trained_s = self.now()
        await self.world.relay.publish(is_remote=self.is_pushed())
        await self.pool.sync_weights(self.world.relay)
        return trained_s - begun_s, self.now() - trained_s

    def note_step(
        self,
        records: Sequence[TrajectoryRecord],
        *,
        begun_s: float,
        rollout_s: float,
        train_s: float,
        sync_s: float,
        demand: float,
        span_s: float | None = None,
    ) -> None:
        """Keep a step's figures; fractions are of ``span_s``, by default the rollout time."""
        span_s = rollout_s if span_s is None else span_s
        own_s = percentile([record.ended_s - record.started_s for record in records], _P75) or 0.0
        end_s = percentile([record.ended_s - begun_s for record in records], _P75) or 0.0
        self.records += records
        self.steps.append(
            StepOutcome(
                rollout_s=rollout_s,
                train_s=train_s,
                sync_s=sync_s,
                demand=demand,
                own_p75_fraction=own_s / span_s if span_s else 0.0,
                end_p75_fraction=end_s / span_s if span_s else 0.0,
            )
        )
        if not self.completion:
            self.completion = _curve(sorted(record.ended_s - begun_s for record in records))


def _rate(account: EngineAccount) -> float:
    time_s = account.busy_s if account.kind is EngineKind.DEDICATED else account.present_s
    return account.num_tokens / time_s if time_s else 0.0


def _curve(ends_s: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return the share done against time, thinned."""
    num = len(ends_s)
    places = sorted({round(i * (num - 1) / (_MAX_CURVE_POINTS - 1)) for i in range(_MAX_CURVE_POINTS)})
    return tuple((ends_s[place], (place + 1) / num) for place in places)


def trajectories_of(groups: Sequence[GroupPlan]) -> list[TrajectoryPlan]:
    """Return the trajectories of groups, group by group."""
    return [plan for group in groups for plan in group.trajectories]


async def run_grpo(job: Job, num_steps: int) -> None:
    """Roll out a batch, train on it, bring the engines up to date; step after step."""
    for step in range(num_steps):
        plans = trajectories_of([job.source.group(step, index) for index in range(job.num_groups)])
        begun_s = job.now()
        job.world.open_window()
        job.pool.expect(len(plans))
        async with job.supply.lend(job.world, job.pool):
            records = await job.runner.run_all(plans)
            rollout_s = job.now() - begun_s
            job.world.close_window(begun_s)
        job.floors_s.append(max(job.alone_s(plan) for plan in plans))
        train_s, sync_s = await job.train_and_sync()
        job.note_step(records, begun_s=begun_s, rollout_s=rollout_s, train_s=train_s, sync_s=sync_s, demand=1.0)


async def run_dapo(job: Job, num_steps: int) -> None:
    """As GRPO, but groups whose rewards are all alike are made up for, in the scenario's way or early where the strategy says so."""
    mode = DapoMode.INFLIGHT if job.strategy.starts_early else job.world.scenario.loop.dapo
    for step in range(num_steps):
        begun_s = job.now()
        job.world.open_window()
        async with job.supply.lend(job.world, job.pool):
            records, num_groups, floor_s = await _SAMPLERS[mode](job, step)
            rollout_s = job.now() - begun_s
            job.world.close_window(begun_s)
        job.floors_s.append(floor_s)
        train_s, sync_s = await job.train_and_sync()
        demand = num_groups / job.num_groups
        job.note_step(records, begun_s=begun_s, rollout_s=rollout_s, train_s=train_s, sync_s=sync_s, demand=demand)


async def _sample_in_rounds(job: Job, step: int) -> tuple[list[TrajectoryRecord], int, float]:
    records: list[TrajectoryRecord] = []
    num_informative = num_started = 0
    floor_s = 0.0
    while num_informative < job.num_groups:
        groups = [job.source.group(step, num_started + i) for i in range(job.num_groups)]
        num_started += len(groups)
        plans = trajectories_of(groups)
        job.pool.expect(len(plans))
        records += await job.runner.run_all(plans)
        num_informative += sum(group.is_informative for group in groups)
        floor_s += max(job.alone_s(plan) for plan in plans)
    return records, num_started, floor_s


async def _sample_known(job: Job, step: int) -> tuple[list[TrajectoryRecord], int, float]:
    """Start as many groups as will be needed at once, and wait for all."""
    groups: list[GroupPlan] = []
    num_informative = 0
    while num_informative < job.num_groups:
        groups.append(job.source.group(step, len(groups)))
        num_informative += groups[-1].is_informative
    plans = trajectories_of(groups)
    return await job.runner.run_all(plans), len(groups), max(job.alone_s(plan) for plan in plans)


async def _sample_early(job: Job, step: int) -> tuple[list[TrajectoryRecord], int, float]:
    """Keep as many groups going as the engines take; stop when enough informative ones are whole, drop the rest."""
    slots = len(job.world.dedicated) + job.world.num_lent
    cap = job.world.scenario.rollout.cap_per_gpu * job.world.rollout.num_gpus
    in_flight = max(job.num_groups, slots * cap // job.world.scenario.rollout.group_size)
    records: list[TrajectoryRecord] = []
    num_started = num_informative = 0
    floor_s = 0.0
    running: dict[asyncio.Task[list[TrajectoryRecord]], GroupPlan] = {}
    try:
        while num_informative < job.num_groups:
            while len(running) < in_flight:
                group = job.source.group(step, num_started)
                num_started += 1
                running[asyncio.create_task(job.runner.run_all(group.trajectories))] = group
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                group = running.pop(task)
                records += task.result()
                num_informative += group.is_informative
                floor_s = max(floor_s, *(job.alone_s(plan) for plan in group.trajectories))
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
    return records, num_started, floor_s


_SAMPLERS = {
    DapoMode.ROUNDS: _sample_in_rounds,
    DapoMode.KNOWN: _sample_known,
    DapoMode.INFLIGHT: _sample_early,
}


async def run_async(job: Job, num_steps: int) -> None:
    """Roll out without a break; train on each batch that is whole while the next one is made, at most ``max_staleness`` behind.

    The first step fills the pipeline and is not counted.
    """
    batch, limit = job.num_groups, job.world.scenario.loop.max_staleness
    done: asyncio.Queue[tuple[GroupPlan, list[TrajectoryRecord]]] = asyncio.Queue()
    room = asyncio.Semaphore((limit + 1) * batch)

    async def one_group(group: GroupPlan) -> None:
        done.put_nowait((group, await job.runner.run_all(group.trajectories)))

    async def start_groups(tasks: asyncio.TaskGroup) -> None:
        index = 0
        while True:
            await room.acquire()
            tasks.create_task(one_group(job.source.group(index // batch, index % batch)))
            index += 1

    begun_s = job.now()
    job.world.open_window()
    async with job.supply.lend(job.world, job.pool):
        try:
            async with asyncio.TaskGroup() as tasks:
                starter = tasks.create_task(start_groups(tasks))
                await _consume(job, done, room, num_steps)
                starter.cancel()
                raise _EnoughError  # noqa: TRY301 - the one way to end a group's tasks
        except* _EnoughError:
            pass
        job.world.close_window(begun_s)


class _EnoughError(Exception):
    """Ends the groups that are still under way."""


async def _consume(
    job: Job,
    done: asyncio.Queue[tuple[GroupPlan, list[TrajectoryRecord]]],
    room: asyncio.Semaphore,
    num_steps: int,
) -> None:
    begun_s = job.now()
    for step in range(num_steps + 1):
        groups = [await done.get() for _ in range(job.num_groups)]
        collected_s = job.now()
        train_s, sync_s = await job.train_and_sync()
        for _ in groups:
            room.release()
        records = [record for _, group in groups for record in group]
        if step > 0:
            job.floors_s.append(max(job.alone_s(plan) for group, _ in groups for plan in group.trajectories))
            job.note_step(
                records,
                begun_s=min(record.started_s for record in records),
                rollout_s=collected_s - begun_s,
                train_s=train_s,
                sync_s=sync_s,
                demand=1.0,
                span_s=job.now() - begun_s,
            )
        begun_s = job.now()
