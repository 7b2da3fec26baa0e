"""The machine itself as a device: steps take the time they really take, turns are exclusive, pages are real."""

from __future__ import annotations

import time
from pathlib import Path

from rose.backends.paging import give_back
from rose.backends.turn_lock import TurnLock
from rose.clocks import MonotonicClock
from rose.interfaces.device import Device, StepWork
from rose.types import DeviceId

# A first guess at a small model's step on one core; the caller's predictor learns the true ratio from its own steps.
_STEP_S = 2e-3
_PREFILL_TOKEN_S = 1e-5
_DECODE_S = 1e-4


class HostClock(MonotonicClock):
    """The machine's monotonic clock with the blocking wait that step loops need. Never frozen."""

    is_frozen = False

    def block(self, duration_s: float) -> None:
        """Sleep on this thread."""
        if duration_s > 0:  # a sleep of no time takes 70 us, and serving asks for one before each step
            time.sleep(duration_s)


class HostDevice(Device):
    """One engine's handle on a shared device without pacing."""

    clock: HostClock

    def __init__(self, path: Path | str) -> None:
        """Open the device whose turn is a lock on ``path``; the file is made if needed.

        Raises:
            LedgerError: The file cannot be opened.
        """
        self.device_id = DeviceId(Path(path).name)
        self.clock = HostClock()
        self._turn = TurnLock(path)

    @property
    def description(self) -> str:
        """What to print beside figures taken on this device."""
        return "host"

    def acquire(self, *, is_blocking: bool) -> bool:
        """Take the turn; returns whether it is held now."""
        return self._turn.acquire(is_blocking=is_blocking)

    def release(self) -> None:
        """Give the turn back; a no-op when not held."""
        self._turn.release()

    def predict_s(self, work: StepWork) -> float:
        """Return a rough linear guess in seconds."""
        return _STEP_S + _PREFILL_TOKEN_S * work.num_prefill_tokens + _DECODE_S * work.num_decodes

    def begin_step(self, work: StepWork, ready_at_s: float) -> float:  # noqa: ARG002 - a real step starts when it starts
        """Return when the step should end if the guess is right.

        Raises:
            RuntimeError: The turn is not held.
        """
        if not self._turn.is_held:
            message = f"a step on {self.device_id} needs the turn; call acquire first"
            raise RuntimeError(message)
        return self.clock.now() + self.predict_s(work)

    def finish_step(self, end_s: float) -> float:
        """Return how much later than guessed the step ended; never waits."""
        return max(0.0, self.clock.now() - end_s)

    def give_pages(self, address: int, num_bytes: int) -> int:
        """Return whole pages of this process to the operating system; returns bytes really given."""
        return give_back(address, num_bytes)

    def close(self) -> None:
        """Close the device, giving the turn back. Idempotent."""
        self._turn.close()
