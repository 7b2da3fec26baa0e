"""The pool for loops without asyncio: the same face, blocking.

Invariants:

* One thread of its own runs the event loop; every call may come from any thread.
* A call that is interrupted (Ctrl-C) or runs over its ``timeout_s`` cancels its turns before it raises.
* ``close`` ends turns, loop and thread; later calls raise ``TurnFailedError``. A program that ends without it is not kept alive.
* Opening that is interrupted ends what it had started.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rose import pool as asynchronous
from rose.errors import DeadlineExceededError, TurnFailedError
from rose.types import EngineId, Turn, TurnResult, WeightVersion

T = TypeVar("T")
_CLOSE_S = 30.0
_CANCEL_S = 2.0


class RolloutPool:
    """A ``rose.RolloutPool`` on a loop of its own. Use it as a context manager, or ``close`` it.

    Example:
        >>> with rose.sync.RolloutPool.connect("http://127.0.0.1:7070") as pool:
        ...     results = pool.generate_many(turns)
    """

    _thread: threading.Thread
    _loop: asyncio.AbstractEventLoop
    _ending: asyncio.Event
    _pool: Any
    _is_closed: bool

    def __init__(self, *args: Any, **options: Any) -> None:
        """Open a pool in this process. Arguments and errors as of ``rose.RolloutPool``."""
        self._start(lambda: asynchronous.RolloutPool(*args, **options))

    @classmethod
    def open(cls, job: Path | str | Mapping[str, Any]) -> Self:
        """Open the pool that a job file describes; returns once its engines run. Errors as of ``rose.RolloutPool.open``."""
        return cls.over(lambda: asynchronous.RolloutPool.open(job))

    @classmethod
    def connect(cls, url: str, **options: Any) -> Self:
        """Open the face of a pool in another process. Arguments and errors as of ``rose.RolloutPool.connect``."""
        return cls.over(lambda: asynchronous.RolloutPool.connect(url, **options))

    @classmethod
    def over(cls, make: Callable[[], Any]) -> Self:
        """Open whatever asynchronous pool ``make`` returns; it is called on the loop's thread, where engines belong that need a loop."""
        self = cls.__new__(cls)
        self._start(make)
        return self

    def generate(self, turn: Turn, *, timeout_s: float | None = None) -> TurnResult:
        """Run one turn to its end. Errors as of ``rose.RolloutPool.generate``.

        Raises:
            DeadlineExceededError: It was not done after ``timeout_s``; it is cancelled.
        """
        result: TurnResult = self.call(lambda pool: pool.generate(turn), timeout_s=timeout_s)
        return result

    def generate_many(self, turns: Iterable[Turn], *, timeout_s: float | None = None) -> list[TurnResult]:
        """Run turns side by side; the results are in the order of the turns.

        Raises:
            RoseError: Of the first turn that failed; the others are cancelled.
            DeadlineExceededError: Not all were done after ``timeout_s``; those left are cancelled.
        """
        wanted: Sequence[Turn] = list(turns)
        return self.call(lambda pool: _all(pool, wanted), timeout_s=timeout_s)

    def sync_weights(self, source: Any, *, timeout_s: float | None = None) -> asynchronous.SyncReport:
        """Bring the engines to the newest weights. See ``rose.RolloutPool.sync_weights``."""
        report: asynchronous.SyncReport = self.call(lambda pool: pool.sync_weights(source), timeout_s=timeout_s)
        return report

    def barrier(self, version: WeightVersion, *, timeout_s: float | None = None) -> None:
        """Wait until nothing of older weights is under way. See ``rose.RolloutPool.barrier``."""
        self.call(lambda pool: pool.barrier(version, timeout_s=timeout_s))

    def snapshot(self) -> asynchronous.PoolSnapshot:
        """Read the pool's state now."""
        snapshot: asynchronous.PoolSnapshot = self.call(lambda pool: _awaited(pool.snapshot))
        return snapshot

    def accounts(self) -> dict[EngineId, asynchronous.EngineAccount]:
        """Return what each engine did for this pool."""
        accounts: dict[EngineId, asynchronous.EngineAccount] = self.call(lambda pool: _awaited(pool.accounts))
        return accounts

    def statistics(self) -> asynchronous.PoolStatistics:
        """Return what became of turns and tokens."""
        statistics: asynchronous.PoolStatistics = self.call(lambda pool: _awaited(pool.statistics))
        return statistics

    def call(self, work: Callable[[Any], Coroutine[Any, Any, T]], *, timeout_s: float | None = None) -> T:
        """Run ``work`` with the asynchronous pool on its loop, and wait for it.

        Raises:
            TurnFailedError: The pool was closed.
            DeadlineExceededError: It was not done after ``timeout_s``; it is cancelled.
        """
        if self._is_closed:
            message = "the pool was closed"
            raise TurnFailedError(message)
        if threading.current_thread() is self._thread:
            message = "this would wait for itself: call the asynchronous pool on its own loop"
            raise RuntimeError(message)
        ended = threading.Event()
        future = asyncio.run_coroutine_threadsafe(self._run(work, ended), self._loop)
        try:
            concurrent.futures.wait([future], timeout_s)
            if not future.done():
                message = f"this was not done after {timeout_s} s (timeout_s), and is cancelled; give it more time, or ask for less"
                raise DeadlineExceededError(message)
            return future.result()
        except concurrent.futures.CancelledError:
            message = "the pool was closed"
            raise TurnFailedError(message) from None
        finally:
            if future.cancel():
                ended.wait(_CANCEL_S)

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(_CLOSE_S)

    def __enter__(self) -> Self:
        """Return the pool, which is open already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # The thread.

    def _start(self, make: Callable[[], Any]) -> None:
        self._is_closed = False
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(make, opened)), name="rose-sync", daemon=True
        )
        self._thread.start()
        try:
            opened.result()
        except BaseException:
            self._is_closed = True
            opened.cancel()
            self._thread.join(_CLOSE_S)
            raise

    async def _live(self, make: Callable[[], Any], opened: concurrent.futures.Future[None]) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        self._end_if_cancelled(opened)
        try:
            async with _opened(make) as self._pool:
                if opened.set_running_or_notify_cancel():
                    opened.set_result(None)
                    await self._ending.wait()
        except BaseException as error:
            if opened.done() and not opened.cancelled():
                raise
            if not opened.cancelled():
                opened.set_exception(error)

    def _end_if_cancelled(self, opened: concurrent.futures.Future[None]) -> None:
        """Cancel the task that opens the pool, which is the running one, when nobody waits for it any more."""
        opening = asyncio.current_task()

        def end(future: concurrent.futures.Future[None]) -> None:
            if future.cancelled() and opening is not None:
                with contextlib.suppress(RuntimeError):  # it has ended, and its loop with it
                    self._loop.call_soon_threadsafe(opening.cancel)

        opened.add_done_callback(end)

    async def _run(self, work: Callable[[Any], Coroutine[Any, Any, T]], ended: threading.Event) -> T:
        try:
            return await work(self._pool)
        finally:
            ended.set()


@contextlib.asynccontextmanager
async def _opened(make: Callable[[], Any]) -> AsyncIterator[Any]:
    async with make() as pool:
        yield pool


async def _all(pool: Any, turns: Sequence[Turn]) -> list[TurnResult]:
    tasks = [asyncio.ensure_future(pool.generate(turn)) for turn in turns]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _awaited(read: Callable[[], Any]) -> Any:
    """Call what is a coroutine function over a connection and a plain one in process."""
    value = read()
    return await value if inspect.isawaitable(value) else value
