"""What one side of a connection has for the other, kept until the other says that it has it.

Invariants:

* Items are numbered from 1 in the order in which they were put; a reader names the last number that it has.
* An item is dropped only when it was named, so that an answer that was lost is given again.
* A reader waits only while there is nothing to give, and never longer than it says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Items for one reader on one event loop."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._num_dropped = 0
        self._filled = asyncio.Event()

    @property
    def items(self) -> Sequence[T]:
        """Return what the reader has not named yet."""
        return tuple(self._items)

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        self._filled.set()

    async def read(self, after: int, wait_s: float) -> tuple[int, Sequence[T]]:
        """Drop all items up to number ``after`` and return the others, waiting up to ``wait_s`` for the first.

        Returns:
            The number of the last one returned (``after`` when there is none), and the items.
        """
        while self._items and self._num_dropped < after:
            self._items.popleft()
            self._num_dropped += 1
        if not self._items:
            self._filled.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._filled.wait()
        return self._num_dropped + len(self._items), tuple(self._items)
