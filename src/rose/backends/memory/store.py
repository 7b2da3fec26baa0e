"""The blobs themselves, and the operations on them.

Invariants: a key keeps the bytes of its first ``put`` until it is deleted; a pointer changes only by ``compare_and_set``; an
arrival wakes those who wait for that very key and nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import attrs

from rose.errors import BlobNotFoundError, VersionConflictError
from rose.interfaces.transport import Payload


class BlobStore(Protocol):
    """What a server needs of a store, here or across a connection. Every ``Transport`` is one."""

    def put(self, key: str, payload: Payload) -> None:
        """Write once."""

    def get(self, key: str) -> Payload:
        """Read."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove."""

    def read_pointer(self, name: str) -> str | None:
        """Read a pointer."""

    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Move a pointer."""

    def close(self) -> None:
        """Let go of connections."""


class WaitingStore(BlobStore, Protocol):
    """A store with the optional abilities, too; what ``MemoryTransport`` needs."""

    def get(self, key: str) -> bytes:
        """Read."""

    def get_when_ready(self, key: str, timeout_s: float) -> bytes:
        """Read as soon as it is there."""

    def invalidate(self, key: str, damaged: str | None = None) -> None:
        """Forget a copy."""


@attrs.define(eq=False)
class _Arrival:
    """Those who wait for one key."""

    event: threading.Event = attrs.field(factory=threading.Event)
    num_waiting: int = 0


class LocalStore:
    """Blobs in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blobs: dict[str, bytes] = {}
        self._pointers: dict[str, str] = {}
        self._arrivals: dict[str, _Arrival] = {}

    def put(self, key: str, payload: Payload) -> None:
        """Write once; the same bytes again are a no-op. ``bytes`` are kept as they are, anything else is copied."""
        data = bytes(payload)
        with self._lock:
            held = self._blobs.setdefault(key, data)
            arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            arrival.event.set()
        if held is not data and held != data:
            message = f"key {key!r} already holds {len(held)} other bytes; keys are written once"
            raise VersionConflictError(message)

    def get(self, key: str) -> bytes:
        """Read."""
        return self.get_when_ready(key, 0.0)

    def get_when_ready(self, key: str, timeout_s: float) -> bytes:
        """Read as soon as it is there."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                held = self._blobs.get(key)
                left_s = deadline_s - time.monotonic()
                if held is None and left_s > 0:
                    arrival = self._arrivals.setdefault(key, _Arrival())
                    arrival.num_waiting += 1
                else:
                    arrival = None
            if held is not None:
                return held
            if arrival is None:
                message = f"there is no blob {key!r}"
                raise BlobNotFoundError(message)
            arrival.event.wait(left_s)
            self._leave(key, arrival)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove; unknown keys are ignored."""
        with self._lock:
            for key in keys:
                self._blobs.pop(key, None)

    def read_pointer(self, name: str) -> str | None:
        """Read a pointer."""
        with self._lock:
            return self._pointers.get(name)

    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Move a pointer if it holds ``expected``."""
        with self._lock:
            if self._pointers.get(name) != expected:
                return False
            self._pointers[name] = value
            return True

    def invalidate(self, key: str, damaged: str | None = None) -> None:
        """Do nothing: these are the originals."""

    def close(self) -> None:
        """Do nothing: the blobs live as long as the object."""

    def _leave(self, key: str, arrival: _Arrival) -> None:
        with self._lock:
            arrival.num_waiting -= 1
            if not arrival.num_waiting and self._arrivals.get(key) is arrival:
                del self._arrivals[key]
