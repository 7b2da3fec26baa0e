"""Write-once blobs and a compare-and-set pointer over Mooncake Store.

A blob is a small *claim* (a nonce, length and checksum), created first and read back, and its chunks. The claim settles who
owns the key, so bytes that differ from it are refused before any chunk moves; a blob whose chunks are not all there yet is
not found. A blob of up to ``INLINE_BYTES`` has no chunks: its bytes follow its claim in the same object. The checksum covers
the whole blob, because the store verifies nothing by default.

The store has no compare-and-set. A pointer is a row of write-once *generations* ``pointer/<name>/<g>``: setting it creates the
generation after the one that holds the expected value, and reading back tells whose value it is. Generations stay, since
finding the newest by bisection needs them without a gap; one is about 100 bytes.

Blobs live in the memory that processes gave with ``segment_bytes`` and are lost with that process. A master that restarts has
forgotten everything, pointers too: they read as never set, upon which a publisher starts again with full weights.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from rose.backends.memory.buffers import fillable
from rose.backends.mooncake.objects import ObjectStore, StoreOptions
from rose.backends.mooncake.retry import RetryPolicy
from rose.errors import BlobNotFoundError, ConfigError, CorruptUpdateError, TransportError, VersionConflictError
from rose.interfaces.transport import Payload, Transport
from rose.transfer.delta import digest
from rose.types import TransportAddress

CHUNK_BYTES = 32 << 20
INLINE_BYTES = 512 << 10
"""Above it the copy out of a shared buffer costs more than the second object."""

_CLAIM = struct.Struct("<4s8sQ16s")
_MAGIC = b"RMC1"
_NONCE_BYTES = 8


@attrs.frozen(kw_only=True)
class _Claim:
    length_bytes: int
    checksum: str

    @property
    def is_inline(self) -> bool:
        return self.length_bytes <= INLINE_BYTES

    def to_bytes(self) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _CLAIM.pack(_MAGIC, nonce, self.length_bytes, bytes.fromhex(self.checksum))

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> _Claim:
        if len(data) != _CLAIM.size or not data.startswith(_MAGIC):
            message = f"the store holds no claim of ROSE's under {key!r}, but {len(data)} bytes that begin {data[:8]!r}"
            raise CorruptUpdateError(message)
        _, _, length, checksum = _CLAIM.unpack(data)
        return cls(length_bytes=length, checksum=checksum.hex())


class MooncakeTransport(Transport):
    """Blobs in a Mooncake Store.

    Args:
        master: ``host:port`` of ``mooncake_master``.
        segment_bytes: Memory that this process gives to the store. At least one process must give some.
        hostname: Address that peers use to reach this process's memory.
        buffer_bytes: The library's own staging buffer.
        protocol: ``tcp`` or ``rdma``; anything but ``tcp`` is handed to the library as it is, and gets its buffers registered.
        rdma_devices: Names of this machine's RDMA devices (``mlx5_0,mlx5_1``); empty lets the library choose. Not part of ``address``.
        metadata: Metadata server, or ``P2PHANDSHAKE`` for none.
        preferred_segment: The ``segment`` of a process whose memory takes what this one puts, while it has room: a
            publisher names one in the serving cluster, so that each byte crosses the link between them once. It is this
            process's own choice and not part of ``address``.
        retry_s: How long a call is repeated whose failure may pass; a call ends by then and the time of one try.

    Raises:
        BackendUnavailableError: Mooncake or libibverbs1 is not installed.
        ConfigError: RDMA devices are named, and the protocol is TCP.
        TransportError: The master cannot be reached, or there is no such preferred segment.
    """

    def __init__(
        self,
        *,
        master: str,
        segment_bytes: int = 0,
        hostname: str = "127.0.0.1",
        buffer_bytes: int = 16 << 20,
        protocol: str = "tcp",
        rdma_devices: str = "",
        metadata: str = "P2PHANDSHAKE",
        preferred_segment: str = "",
        retry_s: float = 5.0,
    ) -> None:
        if rdma_devices and protocol == "tcp":
            message = f"rdma_devices={rdma_devices!r} needs protocol='rdma'; over TCP no such device is used"
            raise ConfigError(message)
        self._objects = ObjectStore(
            StoreOptions(
                master=master,
                hostname=hostname,
                segment_bytes=segment_bytes,
                buffer_bytes=buffer_bytes,
                protocol=protocol,
                rdma_devices=rdma_devices,
                metadata=metadata,
                preferred_segment=preferred_segment,
                retry=RetryPolicy(budget_s=retry_s),
            )
        )
        self._address = TransportAddress(
            name="mooncake", options=(("master", master), ("protocol", protocol), ("metadata", metadata))
        )
        self._lock = threading.Lock()
        self._newest_known: dict[str, int] = {}

    @property
    def segment(self) -> str:
        """Return the name of this process's memory in the store, for ``preferred_segment`` elsewhere."""
        return self._objects.segment

    def put(self, key: str, payload: Payload) -> None:
        """Write a blob once. One that failed half-way may be put again or deleted."""
        data = memoryview(payload).cast("B")
        claim = _Claim(length_bytes=len(data), checksum=digest(data))
        body = data if claim.is_inline else data[:0]
        held = _Claim.from_bytes(self._objects.create(_claim_key(key), claim.to_bytes(), body), key)
        if held != claim:
            message = f"key {key!r} already holds {held.length_bytes} other bytes; keys are written once"
            raise VersionConflictError(message)
        if not claim.is_inline:
            for chunk_key, part in _chunks(key, len(data)):
                self._objects.write_from(chunk_key, data[part])

    def get(self, key: str) -> bytes:
        """Read a blob.

        Raises:
            BlobNotFoundError: There is no such key, or not all of it yet.
            CorruptUpdateError: The store gave other bytes than were put.
            TransportError: The store failed.
        """
        found = self._read(key)
        if found is None:
            message = f"there is no blob {key!r}"
            raise BlobNotFoundError(message)
        claim, data = found
        if not claim.is_inline:
            data = self._read_chunks(key, claim.length_bytes)
        if len(data) != claim.length_bytes or digest(data) != claim.checksum:
            message = f"the store gave other bytes for {key!r} than were put"
            raise CorruptUpdateError(message)
        return data

    def get_into(self, key: str, target: Any) -> None:
        """Fill memory of a GPU with a blob of more than ``INLINE_BYTES``, without a way through this process's own.

        Needs ``protocol="rdma"`` and the library's CUDA build (``rose-rl[mooncake-cuda]``). The checksum is compared after a copy of what
        arrived to the host, as nothing on a GPU computes it. It has not run: docs/gpu.md.

        Args:
            key: The blob.
            target: A contiguous CUDA tensor of bytes, of the blob's length.

        Raises:
            BlobNotFoundError: There is no such key, or not all of it yet.
            ConfigError: The target is not of that form or length, or the blob lies within its claim.
            CorruptUpdateError: The store gave other bytes than were put.
            TransportError: The store failed.
        """
        found = self._read(key)
        if found is None:
            message = f"there is no blob {key!r}"
            raise BlobNotFoundError(message)
        claim = found[0]
        is_bytes = target.is_contiguous() and target.element_size() == 1 and target.numel() == claim.length_bytes
        if claim.is_inline or not is_bytes:
            message = (
                f"blob {key!r} has {claim.length_bytes} bytes: only one of more than {INLINE_BYTES} is read into memory of a GPU, "
                f"and that is a contiguous tensor of as many bytes, not {target.dtype} {tuple(target.shape)}"
            )
            raise ConfigError(message)
        target[
            :1
        ].cpu()  # what is queued for this memory, a fill for instance, would come after bytes that no stream knows of
        for chunk_key, part in _chunks(key, claim.length_bytes):
            self._objects.read_at(chunk_key, target.data_ptr() + part.start, part.stop - part.start)
        if digest(target.cpu().numpy()) != claim.checksum:
            message = f"the store gave other bytes for {key!r} than were put"
            raise CorruptUpdateError(message)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove blobs; the claim goes last, so that a half-removed blob can be removed again."""
        for key in keys:
            found = self._read(key)
            if found is not None:
                claim, _ = found
                for chunk_key, _ in _chunks(key, 0 if claim.is_inline else claim.length_bytes):
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
        record = f"{secrets.token_hex(_NONCE_BYTES)} {value}".encode()
        return self._objects.create(_generation_key(name, newest + 1), record) == record

    def address(self) -> TransportAddress:
        """Return how another process joins the same store, without giving memory to it."""
        return self._address

    def close(self) -> None:
        """Leave the store; memory given to it goes with its blobs."""
        self._objects.close()

    def _read(self, key: str) -> tuple[_Claim, bytes] | None:
        """Return a blob's claim and the bytes that follow it."""
        held = self._objects.read(_claim_key(key), _CLAIM.size)
        return None if held is None else (_Claim.from_bytes(held[0], key), held[1])

    def _read_chunks(self, key: str, length_bytes: int) -> bytes:
        data, view = fillable(length_bytes)
        target = np.frombuffer(view, dtype=np.uint8)
        for chunk_key, part in _chunks(key, length_bytes):
            self._objects.read_into(chunk_key, target[part])
        return data

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
        return newest, record[1].decode().split(" ", 1)[1]

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
