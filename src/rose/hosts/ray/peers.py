"""How the parts call each other: methods by name. Over Ray in production, straight in unit tests."""

from __future__ import annotations

from typing import Any, Protocol


class Peer(Protocol):
    """The other side of a connection."""

    @property
    def is_gone(self) -> bool:
        """Whether it is known that it will never answer again."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method there and return its result.

        Raises:
            RoseError: What the method raised, in its own type; or that it cannot be reached, in a type that the peer was made with.
        """


class LocalPeer:
    """A peer in this process."""

    def __init__(self, host: object) -> None:
        """Call the methods of ``host``."""
        self._host = host

    @property
    def is_gone(self) -> bool:
        """Never."""
        return False

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call it."""
        return await getattr(self._host, method)(*arguments)
