"""Which failures of a turn are worth another try, and for how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import attrs

from rose.errors import (
    DeadlineExceededError,
    EngineBusyError,
    EngineLostError,
    NoEngineError,
    RoseError,
    TransportError,
    VersionUnavailableError,
)
from rose.types import FinishReason, TurnResult

_logger = logging.getLogger("rose_roll")
MENDABLE = (
    DeadlineExceededError,
    EngineBusyError,
    EngineLostError,
    NoEngineError,
    TransportError,
    VersionUnavailableError,
)


@attrs.define
class Patience:
    """How long one turn has failed without a new token.

    Attributes:
        give_up_s: After how long its error is raised.
        clock: Seconds.
    """

    give_up_s: float
    clock: Callable[[], float] = time.monotonic
    _failing_since_s: float | None = attrs.field(default=None, init=False)

    def mend(self, error: RoseError, done: TurnResult) -> TurnResult:
        """Return what the failed turn has, to be asked anew after a pause.

        Args:
            error: One of ``MENDABLE``; ``partial`` is the whole turn so far.
            done: What it had before the try that failed.

        Raises:
            RoseError: That error: it has failed for too long, or waiting does not help.
        """
        partial = error.partial or done
        now_s = self.clock()
        if self._failing_since_s is None or len(partial.token_ids) > len(done.token_ids):
            self._failing_since_s = now_s
        if isinstance(error, VersionUnavailableError) and not error.is_retryable:
            raise error
        if now_s - self._failing_since_s > self.give_up_s:
            raise error
        _logger.warning("a turn failed and is asked anew with its %d tokens: %s", len(partial.token_ids), error)
        return attrs.evolve(partial, finish_reason=FinishReason.ABORTED)

    def reset(self) -> None:
        """Note that a try did not fail: it ended, or ROLL ended it."""
        self._failing_since_s = None
