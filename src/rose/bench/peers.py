"""Other ways to send the same change, each as its own project describes it, on the same bits.

* ``full``: every tensor whole (the copy into a buffer is the encoding; the collective broadcast is in ``broadcast``).
* ``coo32``: int32 position and new pattern of every changed element, in buckets of 64 MB (arXiv 2605.06534).
* ``xor_zstd1``: XOR of the whole tensor with the old one, zstd level 1 (slime, miles, SkyRL).
* ``gap_value_zstd1``: 8-bit gaps (255 escapes) and new patterns, zstd level 1 (PULSE).
* ``blocks``: a differential checkpoint that sends each block of 1,024 elements in which anything changed (Check-N-Run, LowDiff).

A peer's ``decode`` works in place on the receiver's old bits and its result is compared bit by bit before any time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import zstandard

from rose.errors import RoseError

Array = np.ndarray[Any, np.dtype[Any]]
Buckets = list[bytes]

BUCKET_BYTES = 64 << 20
BLOCK_ELEMENTS = 1024
_ESCAPE = 255


@attrs.frozen(kw_only=True)
class Peer:
    """One way to send a tensor.

    Attributes:
        name: Key of its figures.
        encode: ``(new, old)``, flat, to a payload; compares too.
        apply: ``(payload, target)``: turns the old bits in the flat ``target`` into the new ones.
        bucket_bytes: Payloads are joined into buckets of this size before they are sent; 0 sends each as it is.
    """

    name: str
    encode: Callable[[Array, Array], bytes]
    apply: Callable[[bytes | memoryview, Array], None]
    bucket_bytes: int = 0


@attrs.frozen(kw_only=True)
class PeerFigures:
    """What a peer took: bytes on the wire, seconds to compare and encode, seconds to decode and apply, one core."""

    bytes: int
    encode_s: float
    decode_s: float


def measure(peer: Peer, new: Mapping[str, Array], old: Mapping[str, Array]) -> PeerFigures:
    """Encode every tensor, apply the payloads to a copy of the old bits, compare.

    Raises:
        RoseError: The receiver's bits are not the sender's.
    """
    began = time.perf_counter()
    payloads = [peer.encode(new[name].reshape(-1), old[name].reshape(-1)) for name in new]
    buckets = fill_buckets(payloads, peer.bucket_bytes)
    encode_s = time.perf_counter() - began
    sizes = [len(payload) for payload in payloads]
    del payloads
    decode_s = 0.0
    for name, payload in zip(new, _cut_buckets(buckets, sizes), strict=True):
        target = old[name].reshape(-1).copy()
        began = time.perf_counter()
        peer.apply(payload, target)
        decode_s += time.perf_counter() - began
        if not np.array_equal(target, new[name].reshape(-1)):
            message = f"{name} sent by {peer.name} differs from the sender's bits"
            raise RoseError(message)
    return PeerFigures(bytes=sum(map(len, buckets)), encode_s=encode_s, decode_s=decode_s)


def fill_buckets(payloads: Sequence[bytes], bucket_bytes: int) -> Buckets:
    """Join payloads in order into buckets of at least ``bucket_bytes``; the payloads themselves with 0."""
    if not bucket_bytes:
        return list(payloads)
    buckets: Buckets = []
    waiting: list[bytes] = []
    size = 0
    for payload in payloads:
        waiting.append(payload)
        size += len(payload)
        if size >= bucket_bytes:
            buckets.append(b"".join(waiting))
            waiting, size = [], 0
    if waiting:
        buckets.append(b"".join(waiting))
    return buckets


def _cut_buckets(buckets: Buckets, sizes: Sequence[int]) -> list[memoryview]:
    """Return the payloads again, in order."""
    views, bucket, at = [], 0, 0
    for size in sizes:
        if at == len(buckets[bucket]) and size:
            bucket, at = bucket + 1, 0
        views.append(memoryview(buckets[bucket])[at : at + size])
        at += size
        if at == len(buckets[bucket]) and bucket + 1 < len(buckets):
            bucket, at = bucket + 1, 0
    return views


def peers() -> tuple[Peer, ...]:
    """Return all of them."""
    return (
        Peer(name="full", encode=_full_encode, apply=_full_apply),
        Peer(name="coo32", encode=coo32_encode, apply=coo32_apply, bucket_bytes=BUCKET_BYTES),
        Peer(name="xor_zstd1", encode=_xor_encode, apply=_xor_apply),
        Peer(name="gap_value_zstd1", encode=_gap_encode, apply=_gap_apply),
        Peer(name="blocks", encode=_blocks_encode, apply=_blocks_apply),
    )


def _full_encode(new: Array, _: Array) -> bytes:
    return new.tobytes()


def _full_apply(payload: bytes | memoryview, target: Array) -> None:
    np.copyto(target, np.frombuffer(payload, dtype=target.dtype))


def coo32_encode(new: Array, old: Array) -> bytes:
    """Return int32 positions, then new patterns."""
    positions = np.flatnonzero(new != old)
    return b"".join((positions.astype(np.int32).data, new[positions].data))


def coo32_apply(payload: bytes | memoryview, target: Array) -> None:
    """Write the patterns of a ``coo32`` payload."""
    num_changed = len(payload) // (4 + target.itemsize)
    positions = np.frombuffer(payload, dtype=np.int32, count=num_changed)
    target[positions] = np.frombuffer(payload, dtype=target.dtype, offset=4 * num_changed)


def _xor_encode(new: Array, old: Array) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress((new ^ old).data)


def _xor_apply(payload: bytes | memoryview, target: Array) -> None:
    raw = zstandard.ZstdDecompressor().decompress(payload, max_output_size=target.nbytes)
    np.bitwise_xor(target, np.frombuffer(raw, dtype=target.dtype), out=target)


def _gap_encode(new: Array, old: Array) -> bytes:
    positions = np.flatnonzero(new != old)
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(gaps // _ESCAPE + 1) - 1
    coded = np.full(int(ends[-1]) + 1 if ends.size else 0, _ESCAPE, dtype=np.uint8)
    coded[ends] = gaps % _ESCAPE
    head = np.array([positions.size], dtype=np.int64).tobytes()
    return zstandard.ZstdCompressor(level=1).compress(head + coded.tobytes() + new[positions].tobytes())


def _gap_apply(payload: bytes | memoryview, target: Array) -> None:
    raw = zstandard.ZstdDecompressor().decompress(payload)
    count = int(np.frombuffer(raw, dtype=np.int64, count=1)[0])
    num_gaps = len(raw) - 8 - count * target.itemsize
    coded = np.frombuffer(raw, dtype=np.uint8, offset=8, count=num_gaps)
    ends = np.flatnonzero(coded != _ESCAPE)
    positions = np.cumsum(coded, dtype=np.int64)[ends] + np.arange(count)
    target[positions] = np.frombuffer(raw[8 + num_gaps :], dtype=target.dtype)


def _blocks_encode(new: Array, old: Array) -> bytes:
    whole = new.size // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    rows_new, rows_old = new[:whole].reshape(-1, BLOCK_ELEMENTS), old[:whole].reshape(-1, BLOCK_ELEMENTS)
    changed = np.flatnonzero((rows_new != rows_old).any(axis=1)).astype(np.int32)
    head = np.array([changed.size], dtype=np.int64).tobytes()
    tail = new[whole:].tobytes() if not np.array_equal(new[whole:], old[whole:]) else b""
    return b"".join((head, changed.tobytes(), rows_new[changed].tobytes(), tail))


def _blocks_apply(payload: bytes | memoryview, target: Array) -> None:
    count = int(np.frombuffer(payload, dtype=np.int64, count=1)[0])
    changed = np.frombuffer(payload, dtype=np.int32, offset=8, count=count)
    at = 8 + 4 * count
    size = count * BLOCK_ELEMENTS * target.itemsize
    whole = target.size // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    blocks = np.frombuffer(payload[at : at + size], dtype=target.dtype).reshape(count, BLOCK_ELEMENTS)
    target[:whole].reshape(-1, BLOCK_ELEMENTS)[changed] = blocks
    if len(payload) > at + size:
        target[whole:] = np.frombuffer(payload[at + size :], dtype=target.dtype)
