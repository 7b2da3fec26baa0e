"""Requests on their way into SGLang's scheduler: seen before the step loop takes them in, and waited for without spinning.

Invariants: every message is handed on exactly once and in order; a prompt is counted when it is read, before the step loop
knows of it; health checks are no prompts. Only the rank that reads the sockets has anything to do here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

HEALTH_CHECK = "HEALTH_CHECK"


class InputWatch:
    """The messages of one scheduler."""

    def __init__(
        self, scheduler: Any, read: Callable[[], list[Any] | None], note_arrival: Callable[[str], None]
    ) -> None:
        """Watch the scheduler's sockets.

        Args:
            scheduler: SGLang's.
            read: Its own way to read what is there now; ``None`` on a rank that reads nothing.
            note_arrival: Hears of every prompt.
        """
        self._scheduler = scheduler
        self._read = read
        self._note_arrival = note_arrival
        self._early: list[Any] = []
        self._poller = _poller(scheduler)

    def pull(self) -> list[Any] | None:
        """Return what is there now, messages that were read early first; ``None`` on a rank that reads none."""
        found = self._read()
        if found is None:
            return None
        self._note(found)
        early, self._early = self._early, []
        return [*early, *found]

    def look(self) -> None:
        """Read early what is there now, so that prompts among it count as arrived."""
        found = self._read() or []
        self._note(found)
        self._early.extend(found)

    def wait(self, timeout_s: float) -> None:
        """Return as soon as a message is there, or after ``timeout_s``."""
        if self._poller is None or self._early:
            return
        self._poller.poll(max(1, round(timeout_s * 1000)))

    def _note(self, messages: Iterable[Any]) -> None:
        if not self._scheduler.is_generation:
            return
        for message in messages:
            for req in self._scheduler._tokenized_requests(message):  # noqa: SLF001 - SGLang's own sorting
                if is_prompt(req.rid):
                    self._note_arrival(req.rid)


def is_prompt(request_id: Any) -> bool:
    """Return whether a request is a client's, not one of SGLang's own health checks."""
    return isinstance(request_id, str) and not request_id.startswith(HEALTH_CHECK)


def _poller(scheduler: Any) -> Any:
    channels = scheduler.ipc_channels
    sockets = [socket for socket in (channels.recv_from_tokenizer, channels.recv_from_rpc) if hasattr(socket, "poll")]
    if not sockets:
        return None
    zmq: Any = importlib.import_module("zmq")  # comes with SGLang

    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    return poller
