"""OpenRLHF's weights, one tensor a call, into versions of the pool.

A sync, as OpenRLHF runs it, and what happens here:

1. *[trainer rank 0]* calls ``update_weight(name, dtype, shape, empty_cache)`` and broadcasts that tensor; the next call comes when this one returned.
2. *[inlet]* receives it into one buffer and hands it to the trainer's copy (``StreamedTrainer``), which keeps what is published; the buffer is free again.
3. *[trainer rank 0]* marks its last tensor by ``empty_cache=True``; OpenRLHF gives no number, so versions are counted.
4. *[inlet]* closes the pass and publishes: what changed, cut for each target, then the pool's engines fetch it.
5. *[inlet]* returns from that last call once the dedicated engines have the version, or ``sync_timeout_s`` after the pool was last asked for that; OpenRLHF
   waits for it before it generates again.

Invariants:

* A version is published whole or not at all: only after its last tensor came, and only if the copy found every
  tensor of the first pass in it.
* A pass that ends early, or whose first tensor comes again, is dropped; the next whole pass overwrites what it left in the copy.
* A pass in which nothing changed is a version like any other.
* One tensor is held besides the trainer's copy.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import attrs

from rose.errors import TransportError

_logger = logging.getLogger(__name__)
T = TypeVar("T")
_REST_S = 2.0
_THREADS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="rose-weights")


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Do what blocks on threads that weights alone use: the loop's own may all be busy with rewards."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)


class Copy(Protocol):
    """The trainer's copy: ``rose.frameworks.StreamedTrainer``."""

    def update(self, pairs: Iterator[tuple[str, Any]]) -> None:
        """Take one pass of tensors."""


class Push(Protocol):
    """``rose.frameworks.WeightPush``."""

    def push(self) -> Any:
        """Publish the copy; returns the report."""


@attrs.define
class _Pass:
    """One sync under way: a thread that feeds the copy with what is handed over, one tensor at a time. Its methods block."""

    names: list[str] = attrs.field(factory=list)
    _waiting: list[tuple[str, Any] | None] = attrs.field(factory=list)
    _news: threading.Condition = attrs.field(factory=threading.Condition)
    _is_dropped: bool = False
    _is_over: bool = False
    _error: BaseException | None = None

    def begin(self, copy: Copy) -> None:
        threading.Thread(target=self._run, args=(copy,), name="rose-pass", daemon=True).start()

    def _run(self, copy: Copy) -> None:
        error: BaseException | None = None
        try:
            copy.update(self._pairs())
        except BaseException as caught:  # noqa: BLE001 - the root of a thread; raised where the pass is waited for
            error = caught
        with self._news:
            self._is_over, self._error = True, error
            self._news.notify_all()

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._is_dropped)
                if self._is_dropped:
                    raise _DroppedError
                pair = self._waiting[0]
            if pair is None:
                return
            yield pair
            with self._news:  # the next one is asked for, so this one was taken
                self._waiting.clear()
                self._news.notify_all()

    def take(self, name: str, tensor: Any) -> None:
        """Hand a tensor over; returns when the copy has it."""
        self.names.append(name)
        with self._news:
            self._waiting.append((name, tensor))
            self._news.notify_all()
            self._news.wait_for(lambda: not self._waiting or self._is_over)
            self._raise()

    def end(self) -> None:
        """Say that there are no more; returns when the copy is whole."""
        with self._news:
            self._waiting.append(None)
            self._news.notify_all()
            self._news.wait_for(lambda: self._is_over)
            self._raise()

    def drop(self) -> None:
        """Leave the copy half-way; returns when nothing writes to it any more."""
        with self._news:
            self._is_dropped = True
            self._news.notify_all()
            self._news.wait_for(lambda: self._is_over)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class _DroppedError(Exception):
    """The pass was dropped; never leaves its thread."""


@attrs.define
class WeightInlet:
    """Takes OpenRLHF's tensors and publishes each whole pass.

    Args:
        copy: The trainer's copy.
        push: What publishes it.
        retry_s: How long a publish that cannot reach the pool's store is tried again.
        announce: Told of each report, in order.
    """

    copy: Copy
    push: Push
    retry_s: float = 300.0
    announce: Callable[[Any], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep
    _current: _Pass | None = attrs.field(default=None, init=False)

    async def take(self, name: str, tensor: Any, *, is_last: bool) -> None:
        """Take one tensor; with ``is_last`` return when its version is published and the pool was brought to it.

        Raises:
            LayoutMismatchError: The pass had other tensors than the first one; nothing was published.
            RoseError: Publishing failed, or the pool's sync did as a whole.
        """
        if self._current is not None and name in self._current.names:
            _logger.warning(
                "a sync began anew at %s after %d tensors; what had come is dropped", name, len(self._current.names)
            )
            await in_thread(self._current.drop)
            self._current = None
        if self._current is None:
            self._current = _Pass()
            self._current.begin(self.copy)
        current = self._current
        try:
            await in_thread(current.take, name, tensor)
            if is_last:
                await in_thread(current.end)
        except BaseException:
            self._current = None
            await asyncio.shield(in_thread(current.drop))
            raise
        if is_last:
            self._current = None
            await self.publish()

    async def take_all(self, pairs: Iterator[tuple[str, Any]]) -> Any:
        """Take a whole pass from an iterator, on a thread, and publish it; returns the report."""
        await in_thread(self.copy.update, pairs)
        return await self.publish()

    async def publish(self) -> Any:
        """Publish the copy as it is; returns the report."""
        report = await self._pushed()
        if report.error is not None:
            raise report.error
        self.announce(report)
        return report

    async def _pushed(self) -> Any:
        give_up_s = self.clock() + self.retry_s
        while True:
            try:
                return await in_thread(self.push.push)
            except TransportError as error:
                if self.clock() + _REST_S > give_up_s:
                    raise
                _logger.warning("the weights cannot be brought to the pool's store now (%s); trying again", error)
            await self.rest(_REST_S)
