"""Processes of a chaos site: kept running as an init system would, found and ended by pid.

Invariant: every process that a site starts, directly or not, has ``MARK`` with the site's folder in its environment; only those are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

MARK = "ROSE_CHAOS_SITE"
_AGAIN_S = 0.2
_END_S = 20.0
_POLL_S = 0.05


class Kept:
    """One command, started again whenever it ended. An async context manager; leaving it ends the process with SIGTERM.

    Args:
        name: For its log, ``NAME.log`` in ``folder``.
        command: What to run.
        folder: The site's.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self._command = tuple(command)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_starts = 0
        self.exit_codes: list[int] = []

    @property
    def pid(self) -> int | None:
        """The process's pid, ``None`` while there is none."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    async def __aenter__(self) -> Self:
        """Start it."""
        self._start()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def _start(self) -> None:
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.num_starts += 1

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            if self._process is not None and (code := self._process.poll()) is not None:
                self.exit_codes.append(code)
                await asyncio.sleep(_AGAIN_S)
                self._start()


def marked(folder: Path) -> list[int]:
    """Return the pids of the processes that the site in ``folder`` started and that still run, zombies left out."""
    wanted = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found)


def end_marked(folder: Path, timeout_s: float = 10.0) -> list[int]:
    """Kill what is left of a site; returns which pids that were."""
    first = left = marked(folder)
    deadline_s = time.monotonic() + timeout_s
    while left and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        left = marked(folder)
    return first
