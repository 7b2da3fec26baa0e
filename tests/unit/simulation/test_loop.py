"""The virtual loop: order, time, and what it says when nothing can go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import SimulationError
from rose.simulation.loop import LoopClock, VirtualLoop


def test_a_day_passes_at_once() -> None:
    loop = VirtualLoop()

    async def main() -> float:
        await asyncio.sleep(86_400)
        return loop.time()

    assert loop.run(main()) == 86_400


def test_timers_of_one_time_run_in_the_order_in_which_they_were_set() -> None:
    loop = VirtualLoop()
    seen: list[int] = []

    async def main() -> None:
        for i in range(100):
            loop.call_at(1.0, seen.append, i)
        loop.call_at(0.5, seen.append, -1)
        await asyncio.sleep(2)

    loop.run(main())
    assert seen == [-1, *range(100)]


@given(st.lists(st.integers(0, 5), max_size=40))
def test_order_is_by_time_and_then_by_setting(delays: list[int]) -> None:
    loop = VirtualLoop()
    seen: list[tuple[int, int]] = []

    async def main() -> None:
        for i, delay in enumerate(delays):
            loop.call_later(delay, seen.append, (delay, i))
        await asyncio.sleep(10)

    loop.run(main())
    assert seen == sorted((delay, i) for i, delay in enumerate(delays))


def test_what_a_timer_makes_ready_runs_before_the_next_timer() -> None:
    loop = VirtualLoop()
    seen: list[str] = []

    async def main() -> None:
        loop.call_at(1.0, lambda: loop.call_soon(seen.append, "soon"))
        loop.call_at(1.0, seen.append, "second")
        await asyncio.sleep(2)

    loop.run(main())
    assert seen == ["soon", "second"]


def test_a_cancelled_timer_neither_runs_nor_holds_time_up() -> None:
    loop = VirtualLoop()

    async def main() -> float:
        loop.call_later(100, pytest.fail).cancel()
        await asyncio.sleep(1)
        return loop.time()

    assert loop.run(main()) == 1


def test_timeouts_groups_queues_and_waits_work() -> None:
    loop = VirtualLoop()

    async def main() -> list[float]:
        ends = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.sleep(5)
        ends.append(loop.time())
        queue: asyncio.Queue[int] = asyncio.Queue(1)

        async def put() -> None:
            await asyncio.sleep(1)
            await queue.put(7)

        async with asyncio.TaskGroup() as group:
            group.create_task(put())
            assert await queue.get() == 7
        ends.append(loop.time())
        done, pending = await asyncio.wait(
            {asyncio.ensure_future(asyncio.sleep(2)), asyncio.ensure_future(asyncio.sleep(9))},
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert (len(done), len(pending)) == (1, 1)
        ends.append(loop.time())
        return ends

    assert loop.run(main()) == [3, 4, 6]


def test_a_stuck_system_is_named() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.gather(waits_for_ever(), asyncio.sleep(5))

    with pytest.raises(SimulationError, match=r"stuck at 5\.0 s.*waits_for_ever"):
        VirtualLoop().run(main())


def test_time_that_stands_still_is_named() -> None:
    async def spins() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimulationError, match=r"time stands still.*spins"):
        VirtualLoop(max_callbacks_at_once=1000).run(spins())


def test_a_failing_callback_ends_the_run() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        loop.call_later(1, lambda: 1 // 0)
        await asyncio.sleep(2)

    with pytest.raises(ZeroDivisionError):
        loop.run(main())


def test_tasks_that_are_left_are_cancelled() -> None:
    ended = []

    async def lingers() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(True)

    async def main() -> None:
        asyncio.get_running_loop().create_task(lingers())
        await asyncio.sleep(1)

    VirtualLoop().run(main())
    assert ended == [True]


def test_dropped_generators_are_closed() -> None:
    closed = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    async def main() -> None:
        async for _ in numbers():
            break
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    VirtualLoop().run(main())
    assert closed == [True]


def test_a_loop_inside_a_loop_leaves_the_outer_one_as_it_was() -> None:
    outer = VirtualLoop()

    async def inner_main() -> float:
        await asyncio.sleep(50)
        return asyncio.get_running_loop().time()

    async def main() -> tuple[float, float]:
        await asyncio.sleep(1)
        inner = VirtualLoop().run(inner_main())
        assert asyncio.get_running_loop() is outer
        await asyncio.sleep(1)
        return inner, outer.time()

    assert outer.run(main()) == (50, 2)


def test_the_clock_is_the_loops() -> None:
    loop = VirtualLoop()
    clock = LoopClock(loop)

    async def main() -> list[float]:
        times = [clock.now()]
        await clock.sleep(2.5)
        times.append(clock.now())
        await clock.sleep(-1)
        times.append(clock.now())
        return times

    assert loop.run(main()) == [0, 2.5, 2.5]


def test_timers_that_do_not_move_time_count_as_standing_still() -> None:
    loop = VirtualLoop(max_callbacks_at_once=1000)

    def again() -> None:
        loop.call_later(0.0, again)

    async def spins() -> None:
        again()
        await asyncio.Event().wait()

    with pytest.raises(SimulationError, match=r"time stands still at 0\.0 s"):
        loop.run(spins())


def test_a_loop_runs_once() -> None:
    loop = VirtualLoop()
    loop.run(asyncio.sleep(1))
    again = asyncio.sleep(1)
    with pytest.raises(RuntimeError, match="runs once"):
        loop.run(again)
    again.close()
