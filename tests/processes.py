"""What tests ask about processes that are not their own children."""

from __future__ import annotations

import psutil


def is_running(pid: int) -> bool:
    """Return whether a process lives: a zombie does not, nor one that ends while it is asked about."""
    try:
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False
