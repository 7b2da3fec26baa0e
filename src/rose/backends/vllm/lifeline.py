"""Ends an engine process whose driver is gone: vLLM's own would wait for requests for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import connection

LIFELINE = "ROSE_LIFELINE"
"""An environment variable: where it is set, an engine process is tied from its first moment on, not only once it serves."""

_GRACE_S = 10.0


def tie_to_parent() -> None:
    """Watch the process that started this one; when it ends, end this one (SIGTERM, then by force). No-op in the driver."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    threading.Thread(target=_watch, args=(parent.sentinel,), name="rose-lifeline", daemon=True).start()


def _watch(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
