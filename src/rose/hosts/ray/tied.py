"""Becomes a ``rose`` command that ends with the process that started it: ``python -m rose.hosts.ray.tied PARENT-PID COMMAND ...``.

The kernel sends SIGTERM when the parent is gone (Linux only, as co-serving is), so that nothing is left on a node whose Ray processes
were killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to its parent, then become the command."""
    parent = int(arguments[0])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:  # otherwise it was gone before we asked
        os.execv(sys.executable, [sys.executable, "-m", "rose.cli.main", *arguments[1:]])  # noqa: S606 - that is the purpose


if __name__ == "__main__":
    main(sys.argv[1:])
