"""The outer loops of RL: what they start they end, whether they come to their end, fail or are given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from rose.simulation.loop import VirtualLoop
from rose.simulation.presets import PRESETS
from rose.simulation.rl_loops import Job, run_async, run_dapo, run_grpo
from rose.simulation.rollouts import TrajectoryRecord
from rose.simulation.scenario import DapoMode
from rose.simulation.strategies import STRATEGIES
from rose.simulation.supply import Supply
from rose.simulation.trajectories import GroupPlan, TrajectoryPlan, TurnPlan

GROUPS = 4


class Source:
    """Groups that last 1 to 7 s; every third one tells nothing."""

    def group(self, step: int, index: int) -> GroupPlan:
        name = f"{step}/{index}"
        turns = (TurnPlan(10, 1 + 3 * index % 7, 0.0),)
        plan = TrajectoryPlan(trajectory_id=name, group_id=name, turns=turns)
        return GroupPlan(group_id=name, trajectories=(plan,), is_informative=index % 3 != 2)


@attrs.define(eq=False)
class Runner:
    """Runs trajectories without engines; that of group ``fails`` fails."""

    fails: str | None = None
    running: set[str] = attrs.field(factory=set)
    most: int = 0
    num_started: int = 0

    async def run_all(self, plans: Sequence[TrajectoryPlan]) -> list[TrajectoryRecord]:
        begun_s = asyncio.get_running_loop().time()
        names = {plan.trajectory_id for plan in plans}
        self.running |= names
        self.num_started += len(names)
        self.most = max(self.most, len(self.running))
        try:
            await asyncio.sleep(max(plan.num_output_tokens for plan in plans))
            if self.fails in names:
                raise ValueError(self.fails)
        finally:
            self.running -= names
        ended_s = asyncio.get_running_loop().time()
        return [
            TrajectoryRecord(
                started_s=begun_s, ended_s=ended_s, num_turns=1, num_tokens=1, num_hops=0, needed_tokens=10
            )
            for _ in plans
        ]


@attrs.define(eq=False)
class Watched(Supply):
    """Lends nothing, and knows whether a phase is under way."""

    is_lending: bool = False

    @contextlib.asynccontextmanager
    async def lend(self, world: object, pool: object) -> AsyncIterator[None]:
        self.is_lending = True
        try:
            yield
        finally:
            self.is_lending = False


async def nothing(*_args: object, **_options: object) -> None:
    """Stand for a sync that takes no time."""


def make_job(loop: VirtualLoop, runner: Runner, strategy: str = "default", dapo: DapoMode = DapoMode.ROUNDS) -> Job:
    base = PRESETS["frozenlake-8b-dapo"]
    scenario = attrs.evolve(
        base,
        rollout=attrs.evolve(base.rollout, num_trajectories=GROUPS, group_size=1, cap_per_gpu=9),
        loop=attrs.evolve(base.loop, dapo=dapo),
    )
    world: Any = SimpleNamespace(
        scenario=scenario,
        loop=loop,
        dedicated=[None],
        num_lent=0,
        rollout=SimpleNamespace(num_gpus=1),
        relay=SimpleNamespace(publish=nothing),
        open_window=lambda: None,
        close_window=lambda _begun_s: None,
    )
    pool: Any = SimpleNamespace(sync_weights=nothing, expect=lambda _num_trajectories: None)
    source: Any = Source()
    played: Any = runner
    return Job(
        world=world,
        strategy=STRATEGIES[strategy],
        supply=Watched(),
        pool=pool,
        source=source,
        runner=played,
        train_s=2.0,
        alone_s=lambda plan: plan.num_output_tokens,
    )


Loop = Callable[[Job, int], Awaitable[None]]
LOOPS: list[tuple[Loop, str]] = [
    (run_grpo, "default"),
    (run_dapo, "default"),
    (run_dapo, "eager-groups"),
    (run_async, "default"),
]


@pytest.mark.parametrize(("play", "strategy"), LOOPS)
def test_nothing_runs_after_the_last_step(play: Loop, strategy: str) -> None:
    loop, runner = VirtualLoop(), Runner()

    async def main() -> None:
        job = make_job(loop, runner, strategy)
        await play(job, 3)
        assert len(job.steps) == len(job.floors_s) == 3
        assert (runner.running, job.supply.is_lending) == (set(), False)  # type: ignore[attr-defined]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    loop.run(main())


@pytest.mark.parametrize(("play", "strategy"), LOOPS)
@pytest.mark.parametrize("at_s", [0.0, 0.5, 1.0, 4.0, 8.0, 11.0])
def test_a_loop_that_is_given_up_leaves_nothing_behind(play: Loop, strategy: str, at_s: float) -> None:
    loop, runner = VirtualLoop(), Runner()

    async def main() -> None:
        job = make_job(loop, runner, strategy)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(at_s):
                await play(job, 100)
        assert (runner.running, job.supply.is_lending) == (set(), False)  # type: ignore[attr-defined]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    loop.run(main())


@pytest.mark.parametrize(("play", "strategy"), LOOPS)
def test_a_trajectory_that_fails_ends_the_loop_and_the_others(play: Loop, strategy: str) -> None:
    loop, runner = VirtualLoop(), Runner(fails="0/1")

    async def main() -> None:
        job = make_job(loop, runner, strategy)
        seen: list[BaseException] = []
        try:
            await play(job, 100)
        except* ValueError as errors:
            seen += errors.exceptions
        assert "0/1" in repr(seen)
        assert runner.running == set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    loop.run(main())


def test_dapo_early_keeps_room_filled_and_stops_when_enough_groups_tell_something() -> None:
    loop, runner = VirtualLoop(), Runner()

    async def main() -> None:
        job = make_job(loop, runner, "eager-groups")
        await run_dapo(job, 1)
        assert runner.most == 9
        assert len(job.records) >= GROUPS
        assert job.steps[0].demand == runner.num_started / GROUPS
        assert job.steps[0].rollout_s < 7

    loop.run(main())


def test_dapo_that_knows_its_demand_starts_that_many_groups_at_once_and_waits_for_all() -> None:
    loop, runner = VirtualLoop(), Runner()

    async def main() -> None:
        job = make_job(loop, runner, dapo=DapoMode.KNOWN)
        await run_dapo(job, 1)
        assert runner.most == runner.num_started == len(job.records) == 5  # the third group tells nothing
        assert job.steps[0].demand == 5 / GROUPS
        assert job.steps[0].rollout_s == max(plan.num_output_tokens for plan in plans_of(5))

    loop.run(main())


@pytest.mark.parametrize(("dapo", "num_started"), [(DapoMode.ROUNDS, 8), (DapoMode.KNOWN, 5), (DapoMode.INFLIGHT, 9)])
def test_the_scenario_says_how_dapo_starts_groups(dapo: DapoMode, num_started: int) -> None:
    loop, runner = VirtualLoop(), Runner()

    async def main() -> None:
        await run_dapo(make_job(loop, runner, dapo=dapo), 1)
        assert runner.num_started >= num_started

    loop.run(main())


def plans_of(num_groups: int) -> list[TrajectoryPlan]:
    return [Source().group(0, index).trajectories[0] for index in range(num_groups)]


def test_an_asynchronous_loop_has_at_most_its_staleness_in_batches_under_way() -> None:
    loop, runner = VirtualLoop(), Runner()

    async def main() -> None:
        job = make_job(loop, runner)
        limit = job.world.scenario.loop.max_staleness
        await run_async(job, 5)
        assert runner.num_started <= (limit + 1 + 6) * GROUPS
        assert runner.most <= (limit + 1) * GROUPS
        assert all(step.train_s == 2.0 for step in job.steps)

    loop.run(main())
