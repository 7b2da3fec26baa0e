"""The manual clock moves only when told, and in order."""

from __future__ import annotations

import asyncio
import doctest
import time

import pytest

import rose.testing.clock
import rose.testing.updates
from rose.errors import DeadlineExceededError
from rose.testing import ManualClock


async def test_sleepers_see_their_own_moment():
    clock, seen = ManualClock(start_s=100.0), []

    async def tick(name, every_s):
        for _ in range(3):
            await clock.sleep(every_s)
            seen.append((clock.now(), name))

    async with asyncio.TaskGroup() as group:
        group.create_task(tick("slow", 2.0))
        group.create_task(tick("fast", 1.0))
        await clock.advance(1.5)
        assert seen == [(101.0, "fast")]
        assert clock.now() == 101.5
        assert clock.num_sleepers == 2
        await clock.advance(10.0)
    assert seen[1:] == [(102.0, "slow"), (102.0, "fast"), (103.0, "fast"), (104.0, "slow"), (106.0, "slow")]


async def test_chains_of_tasks_settle_before_time_moves():
    clock, queue, seen = ManualClock(), asyncio.Queue(), []

    async def relay(depth):
        if depth:
            return await asyncio.create_task(relay(depth - 1))
        return clock.now()

    async def consume():
        while True:
            await queue.get()
            seen.append(await relay(20))

    async def produce():
        for _ in range(3):
            await clock.sleep(1.0)
            queue.put_nowait(None)

    consumer = asyncio.create_task(consume())
    await clock.run(produce())
    await clock.advance(0.0)
    consumer.cancel()
    assert seen == [1.0, 2.0, 3.0]


async def test_run_returns_the_result_or_the_error():
    clock = ManualClock()

    async def fail():
        await clock.sleep(3.0)
        raise KeyError

    with pytest.raises(KeyError):
        await clock.run(fail())
    assert clock.now() == 3.0
    assert await clock.run(asyncio.sleep(0, "done")) == "done"


async def test_run_waits_for_threads():
    clock = ManualClock()

    async def work():
        await asyncio.to_thread(time.sleep, 0.02)
        await clock.sleep(5.0)
        return clock.now()

    assert await clock.run(work()) == 5.0


async def test_run_says_when_time_alone_does_not_help():
    with pytest.raises(DeadlineExceededError, match="it waits for an event that no task will set"):
        await ManualClock().run(asyncio.Event().wait(), real_timeout_s=0.05)


async def test_a_cancelled_sleep_does_not_move_time():
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(5.0))
    await clock.advance(1.0)
    task.cancel()
    await clock.advance(1.0)
    assert clock.num_sleepers == 0
    assert clock.now() == 2.0


async def test_run_says_when_only_others_go_on():
    clock = ManualClock()

    async def tick():
        while True:
            await clock.sleep(1.0)

    ticking = asyncio.create_task(tick())
    with pytest.raises(DeadlineExceededError, match="not done after 60 s on the clock, though others still wake"):
        await clock.run(asyncio.Event().wait(), timeout_s=60)
    ticking.cancel()


@pytest.mark.parametrize("module", [rose.testing.clock, rose.testing.updates], ids=lambda module: module.__name__)
def test_the_examples_in_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
