"""What every clock must do."""

from __future__ import annotations

import asyncio

from rose.interfaces.clock import Clock

_TOLERANCE_S = 1e-6


class ClockContract:
    """Subclass it and override ``make_clock``; a clock that does not run by itself overrides ``let_pass`` too.

    Attributes:
        short_s: A wait that is short on this clock.
    """

    short_s: float = 0.02

    def make_clock(self) -> Clock:
        """Return a clock."""
        message = "override make_clock() and return a clock"
        raise NotImplementedError(message)

    async def let_pass(self, clock: Clock, duration_s: float) -> None:
        """Let time pass on the clock, and tasks run meanwhile."""
        await clock.sleep(duration_s)

    async def test_now_never_goes_back(self) -> None:
        """Readings are in order. Look for a wall clock where a monotonic one is needed."""
        clock = self.make_clock()
        readings = []
        for _ in range(20):
            readings.append(clock.now())
            await self.let_pass(clock, self.short_s / 20)
        assert readings == sorted(readings)
        assert clock.now() > readings[0], "time did not pass"

    async def test_sleep_lasts_at_least_as_long(self) -> None:
        """``sleep`` returns once ``now()`` has advanced by the duration, not sooner."""
        clock = self.make_clock()
        start_s = clock.now()
        task = asyncio.create_task(clock.sleep(self.short_s))
        await asyncio.sleep(0)
        while not task.done():
            await self.let_pass(clock, self.short_s / 4)
        assert clock.now() - start_s >= self.short_s - _TOLERANCE_S

    async def test_zero_and_negative_sleeps_return(self) -> None:
        """A deadline that has passed is no error; ``sleep`` returns without time passing."""
        clock = self.make_clock()
        async with asyncio.timeout(5.0):
            await clock.sleep(0.0)
            await clock.sleep(-1.0)

    async def test_sleepers_wake_in_order(self) -> None:
        """The shorter sleep ends first, whichever began first."""
        clock = self.make_clock()
        woken: list[str] = []

        async def nap(name: str, duration_s: float) -> None:
            await clock.sleep(duration_s)
            woken.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(nap("long", 2 * self.short_s))
            group.create_task(nap("short", self.short_s))
            await asyncio.sleep(0)
            await self.let_pass(clock, 3 * self.short_s)
        assert woken == ["short", "long"]

    async def test_a_cancelled_sleep_leaves_the_clock_whole(self) -> None:
        """Timeouts cancel sleeps all the time; others must still wake."""
        clock = self.make_clock()
        cancelled, kept = (asyncio.create_task(clock.sleep(self.short_s)) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        await self.let_pass(clock, 2 * self.short_s)
        async with asyncio.timeout(5.0):
            await kept
        assert cancelled.cancelled()
