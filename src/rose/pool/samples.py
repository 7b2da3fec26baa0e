"""Finished samples on their way to a trainer that is slower than the rollouts.

Invariants:

* ``SampleQueue`` holds at most ``capacity`` samples, and none that is more than ``max_staleness`` versions behind the latest version.
* Every sample that was put is held, was taken once, or was dropped as stale and counted.
* Who puts into a full ``SampleBuffer`` or takes from an empty one sleeps until there is room or a sample; nobody polls. A cancelled wait
  passes its turn on.
* After ``close`` nothing can be put; what is held can still be taken, then iteration ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import attrs

from rose import checks
from rose.errors import TurnFailedError
from rose.policies.staleness import staleness
from rose.types import WeightVersion

T = TypeVar("T")


@attrs.define
class SampleQueue(Generic[T]):
    """The sync core of ``SampleBuffer``.

    Attributes:
        capacity: The most samples that are held.
        max_staleness: How many versions a sample may be behind; ``None``: any number.
        latest: The latest version that was told.
        num_put: Samples that came, the stale ones included.
        num_taken: Samples that were handed out.
        num_dropped: Samples that were too stale to hand out.
    """

    capacity: int = attrs.field(validator=checks.integer(1))
    max_staleness: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(0)))
    latest: WeightVersion | None = None
    num_put: int = 0
    num_taken: int = 0
    num_dropped: int = 0
    _held: deque[tuple[T, WeightVersion | None]] = attrs.field(factory=deque)

    def __len__(self) -> int:
        """Return how many samples are held."""
        return len(self._held)

    @property
    def has_room(self) -> bool:
        """Return whether one more can be held."""
        return len(self._held) < self.capacity

    def put(self, sample: T, oldest: WeightVersion | None) -> bool:
        """Hold a sample whose oldest token is of version ``oldest``; false when it is dropped as stale instead.

        Raises:
            ValueError: There is no room.
        """
        if not self.has_room:
            message = f"the queue holds {len(self._held)} samples, its capacity; wait for room before putting more"
            raise ValueError(message)
        self.num_put += 1
        if self._is_stale(oldest):
            self.num_dropped += 1
            return False
        self._held.append((sample, oldest))
        return True

    def take(self) -> T:
        """Hand out the sample that came first.

        Raises:
            IndexError: None is held.
        """
        sample, _ = self._held.popleft()
        self.num_taken += 1
        return sample

    def note_version(self, version: WeightVersion) -> int:
        """Drop what ``version`` makes stale; returns how many that was."""
        self.latest = version
        fresh = [held for held in self._held if not self._is_stale(held[1])]
        num_stale = len(self._held) - len(fresh)
        self.num_dropped += num_stale
        self._held = deque(fresh)
        return num_stale

    def _is_stale(self, oldest: WeightVersion | None) -> bool:
        return self.max_staleness is not None and staleness(oldest, self.latest) > self.max_staleness


class SampleBuffer(Generic[T]):
    """A bounded way from many producers to a trainer, in order of arrival.

    Example:
        >>> buffer = SampleBuffer(capacity=64, max_staleness=2)
        >>> await buffer.put(trajectory, oldest)  # in each rollout; waits while the trainer is behind
        >>> async for trajectory in buffer:  # in the trainer
        ...     learn(trajectory)
    """

    def __init__(self, *, capacity: int, max_staleness: int | None = None) -> None:
        """Hold at most ``capacity`` samples, none more than ``max_staleness`` versions behind (``None``: however far).

        Raises:
            ValueError: An argument is out of range.
        """
        self._queue: SampleQueue[T] = SampleQueue(capacity, max_staleness)
        self._putters: deque[asyncio.Future[None]] = deque()
        self._takers: deque[asyncio.Future[None]] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many samples are held."""
        return len(self._queue)

    @property
    def num_dropped(self) -> int:
        """Return how many samples were dropped as stale."""
        return self._queue.num_dropped

    @property
    def num_taken(self) -> int:
        """Return how many samples the trainer has taken."""
        return self._queue.num_taken

    async def put(self, sample: T, oldest: WeightVersion | None, *, timeout_s: float | None = None) -> bool:
        """Wait for room, then hand the sample over.

        Args:
            sample: What the trainer is to get.
            oldest: The version of the sample's oldest token; ``None`` when its tokens have none.
            timeout_s: How long to wait, on the event loop's time; ``None``: for ever.

        Returns:
            Whether it is held; false when it is stale and was dropped.

        Raises:
            TurnFailedError: The buffer is closed.
            TimeoutError: There was no room in time.
        """
        async with asyncio.timeout(timeout_s):
            await self._wait(self._putters, lambda: self._queue.has_room or self._is_closed)
        if self._is_closed:
            message = "the sample buffer is closed; nothing more can be put"
            raise TurnFailedError(message)
        is_held = self._queue.put(sample, oldest)
        _wake(self._takers if is_held else self._putters)
        return is_held

    async def take(self, *, timeout_s: float | None = None) -> T:
        """Wait for a sample and take it.

        Raises:
            StopAsyncIteration: The buffer is closed and empty.
            TimeoutError: None came in time, on the event loop's time.
        """
        async with asyncio.timeout(timeout_s):
            await self._wait(self._takers, lambda: len(self._queue) > 0 or self._is_closed)
        if not len(self._queue):
            raise StopAsyncIteration
        sample = self._queue.take()
        _wake(self._putters)
        return sample

    def note_version(self, version: WeightVersion) -> int:
        """Tell which version is the latest; returns how many samples that made stale."""
        num_stale = self._queue.note_version(version)
        for _ in range(num_stale):
            _wake(self._putters)
        return num_stale

    def close(self) -> None:
        """Take nothing more in; whoever waits to put is told so, whoever takes gets what is held and then the end."""
        self._is_closed = True
        for waiting in (*self._putters, *self._takers):
            if not waiting.done():
                waiting.set_result(None)

    def __aiter__(self) -> AsyncIterator[T]:
        """Iterate until the buffer is closed and empty."""
        return self

    async def __anext__(self) -> T:
        """Wait for the next sample."""
        return await self.take()

    async def _wait(self, waiting: deque[asyncio.Future[None]], is_ready: Callable[[], bool]) -> None:
        while not is_ready():
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    _wake(waiting)  # it was this one's turn, which it cannot use
                raise
            finally:
                if mine in waiting:
                    waiting.remove(mine)


def _wake(waiting: deque[asyncio.Future[None]]) -> None:
    """Let the one go on that waits longest."""
    while waiting:
        first = waiting.popleft()
        if not first.done():
            first.set_result(None)
            return
