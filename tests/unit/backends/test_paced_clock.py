"""The paced clock, with real but short waits."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rose.backends.paced import PacedClock
from rose.errors import ConfigError, LedgerError


@pytest.fixture
def clock(tmp_path: Path) -> PacedClock:
    return PacedClock.create(tmp_path / "clock", k=2.0)


def test_modelled_seconds_take_k_real_ones(clock: PacedClock) -> None:
    real_s, start_s = time.monotonic(), clock.now()
    assert clock.sleep_until(start_s + 0.02)
    passed_s = time.monotonic() - real_s
    assert passed_s >= 0.04
    assert clock.now() - start_s == pytest.approx((time.monotonic() - real_s) / 2.0, abs=5e-3)


def test_other_processes_read_the_same_time(clock: PacedClock) -> None:
    code = "import sys; from rose.backends.paced import PacedClock; print(PacedClock(sys.argv[1]).now())"
    before_s = clock.now()
    out = subprocess.run([sys.executable, "-c", code, clock.path], capture_output=True, text=True, check=True)
    assert before_s <= float(out.stdout) <= clock.now()


def test_frozen_time_stands_still_and_goes_on_from_there(clock: PacedClock) -> None:
    clock.freeze()
    clock.freeze()
    frozen_s = clock.now()
    assert clock.is_frozen
    time.sleep(0.02)
    assert clock.now() == frozen_s
    clock.unfreeze()
    clock.unfreeze()
    assert frozen_s <= clock.now() < frozen_s + 0.01


def test_time_does_not_go_back_when_a_freeze_is_anchored_before_the_last_reading(clock: PacedClock) -> None:
    reader = PacedClock(clock.path)
    read_s = reader.now()
    frozen_before = (clock.k, time.monotonic(), read_s - 1e-3, True, clock.born_s)
    clock._section.write(*frozen_before)
    assert reader.is_frozen
    assert reader.now() == read_s


def test_a_sleep_is_stretched_by_the_freeze(clock: PacedClock) -> None:
    ended_s: list[float] = []
    end_s = clock.now() + 0.4
    sleeper = threading.Thread(target=lambda: ended_s.append(clock.sleep_until(end_s) and clock.now()))
    sleeper.start()
    clock.freeze()
    time.sleep(1.0)
    assert not ended_s, "time stood still, yet the sleep ended"
    clock.unfreeze()
    sleeper.join()
    assert ended_s[0] >= end_s


def test_a_step_loop_can_leave_a_frozen_sleep(clock: PacedClock) -> None:
    clock.freeze()
    assert not clock.sleep_until(clock.now() + 9, returns_when_frozen=True)
    assert clock.sleep_until(clock.now(), returns_when_frozen=True), "the moment has come already"


async def test_async_sleep_waits_for_modelled_time(clock: PacedClock) -> None:
    clock.freeze()
    task = asyncio.create_task(clock.sleep(0.01))
    await asyncio.sleep(0.05)
    assert not task.done()
    clock.unfreeze()
    async with asyncio.timeout(5):
        await task


def test_blocking_passes_also_while_frozen(clock: PacedClock) -> None:
    clock.freeze()
    real_s = time.monotonic()
    clock.block(0.01)
    clock.block(-1.0)
    assert 0.02 <= time.monotonic() - real_s < 1.0


def test_only_the_owner_freezes(clock: PacedClock) -> None:
    with pytest.raises(LedgerError, match="only the process that created"):
        PacedClock(clock.path).freeze()


def test_errors_name_the_file_and_the_value(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="nothing-here"):
        PacedClock(tmp_path / "nothing-here")
    with pytest.raises(ConfigError, match="got 0"):
        PacedClock.create(tmp_path / "c", k=0)
