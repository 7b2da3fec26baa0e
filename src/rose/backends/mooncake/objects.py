"""Mooncake's store with its silences made loud.

What the store does (0.3.13) and what is done about it here:

* a put of an existing key returns 0 and keeps the old value: creation is followed by reading back what is held;
* ``get`` answers a missing key, an unfinished object and a dead master all with no bytes: ``get_into`` tells them apart;
* get and put are limited by the library's staging buffer: everything goes through ``put_from`` and ``get_into``;
* objects are evicted silently when space runs out: everything is hard-pinned, so that a full store refuses instead;
* a preferred segment that does not exist is ignored: it is checked when the store is opened;
* a remove within the lease of a read is refused: removal is forced.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import attrs
import numpy as np

from rose.backends.mooncake.library import check_reachable, load_library, prepare_environment
from rose.backends.mooncake.retry import Code, RetryPolicy, describe
from rose.backends.mooncake.scratch import ScratchPool
from rose.errors import BlobNotFoundError, TransportError

MAX_SMALL_BYTES = (512 << 10) + 4096
"""Size of the largest object for ``create`` and ``read``."""
_WHOLE_READBACK_BYTES = 64 << 10
"""Below it reading an object whole is quicker than reading a range of it."""
_NUM_PROBES = 12
_PROBE_BYTES = 64


@attrs.frozen(kw_only=True)
class StoreOptions:
    """How a process joins a store.

    Attributes:
        master: ``host:port`` of ``mooncake_master``.
        hostname: Address that peers use to reach this process's memory.
        segment_bytes: Memory that this process gives to the store; 0 only uses what others gave.
        buffer_bytes: The library's own staging buffer.
        protocol: ``tcp`` or ``rdma``.
        rdma_devices: Names of this machine's RDMA devices, with commas between; empty lets the library choose.
        metadata: Metadata server, or ``P2PHANDSHAKE`` for none.
        preferred_segment: Name of the segment that new objects go to while it has room; empty leaves it to the store.
        retry: How failures that may pass are repeated.
    """

    master: str
    hostname: str
    segment_bytes: int
    buffer_bytes: int
    protocol: str
    rdma_devices: str
    metadata: str
    preferred_segment: str
    retry: RetryPolicy


class ObjectStore:
    """Write-once objects in a Mooncake Store.

    Raises:
        BackendUnavailableError: Mooncake is not installed.
        TransportError: The master cannot be reached, or there is no preferred segment of that name.
    """

    def __init__(self, options: StoreOptions) -> None:
        prepare_environment(options.hostname)
        self._library = library = load_library()
        check_reachable(options.master)
        self._options = options
        self._store = library.MooncakeDistributedStore()
        code = self._store.setup(
            options.hostname,
            options.metadata,
            options.segment_bytes,
            options.buffer_bytes,
            options.protocol,
            options.rdma_devices,
            options.master,
        )
        if code:
            message = f"cannot join the Mooncake store of master {options.master} (code {code}); its log says why"
            raise TransportError(message)
        self._is_closed = False
        self._scratch = ScratchPool(self._store, MAX_SMALL_BYTES)
        self._pinned = library.ReplicateConfig()
        self._pinned.with_hard_pin = True
        if options.preferred_segment:
            self._pinned.preferred_segment = options.preferred_segment
            try:
                self._check_preferred(options.preferred_segment)
            except TransportError:
                self.close()
                raise

    @property
    def segment(self) -> str:
        """Return the name of this process's segment, for others' ``preferred_segment``."""
        return str(self._store.get_hostname())

    def create(self, key: str, head: bytes, body: bytes | memoryview = b"") -> bytes:
        """Write a small object, ``head`` and ``body`` in one, unless it exists.

        Returns:
            What the store then holds, as far as ``head`` is long; it may be another writer's.

        Raises:
            TransportError: The store failed or is full.
        """
        size = len(head) + len(body)
        with self._scratch.borrow() as buffer:
            buffer[: len(head)] = np.frombuffer(head, dtype=np.uint8)
            buffer[len(head) : size] = np.frombuffer(body, dtype=np.uint8)
            self._put(key, buffer.ctypes.data, size, self._pinned)
            if size <= _WHOLE_READBACK_BYTES:
                code = self._options.retry.run(lambda: self._get_into(key, buffer))
            else:
                code = self._options.retry.run(lambda: self._get_start(key, buffer, len(head)))
            if code < 0:
                self._fail("read back", key, code)
            return buffer[: min(code, len(head))].tobytes()

    def read(self, key: str, head_bytes: int = 0) -> tuple[bytes, bytes] | None:
        """Return a small object in two parts, or ``None`` when it does not exist or is still being written.

        Args:
            key: Its key.
            head_bytes: Size of the first part.

        Raises:
            TransportError: The store failed.
        """
        with self._scratch.borrow() as buffer:
            code = self._options.retry.run(lambda: self._get_into(key, buffer))
            if code in (Code.NOT_FOUND, Code.NOT_READY):
                return None
            if code < 0:
                self._fail("get", key, code)
            return buffer[: min(code, head_bytes)].tobytes(), buffer[head_bytes:code].tobytes()

    def exists(self, key: str) -> bool:
        """Return whether an object exists.

        Raises:
            TransportError: The master does not answer.
        """
        code = self._options.retry.run(lambda: int(self._store.is_exist(key)))
        if code < 0:
            self._fail("look up", key, code)
        return bool(code)

    def write_from(self, key: str, chunk: memoryview) -> None:
        """Write a large object; the caller makes sure that a key is only ever written with the same bytes.

        Raises:
            TransportError: The store failed or is full.
        """
        source = np.frombuffer(chunk, dtype=np.uint8)
        with self._registered(source.ctypes.data, source.nbytes):
            self._put(key, source.ctypes.data, source.nbytes, self._pinned)

    def read_into(self, key: str, target: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Fill ``target`` with a large object; see ``read_at``."""
        self.read_at(key, target.ctypes.data, target.nbytes)

    def read_at(self, key: str, address: int, num_bytes: int) -> None:
        """Fill memory with a large object: of the host, or, with the library's CUDA build, of a GPU.

        Raises:
            BlobNotFoundError: It does not exist, or is still being written.
            TransportError: The store failed, or the object has another size.
        """
        with self._registered(address, num_bytes):
            code = self._options.retry.run(lambda: int(self._store.get_into(key, address, num_bytes)))
        if code in (Code.NOT_FOUND, Code.NOT_READY):
            message = f"there is no object {key!r} in the store of {self._options.master} ({describe(code)})"
            raise BlobNotFoundError(message)
        if code != num_bytes:
            self._fail(f"get {num_bytes} bytes of", key, code)

    def remove(self, key: str) -> None:
        """Remove an object; an unknown key is fine.

        Raises:
            TransportError: The store failed.
        """
        code = self._options.retry.run(lambda: int(self._store.remove(key, True)))
        if code not in (Code.OK, Code.NOT_FOUND):
            self._fail("remove", key, code)

    def close(self) -> None:
        """Leave the store; memory given to it goes with its objects. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._scratch.close()
            self._store.close()

    def _put(self, key: str, pointer: int, size: int, config: Any) -> None:
        code = self._options.retry.run(lambda: int(self._store.put_from(key, pointer, size, config)))
        if code == Code.FULL:
            message = (
                f"the Mooncake store of master {self._options.master} has no room for the {size} bytes of {key!r}; this "
                f"process gives it segment_bytes={self._options.segment_bytes}: give more here or in another process, "
                "or let the publisher retire versions sooner"
            )
            raise TransportError(message)
        if code:
            self._fail(f"put {size} bytes as", key, code)

    def _get_into(self, key: str, target: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
        return int(self._store.get_into(key, target.ctypes.data, target.nbytes))

    def _get_start(self, key: str, target: np.ndarray[Any, np.dtype[np.uint8]], size: int) -> int:
        pieces = self._store.get_into_ranges([target.ctypes.data], [[key]], [[[0]]], [[[0]]], [[[size]]])
        return int(pieces[0][0][0])

    @contextmanager
    def _registered(self, address: int, num_bytes: int) -> Iterator[None]:
        """Register a caller's memory for the time of a transfer, where the protocol needs it; TCP does not."""
        if self._options.protocol == "tcp":
            yield
            return
        code = self._store.register_buffer(address, num_bytes)
        if code:
            message = f"Mooncake does not register {num_bytes} bytes for {self._options.protocol} (code {code})"
            raise TransportError(message)
        try:
            yield
        finally:
            self._store.unregister_buffer(address)

    def _check_preferred(self, segment: str) -> None:
        """Put probes: the store ignores an unknown name and spreads them, or they land in this process's own memory."""
        places = self._probe(self._pinned, _NUM_PROBES)
        if self._options.segment_bytes and segment != self.segment:
            own = self._library.ReplicateConfig()
            own.with_hard_pin, own.preferred_segment = True, self.segment
            is_elsewhere = places.isdisjoint(self._probe(own, 1))
        else:
            is_elsewhere = True
        if len(places) != 1 or not is_elsewhere:
            message = (
                f"the Mooncake store of master {self._options.master} has no segment {segment!r} with room; take the "
                "name from MooncakeTransport.segment of a process there that gives segment_bytes"
            )
            raise TransportError(message)

    def _probe(self, config: Any, num_probes: int) -> set[str]:
        """Return at which places objects put with this configuration land."""
        prefix = f"probe/{secrets.token_hex(8)}"
        keys = [f"{prefix}/{index}" for index in range(num_probes)]
        try:
            with self._scratch.borrow() as buffer:
                for key in keys:
                    self._put(key, buffer.ctypes.data, _PROBE_BYTES, config)
            return {self._place(key) for key in keys}
        finally:
            for key in keys:
                self.remove(key)

    def _place(self, key: str) -> str:
        """Return where an object lies: ``host:port`` of the process's transfer engine."""
        replicas = self._store.get_replica_desc(key)
        return str(replicas[0].get_memory_descriptor().buffer_descriptor.transport_endpoint) if replicas else ""

    def _fail(self, what: str, key: str, code: int) -> NoReturn:
        message = (
            f"the Mooncake store of master {self._options.master} could not {what} {key!r} ({describe(code)}), "
            f"tried for {self._options.retry.budget_s} s; are the master and the processes with segment_bytes alive?"
        )
        raise TransportError(message)
