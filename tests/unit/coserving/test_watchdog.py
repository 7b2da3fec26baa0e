"""The watchdog against a real process that is stopped while it holds the turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest

from rose.backends.turn_lock import TurnLock
from rose.coserving.ledger import Ledger, RolloutState
from rose.coserving.processes import process_start
from rose.coserving.watchdog import Watchdog

HOLD = """
import sys, time
from rose.backends.turn_lock import TurnLock
lock = TurnLock(sys.argv[1])
lock.acquire(is_blocking=True)
print("held", flush=True)
time.sleep(60)
"""


def test_a_stopped_holder_is_ended_and_the_turn_comes_free(tmp_path: Path) -> None:
    device = tmp_path / "device"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(device)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        ledger = Ledger.create(tmp_path / "ledger")
        now_s = time.monotonic()
        state = RolloutState(pid=holder.pid, pid_start=process_start(holder.pid), turn_ends_s=now_s + 0.2, step_s=0.2)
        ledger.publish_rollout(state)
        os.kill(holder.pid, signal.SIGSTOP)
        watchdog, lock = Watchdog([ledger], grace_s=0.05), TurnLock(device)
        watchdog.look(now_s + 10)
        assert holder.poll() is None, "nobody waits"
        watchdog.begin(now_s)
        watchdog.look(now_s + 0.24)
        assert holder.poll() is None, "its turn may last that long"
        assert not lock.acquire(is_blocking=False)
        watchdog.look(now_s + 0.26)
        assert lock.acquire(is_blocking=True)
        assert holder.wait(5) == -signal.SIGKILL
        assert watchdog.num_ended == 1
        lock.close()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()  # type: ignore[union-attr]


def test_only_the_process_that_the_ledger_means_is_ended(tmp_path: Path) -> None:
    """Not this process, not another one that got the same pid, nobody after serving has its turn."""
    ledger = Ledger.create(tmp_path / "ledger")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        real = RolloutState(pid=bystander.pid, pid_start=process_start(bystander.pid))
        watchdog = Watchdog([ledger], grace_s=0.05)
        watchdog.begin(0.0)
        own = attrs.evolve(real, pid=os.getpid(), pid_start=process_start(os.getpid()))
        for state in (own, attrs.evolve(real, pid_start=real.pid_start - 1), RolloutState()):
            ledger.publish_rollout(state)
            watchdog.look(100.0)
        ledger.publish_rollout(real)
        watchdog.end()
        watchdog.look(100.0)
        assert bystander.poll() is None
        assert watchdog.num_ended == 0
    finally:
        bystander.kill()
        bystander.wait()
    assert process_start(bystander.pid) == 0


def test_a_process_that_may_not_be_ended_does_not_end_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that looks goes on; nor does a name of any bytes stop it."""
    sleep = tmp_path / "sl\xffeep".encode("latin-1").decode("utf-8", "surrogateescape")
    sleep.symlink_to("/bin/sleep")
    bystander = subprocess.Popen([sleep, "60"])
    try:
        deadline = time.monotonic() + 5
        while not (start := process_start(bystander.pid)):
            assert time.monotonic() < deadline
        ledger = Ledger.create(tmp_path / "ledger")
        ledger.publish_rollout(RolloutState(pid=bystander.pid, pid_start=start))

        def refuse(pid: int, number: int) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "kill", refuse)
        watchdog = Watchdog([ledger], grace_s=0.05)
        watchdog.begin(0.0)
        watchdog.look(100.0)
        assert watchdog.num_ended == 0
    finally:
        monkeypatch.undo()
        bystander.kill()
        bystander.wait()
