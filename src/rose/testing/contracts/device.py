"""What every shared device must do; see ``rose.interfaces.device``."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest

from rose.interfaces.device import Device, StepWork


class DeviceContract:
    """Subclass it and override ``make_device``; with ``make_contender`` the exclusion of two holders is tested too.

    Attributes:
        is_paced: Whether steps take as long as the device says, so that ``finish_step`` waits; on a device that runs
            the step for real it is over when it is over.
    """

    is_paced: bool = True

    def make_device(self) -> Device:
        """Return a device whose turn nobody holds."""
        message = "override make_device() and return a device"
        raise NotImplementedError(message)

    def make_contender(self, device: Device) -> Device:
        """Return another engine's handle of the same device."""
        pytest.skip(f"make_contender() is not overridden for {device.device_id}")

    def release_device(self, device: Device) -> None:
        """Let go of a device after a test."""
        device.release()

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """Give a device for the length of one test."""
        device = self.make_device()
        yield device
        self.release_device(device)

    def test_the_turn_is_reentrant(self, device: Device) -> None:
        """Its holder may acquire it again; one release is enough, and another is a no-op."""
        assert device.acquire(is_blocking=True)
        assert device.acquire(is_blocking=False)
        device.release()
        device.release()
        assert device.acquire(is_blocking=False)

    def test_one_holder_at_a_time(self, device: Device) -> None:
        """A second engine does not get the turn until the first gives it back."""
        contender = self.make_contender(device)
        try:
            assert device.acquire(is_blocking=False)
            assert not contender.acquire(is_blocking=False), "two engines hold one device's turn"
            device.release()
            assert contender.acquire(is_blocking=False)
            assert not device.acquire(is_blocking=False), "two engines hold one device's turn"
        finally:
            self.release_device(contender)

    def test_more_work_takes_no_less_time(self, device: Device) -> None:
        """Predictions are not negative and do not fall with more tokens, more sequences or longer contexts."""
        steps = [
            StepWork(),
            StepWork(num_decodes=1, context_tokens=10),
            StepWork(num_decodes=4, context_tokens=400),
            StepWork(num_decodes=4, context_tokens=400, num_prefill_tokens=512, prefill_positions=512 * 256),
        ]
        predicted = [device.predict_s(step) for step in steps]
        assert predicted[0] >= 0.0
        assert predicted == sorted(predicted)

    def test_steps_follow_each_other(self, device: Device) -> None:
        """A step ends after it may start, the next one after it, and ``finish_step`` returns when it is over."""
        assert device.acquire(is_blocking=True)
        work = StepWork(num_decodes=1, context_tokens=16)
        end_s = device.clock.now()
        for _ in range(3):
            previous_s = end_s
            end_s = device.begin_step(work, previous_s)
            assert end_s >= previous_s
            late_s = device.finish_step(end_s)
            assert late_s >= 0.0
            assert not self.is_paced or device.clock.now() >= end_s, "finish_step() returned before the step was over"

    def test_given_pages_are_lost_and_usable_again(self, device: Device) -> None:
        """``give_pages`` returns no more than it was asked for, touches nothing outside, and the range stays mapped."""
        page = mmap.PAGESIZE
        with mmap.mmap(-1, 8 * page) as memory:
            memory.write(b"\x07" * (8 * page))
            hold = ctypes.c_char.from_buffer(memory)
            given_bytes = device.give_pages(ctypes.addressof(hold) + page, 4 * page)
            del hold
            assert 0 <= given_bytes <= 4 * page
            assert memory[:page] == b"\x07" * page, "memory before the range was lost"
            assert memory[5 * page :] == b"\x07" * (3 * page), "memory after the range was lost"
            memory[page : 5 * page] = b"\x08" * (4 * page)
            assert memory[page : 5 * page] == b"\x08" * (4 * page)
