"""Turns whose weights the pool has lost are ended, long before their deadline.

A pool that was started anew knows nothing of a job, and a turn that asks for the job's weights would wait there until its deadline.

Invariants: the pool is looked at only while turns are under way; a turn that is ended so has one error, which says what the pool has instead; a caller's
cancellation reaches the turn, and returns when the turn has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import attrs

from rose.errors import RoseError, TurnFailedError
from rose.types import TurnResult, WeightVersion

_logger = logging.getLogger(__name__)


@attrs.define(kw_only=True, eq=False)
class WeightsWatch:
    """Watches over turns at a pool, for the coroutines of one event loop.

    Args:
        version: Asks the pool which weights it was brought to.
        launch: The run that versions of this launch's weights are of.
        is_due: Whether the pool was brought to any of them yet.
        patience_s: How long it may be at others, where the next sync may bring it back.
        pause_s: Between two looks.
        advice: What the user should do then; ends the error.
        tell: Hears the error once, however many turns it ends.
        rest, clock: Tests give their own.
    """

    version: Callable[[], Awaitable[WeightVersion | None]]
    launch: str
    is_due: Callable[[], bool]
    patience_s: float
    pause_s: float
    advice: str
    tell: Callable[[str], None] = _logger.error
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    _turns: dict[asyncio.Future[TurnResult], TurnFailedError | None] = attrs.field(factory=dict, init=False)
    _looking: asyncio.Task[None] | None = attrs.field(default=None, init=False)

    async def guard(self, turn: asyncio.Future[TurnResult]) -> TurnResult:
        """Wait for a turn that is under way at the pool.

        Raises:
            TurnFailedError: The pool has had no weights of this launch for ``patience_s``.
            RoseError: As the turn's own.
        """
        self._turns[turn] = None
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="rose-weights-watch")
        try:
            await asyncio.wait({turn})
            error = self._turns[turn]
            if error is not None and turn.cancelled():
                raise error
            return turn.result()
        finally:
            del self._turns[turn]
            if not turn.done():
                turn.cancel()
                await asyncio.wait({turn})

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    async def _look(self) -> None:
        lost_since_s: float | None = None
        while self._turns:
            await self.rest(self.pause_s)
            if not self.is_due():
                continue
            try:
                found = await self.version()
            except RoseError:
                continue  # a pool out of reach is the turns' own affair
            if found is not None and found.run == self.launch:
                lost_since_s = None
                continue
            now_s = self.clock()
            if lost_since_s is None:
                lost_since_s = now_s
                _logger.warning("the pool has no weights of this job any more: it is at %s", found or "no version")
            if now_s - lost_since_s >= self.patience_s:
                self._end_all(found)
                return

    def _end_all(self, found: WeightVersion | None) -> None:
        message = (
            f"the pool is at {found or 'no version'}, and has lost the weights of this job, {self.launch}: it was started anew, or another job "
            f"publishes to it; {self.advice}"
        )
        self.tell(message)
        for turn in self._turns:
            self._turns[turn] = TurnFailedError(message)
            turn.cancel()
