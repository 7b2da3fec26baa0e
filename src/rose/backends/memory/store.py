"""The blobs themselves, and the five operations on them.

Invariants: a key keeps the bytes of its first ``put`` until it is deleted; a pointer changes only by ``compare_and_set``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from rose.errors import BlobNotFoundError, VersionConflictError


class BlobStore(Protocol):
    """What ``MemoryTransport`` needs of a store, here or across a connection."""

    def put(self, key: str, payload: bytes | memoryview) -> None:
        """Write once."""

    def get(self, key: str) -> bytes:
        """Read."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove."""

    def read_pointer(self, name: str) -> str | None:
        """Read a pointer."""

    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Move a pointer."""

    def close(self) -> None:
        """Let go of connections."""


class LocalStore:
    """Blobs in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blobs: dict[str, bytes] = {}
        self._pointers: dict[str, str] = {}

    def put(self, key: str, payload: bytes | memoryview) -> None:
        """Write once; the same bytes again are a no-op."""
        data = bytes(payload)
        with self._lock:
            held = self._blobs.setdefault(key, data)
        if held is not data and held != data:
            message = f"key {key!r} already holds {len(held)} other bytes; keys are written once"
            raise VersionConflictError(message)

    def get(self, key: str) -> bytes:
        """Read."""
        with self._lock:
            held = self._blobs.get(key)
        if held is None:
            message = f"there is no blob {key!r}"
            raise BlobNotFoundError(message)
        return held

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

    def close(self) -> None:
        """Do nothing: the blobs live as long as the object."""
