"""An asyncio event loop whose time is virtual: it jumps to the next timer as soon as nothing can run.

Invariants:

* Time moves only when no callback is ready, and then exactly to the earliest timer; no real second is slept.
* Order is stated: ready callbacks run in the order in which they were made ready; timers by due time, those due at the same
  time in the order in which they were set, each followed by all that it made ready. So a program without other sources of chance always runs the same way.
* A loop may run inside another (a question that is settled by a small simulation); the outer one stands still meanwhile.
* A system that waits for what no callback will bring is reported (``SimulationError``) with the tasks that wait, and so is one
  that runs on and on while time stands still.

Threads, sockets, subprocesses and signals do not exist here: what needs them raises ``NotImplementedError``.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

from rose.errors import SimulationError
from rose.interfaces.clock import Clock

T = TypeVar("T")

_MAX_SHOWN_TASKS = 5


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs one coroutine, and the tasks it starts, in virtual time.

    Attributes:
        num_callbacks: Callbacks run so far.
    """

    def __init__(self, *, max_callbacks_at_once: int = 50_000_000) -> None:
        """Begin at time 0.

        Args:
            max_callbacks_at_once: So many callbacks without any progress of time count as stuck.
        """
        self.num_callbacks = 0
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._is_running = False
        self._is_closed = False
        self._is_stopped = False
        self._max_at_once = max_callbacks_at_once
        self._failures: list[BaseException] = []

    # -- time and callbacks

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def call_soon(  # type: ignore[override] # any arguments, as the callback takes them
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Run ``callback`` after everything that is ready already."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override] # as above
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run ``callback`` at ``when``; at once, but in order, if that is past."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def call_later(  # type: ignore[override] # as above
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run ``callback`` in ``delay`` seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave a cancelled timer in the heap; it is skipped when its time comes."""

    # -- futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """Start a task."""
        return asyncio.Task(coro, loop=self, name=name, context=context)

    # -- running

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end and return its result; tasks that are left are cancelled.

        Raises:
            SimulationError: Nothing can bring ``main`` to its end.
            RuntimeError: The loop has run already.
        """
        result: T = self.run_until_complete(main)
        return result

    def run_until_complete(self, future: Any) -> Any:
        """Run until ``future`` is done; see ``run``."""
        if self._is_closed:
            message = "a virtual loop runs once; make a new one"
            raise RuntimeError(message)
        hooks, outer = sys.get_asyncgen_hooks(), asyncio._get_running_loop()  # noqa: SLF001 - as below
        asyncio._set_running_loop(self)  # noqa: SLF001 - meant for those who write event loops
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._close_generator)
        self._is_running = True
        task: asyncio.Future[Any] = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(self._stop)
        try:
            self._run_until_stopped()
            return task.result()
        finally:
            self._cancel_all()
            self._is_running, self._is_closed = False, True
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(outer)  # noqa: SLF001

    def _stop(self, _task: object) -> None:
        self._is_stopped = True

    def _run_until_stopped(self) -> None:
        ready, num_at_once, before_s = self._ready, 0, self._now_s
        while not self._is_stopped:
            if not ready:
                if not self._advance():
                    message = (
                        f"the simulation is stuck at {self._now_s} s: nothing is ready, no timer is set, and the work is not "
                        f"done; {self._describe_tasks()}"
                    )
                    raise SimulationError(message)
                if self._now_s > before_s:
                    before_s, num_at_once = self._now_s, 0
            handle = ready.popleft()
            if handle.cancelled():
                continue
            self.num_callbacks += 1
            num_at_once += 1
            handle._run()  # noqa: SLF001 - what every loop does with its handles
            if self._failures:
                raise self._failures[0]
            if num_at_once > self._max_at_once:
                message = (
                    f"time stands still at {self._now_s} s after {num_at_once} callbacks; {self._describe_tasks()}"
                )
                raise SimulationError(message)

    def _advance(self) -> bool:
        """Move to the next timer and make it ready; returns whether there was one."""
        timers = self._timers
        while timers:
            when, _, handle = heapq.heappop(timers)
            if not handle.cancelled():
                self._now_s = max(self._now_s, when)
                self._ready.append(handle)
                return True
        return False

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self)
        for task in sorted(tasks, key=lambda task: task.get_name()):
            task.cancel()
        while self._ready or any(not task.done() for task in tasks):
            if self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()  # noqa: SLF001
            elif not self._advance():
                return

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._is_closed:
            self.create_task(generator.aclose())

    def _describe_tasks(self) -> str:
        waiting = sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks(self))  # type: ignore[union-attr]
        shown = ", ".join(waiting[:_MAX_SHOWN_TASKS])
        more = f" and {len(waiting) - _MAX_SHOWN_TASKS} more" if len(waiting) > _MAX_SHOWN_TASKS else ""
        return f"waiting are {shown}{more}"

    # -- what asyncio asks of a loop

    def is_running(self) -> bool:
        """Tell whether the loop runs."""
        return self._is_running

    def is_closed(self) -> bool:
        """Tell whether the loop has done its work."""
        return self._is_closed

    def get_debug(self) -> bool:
        """Return false: there is no debug mode."""
        return False

    def get_exception_handler(self) -> None:
        """Return ``None``: every failure ends the run."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run with the failure of a callback or of a task that nobody awaited."""
        error = context.get("exception")
        if not isinstance(error, BaseException):
            error = SimulationError(str(context.get("message", "a callback failed")))
        if not self._is_closed:
            self._failures.append(error)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Do as ``call_exception_handler``."""
        self.call_exception_handler(context)

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: generators are closed as they are dropped."""


def new_loop() -> VirtualLoop:
    """Return a fresh loop at time 0."""
    return VirtualLoop()  # type: ignore[abstract] # what a simulation cannot have stays abstract, and raises


class LoopClock(Clock):
    """The clock of the running virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        """Tell the time of ``loop``."""
        self._loop = loop

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._loop.time()

    async def sleep(self, duration_s: float) -> None:
        """Return when virtual time has moved by ``duration_s``."""
        await asyncio.sleep(max(0.0, duration_s))
