"""The transport role: write-once blobs and one small compare-and-set pointer, reachable from several processes.

Blocking and thread-safe: trainer ranks and engine worker threads call it directly; async callers use a thread.

Invariants (``rose.testing.TransportContract`` checks them): a key is written once, a second ``put`` with other bytes is
refused; ``get`` returns exactly what was put or raises; the pointer changes only by a compare-and-set that names its old
value; nothing is pickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rose.types import TransportAddress

Payload = bytes | bytearray | memoryview
"""The bytes of a blob."""


class Transport(ABC):
    """A store of named blobs."""

    @abstractmethod
    def put(self, key: str, payload: Payload) -> None:
        """Write a blob once. Writing the same bytes again is a no-op.

        Raises:
            VersionConflictError: The key holds other bytes.
            TransportError: The store is not reachable or full.
        """

    @abstractmethod
    def get(self, key: str) -> Payload:
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


@runtime_checkable
class SupportsWait(Protocol):
    """A transport that can wait for a blob without being asked again and again (``rose.transfer.cluster_wait`` asks)."""

    def get_when_ready(self, key: str, timeout_s: float) -> Payload:
        """Read a blob as soon as it is there; ``timeout_s`` of 0 is a plain ``get``.

        Raises:
            BlobNotFoundError: It did not come in time.
            TransportError: The store is not reachable.
        """


@runtime_checkable
class SupportsInvalidate(Protocol):
    """A transport that may hold copies of blobs whose originals are elsewhere."""

    def invalidate(self, key: str, damaged: str | None = None) -> None:
        """Forget the copy of a blob, so that the next ``get`` reads the original again.

        Args:
            key: The blob.
            damaged: ``rose.transfer.delta.digest`` of the bytes that were found damaged. A copy that is another by now
                stays, so that many engines that met the same damage cause one more transfer together. ``None`` is
                whatever copy there is.
        """
