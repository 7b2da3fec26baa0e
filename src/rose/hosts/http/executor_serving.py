"""The serving engine beside an executor: started by it or not, it is never ended by it.

Invariants:

* A serving engine that the executor starts runs in a session of its own and writes its own pid file before it becomes the engine, so
  neither the executor's death nor its timing can lose it; the next executor finds it by pid and start time and goes on with it.
* Of one that died (its pid is free, another process's, or a zombie's) another is started, with growing waits.
* The executor never ends a serving engine; ``stop`` does, when the operator asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from rose.backends.vllm.lifeline import LIFELINE
from rose.coserving.ledger import Ledger
from rose.coserving.processes import ProcessName, parse_stat
from rose.errors import ConfigError, LedgerError
from rose.hosts.http.executor_rollout import RestartConfig
from rose.interfaces.clock import Clock

_logger = logging.getLogger(__name__)
PID_FILE, LOG_FILE, LOCK_FILE = "serving.pid", "serving.log", "executor.lock"
_LOOK_S = 0.25
_APPEAR_S = 5.0
_STOP_POLL_S = 0.05
_children: list[subprocess.Popen[bytes]] = []  # kept while they live, for they are meant to outlive whoever holds them
# The shell becomes the engine by exec: same pid, same start time, and the file is there before anything can go wrong.
_LAUNCH = 'IFS= read -r stat </proc/$$/stat && printf "%s\\n" "$stat" >"$0.new" && mv "$0.new" "$0" && exec "$@"'


def read_pid_file(path: Path) -> ProcessName | None:
    """Return the process that a pid file names, running or not; ``None`` when there is no such file."""
    try:
        found = parse_stat(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return None if found is None else found[0]


def launch(
    command: Sequence[str], pid_file: Path, log_file: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; it writes its pid file itself and appends to its log.

    Raises:
        ConfigError: The log cannot be written.
    """
    try:
        with _open_private(log_file) as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", _LAUNCH, str(pid_file), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**{name: value for name, value in os.environ.items() if name != LIFELINE}, **environment},
            )
    except OSError as error:
        message = f"cannot start the serving engine: {error}"
        raise ConfigError(message) from error


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other executors out of a folder, which is made where missing. The kernel gives the lock back when its holder dies.

    Raises:
        ConfigError: An executor has it, or the folder cannot be used.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _open_private(run_dir / LOCK_FILE)
    except OSError as error:
        message = f"run_dir {run_dir} cannot be used: {error.strerror}"
        raise ConfigError(message) from error
    with lock:
        _lock(lock, f"an executor runs in {run_dir}; end it first, or choose another run_dir")
        yield


@contextlib.contextmanager
def sole_executor(ledger: Path) -> Iterator[None]:
    """Keep other executors off a device, whatever their folders: its ledger has one writer a section.

    Raises:
        ConfigError: An executor is at work there.
    """
    with ledger.open("rb") as lock:
        _lock(lock, f"another executor shares the device of ledger {ledger}; end it first, or name another device")
        yield


def _lock(file: BinaryIO, problem: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(problem) from error


def stop(run_dir: Path, timeout_s: float = 30.0) -> bool:
    """End the serving engine that an executor of ``run_dir`` started; returns whether there was one.

    Its whole session gets SIGTERM, and SIGKILL when it has not ended in time.

    Raises:
        ConfigError: An executor is running there, which would start another.
    """
    with locked(run_dir):
        return _end(run_dir, timeout_s)


def _end(run_dir: Path, timeout_s: float) -> bool:
    process = read_pid_file(run_dir / PID_FILE)
    if process is None or not process.is_running():
        return False
    deadline_s = time.monotonic() + timeout_s
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while process.is_running() and time.monotonic() < deadline_s:
            time.sleep(_STOP_POLL_S)
        os.killpg(process.pid, signal.SIGKILL)
    return True


class ServingProcess:
    """Watches one serving engine, and starts it where that is the executor's task.

    Args:
        ledgers: The ledgers of its devices.
        clock: Their clock.
        command: How it is started; nothing where somebody else does.
        run_dir: Where its pid file and log are.
        environment: Variables for it.
        stale_s: From which age on a heartbeat is reported.
        restart: When it is started again.
        say: Told what happens, one line each.
    """

    def __init__(
        self,
        ledgers: Sequence[Ledger],
        clock: Clock,
        *,
        command: Sequence[str],
        run_dir: Path,
        environment: Mapping[str, str] | None = None,
        stale_s: float = 1.0,
        restart: RestartConfig | None = None,
        say: Callable[[str], None] = _logger.info,
    ) -> None:
        self._ledgers = tuple(ledgers)
        self._clock = clock
        self._command = tuple(command)
        self._pid_file, self._log_file = run_dir / PID_FILE, run_dir / LOG_FILE
        self._environment = environment or {}
        self._stale_s = stale_s
        self._restart = restart or RestartConfig()
        self._say = say
        self.num_starts = 0

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds of the device's clock since serving was last heard of, on the device where that is longest; ``inf``: never."""
        try:
            return max(self._clock.now() - ledger.serving().heartbeat_s for ledger in self._ledgers)
        except LedgerError:
            return float("inf")

    @property
    def problem(self) -> str | None:
        """Why rollouts cannot trust serving now, or ``None``."""
        age_s = self.heartbeat_age_s
        if abs(age_s) <= self._stale_s:
            return None
        if age_s < 0:
            return "serving's heartbeat is of another boot or clock; rollouts stand still"
        if age_s == float("inf"):
            return "serving has no heartbeat in the ledger; rollouts stand still"
        return f"serving's heartbeat is {age_s:.1f} s old; rollouts stand still"

    async def wait_until_heard(self) -> None:
        """Return once serving's heartbeat is fresh."""
        while self.problem is not None:  # noqa: ASYNC110 - another process writes the ledger
            await asyncio.sleep(_LOOK_S)

    async def run(self) -> None:
        """Start serving, and again whenever it died; for ever. Returns at once where that is somebody else's task."""
        num_failures = 0
        while self._command:
            began_s = time.monotonic()
            try:
                await self._run_one()
                end = f"the serving engine ended (see {self._log_file})"
            except (
                ConfigError,
                OSError,
            ) as error:  # a full disk for instance, which passes: nobody else would try again
                end = str(error)
            is_well = time.monotonic() - began_s >= self._restart.well_s
            num_failures = 1 if is_well else num_failures + 1
            wait_s = self._restart.wait_s(num_failures)
            self._say(f"{end}; another start in {wait_s:g} s")
            await asyncio.sleep(wait_s)

    async def _run_one(self) -> None:
        process = self._find() or await self._begin()
        while process is not None and process.is_running():  # noqa: ASYNC110 - it may be another executor's child
            await asyncio.sleep(_LOOK_S)
        _children[:] = [child for child in _children if child.poll() is None]

    def _find(self) -> ProcessName | None:
        process = read_pid_file(self._pid_file)
        if process is None or not process.is_running():
            return None
        self._say(f"serving engine found: process {process.pid}")
        return process

    async def _begin(self) -> ProcessName | None:
        """Start one; returns it once its pid file is there, ``None`` when it did not get that far."""
        self._pid_file.unlink(missing_ok=True)
        child = launch(self._command, self._pid_file, self._log_file, self._environment)
        _children.append(child)
        self.num_starts += 1
        self._say(f"serving engine started: process {child.pid}, log in {self._log_file}")
        give_up_s = time.monotonic() + _APPEAR_S
        while (process := read_pid_file(self._pid_file)) is None:
            if child.poll() is not None or time.monotonic() > give_up_s:
                return None
            await asyncio.sleep(_STOP_POLL_S)
        return process


def _open_private(path: Path) -> BinaryIO:
    """Open a file to append to, made for its owner alone."""
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab"
    )  # what serving says may quote prompts
