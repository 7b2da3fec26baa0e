"""The asyncio shell around ``PoolState``: it does the I/O that the state asks for, and reports what came of it.

Invariants:

* Every task belongs to one task group; ``stop`` ends them all.
* A report to the state is followed by ``apply`` before anything else runs.
* One task feeds each started attempt, one aborts each that is given up, one waits for the next moment that matters. Two watch
  each engine: one reads it now and then, one sees to it that the readings come in time.
* Observers are called by the event loop, after the fact; what they raise does not reach the pool.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from rose.checks import shown
from rose.errors import DeadlineExceededError, EngineError, EngineLostError, RoseError, TurnFailedError
from rose.interfaces import Clock
from rose.policies.routing import EngineState
from rose.pool.actions import TIME_EPSILON_S, SettleTurn, StartAttempt, StopAttempt
from rose.pool.barrier import Barrier
from rose.pool.config import PoolConfig
from rose.pool.events import Observer
from rose.pool.membership import Member
from rose.pool.sources import open_stream
from rose.pool.state import PoolState
from rose.pool.timing import within
from rose.pool.turns import Attempt
from rose.types import EngineSnapshot, TokenChunk, WeightVersion

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Driver:
    """Carries the state's plans out.

    Attributes:
        is_open: Between ``start`` and ``stop``.
        on_gone: Called with each engine that is watched no longer while the pool is open: it left or was lost.
    """

    def __init__(self, state: PoolState, *, config: PoolConfig, clock: Clock, on_event: Observer | None) -> None:
        """Act for ``state``; the waiters of its turns must be futures."""
        self.is_open = False
        self.on_gone: Callable[[Member], None] = _ignore
        self._state = state
        self._config = config
        self._clock = clock
        self._on_event = on_event
        self._tasks = asyncio.TaskGroup()
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_s = 0.0
        self._free: dict[Member, asyncio.Event] = {}
        self._barriers: dict[Barrier, asyncio.Future[None]] = {}
        self._was_started = False

    async def start(self) -> None:
        """Begin; in the task that will call ``stop``.

        Raises:
            TurnFailedError: It began before.
        """
        if self._was_started:
            message = "a pool is opened once, and this one is or was; make another RolloutPool of the same engines"
            raise TurnFailedError(message)
        self._was_started = True
        await self._tasks.__aenter__()
        self.is_open = True

    async def stop(self) -> None:
        """End every turn, tell the engines, end all tasks."""
        self.is_open = False
        self._state.close(self._clock.now())
        self.apply()
        for passed in self._barriers.values():
            _settle(passed, TurnFailedError("the pool was closed"))
        try:
            if self._stops:
                # On the loop's time: the pool's clock may stand still while it is closed.
                await asyncio.wait(self._stops, timeout=self._config.close_timeout_s)
        finally:
            for task in [*self._pumps.values(), *self._stops, *self._background]:
                task.cancel()
            await self._tasks.__aexit__(None, None, None)

    def apply(self) -> None:
        """Do what the state asks for."""
        actions, events = self._state.plan(self._clock.now())
        for action in actions:
            match action:
                case StartAttempt(attempt):
                    self._pumps[attempt.number] = self._tasks.create_task(self._pump(attempt))
                case StopAttempt(attempt):
                    self._give_up(attempt)
                case SettleTurn(record, outcome):
                    _settle(record.waiter, outcome)
        if self._on_event is not None:
            loop = asyncio.get_running_loop()
            for event in events:
                loop.call_soon(self._on_event, event)
        for member in self._state.engines.take_freed():
            if member in self._free:
                self._free.pop(member).set()
        for barrier in [each for each in self._barriers if each.is_passed(self._state.engines, self._state.live)]:
            _settle(self._barriers.pop(barrier), None)
        self._set_alarm()

    async def _pump(self, attempt: Attempt) -> None:
        """Feed one attempt's stream to the state."""
        self._state.started(attempt)
        try:
            error = await self._feed(attempt)
        finally:
            del self._pumps[attempt.number]
        if attempt.is_open:
            self._state.fail(attempt, error, self._clock.now())
            self.apply()

    async def _feed(self, attempt: Attempt) -> Exception:
        """Report every chunk; returns what the stream's end means for an attempt that is still open then."""
        stream: AsyncIterator[TokenChunk] | None = None
        while True:
            try:
                if stream is None:
                    stream = aiter(open_stream(attempt))
                chunk = await anext(stream)
            except StopAsyncIteration:
                return EngineError(f"engine {attempt.engine_id!r} ended a stream without a finish reason")
            except EngineError as error:
                return error
            except Exception as error:  # noqa: BLE001 - the root of a task: whatever an engine raises ends this attempt only
                _logger.warning("engine %s failed a request", attempt.engine_id, exc_info=error)
                return error
            if self._state.take(attempt, chunk, self._clock.now()):
                self.apply()
            if not attempt.is_open:
                return await self._drain(attempt, stream)

    async def _drain(self, attempt: Attempt, stream: AsyncIterator[TokenChunk]) -> Exception:
        """Let a stream end whose attempt is over, for ``reading_timeout_s`` on the loop's time at most; nobody takes what it still says."""
        try:
            async with asyncio.timeout(self._config.reading_timeout_s):
                async for _ in stream:
                    pass
        except Exception as error:  # noqa: BLE001 - the root of a task: the attempt is over whatever comes
            return error
        return EngineError(f"the attempt on engine {attempt.engine_id!r} is over")

    def _give_up(self, attempt: Attempt) -> None:
        if attempt.is_started:
            task = self._tasks.create_task(self._stop(attempt))
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)
        else:
            self._pumps.pop(attempt.number).cancel()

    async def _stop(self, attempt: Attempt) -> None:
        """Abort a request, then close its stream; what it still says on the way is discarded by the state.

        An engine that does not answer the abort for ``reading_timeout_s``, on the loop's time, does not keep the slot: the closed stream
        has to do.
        """
        member, request_id = attempt.member, attempt.request.request_id
        try:
            async with asyncio.timeout(self._config.reading_timeout_s):
                await member.engine.abort(request_id)
        except EngineLostError as error:
            self._state.lifecycle.fall_out(member, EngineState.LOST, str(error), self._clock.now())
        except Exception:  # noqa: BLE001 - the root of a task: an abort that fails leaves the closing of the stream
            _logger.warning("engine %s: abort of %s failed", member.engine_id, request_id, exc_info=True)
        finally:
            pump = self._pumps.get(attempt.number)
            if pump is not None:
                pump.cancel()
            self._state.released(attempt, self._clock.now())
            self.apply()

    async def read(self, member: Member) -> EngineSnapshot:
        """Read an engine's load.

        Raises:
            EngineLostError: It is gone, or does not answer in time.
        """
        what = f"reading engine {member.engine_id!r}"
        try:
            reading = await within(self._clock, member.engine.snapshot(), self._config.reading_timeout_s, what=what)
        except DeadlineExceededError as error:
            raise EngineLostError(str(error)) from error
        given: object = reading
        if not isinstance(given, EngineSnapshot) or not isinstance(given.weight_version, WeightVersion | None):
            message = f"engine {member.engine_id!r} gave {shown(given)} as a reading, not an EngineSnapshot with a WeightVersion or None"
            raise EngineLostError(message)
        return reading

    async def watch(self, member: Member) -> None:
        """Read an engine's load and health until it leaves or is lost."""
        guard = self.spawn(self._guard(member, asyncio.current_task()))
        try:
            while True:
                await self._clock.sleep(self._config.reading_interval_s)
                if not self._state.engines.is_present(member):
                    return
                member.asked_s = self._clock.now()
                reading = await member.engine.snapshot()
                member.asked_s = math.inf
                self._state.lifecycle.note_reading(member, reading, self._clock.now())
                self.apply()
        except Exception as error:  # noqa: BLE001 - the root of a task: an engine that cannot be read cannot be trusted
            self._lose(member, str(error))
        finally:
            guard.cancel()
            if self.is_open:
                self.on_gone(member)

    async def _guard(self, member: Member, watcher: asyncio.Task[None] | None) -> None:
        """End ``watch`` when a reading does not come in time; wakes about once in ``reading_timeout_s``."""
        timeout_s = self._config.reading_timeout_s
        while (now_s := self._clock.now()) < member.asked_s + timeout_s - TIME_EPSILON_S:
            await self._clock.sleep(min(member.asked_s, now_s) + timeout_s - now_s)
        if watcher is not None:
            watcher.cancel()
        self._lose(member, f"reading engine {member.engine_id!r} was not done after {timeout_s} s")

    def _lose(self, member: Member, why: str) -> None:
        self._state.lifecycle.fall_out(member, EngineState.LOST, f"it could not be read: {why}", self._clock.now())
        self.apply()

    def _set_alarm(self) -> None:
        """See to it that ``tick`` is called when time alone changes something."""
        due_s = self._state.next_due_s()
        if due_s is None or not self.is_open:
            return
        if self._alarm is not None:
            if self._alarm_s <= due_s:
                return
            self._alarm.cancel()
        self._alarm_s = due_s
        self._alarm = self.spawn(self._ring())

    async def _ring(self) -> None:
        while True:
            await self._clock.sleep(self._alarm_s - self._clock.now())
            self._state.tick(self._clock.now())
            self.apply()
            due_s = self._state.next_due_s()
            if due_s is None:
                break
            self._alarm_s = due_s
        self._alarm = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in the background until it ends or ``stop``; it must not raise."""
        task = self._tasks.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def wait_until_free(self, member: Member, timeout_s: float | None) -> bool:
        """Return true once the engine works on nothing of the pool's, false after ``timeout_s``."""
        if not member.held:
            return True
        freed = self._free.setdefault(member, asyncio.Event()).wait()
        try:
            if timeout_s is None:
                await freed
            else:
                await within(self._clock, freed, timeout_s, what=f"freeing engine {member.engine_id!r}")
        except DeadlineExceededError:
            return False
        return True

    async def wait_for_barrier(self, barrier: Barrier, timeout_s: float | None) -> None:
        """Return once ``barrier`` is passed.

        Raises:
            DeadlineExceededError: It was not after ``timeout_s``; says what holds it up.
            TurnFailedError: The pool was closed.
        """
        engines = self._state.engines
        if barrier.is_passed(engines, self._state.live):
            return
        passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._barriers[barrier] = passed
        try:
            await (passed if timeout_s is None else within(self._clock, passed, timeout_s, what="the barrier"))
        except DeadlineExceededError as error:
            message = f"not all was at {barrier.version} after {timeout_s} s: {barrier.what_holds_it_up(engines)}"
            raise DeadlineExceededError(message) from error
        finally:
            self._barriers.pop(barrier, None)


def _ignore(_member: Member) -> None:
    """Do nothing."""


def _settle(waiter: asyncio.Future[T], outcome: T | RoseError) -> None:
    if waiter.done():
        return
    if isinstance(outcome, RoseError):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)
