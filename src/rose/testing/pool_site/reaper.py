"""Ends what a site started and did not end, and removes its folder. Run as a file, by the site, with the standard library alone.

It waits for the end of its input, which comes when the site closes the pipe or is no more; each line before that names a process:
``pid start``, the start in the kernel's ticks since boot, so that a pid that was given anew is nobody's mistake. In the folder it looks for
the pid files of serving engines, which live in sessions of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

_START_FIELD = 19  # of /proc/PID/stat, counted behind the name in parentheses
_GONE_S = 15.0
_POLL_S = 0.05


def main(folder: Path) -> None:
    """Wait, then end and remove."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    named = set()
    with contextlib.suppress(OSError):
        for line in sys.stdin:
            pid, _, start = line.partition(" ")
            named.add((int(pid), int(start)))
    sessions = {_parsed(path.read_text(errors="replace")) for path in folder.glob("*/serving.pid")}
    for process in sorted(process for process in sessions if process is not None):
        if _is_running(*process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process[0], signal.SIGKILL)
    for pid, start in named:
        if _is_running(pid, start):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    give_up_s = time.monotonic() + _GONE_S
    while any(_is_running(*process) for process in named) and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int, start: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return _parsed(text) == (pid, start) and text.rpartition(")")[2].split()[0] not in {"Z", "X"}


def _parsed(text: str) -> tuple[int, int] | None:
    head, found, rest = text.rpartition(")")
    fields = rest.split()
    if not found or len(fields) <= _START_FIELD:
        return None
    return int(head.partition(" ")[0]), int(fields[_START_FIELD])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
