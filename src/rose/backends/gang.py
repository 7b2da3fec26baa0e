"""Several devices of one node as one: an engine that is split over n of them steps only when it has all n.

Invariants: turns are taken in the order of the devices' ids, the same for every engine, and all or none, so that two engines that
want overlapping devices never wait for each other in a circle. A step starts when the last device is free and ends on all at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.coserving.governor import SupportsReleaseHint
from rose.errors import ConfigError
from rose.interfaces.device import Device, StepWork
from rose.types import DeviceId


class GangDevice(Device):
    """Handles on n devices with one clock, used as one."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """Take the handles over; they are closed together.

        Raises:
            ConfigError: There is none, or the same device twice.
        """
        self._devices = sorted(devices, key=lambda device: device.device_id)
        ids = [device.device_id for device in self._devices]
        if not ids or len(set(ids)) < len(ids):
            message = f"an engine over several devices needs one or more different ones; got {', '.join(ids) or 'none'}"
            raise ConfigError(message)
        self.device_id = DeviceId("+".join(ids))
        self.clock = self._devices[0].clock

    @property
    def description(self) -> str:
        """What to print beside figures taken on these devices."""
        return f"{len(self._devices)} x {getattr(self._devices[0], 'description', self._devices[0].device_id)}"

    @property
    def expected_release_s(self) -> float:
        """When the last device becomes free if nobody takes another turn; 0 where no device knows."""
        hints = (device.expected_release_s for device in self._devices if isinstance(device, SupportsReleaseHint))
        return max(hints, default=0.0)

    def acquire(self, *, is_blocking: bool) -> bool:
        """Take all turns or none; a blocking call waits for one device after the other."""
        for device in self._devices:
            if not device.acquire(is_blocking=is_blocking):
                self.release()
                return False
        return True

    def release(self) -> None:
        """Give all turns back."""
        for device in self._devices:
            device.release()

    def predict_s(self, work: StepWork) -> float:
        """Return how long the step takes on the slowest device; each one's profile is that of the whole engine."""
        return max(device.predict_s(work) for device in self._devices)

    def begin_step(self, work: StepWork, ready_at_s: float) -> float:
        """Charge the step to every device from the moment that the last one is free; return its end."""
        start_s = max(ready_at_s, self.expected_release_s)
        return max(device.begin_step(work, start_s) for device in self._devices)

    def finish_step(self, end_s: float) -> float:
        """Wait for ``end_s``; return how late it is."""
        return max(device.finish_step(end_s) for device in self._devices)

    def give_pages(self, address: int, num_bytes: int) -> int:
        """Return pages of this process; every rank's pages are its own process's."""
        return self._devices[0].give_pages(address, num_bytes)

    def close(self) -> None:
        """Close all devices, giving the turns back. Idempotent."""
        for device in self._devices:
            closer = getattr(device, "close", device.release)
            closer()
