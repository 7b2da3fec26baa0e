"""The clock of paced devices: modelled seconds, slower than the machine's by a factor, shared by every process.

Invariants:

* Modelled time never goes back for a handle, and advances ``1 / k`` as fast as the machine's monotonic time, or not at all while the
  clock is frozen. All processes of the machine that map the same file read the same time.
* Only the owner, who created the file, freezes and unfreezes.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from pathlib import Path

from rose.coserving.shared_page import SECTION_BYTES, Section, map_file
from rose.errors import ConfigError, LedgerError
from rose.interfaces.clock import Clock

_LAYOUT = "<dddqd"  # k, monotonic anchor, modelled anchor, is frozen, born
_READ_TRIES = 20_000
_FROZEN_POLL_S = 1e-3
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1_000
_sharp_threads = threading.local()


def _sharpen_sleep() -> None:
    """Let this thread's sleeps end within a microsecond or so; the kernel's default slack is 50."""
    if not getattr(_sharp_threads, "is_done", False):
        prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only; elsewhere sleeps stay as they are
        if prctl is not None:
            prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
        _sharp_threads.is_done = True


class PacedClock(Clock):
    """Modelled seconds. ``PacedClock(path)`` attaches; ``PacedClock.create(path, k=2)`` starts one at time zero.

    Attributes:
        born_s: The machine's monotonic time of the creation: tells one clock from the next in the same file.
    """

    def __init__(self, path: Path | str) -> None:
        """Attach to the clock in ``path``.

        Raises:
            LedgerError: There is no clock in ``path``.
        """
        self.path = str(path)
        self._section = Section(map_file(path, SECTION_BYTES, is_new=False), 0, _LAYOUT, f"clock {path}")
        self._is_owner = False
        self._latest_s = 0.0
        self.born_s = self._read()[4]

    @classmethod
    def create(cls, path: Path | str, *, k: float = 1.0) -> PacedClock:
        """Make a clock that starts now at 0 and takes ``k`` real seconds for a modelled one. The caller owns it.

        Raises:
            ConfigError: ``k`` is not positive.
            LedgerError: The file cannot be made.
        """
        if not k > 0:
            message = f"k, the real seconds of one modelled second, must be positive; got {k}"
            raise ConfigError(message)
        section = Section(map_file(path, SECTION_BYTES, is_new=True), 0, _LAYOUT, f"clock {path}")
        born_s = time.monotonic()
        section.write(k, born_s, 0.0, 0, born_s)
        clock = cls(path)
        clock._is_owner = True
        return clock

    def _read(self) -> tuple[float, ...]:
        return self._section.read(_READ_TRIES)

    @property
    def k(self) -> float:
        """Real seconds of one modelled second."""
        return self._read()[0]

    @property
    def is_frozen(self) -> bool:
        """Whether modelled time stands still."""
        return bool(self._read()[3])

    def now(self) -> float:
        """Return the modelled time in seconds since the clock was created."""
        k, real_anchor_s, anchor_s, is_frozen, _ = self._read()
        now_s = anchor_s if is_frozen else anchor_s + (time.monotonic() - real_anchor_s) / k
        # a freeze is anchored a moment before it is seen: who read in that moment must not see time go back
        self._latest_s = max(self._latest_s, now_s)
        return self._latest_s

    def freeze(self) -> None:
        """Let modelled time stand still for every process. A no-op when it does already."""
        self._move(is_frozen=True)

    def unfreeze(self) -> None:
        """Let modelled time go on from where it stood. A no-op when it runs."""
        self._move(is_frozen=False)

    def _move(self, *, is_frozen: bool) -> None:
        if not self._is_owner:
            message = f"only the process that created clock {self.path} may freeze or unfreeze it"
            raise LedgerError(message)
        if is_frozen != self.is_frozen:
            self._section.write(self.k, time.monotonic(), self.now(), is_frozen, self.born_s)

    def block(self, duration_s: float) -> None:
        """Sleep for ``duration_s * k`` real seconds on this thread, frozen or not. For polling."""
        _sharpen_sleep()
        time.sleep(max(0.0, duration_s) * self.k)

    def sleep_until(self, at_s: float, *, returns_when_frozen: bool = False) -> bool:
        """Block this thread until modelled time is ``at_s``.

        A freeze that comes meanwhile stretches the sleep by just as much, or ends it if ``returns_when_frozen``.

        Returns:
            Whether ``at_s`` is reached; ``False`` only if the clock is frozen.
        """
        _sharpen_sleep()
        while True:
            k, real_anchor_s, anchor_s, is_frozen, _ = self._read()
            if is_frozen:
                if anchor_s >= at_s:
                    return True
                if returns_when_frozen:
                    return False
                time.sleep(_FROZEN_POLL_S)
                continue
            left_s = (at_s - anchor_s) * k - (time.monotonic() - real_anchor_s)
            if left_s <= 0:
                return True
            time.sleep(left_s)

    async def sleep(self, duration_s: float) -> None:
        """Return once modelled time has advanced by ``duration_s``; other tasks run meanwhile."""
        end_s = self.now() + duration_s
        while (left_s := end_s - self.now()) > 0:  # noqa: ASYNC110 - other processes move this clock
            await asyncio.sleep(max(_FROZEN_POLL_S if self.is_frozen else 0.0, left_s * self.k))
        await asyncio.sleep(0)
