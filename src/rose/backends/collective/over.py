"""A transport over an origin: what both sides of a collective have in common."""

from __future__ import annotations

from collections.abc import Sequence

from rose.interfaces.transport import Payload, SupportsInvalidate, Transport
from rose.transfer.cluster_wait import wait_for_blob
from rose.types import TransportAddress


class OverOrigin(Transport):
    """Hands every call on.

    Args:
        origin: The store behind, which has every blob.
    """

    def __init__(self, origin: Transport) -> None:
        self._origin = origin

    def put(self, key: str, payload: Payload) -> None:
        """Write a blob once, to the origin."""
        self._origin.put(key, payload)

    def get(self, key: str) -> Payload:
        """Read a blob from the origin."""
        return self._origin.get(key)

    def get_when_ready(self, key: str, timeout_s: float) -> Payload:
        """Read a blob from the origin as soon as it is there; see ``rose.interfaces.transport.SupportsWait``."""
        return wait_for_blob(self._origin, key, timeout_s)

    def invalidate(self, key: str, damaged: str | None = None) -> None:
        """Forget copies of a blob, at the origin too; see ``rose.interfaces.transport.SupportsInvalidate``."""
        if isinstance(self._origin, SupportsInvalidate):
            self._origin.invalidate(key, damaged)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove blobs from the origin."""
        self._origin.delete(keys)

    def read_pointer(self, name: str) -> str | None:
        """Return the pointer's value at the origin."""
        return self._origin.read_pointer(name)

    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Set the pointer at the origin."""
        return self._origin.compare_and_set(name, expected, value)

    def address(self) -> TransportAddress:
        """Return the origin's address."""
        return self._origin.address()
