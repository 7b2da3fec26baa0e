"""Runs a server for as long as somebody wants it: ``python keeper.py FOLDER COMMAND ...``, with the standard library alone.

A process between the engine's client and the server, for the server's own processes outlive whoever started them. When the pipe to it closes,
which the kernel sees to for a client that was killed as well, it kills all processes of the server, waits until they are gone, and removes the
folder, where the server keeps what is temporary. It ends when the server does, with its exit status.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_PR_SET_CHILD_SUBREAPER = 36


def main(folder: str, command: list[str]) -> int:
    """Run the command; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one from a terminal is the client's to handle
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # schedulers that outlive the server become ours
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        select.select([sys.stdin, os.pidfd_open(server.pid)], [], [])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        status = server.wait()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
