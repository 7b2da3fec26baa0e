"""What ROLL's router tells a proxy that does not go through it: when to stop, when to go on, when it is over.

Life cycle of a turn under ROLL's router (an actor; it has no event for "suspended", so a process asks while it has turns under way):

1. [proxy] ``on_send_request``: waits there while ROLL is suspended; false once it shuts down.
2. [proxy] runs the turn; ROLL counts it as under way, and waits for it before it updates weights.
3. [watch] sees the suspension within ``poll_s`` and aborts the process's turns.
4. [proxy] ``on_request_routed``, then returns "aborted"; ROLL asks the turn anew, which waits at 1 until the resume.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ray


def read_suspended(manager: Any) -> bool:
    """Run inside ROLL's router manager: tell whether its requests are to stop."""
    return bool(manager.need_suspend or manager.need_shutdown)


class RouterGate:
    """The router manager of one scheduler, seen from one process.

    Args:
        router: The actor's handle.
        abort: Ends the process's turns of that router; called from the watching thread.
        poll_s: How often to ask.
    """

    def __init__(self, router: Any, *, abort: Callable[[], object], poll_s: float) -> None:
        self._router = router
        self._abort = abort
        self._poll_s = poll_s
        self._num_turns = 0
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None

    def enter(self, request_id: str) -> bool:
        """Wait until ROLL lets requests through; false when it shuts down."""
        if not ray.get(self._router.on_send_request.remote(request_id)):
            return False
        with self._lock:
            self._num_turns += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="rose-roll-suspension", daemon=True)
                self._thread.start()
            self._lock.notify()
        return True

    def leave(self, request_id: str) -> None:
        """Tell ROLL that the request is over."""
        with self._lock:
            self._num_turns -= 1
        ray.get(self._router.on_request_routed.remote(request_id))

    def _watch(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._num_turns > 0)
            try:
                is_suspended = ray.get(self._router.__ray_call__.remote(read_suspended))
            except ray.exceptions.RayError:  # the router is gone, and ROLL with it
                is_suspended = True
            if is_suspended:
                self._abort()
            with self._lock:
                self._lock.wait(timeout=self._poll_s)
