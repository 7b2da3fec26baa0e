"""The tasks behind a pool: its alarm, the readings of its engines, those who wait for an engine to become free."""

from __future__ import annotations

import asyncio

import pytest

from rose.pool import EngineState, EngineStateChanged, PoolConfig, RolloutPool
from rose.pool.state import PoolState
from rose.testing import FakeEngine, ManualClock
from rose.types import EngineId, EngineKind, HopEnd, Sampling, Turn

A, B = EngineId("a"), EngineId("b")


def turn(name: str) -> Turn:
    return Turn(trajectory_id=name, group_id="g", prompt_ids=(1, 2), sampling=Sampling(max_tokens=10))


class SlowToRead(FakeEngine):
    """Takes a while for each reading but the first."""

    reading_s = 0.0
    num_readings = 0

    async def snapshot(self):
        self.num_readings += 1
        if self.num_readings > 1:
            await self.clock.sleep(self.reading_s)
        return await super().snapshot()


def engine(clock: ManualClock, name: str, reading_s: float = 0.0) -> SlowToRead:
    made = SlowToRead(engine_id=EngineId(name), clock=clock, token_s=0.1)
    made.reading_s = reading_s
    return made


def run(clock: ManualClock, work):
    return asyncio.run(clock.run(work()))


def test_turns_that_stall_are_found_after_a_time_without_any():
    clock = ManualClock()
    first, second = engine(clock, "a"), engine(clock, "b")

    async def work():
        async with RolloutPool([first, second], clock=clock) as pool:
            await pool.generate(turn("early"))
            await clock.sleep(100.0)
            assert pool._state.next_due_s() is None
            running = asyncio.ensure_future(pool.generate(turn("late")))
            await clock.sleep(0.25)
            first.stall()
            start_s = clock.now()
            result = await running
            return clock.now() - start_s, result.hops

    duration_s, hops = run(clock, work)
    assert [(hop.engine_id, hop.ended) for hop in hops] == [("a", HopEnd.STALLED), ("b", HopEnd.FINISHED)]
    assert duration_s < 4.0


def test_an_engine_that_answers_in_time_stays_whatever_the_interval():
    """The time between two readings is longer than one may take."""
    clock = ManualClock()
    config = PoolConfig(reading_interval_s=10.0, reading_timeout_s=3.0)
    slow = engine(clock, "a", reading_s=2.9)

    async def work():
        async with RolloutPool([slow], clock=clock, config=config) as pool:
            await clock.sleep(300.0)
            assert pool.state_of(A) is EngineState.READY
        assert slow.num_readings > 20

    run(clock, work)


@pytest.mark.parametrize("timeout_s", [3.0, 30.0])
def test_a_reading_that_does_not_come_loses_the_engine_in_time_and_leaves_no_task(timeout_s):
    clock, events = ManualClock(), []
    config = PoolConfig(reading_interval_s=7.0, reading_timeout_s=timeout_s, rejoin_s=None)

    async def work():
        late = engine(clock, "a", reading_s=1000.0)
        async with RolloutPool([late, engine(clock, "b")], clock=clock, config=config, on_event=events.append) as pool:
            num_tasks = len(pool._driver._background)
            await clock.sleep(50.0)
            assert (pool.state_of(A), pool.state_of(B)) == (EngineState.LOST, EngineState.READY)
            assert pool.state_of(EngineId("c")) is None
            assert len(pool._driver._background) == num_tasks / 2

    run(clock, work)
    [lost] = [event for event in events if isinstance(event, EngineStateChanged) and event.new is EngineState.LOST]
    assert lost.at_s == pytest.approx(7.0 + timeout_s)
    assert f"reading engine 'a' was not done after {timeout_s} s" in lost.why


def test_everybody_who_waits_for_an_engine_to_become_free_is_told():
    clock = ManualClock()

    async def work():
        async with RolloutPool([engine(clock, "a"), engine(clock, "b")], clock=clock) as pool:
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(4)]
            await clock.sleep(0.25)
            waits = [pool.drain_engine(A, "test"), pool.drain_engine(A, "test"), pool.drain_engine(B, "test")]
            short = pool.drain_engine(B, "test", timeout_s=0.1)
            assert await asyncio.gather(*waits, short) == [True, True, True, False]
            assert all(task.done() for task in turns)
            assert not pool._driver._free

    run(clock, work)


def test_a_turn_that_could_go_is_not_counted_as_waiting_for_anything():
    state = PoolState(PoolConfig(), name="p", seed=0)
    assert dict(state.waiting_reasons()) == {}
    member = state.lifecycle.join(FakeEngine(), EngineKind.DEDICATED, None, 0.0)
    state.lifecycle.joined(member, asyncio.run(member.engine.snapshot()), 0.0)
    state.submit(turn("t"), None, 0.0)
    assert dict(state.waiting_reasons()) == {}
