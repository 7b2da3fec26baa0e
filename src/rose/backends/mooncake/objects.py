"""Mooncake's store with its silences made loud.

What the store does (0.3.13) and what is done about it here:

* a put of an existing key returns 0 and keeps the old value: creation is followed by reading back what is held;
* a get of a missing key returns no bytes, as does one that failed: the two are told apart by asking for existence;
* get and put are limited by the local buffer: large objects go through ``put_from`` and ``get_into``;
* objects are evicted silently when space runs out: everything is hard-pinned, so that a full store refuses instead;
* a remove within the lease of a read is refused: removal is forced.
"""

from __future__ import annotations

import importlib
import socket
import time
from typing import Any

import numpy as np

from rose.errors import BackendUnavailableError, BlobNotFoundError, TransportError

_NOT_FOUND = -704
_READBACK_S = 2.0
_READBACK_PAUSE_S = 0.005
_REACH_S = 5.0


def load_library() -> Any:
    """Return the ``mooncake.store`` module.

    Raises:
        BackendUnavailableError: It or a library that it links cannot be loaded.
    """
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        message = (
            f"the mooncake transport cannot load Mooncake ({error}); install it with pip install 'rose-rl[mooncake]' "
            "and its system library with apt-get install libibverbs1"
        )
        raise BackendUnavailableError(message) from error


def _check_reachable(master: str) -> None:
    """Ask for a plain connection first: the library tries for a minute and a half before it gives up."""
    if "://" in master:
        return  # found through a metadata service
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, ValueError) as error:
        message = f"cannot reach the Mooncake master at {master!r} ({error}); is mooncake_master running there?"
        raise TransportError(message) from error


class ObjectStore:
    """Write-once objects in a Mooncake Store.

    Args:
        master: ``host:port`` of ``mooncake_master``.
        hostname: Address that peers use to reach this process's memory.
        segment_bytes: Memory that this process gives to the store; 0 only uses what others gave.
        buffer_bytes: Local staging buffer for small objects.
        protocol: ``tcp`` or ``rdma``.
        metadata: Metadata server, or ``P2PHANDSHAKE`` for none.

    Raises:
        BackendUnavailableError: Mooncake is not installed.
        TransportError: The master cannot be reached.
    """

    def __init__(
        self, *, master: str, hostname: str, segment_bytes: int, buffer_bytes: int, protocol: str, metadata: str
    ) -> None:
        library = load_library()
        _check_reachable(master)
        self._master = master
        self._store = library.MooncakeDistributedStore()
        code = self._store.setup(hostname, metadata, segment_bytes, buffer_bytes, protocol, "", master)
        if code:
            message = f"cannot join the Mooncake store of master {master} (code {code}); its log says why"
            raise TransportError(message)
        self._pinned = library.ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._is_closed = False

    def create(self, key: str, value: bytes) -> bytes:
        """Write a small object unless it exists; return what the store then holds, which may be another writer's value.

        Raises:
            TransportError: The store failed or is full.
        """
        code = self._store.put(key, value, self._pinned)
        deadline = time.monotonic() + _READBACK_S
        while not (held := bytes(self._store.get(key))):
            if time.monotonic() > deadline:
                raise TransportError(self._failure("put", key, code))
            time.sleep(_READBACK_PAUSE_S)
        return held

    def read(self, key: str) -> bytes | None:
        """Return a small object, or ``None`` when it does not exist.

        Raises:
            TransportError: The store failed.
        """
        deadline = time.monotonic() + _READBACK_S
        while not (held := bytes(self._store.get(key))):
            if not self.exists(key):
                return None
            if time.monotonic() > deadline:
                raise TransportError(self._failure("get", key, 0))
            time.sleep(_READBACK_PAUSE_S)
        return held

    def exists(self, key: str) -> bool:
        """Return whether an object exists.

        Raises:
            TransportError: The master does not answer.
        """
        code = self._store.is_exist(key)
        if code < 0:
            raise TransportError(self._failure("look up", key, code))
        return bool(code)

    def write_from(self, key: str, chunk: memoryview) -> None:
        """Write a large object; the caller makes sure that a key is only ever written with the same bytes.

        Raises:
            TransportError: The store failed or is full.
        """
        source = np.frombuffer(chunk, dtype=np.uint8)
        code = self._store.put_from(key, source.ctypes.data, source.nbytes, self._pinned)
        if code:
            raise TransportError(self._failure("put", key, code))

    def read_into(self, key: str, target: memoryview) -> None:
        """Fill ``target`` with a large object.

        Raises:
            BlobNotFoundError: It does not exist.
            TransportError: The store failed, or the object has another size.
        """
        view = np.frombuffer(target, dtype=np.uint8)
        code = self._store.get_into(key, view.ctypes.data, view.nbytes)
        if code == _NOT_FOUND:
            message = f"there is no object {key!r} in the store of {self._master}"
            raise BlobNotFoundError(message)
        if code != view.nbytes:
            raise TransportError(self._failure("get", key, code))

    def remove(self, key: str) -> None:
        """Remove an object; an unknown key is fine.

        Raises:
            TransportError: The store failed.
        """
        code = self._store.remove(key, True)
        if code not in (0, _NOT_FOUND):
            raise TransportError(self._failure("remove", key, code))

    def close(self) -> None:
        """Leave the store; memory given to it goes with its objects. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._store.close()

    def _failure(self, what: str, key: str, code: int) -> str:
        return (
            f"Mooncake store of master {self._master} could not {what} {key!r} (code {code}); "
            "is the master alive, and has a process given enough segment_bytes?"
        )
