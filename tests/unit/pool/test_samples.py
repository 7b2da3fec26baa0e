"""The way from fast rollouts to a slow trainer."""

from __future__ import annotations

import asyncio

import pytest

from rose.errors import TurnFailedError
from rose.pool.samples import SampleBuffer, SampleQueue
from rose.testing import ManualClock
from rose.types import WeightVersion


def v(n: int, run: str = "r") -> WeightVersion:
    return WeightVersion(run, n)


class TestSampleQueue:
    def test_samples_come_out_in_the_order_in_which_they_came(self):
        queue = SampleQueue(3)
        for name in "abc":
            assert queue.put(name, None)
        assert not queue.has_room
        with pytest.raises(ValueError, match="holds 3 samples"):
            queue.put("d", None)
        assert [queue.take(), queue.take(), queue.take()] == ["a", "b", "c"]
        with pytest.raises(IndexError):
            queue.take()

    def test_stale_samples_are_dropped_wherever_they_are_and_counted(self):
        queue = SampleQueue(8, 2)
        for n in (1, 2, 3):
            queue.put(n, v(n))
        queue.put("no version", None)
        assert queue.note_version(v(3)) == 0
        assert queue.note_version(v(4)) == 1
        assert not queue.put("late", v(1))
        assert queue.put("just", v(2))
        assert queue.note_version(v(0, "other")) == 3, "nothing of another run is fresh"
        assert (queue.num_put, queue.num_dropped, len(queue)) == (6, 5, 1)
        assert queue.take() == "no version"

    def test_without_a_bound_nothing_is_stale(self):
        queue = SampleQueue(1)
        queue.put("a", v(0))
        assert queue.note_version(v(99)) == 0

    @pytest.mark.parametrize("bad", [(0, None), (1, -1), (True, None)])
    def test_bounds_that_make_no_sense_are_refused(self, bad):
        with pytest.raises(ValueError, match="must be"):
            SampleQueue(*bad)


def test_s08_a_slow_trainer_holds_the_rollouts_up():
    """Case S08: 1000 samples/s of 10 KB, a consumer of 10/s, at most 2 versions stale, a bound of 64, for 5 s."""
    clock = ManualClock()
    buffer: SampleBuffer[tuple[int, bytes]] = SampleBuffer(capacity=64, max_staleness=2)
    version, num_wakes, num_made, longest, ages = 0, 0, 0, 0, []

    async def produce():
        nonlocal num_wakes, num_made, longest
        while True:
            await clock.sleep(0.01)
            num_made += 1
            await buffer.put((version, bytes(10_000)), v(version))
            num_wakes += 1
            longest = max(longest, len(buffer))

    async def consume():
        async for made_at, _ in buffer:
            ages.append(version - made_at)
            await clock.sleep(0.1)

    async def publish():
        nonlocal version
        while True:
            await clock.sleep(0.5)
            version += 1
            buffer.note_version(v(version))

    async def work():
        tasks = [asyncio.ensure_future(each) for each in (*(produce() for _ in range(10)), consume(), publish())]
        await clock.sleep(5.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(clock.run(work()))
    assert longest == 64
    assert max(ages) == 2
    assert buffer.num_dropped > 0
    assert 49 <= buffer.num_taken <= 51
    num_through = buffer.num_taken + buffer.num_dropped + len(buffer)
    assert num_through == num_wakes
    assert num_made - num_through <= 10, "each producer waits with one sample in its hands"


async def test_a_cancelled_producer_passes_its_turn_on():
    buffer: SampleBuffer[str] = SampleBuffer(capacity=1)
    await buffer.put("a", None)
    first, second = (asyncio.ensure_future(buffer.put(name, None)) for name in "bc")
    await asyncio.sleep(0)
    assert await buffer.take() == "a"
    first.cancel()
    assert await second
    assert await buffer.take() == "c"


async def test_a_cancelled_taker_passes_its_sample_on():
    buffer: SampleBuffer[str] = SampleBuffer(capacity=2)
    first, second = (asyncio.ensure_future(buffer.take()) for _ in range(2))
    await asyncio.sleep(0)
    await buffer.put("a", None)
    first.cancel()
    assert await second == "a"


async def test_a_dropped_sample_makes_room_for_a_producer():
    buffer: SampleBuffer[str] = SampleBuffer(capacity=1, max_staleness=0)
    await buffer.put("a", v(1))
    waiting = asyncio.ensure_future(buffer.put("b", v(2)))
    await asyncio.sleep(0)
    assert buffer.note_version(v(2)) == 1
    assert await waiting
    assert not await asyncio.wait_for(put_when_taken(buffer), 1)
    assert (buffer.num_dropped, len(buffer)) == (2, 0)


async def put_when_taken(buffer: SampleBuffer[str]) -> bool:
    await buffer.take()
    return await buffer.put("old", v(1))


async def test_waits_are_bounded():
    buffer: SampleBuffer[str] = SampleBuffer(capacity=1)
    with pytest.raises(TimeoutError):
        await buffer.take(timeout_s=0.001)
    await buffer.put("a", None)
    with pytest.raises(TimeoutError):
        await buffer.put("b", None, timeout_s=0.001)
    assert await buffer.take() == "a"


async def test_closing_ends_producers_and_lets_the_trainer_finish():
    buffer: SampleBuffer[str] = SampleBuffer(capacity=1)
    await buffer.put("a", None)
    waiting = asyncio.ensure_future(buffer.put("b", None))
    await asyncio.sleep(0)
    buffer.close()
    with pytest.raises(TurnFailedError, match="closed"):
        await waiting
    assert [sample async for sample in buffer] == ["a"]
    with pytest.raises(TurnFailedError, match="closed"):
        await buffer.put("c", None)
