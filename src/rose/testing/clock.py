"""A clock that stands still until a test moves it.

Invariants: time changes only inside ``advance`` and ``run``; sleepers wake in the order of their due time, and of their
``sleep`` call where that is equal; before time moves on, every task that can run has run.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Sized
from typing import TypeVar

from rose.errors import DeadlineExceededError
from rose.interfaces.clock import Clock

T = TypeVar("T")

_SETTLE_TURNS = 100
_THREAD_POLL_S = 0.001


class ManualClock(Clock):
    """A ``Clock`` for unit tests: hours pass in milliseconds and every run is the same.

    Example:
        >>> clock = ManualClock()
        >>> async def nap() -> float:
        ...     await clock.sleep(3600.0)
        ...     return clock.now()
        >>> asyncio.run(clock.run(nap()))
        3600.0
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """Return the time in seconds; it moves only in ``advance`` and ``run``."""
        return self._now_s

    async def sleep(self, duration_s: float) -> None:
        """Wait until the clock was moved by ``duration_s``; zero or less lets other tasks run once."""
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        due = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + duration_s, next(self._order), due))
        await due

    @property
    def num_sleepers(self) -> int:
        """Return how many tasks wait for this clock."""
        return sum(not due.done() for _, _, due in self._sleepers)

    async def advance(self, duration_s: float) -> None:
        """Move time forward, waking every sleeper at its own moment and letting tasks run in between."""
        end_s = self._now_s + duration_s
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            await self._wake_next()
        self._now_s = max(self._now_s, end_s)
        await self._settle()

    async def run(self, work: Awaitable[T], *, timeout_s: float = 86_400.0, real_timeout_s: float = 10.0) -> T:
        """Move time as far as ``work`` needs, and return its result.

        Args:
            work: A coroutine or future of the code under test.
            timeout_s: How far to move time at most, in seconds of this clock.
            real_timeout_s: How long, in real seconds, to wait for threads while no task waits for this clock.

        Raises:
            DeadlineExceededError: The work waits for something that time alone will not bring.
        """
        end_s = self._now_s + timeout_s
        task = asyncio.ensure_future(work)
        try:
            await self._settle()
            while not task.done():
                if self._now_s > end_s:
                    message = f"the work is not done after {timeout_s} s on the clock, though others still wake"
                    raise DeadlineExceededError(message)
                if self.num_sleepers:
                    await self._wake_next()
                else:
                    await self._wait_for_threads(task, real_timeout_s)
        finally:
            task.cancel()
            await asyncio.wait({task})
        return task.result()

    async def _wait_for_threads(self, task: asyncio.Future[T], real_timeout_s: float) -> None:
        deadline_s = asyncio.get_running_loop().time() + real_timeout_s
        while not self.num_sleepers:
            done, _ = await asyncio.wait({task}, timeout=_THREAD_POLL_S)
            if done:
                return
            if asyncio.get_running_loop().time() > deadline_s:
                message = (
                    f"nothing waits for the clock at {self._now_s} s, and the work is not done after {real_timeout_s} s "
                    "of real time; it waits for an event that no task will set"
                )
                raise DeadlineExceededError(message)

    async def _wake_next(self) -> None:
        due_s, _, due = heapq.heappop(self._sleepers)
        if due.done():
            return
        self._now_s = max(self._now_s, due_s)
        due.set_result(None)
        await self._settle()

    async def _settle(self) -> None:
        """Let every task run until none can go on without the clock or a thread.

        asyncio's own loops show their queue of runnable callbacks; on other loops a fixed number of turns is given.
        """
        runnable: Sized | None = getattr(asyncio.get_running_loop(), "_ready", None)
        for _ in range(_SETTLE_TURNS):
            await asyncio.sleep(0)
            if runnable is not None and not len(runnable):
                return
