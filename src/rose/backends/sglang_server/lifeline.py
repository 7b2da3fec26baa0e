"""Ends a server whose launcher is gone: SGLang's own would wait for requests for ever.

Only the server's first process is tied: SGLang lets the kernel end the others with it.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time
from pathlib import Path

LAUNCHER = "ROSE_SGLANG_LAUNCHER"
"""An environment variable: where it is set, to ``launcher_mark()`` of a process, the server ends with that process."""

_GRACE_S = 5.0
_START_TIME_FIELD = 19  # of /proc/PID/stat, counted behind the command's closing parenthesis


def launcher_mark(pid: int | None = None) -> str:
    """Return how a process is named to those that shall end with it: its id and when it started, since ids are used again.

    Args:
        pid: The process; this one when left out.
    """
    number = os.getpid() if pid is None else pid
    return f"{number}:{_started_at(number)}"


def tie_to_launcher(mark: str) -> None:
    """Watch the launcher; when it ends, end this process (SIGTERM, then by force). A no-op in processes that SGLang started.

    Args:
        mark: What ``launcher_mark`` returned.
    """
    if multiprocessing.parent_process() is None:
        threading.Thread(target=_watch, args=(mark,), name="rose-lifeline", daemon=True).start()


def _watch(mark: str) -> None:
    wait_for_end(mark)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)


def wait_for_end(mark: str) -> None:
    """Return when a marked process is gone."""
    pid = int(mark.partition(":")[0])
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if launcher_mark(pid) == mark:  # looked at after the handle was opened, so it is the handle's process
            select.select([handle], [], [])
    finally:
        os.close(handle)


def _started_at(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; empty when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[_START_TIME_FIELD]
