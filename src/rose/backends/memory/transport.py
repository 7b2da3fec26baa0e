"""The reference transport, and the embedded default.

One class in three places: the owner of the blobs; another object in the same process (``local``); a client in another
process (``host``, ``port``, ``token``), once the owner serves.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence

from rose.backends.memory.client import StoreClient
from rose.backends.memory.server import StoreServer
from rose.backends.memory.store import LocalStore, WaitingStore
from rose.errors import ConfigError, TransportError
from rose.interfaces.transport import Payload, Transport
from rose.types import TransportAddress

_local_stores: weakref.WeakValueDictionary[str, LocalStore] = weakref.WeakValueDictionary()


class MemoryTransport(Transport):
    """Blobs in memory.

    Args:
        local: Name of a store in this process, as its ``address`` gives it. Without it and ``host``: a new store.
        host: Where another process serves its store.
        port: Its port.
        token: Its token.
        timeout_s: How long a send or a receive may stand still.

    Raises:
        ConfigError: The arguments name no one place.
        TransportError: ``local`` names a store that is not in this process.
    """

    def __init__(
        self,
        *,
        local: str | None = None,
        host: str | None = None,
        port: int | None = None,
        token: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._server: StoreServer | None = None
        self._address: TransportAddress
        self._store: WaitingStore
        if host is not None and port is not None and token is not None and local is None:
            self._store = StoreClient(host, port, token, timeout_s=timeout_s)
            options = (("host", host), ("port", port), ("token", token))
            self._address = TransportAddress(name="memory", options=options)
        elif (host, port, token) == (None, None, None):
            name, self._store = _find_local(local)
            self._address = TransportAddress(name="memory", options=(("local", name),))
        else:
            message = "a memory transport takes nothing, or local=..., or host=..., port=... and token=... together"
            raise ConfigError(message)

    def serve(
        self, host: str = "127.0.0.1", port: int = 0, *, is_public: bool = False, token: str | None = None
    ) -> TransportAddress:
        """Let other processes reach this store until ``close``; returns the address that ``address`` gives from then on.

        Args:
            host: Address to listen on, and under which others find the store: name an interface, not ``0.0.0.0``.
            port: Port, or 0 for a free one.
            is_public: Allow an address that other machines can reach. The token is all that protects it.
            token: What clients must know; a new one by default.

        Raises:
            TransportError: The port is taken, the host is not loopback, it is served already, or this is a client.
        """
        if not isinstance(self._store, LocalStore) or self._server is not None:
            message = f"only the owner of the blobs can serve them, and once; this is {self.address()}"
            raise TransportError(message)
        self._server = StoreServer(self._store, host, port, is_public=is_public, token=token)
        self._address = self._server.address()
        return self._address

    def put(self, key: str, payload: Payload) -> None:
        """Write a blob once."""
        self._store.put(key, payload)

    def get(self, key: str) -> bytes:
        """Read a blob."""
        return self._store.get(key)

    def get_when_ready(self, key: str, timeout_s: float) -> bytes:
        """Read a blob as soon as it is there."""
        return self._store.get_when_ready(key, timeout_s)

    def invalidate(self, key: str, damaged: str | None = None) -> None:
        """Let whoever serves the store forget its copy; without effect where the originals are."""
        self._store.invalidate(key, damaged)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove blobs."""
        self._store.delete(keys)

    def read_pointer(self, name: str) -> str | None:
        """Read a pointer."""
        return self._store.read_pointer(name)

    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Move a pointer if it holds ``expected``."""
        return self._store.compare_and_set(name, expected, value)

    def address(self) -> TransportAddress:
        """Return how to open the same store: from any process once served, before that from this process only."""
        return self._address

    def close(self) -> None:
        """Stop serving, or close the connection."""
        if self._server is not None:
            self._server.close()
        self._store.close()


def _find_local(name: str | None) -> tuple[str, LocalStore]:
    if name is None:
        name, store = secrets.token_hex(8), LocalStore()
        _local_stores[name] = store
        return name, store
    found = _local_stores.get(name)
    if found is None:
        message = (
            f"there is no memory store {name!r} in this process; its owner must serve it to be reached from others"
        )
        raise TransportError(message)
    return name, found
