"""Serving's watchdog: a rollout engine that keeps the device far beyond its turn is ended, so that serving goes on.

The kernel frees the turn of a process that died. A process that is stopped (``SIGSTOP``, a debugger, a frozen container) keeps it for
ever; this is for that case.

Invariants: only the process that the ledger names as the rollout engine of the device is ended, and only if it is still the one that
wrote it (same start time) and not this process; never before its turn, or the longest turn that it may have taken unseen, is over
by ``grace_s``. So serving waits at most one rollout step, ``grace_s`` and one look longer than it would have.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from rose.coserving.ledger import Ledger, RolloutState
from rose.errors import LedgerError

_logger = logging.getLogger(__name__)
_START_FIELD = 19  # of /proc/PID/stat, counted behind the name in parentheses


def process_start(pid: int) -> int:
    """Return when a process started, in the kernel's ticks since boot; 0 when there is none or it cannot be told."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[_START_FIELD])


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
        if rollout.pid in {0, os.getpid()} or process_start(rollout.pid) != rollout.pid_start:
            return
        _logger.warning(
            "serving waited %.3f s for the turn of %s; the rollout engine (pid %d) does not give it back and is ended",
            waited_s,
            ledger.path,
            rollout.pid,
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(rollout.pid, signal.SIGKILL)
            self.num_ended += 1
