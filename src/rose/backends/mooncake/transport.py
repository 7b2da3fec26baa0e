"""Write-once blobs and a compare-and-set pointer over Mooncake Store.

A blob is a small *claim* (a nonce, length and checksum), created first and read back, and its chunks. The claim settles who
owns the key, so bytes that differ from it are refused before any chunk moves; a blob whose chunks are not all there yet is
not found. The checksum covers the whole blob, because the store verifies nothing by default.

The store has no compare-and-set. A pointer is a row of write-once *generations* ``pointer/<name>/<g>``: setting it creates the
generation after the one that holds the expected value, and reading back tells whose value it is. Generations stay, since
finding the newest by bisection needs them without a gap; one is about 100 bytes.

Blobs live in the memory that processes gave with ``segment_bytes`` and are lost with that process. A master that restarts has
forgotten everything, pointers too: they read as never set, upon which a publisher starts again with full weights.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence

import attrs

from rose.backends.mooncake.objects import ObjectStore
from rose.errors import BlobNotFoundError, CorruptUpdateError, TransportError, VersionConflictError
from rose.interfaces.transport import Transport
from rose.transfer.delta import digest
from rose.types import TransportAddress

CHUNK_BYTES = 32 << 20


@attrs.frozen(kw_only=True)
class _Claim:
    length_bytes: int
    checksum: str

    def to_bytes(self) -> bytes:
        return f"{secrets.token_hex(8)} {self.length_bytes} {self.checksum}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Claim:
        _, length, checksum = data.decode().split(" ")
        return cls(length_bytes=int(length), checksum=checksum)


class MooncakeTransport(Transport):
    """Blobs in a Mooncake Store.

    Args:
        master: ``host:port`` of ``mooncake_master``.
        segment_bytes: Memory that this process gives to the store. At least one process must give some.
        hostname: Address that peers use to reach this process's memory.
        buffer_bytes: Local staging buffer.
        protocol: ``tcp`` or ``rdma``.
        metadata: Metadata server, or ``P2PHANDSHAKE`` for none.

    Raises:
        BackendUnavailableError: Mooncake or libibverbs1 is not installed.
        TransportError: The master cannot be reached.
    """

    def __init__(
        self,
        *,
        master: str,
        segment_bytes: int = 0,
        hostname: str = "127.0.0.1",
        buffer_bytes: int = 64 << 20,
        protocol: str = "tcp",
        metadata: str = "P2PHANDSHAKE",
    ) -> None:
        self._objects = ObjectStore(
            master=master,
            hostname=hostname,
            segment_bytes=segment_bytes,
            buffer_bytes=buffer_bytes,
            protocol=protocol,
            metadata=metadata,
        )
        self._address = TransportAddress(
            name="mooncake", options=(("master", master), ("protocol", protocol), ("metadata", metadata))
        )
        self._lock = threading.Lock()
        self._newest_known: dict[str, int] = {}

    def put(self, key: str, payload: bytes | memoryview) -> None:
        """Write a blob once."""
        data = memoryview(payload).cast("B")
        claim = _Claim(length_bytes=len(data), checksum=digest(data))
        held = _Claim.from_bytes(self._objects.create(_claim_key(key), claim.to_bytes()))
        if held != claim:
            message = f"key {key!r} already holds {held.length_bytes} other bytes; keys are written once"
            raise VersionConflictError(message)
        for chunk_key, part in _chunks(key, len(data)):
            self._objects.write_from(chunk_key, data[part])

    def get(self, key: str) -> bytes:
        """Read a blob.

        Raises:
            BlobNotFoundError: There is no such key, or not all of it yet.
            CorruptUpdateError: The store gave other bytes than were put.
            TransportError: The store failed.
        """
        claim = self._claim(key)
        if claim is None:
            message = f"there is no blob {key!r}"
            raise BlobNotFoundError(message)
        data = bytearray(claim.length_bytes)
        for chunk_key, part in _chunks(key, len(data)):
            self._objects.read_into(chunk_key, memoryview(data)[part])
        if digest(memoryview(data)) != claim.checksum:
            message = f"the store gave other bytes for {key!r} than were put"
            raise CorruptUpdateError(message)
        return bytes(data)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove blobs; the claim goes last, so that a half-removed blob can be removed again."""
        for key in keys:
            claim = self._claim(key)
            if claim is not None:
                for chunk_key, _ in _chunks(key, claim.length_bytes):
                    self._objects.remove(chunk_key)
                self._objects.remove(_claim_key(key))

    def read_pointer(self, name: str) -> str | None:
        """Return the pointer's value, or ``None`` when it was never set."""
        return self._read_newest(name)[1]

    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Set the pointer if it holds ``expected``; of several callers at once one succeeds."""
        newest, found = self._read_newest(name)
        if found != expected:
            return False
        record = f"{secrets.token_hex(8)} {value}".encode()
        return self._objects.create(_generation_key(name, newest + 1), record) == record

    def address(self) -> TransportAddress:
        """Return how another process joins the same store, without giving memory to it."""
        return self._address

    def close(self) -> None:
        """Leave the store; memory given to it goes with its blobs."""
        self._objects.close()

    def _claim(self, key: str) -> _Claim | None:
        held = self._objects.read(_claim_key(key))
        return None if held is None else _Claim.from_bytes(held)

    def _read_newest(self, name: str) -> tuple[int, str | None]:
        """Return the newest generation (-1 before the first) and its value."""
        with self._lock:
            newest = self._find_newest(name, self._newest_known.get(name, -1))
            self._newest_known[name] = newest
        if newest < 0:
            return newest, None
        record = self._objects.read(_generation_key(name, newest))
        if record is None:
            message = f"generation {newest} of pointer {name!r} vanished while it was read; was the master restarted?"
            raise TransportError(message)
        return newest, record.decode().split(" ", 1)[1]

    def _find_newest(self, name: str, known: int) -> int:
        """Step out from a known generation in growing strides, then bisect; generations have no gap."""
        is_forgotten = known >= 0 and not self._objects.exists(_generation_key(name, known))
        stride, low = 1, -1 if is_forgotten else known
        while self._objects.exists(_generation_key(name, low + stride)):
            low += stride
            stride *= 2
        high = low + stride
        while high - low > 1:
            middle = (low + high) // 2
            if self._objects.exists(_generation_key(name, middle)):
                low = middle
            else:
                high = middle
        return low


def _claim_key(key: str) -> str:
    return f"claim/{key}"


def _generation_key(name: str, generation: int) -> str:
    return f"pointer/{name}/{generation}"


def _chunks(key: str, length_bytes: int) -> Iterator[tuple[str, slice]]:
    for index, start in enumerate(range(0, length_bytes, CHUNK_BYTES)):
        yield f"chunk/{key}/{index}", slice(start, min(start + CHUNK_BYTES, length_bytes))
