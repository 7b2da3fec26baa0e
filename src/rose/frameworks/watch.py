"""Turns whose weights the pool has lost are ended, long before their deadline; that no engine takes turns is said.

A pool that was started anew knows nothing of a job, and a turn that asks for the job's weights would wait there until its deadline. One whose
engines are all lost ends turns by itself, but late, since an engine may join; a job should not wait for that in silence.

Invariants: the pool is looked at only while turns are under way; no turn is ended before the pool is known to have had the job's weights; one that is has one
error, which says what the pool has instead, and keeps its tokens; an outage of the engines
is told once and ends nothing; a caller's cancellation is the turn's own, and returns when that has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import attrs

from rose.errors import RoseError, TurnFailedError
from rose.pool import EngineState, PoolSnapshot, WaitReason
from rose.types import TurnResult, WeightVersion

_logger = logging.getLogger(__name__)
_GONE = (EngineState.DRAINING, EngineState.FENCED, EngineState.LOST)
"""An engine in another state takes turns, or soon will."""


@attrs.define(kw_only=True, eq=False)
class WeightsWatch:
    """Watches over turns at a pool, for the coroutines of one event loop.

    Args:
        snapshot: Reads the pool: the weights that it was brought to, and its engines.
        launch: The run that versions of this launch's weights are of; ``None`` where that is not known: weights of any run pass for them then.
        patience_s: How long it may be at others, where the next sync may bring it back.
        pause_s: Between two looks.
        advice: What the user should do then; ends the error.
        tell: Hears of lost weights, and of an outage of the engines, once each, however many turns are under way.
        rest, clock: Tests give their own.
    """

    snapshot: Callable[[], Awaitable[PoolSnapshot]]
    launch: str | None
    patience_s: float
    pause_s: float
    advice: str
    tell: Callable[[str], None] = _logger.error
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    _turns: dict[asyncio.Future[TurnResult], TurnFailedError | None] = attrs.field(factory=dict, init=False)
    _looking: asyncio.Task[None] | None = attrs.field(default=None, init=False)
    _was_there: bool = attrs.field(default=False, init=False)
    _lost_since_s: float | None = attrs.field(default=None, init=False)
    _is_out: bool = attrs.field(default=False, init=False)

    async def guard(self, turn: asyncio.Future[TurnResult]) -> TurnResult:
        """Wait for a turn that is under way at the pool.

        Raises:
            TurnFailedError: The pool has lost the weights of this launch ``patience_s`` ago; ``partial`` is what the turn has.
            RoseError: As the turn's own.
        """
        self._turns[turn] = None
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="rose-weights-watch")
        try:
            result = await turn
        except asyncio.CancelledError as cancelled:
            error, caller = self._turns[turn], asyncio.current_task()
            if error is None or (caller is not None and caller.cancelling()):
                if turn.done() and not turn.cancelled():  # it ended in the same moment
                    own = turn.exception()
                    vars(cancelled)["partial"] = turn.result() if own is None else getattr(own, "partial", None)
                raise
            error.partial = getattr(cancelled, "partial", None)
            raise error from None
        finally:
            del self._turns[turn]
        for span in result.versions:
            self.note(span.version)
        return result

    def note(self, version: WeightVersion | None) -> bool:
        """Note weights that the pool is at, or was; those of tokens, and those that a look finds, are noted without it.

        Returns:
            Whether they are of this launch: from now on they can be lost.
        """
        is_own = version is not None and self.launch in (None, version.run)
        self._was_there |= is_own
        return is_own

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    async def _look(self) -> None:
        while self._turns:
            await self.rest(self.pause_s)
            try:
                snapshot = await self.snapshot()
            except RoseError:
                continue  # a pool out of reach is the turns' own affair
            except Exception as error:  # noqa: BLE001 - the root of a task, whose end nobody would see
                _logger.warning("what the pool says of itself is not understood", exc_info=error)
                continue
            self._note_engines(snapshot)
            found = snapshot.version
            if self.note(found) or not self._was_there:
                self._lost_since_s = None
                continue
            now_s = self.clock()
            if self._lost_since_s is None:
                self._lost_since_s = now_s
                _logger.warning("the pool has no weights of this job any more: it is at %s", found or "no version")
            if now_s - self._lost_since_s >= self.patience_s:
                self._end_all(found)
                return

    def _note_engines(self, snapshot: PoolSnapshot) -> None:
        num_waiting = snapshot.waiting.get(WaitReason.NO_READY_ENGINE, 0)
        was_out, self._is_out = self._is_out, num_waiting > 0 and all(one.state in _GONE for one in snapshot.engines)
        if self._is_out and not was_out:
            named = ", ".join(f"{one.engine_id} is {one.state.value}" for one in snapshot.engines) or "it has none"
            self.tell(
                f"no engine of the pool takes turns, and {num_waiting} wait ({named}; the pool's log says why): they go on "
                "when an engine joins; the pool gives each up after the no_engine_timeout_s of its job file"
            )

    def _end_all(self, found: WeightVersion | None) -> None:
        name = "" if self.launch is None else f", {self.launch}"
        message = (
            f"the pool is at {found or 'no version'}, and has lost the weights of this job{name}: it was started anew"
            f"{', or another job publishes to it' if found else ''}; {self.advice}"
        )
        self.tell(message)
        for turn in self._turns:
            self._turns[turn] = TurnFailedError(message)
            turn.cancel()
