"""Bounded waits on an injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rose.errors import DeadlineExceededError
from rose.interfaces import Clock

T = TypeVar("T")


async def within(clock: Clock, work: Awaitable[T], timeout_s: float, *, what: str) -> T:
    """Return the result of ``work`` if it comes within ``timeout_s`` on ``clock``; it is cancelled otherwise.

    Raises:
        DeadlineExceededError: It did not come in time.
    """
    task = asyncio.ensure_future(work)
    alarm = asyncio.ensure_future(clock.sleep(timeout_s))
    try:
        await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        message = f"{what} was not done after {timeout_s} s"
        raise DeadlineExceededError(message)
    finally:
        task.cancel()
        alarm.cancel()
        await asyncio.gather(task, alarm, return_exceptions=True)
