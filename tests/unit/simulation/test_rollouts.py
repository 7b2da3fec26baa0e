"""Slots of trajectories: first come, first served; none is lost or invented, whatever is given up and whoever leaves."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pool import EngineState, EngineStateChanged
from rose.simulation.engine import PromptHeader
from rose.simulation.loop import VirtualLoop
from rose.simulation.rollouts import TrajectoryRunner, TrajectorySlots
from rose.simulation.trajectories import TrajectoryPlan, TurnPlan
from rose.types import EngineId, EngineKind, FinishReason, Turn, TurnResult


def change(slots: TrajectorySlots, name: str, *, is_ready: bool, kind: EngineKind = EngineKind.DEDICATED) -> None:
    old, new = (EngineState.STALE, EngineState.READY) if is_ready else (EngineState.READY, EngineState.LOST)
    slots.hear(
        EngineStateChanged(engine_id=EngineId(name), kind=kind, lease_id=None, old=old, new=new, why="", at_s=0.0)
    )


def test_slots_follow_the_ready_engines_and_are_given_in_order() -> None:
    slots, seen = TrajectorySlots(2, borrowed_share=0.5), []

    async def work(number: int) -> None:
        await slots.acquire()
        seen.append(number)

    async def main() -> None:
        tasks = [asyncio.ensure_future(work(number)) for number in range(9)]
        await asyncio.sleep(1)
        assert seen == []
        change(slots, "a", is_ready=True)
        await asyncio.sleep(1)
        assert seen == [0, 1]
        change(slots, "b", is_ready=True, kind=EngineKind.BORROWED)
        change(slots, "b", is_ready=True, kind=EngineKind.BORROWED)  # said twice
        await asyncio.sleep(1)
        assert seen == [0, 1, 2]
        change(slots, "a", is_ready=False)
        slots.release()
        slots.release()
        await asyncio.sleep(1)
        assert seen == [0, 1, 2]  # one slot is left, and taken
        slots.release()
        await asyncio.sleep(1)
        assert seen == [0, 1, 2, 3]
        for task in tasks:
            task.cancel()

    VirtualLoop().run(main())


def test_without_a_limit_nobody_waits() -> None:
    slots = TrajectorySlots(None)

    async def main() -> float:
        for _ in range(1000):
            await slots.acquire()
        return asyncio.get_running_loop().time()

    assert VirtualLoop().run(main()) == 0


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10_000))
def test_slots_that_are_given_up_come_free(seed: int) -> None:
    rng, slots = Random(seed), TrajectorySlots(2)
    running: set[int] = set()

    async def work(number: int) -> None:
        await slots.acquire()
        running.add(number)
        try:
            await asyncio.sleep(rng.choice([0, 1, 2]))
        finally:
            running.discard(number)
            slots.release()

    async def main() -> None:
        change(slots, "a", is_ready=True)
        tasks = []
        for number in range(30):
            tasks.append(asyncio.ensure_future(work(number)))
            await asyncio.sleep(rng.choice([0, 0, 0.5]))
            if rng.random() < 0.5:
                rng.choice(tasks).cancel()
            if rng.random() < 0.2:
                change(slots, "b", is_ready=rng.random() < 0.5)
            assert len(running) <= 4
        change(slots, "b", is_ready=False)
        await asyncio.sleep(100)
        assert all(task.done() for task in tasks)
        assert slots._num_taken == 0
        late = [asyncio.ensure_future(work(number)) for number in (100, 101, 102)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert running <= {100, 101}
        await asyncio.gather(*late)

    VirtualLoop().run(main())


@pytest.mark.parametrize("asks_exactly", [False, True])
def test_a_turns_prompt_is_all_that_was_said_before_however_long(asks_exactly: bool) -> None:  # noqa: FBT001 - a parameter
    asked: list[Turn] = []

    async def generate(turn: Turn) -> TurnResult:
        asked.append(turn)
        header = PromptHeader.read(turn.prompt_ids)
        assert header is not None
        num_new = header.stop_at - len(turn.prompt_ids)
        return TurnResult(
            token_ids=(1,) * num_new,
            logprobs=(),
            finish_reason=FinishReason.STOP,
            versions=(),
            hops=("h",),
        )

    runner = TrajectoryRunner(
        generate=generate,
        started={1: 0.0},
        resolution_tokens=1,
        max_turn_tokens=5000,
        slots=TrajectorySlots(None),
        asks_exactly=asks_exactly,
    )
    plan = TrajectoryPlan(
        trajectory_id="t", group_id="g", turns=(TurnPlan(100_000, 50, 3.0), TurnPlan(2, 7, 3.0), TurnPlan(0, 1, 9.0))
    )
    record = VirtualLoop().run(runner.run(plan))
    assert [len(turn.prompt_ids) for turn in asked] == [100_000, 100_052, 100_060]
    assert [turn.sampling.max_tokens for turn in asked] == ([50, 7, 1] if asks_exactly else [5000] * 3)
    assert (record.num_tokens, record.needed_tokens, record.ended_s) == (58, 100_003, 6.0)
