"""Processes of this machine, named for certain: a pid alone may be another process's by tomorrow.

Invariant: what cannot be told is no running process, so that nobody is ended by mistake.
"""

from __future__ import annotations

from pathlib import Path

import attrs

_START_FIELD = 19  # of /proc/PID/stat, counted behind the name in parentheses


@attrs.frozen
class ProcessName:
    """A process for certain: its pid, and its start in the kernel's ticks since boot; 0 for what is not known."""

    pid: int
    start: int

    def is_running(self) -> bool:
        """Return whether it is the process that has the pid now, and no zombie."""
        return parse_stat(_stat_of(self.pid)) == (self, True)


def parse_stat(text: str) -> tuple[ProcessName, bool] | None:
    """Return the process of a line of ``/proc/PID/stat``, and whether it is alive; ``None`` for another text."""
    head, found, rest = text.rpartition(")")
    fields = rest.split()
    pid = head.partition(" ")[0]
    if not found or not pid.isdecimal() or len(fields) <= _START_FIELD or not fields[_START_FIELD].isdecimal():
        return None
    return ProcessName(int(pid), int(fields[_START_FIELD])), fields[0] not in {"Z", "X"}


def process_start(pid: int) -> int:
    """Return when a process started, in the kernel's ticks since boot; 0 when there is none or it cannot be told."""
    found = parse_stat(_stat_of(pid))
    return 0 if found is None else found[0].start


def _stat_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")  # names may be any bytes
    except OSError:
        return ""
