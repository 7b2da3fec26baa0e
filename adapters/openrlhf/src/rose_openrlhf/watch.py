"""Turns whose weights the pool has lost are ended, long before their deadline.

Invariants: the pool is looked at only while turns are under way; a turn that is ended so has one error, which says what the pool has instead; a caller's
cancellation reaches the turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import attrs

from rose.errors import RoseError, TurnFailedError
from rose.types import Turn, TurnResult, WeightVersion

_logger = logging.getLogger(__name__)


@attrs.define(kw_only=True, eq=False)
class WeightsWatch:
    """Runs turns at a pool, as long as that has this launch's weights: one that was started anew has none.

    Args:
        generate: The pool's.
        version: Asks the pool which weights it was brought to.
        launch: The run that versions of this launch's weights are of.
        is_due: Whether the pool was brought to any of them yet.
        patience_s: How long it may be at others, since the next sync may bring it back.
        pause_s: Between two looks.
        rest, clock: Tests give their own.
    """

    generate: Callable[[Turn], Awaitable[TurnResult]]
    version: Callable[[], Awaitable[WeightVersion | None]]
    launch: str
    is_due: Callable[[], bool]
    patience_s: float
    pause_s: float
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    _turns: dict[asyncio.Future[TurnResult], TurnFailedError | None] = attrs.field(factory=dict, init=False)
    _looking: asyncio.Task[None] | None = attrs.field(default=None, init=False)

    async def run(self, turn: Turn) -> TurnResult:
        """Run a turn.

        Raises:
            TurnFailedError: The pool has had no weights of this launch for ``patience_s``.
            RoseError: As the pool's own.
        """
        work = asyncio.ensure_future(self.generate(turn))
        self._turns[work] = None
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="rose-weights-watch")
        try:
            return await work
        except asyncio.CancelledError:
            error, task = self._turns[work], asyncio.current_task()
            if error is None or (task is not None and task.cancelling()):
                raise
            raise error from None
        finally:
            del self._turns[work]

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
            elif now_s - lost_since_s >= self.patience_s:
                self._end_all(found)
                return

    def _end_all(self, found: WeightVersion | None) -> None:
        message = (
            f"the pool is at {found or 'no version'}, and had no weights of {self.launch} for {self.patience_s:g} s (--rose.retry_s): it was started anew, or "
            "another job uses it; start this job again from its last checkpoint (--ckpt.load_enable)"
        )
        for work in self._turns:
            self._turns[work] = TurnFailedError(message)
            work.cancel()
