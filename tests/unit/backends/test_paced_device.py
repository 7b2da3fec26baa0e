"""Paced and host devices, the profiles behind them, and giving pages back."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rose.backends.host import HostDevice
from rose.backends.paced import PROFILES, PacedClock, PacedDevice, profile_named
from rose.backends.paging import give_back
from rose.errors import ConfigError, EngineError
from rose.interfaces.device import StepWork

DECODE = StepWork(num_decodes=4, context_tokens=4000)
NAME = "h100:qwen3-8b"


@pytest.fixture
def clock(tmp_path: Path) -> PacedClock:
    return PacedClock.create(tmp_path / "clock")


@pytest.fixture
def device(tmp_path: Path, clock: PacedClock) -> PacedDevice:
    return PacedDevice(tmp_path / "dev", NAME, clock)


def test_a_step_takes_the_profile_s_time(device: PacedDevice, clock: PacedClock) -> None:
    device.acquire(is_blocking=True)
    start_s = clock.now()
    end_s = device.begin_step(DECODE, start_s)
    assert end_s - start_s == pytest.approx(PROFILES[NAME].step_s(DECODE))
    assert device.expected_release_s == end_s
    assert device.finish_step(end_s) >= 0.0
    assert clock.now() >= end_s


def test_two_engines_share_one_device_s_time(tmp_path: Path, device: PacedDevice, clock: PacedClock) -> None:
    """The second engine's step starts when the device is free, not when the engine was ready."""
    other = PacedDevice(tmp_path / "dev", "h100:qwen2.5-7b", clock)
    device.acquire(is_blocking=True)
    first_end_s = device.begin_step(DECODE, clock.now())
    device.release()
    other.acquire(is_blocking=True)
    assert other.begin_step(DECODE, 0.0) == pytest.approx(first_end_s + other.predict_s(DECODE))


def test_a_step_needs_the_turn(device: PacedDevice, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="call acquire first"):
        device.begin_step(DECODE, 0.0)
    with pytest.raises(RuntimeError, match="call acquire first"):
        HostDevice(tmp_path / "h").begin_step(DECODE, 0.0)


def test_the_time_of_an_earlier_clock_is_forgotten(tmp_path: Path, device: PacedDevice) -> None:
    """A device file left over from an earlier run must not block the next one until that run's time."""
    device.acquire(is_blocking=True)
    device.begin_step(DECODE, 1e6)
    device.close()
    fresh = PacedDevice(tmp_path / "dev", NAME, PacedClock.create(tmp_path / "clock2"))
    assert fresh.expected_release_s == 0.0


def test_a_freeze_ends_the_wait_but_not_the_charge(device: PacedDevice, clock: PacedClock) -> None:
    device.acquire(is_blocking=True)
    end_s = device.begin_step(DECODE, clock.now() + 5)
    clock.freeze()
    assert device.finish_step(end_s) == 0.0
    assert device.expected_release_s == end_s


def test_the_kernel_frees_the_turn_of_a_dead_process(tmp_path: Path, device: PacedDevice, clock: PacedClock) -> None:
    code = (
        "import sys, time; from rose.backends.paced import PacedDevice\n"
        f"d = PacedDevice(sys.argv[1], {NAME!r}, sys.argv[2]); print(d.acquire(is_blocking=True), flush=True)\n"
        "time.sleep(60)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "dev"), clock.path]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert not device.acquire(is_blocking=False)
        os.kill(holder.pid, signal.SIGKILL)
        started_s = time.monotonic()
        assert device.acquire(is_blocking=True)
        assert time.monotonic() - started_s < 5


def test_figures_carry_their_device(device: PacedDevice, tmp_path: Path) -> None:
    assert device.description == "paced:h100:qwen3-8b k=1"
    assert HostDevice(tmp_path / "h").description == "host"


def test_profiles_are_those_of_the_published_shapes() -> None:
    """KV bytes a token from layers, KV heads and head size; decode and prefill times as rooflines give them."""
    serving, rollout = profile_named("h100:qwen2.5-7b"), profile_named(NAME)
    assert (serving.kv_bytes_per_token, rollout.kv_bytes_per_token) == (57_344, 147_456)
    assert serving.step_s(StepWork(num_decodes=8, context_tokens=8000)) == pytest.approx(6.64e-3, rel=0.01)
    chunk = StepWork(num_prefill_tokens=2048, prefill_positions=2048**2 / 2)
    assert serving.step_s(chunk) == pytest.approx(52.6e-3, rel=0.01)
    with pytest.raises(ConfigError, match=r"known are h100:qwen2\.5-7b, h100:qwen3-8b"):
        profile_named("a100:x")


def test_given_pages_leave_the_process() -> None:
    num_bytes = 32 << 20
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"\x01" * num_bytes)
        full = psutil.Process().memory_info().rss
        hold = ctypes.c_char.from_buffer(memory)
        given = give_back(ctypes.addressof(hold) + 1, num_bytes - 1)
        del hold
        assert given == num_bytes - mmap.PAGESIZE, "the page of the first byte is kept"
        assert full - psutil.Process().memory_info().rss > 0.9 * num_bytes
        assert memory[0] == 1
        assert memory[mmap.PAGESIZE] == 0


def test_less_than_a_page_is_nothing_and_nonsense_an_error() -> None:
    assert give_back(mmap.PAGESIZE + 1, mmap.PAGESIZE) == 0
    with pytest.raises(EngineError, match="madvise refused"):
        give_back(mmap.PAGESIZE, mmap.PAGESIZE)
