"""A device whose steps take as long as a named GPU and model would take them.

Invariants:

* The turn is a lock of the kernel on the device's file; whoever holds it, and only it, moves ``free_at``.
* Step ends are absolute: a step starts when its engine was ready or the device became free, whichever is later, and not
  when the engine woke up. So a late wake-up shortens the next sleep and nothing drifts.
* Time is the paced clock's. While the clock is frozen ``finish_step`` returns at once; the step's time stays charged.
"""

from __future__ import annotations

import struct
from pathlib import Path

from rose.backends.paced.clock import PacedClock
from rose.backends.paced.profiles import Profile, profile_named
from rose.backends.paging import give_back
from rose.backends.turn_lock import TurnLock
from rose.coserving.shared_page import map_file
from rose.interfaces.device import Device, StepWork
from rose.types import DeviceId

_PAGE_BYTES = 4096
_STATE = struct.Struct("dd")  # the clock it is told on, free_at


class PacedDevice(Device):
    """One engine's handle on a paced device. Two handles, also in one process, contend like two engines."""

    clock: PacedClock

    def __init__(self, path: Path | str, profile: Profile | str, clock: PacedClock | Path | str) -> None:
        """Open the device in ``path``, making it if needed, for an engine that runs the model of ``profile``.

        Raises:
            ConfigError: Unknown profile name.
            LedgerError: The device's or the clock's file cannot be opened.
        """
        self.device_id = DeviceId(Path(path).name)
        self.profile = profile_named(profile) if isinstance(profile, str) else profile
        self.clock = clock if isinstance(clock, PacedClock) else PacedClock(clock)
        self._turn = TurnLock(path)
        self._turn.make_room(_PAGE_BYTES)
        self._memory = map_file(path, _PAGE_BYTES, is_new=False)

    @property
    def description(self) -> str:
        """``paced:<profile> k=<k>``, to be printed beside every figure taken on this device."""
        return f"paced:{self.profile.name} k={self.clock.k:g}"

    @property
    def expected_release_s(self) -> float:
        """When the device becomes free if nobody takes another turn, on ``clock``."""
        born_s, free_at_s = _STATE.unpack_from(self._memory, 0)
        return float(free_at_s) if born_s == self.clock.born_s else 0.0

    def acquire(self, *, is_blocking: bool) -> bool:
        """Take the turn; returns whether it is held now."""
        return self._turn.acquire(is_blocking=is_blocking)

    def release(self) -> None:
        """Give the turn back; a no-op when not held."""
        self._turn.release()

    def predict_s(self, work: StepWork) -> float:
        """Return the profile's time for this step, in modelled seconds."""
        return self.profile.step_s(work)

    def begin_step(self, work: StepWork, ready_at_s: float) -> float:
        """Charge the step to the device and return its modelled end.

        Raises:
            RuntimeError: The turn is not held.
        """
        if not self._turn.is_held:
            message = f"a step on {self.device_id} needs the turn; call acquire first"
            raise RuntimeError(message)
        end_s = max(ready_at_s, self.expected_release_s) + self.predict_s(work)
        _STATE.pack_into(self._memory, 0, self.clock.born_s, end_s)
        return end_s

    def finish_step(self, end_s: float) -> float:
        """Wait for ``end_s``; return how late it is, or 0 when the clock is frozen."""
        if not self.clock.sleep_until(end_s, returns_when_frozen=True):
            return 0.0
        return max(0.0, self.clock.now() - end_s)

    def give_pages(self, address: int, num_bytes: int) -> int:
        """Return whole pages of this process to the operating system; returns bytes really given."""
        return give_back(address, num_bytes)

    def close(self) -> None:
        """Close the device, giving the turn back. Idempotent."""
        self._turn.close()
