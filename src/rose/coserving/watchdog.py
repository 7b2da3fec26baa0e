"""Serving's watchdog: a rollout engine that keeps the device far beyond its turn is ended, so that serving goes on.

The kernel frees the turn of a process that died. A process that is stopped (``SIGSTOP``, a debugger, a frozen container) keeps it for
ever; this is for that case.

Invariants: only the process that the ledger names as the rollout engine of the device is ended, and only if it is still the one that
wrote it (same start time) and not this process; never before its turn, or the longest turn that it may have taken unseen, is over
by ``grace_s``. So serving waits at most one rollout step, ``grace_s`` and one look longer than it would have.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

from rose.coserving.ledger import Ledger, RolloutState
from rose.coserving.processes import ProcessName
from rose.errors import LedgerError

_logger = logging.getLogger(__name__)


class Watchdog:
    """Watches one serving engine's waits for its device. ``begin`` and ``end`` on the step loop, ``look`` on another thread."""

    def __init__(self, ledgers: Sequence[Ledger], grace_s: float) -> None:
        """Watch waits for the devices of ``ledgers``."""
        self._ledgers = ledgers
        self._grace_s = grace_s
        self._since_s: float | None = None
        self.num_ended = 0

    def begin(self, now_s: float) -> None:
        """[STEP LOOP] Serving starts to wait for its turn."""
        self._since_s = now_s

    def end(self) -> None:
        """[STEP LOOP] Serving has its turn."""
        self._since_s = None

    def look(self, now_s: float) -> None:
        """[WATCHING THREAD] End the rollout engines that are the reason of a wait beyond all bounds."""
        since_s = self._since_s
        if since_s is None:
            return
        for ledger in self._ledgers:
            try:
                rollout = ledger.rollout()
            except LedgerError:
                continue  # torn for good: its writer died half-way, and the dead hold no turn
            if now_s > max(rollout.turn_ends_s, since_s + rollout.step_s) + self._grace_s and self._since_s == since_s:
                self._end_process(rollout, ledger, now_s - since_s)

    def _end_process(self, rollout: RolloutState, ledger: Ledger, waited_s: float) -> None:
        if rollout.pid == os.getpid() or not ProcessName(rollout.pid, rollout.pid_start).is_running():
            return
        _logger.warning(
            "serving waited %.3f s for the turn of %s; the rollout engine (pid %d) does not give it back and is ended",
            waited_s,
            ledger.path,
            rollout.pid,
        )
        try:
            os.kill(rollout.pid, signal.SIGKILL)
        except OSError as error:  # the thread that looks is also serving's heartbeat, and goes on
            _logger.error("rollout engine %d cannot be ended: %s", rollout.pid, error.strerror)  # noqa: TRY400
            return
        self.num_ended += 1
