"""Paced and host devices keep the contracts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rose.backends.host import HostClock, HostDevice
from rose.backends.paced import PacedClock, PacedDevice
from rose.interfaces.clock import Clock
from rose.interfaces.device import Device
from rose.testing.contracts.clock import ClockContract
from rose.testing.contracts.device import DeviceContract


class Files:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path


class TestPacedDevice(Files, DeviceContract):
    def make_device(self) -> Device:
        clock = PacedClock.create(self.folder / "clock")
        return PacedDevice(self.folder / "dev", "h100:qwen3-8b", clock)

    def make_contender(self, device: Any) -> Device:
        return PacedDevice(self.folder / "dev", "h100:qwen2.5-7b", device.clock)

    def release_device(self, device: Any) -> None:
        device.close()


class TestHostDevice(Files, DeviceContract):
    is_paced = False

    def make_device(self) -> Device:
        return HostDevice(self.folder / "dev")

    def make_contender(self, device: Device) -> Device:
        return HostDevice(self.folder / "dev")

    def release_device(self, device: Any) -> None:
        device.close()


class TestPacedClock(Files, ClockContract):
    def make_clock(self) -> Clock:
        return PacedClock.create(self.folder / "clock", k=2.0)


class TestHostClock(ClockContract):
    def make_clock(self) -> Clock:
        return HostClock()
