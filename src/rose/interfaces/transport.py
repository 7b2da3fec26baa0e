"""The transport role: write-once blobs and one small compare-and-set pointer, reachable from several processes.

Blocking and thread-safe: trainer ranks and engine worker threads call it directly; async callers use a thread.

Invariants (``rose.testing.TransportContract`` checks them): a key is written once, a second ``put`` with other bytes is
refused; ``get`` returns exactly what was put or raises; the pointer changes only by a compare-and-set that names its old
value; nothing is pickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rose.types import TransportAddress


class Transport(ABC):
    """A store of named blobs."""

    @abstractmethod
    def put(self, key: str, payload: bytes | memoryview) -> None:
        """Write a blob once. Writing the same bytes again is a no-op.

        Raises:
            VersionConflictError: The key holds other bytes.
            TransportError: The store is not reachable or full.
        """

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Read a blob.

        Raises:
            BlobNotFoundError: There is no such key.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Remove blobs; unknown keys are ignored."""

    @abstractmethod
    def read_pointer(self, name: str) -> str | None:
        """Return the pointer's value, or ``None`` when it was never set."""

    @abstractmethod
    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Set the pointer if it holds ``expected``; return whether it was set."""

    @abstractmethod
    def address(self) -> TransportAddress:
        """Return how another process opens the same store (``rose.registry.open_transport``)."""

    def close(self) -> None:
        """Let go of connections. Idempotent."""
