"""The codec: which bit patterns changed, and the smallest exact bytes that say so.

Two forms. *dense*: the raw bits, row-major, little-endian. *sparse*: the gaps between changed positions, then the new
bits of those positions. A gap is the count of unchanged elements before a changed one, written as ``gap // 255`` bytes
of 255 and one byte ``gap % 255``; so positions have no upper bound and an unchanged stretch costs 1/255 byte an element.

Both forms overwrite, so applying one twice is the same as once. Values are never interpreted: 0.0 to -0.0 is a change,
a NaN that keeps its payload is none. One changed bfloat16 costs about 3 bytes, so sparse wins below 2/3 changed.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import xxhash

from rose.errors import CorruptUpdateError

Bits = np.ndarray[Any, np.dtype[Any]]

NONE = "none"
DENSE = "dense"
SPARSE = "sparse"
CODECS = (NONE, DENSE, SPARSE)

_ESCAPE = 255
_BLOCK_ELEMENTS = 1 << 20
_NEGLIGIBLE = 25.0  # exp(-25) of the escape bytes and less is left out of an estimate


@attrs.frozen(kw_only=True, eq=False)
class Dense:
    """New bits of a whole cell, shape of the cell."""

    bits: Bits


@attrs.frozen(kw_only=True, eq=False)
class Sparse:
    """New bits of some elements: ``positions`` int64, ascending, flat row-major within the cell."""

    positions: np.ndarray[Any, np.dtype[np.int64]]
    values: Bits


@attrs.frozen(kw_only=True, eq=False)
class EncodedCell:
    """What one cell sends. The payload may be a view of the encoded array."""

    codec: str
    payload: bytes | memoryview
    num_changed: int


def byte_view(bits: Bits) -> memoryview:
    """Return the row-major bytes of an array of any shape; a copy only when it is not contiguous."""
    return np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data


def digest(bits: Bits | bytes | memoryview) -> str:
    """Return the xxh3_128 hex digest of the row-major bytes."""
    return str(xxhash.xxh3_128_hexdigest(byte_view(bits) if isinstance(bits, np.ndarray) else bits))


def encode(new: Bits, old: Bits | None) -> EncodedCell:
    """Encode a cell in whichever form has fewer bytes.

    Args:
        new: Bit patterns of the cell now.
        old: Bit patterns last published, same shape and type; ``None`` sends the whole cell.
    """
    flat_new = np.ascontiguousarray(new).reshape(-1)
    if flat_new.size == 0:
        return EncodedCell(codec=NONE, payload=b"", num_changed=0)
    if old is None:
        return EncodedCell(codec=DENSE, payload=byte_view(flat_new), num_changed=flat_new.size)
    flat_old = np.ascontiguousarray(old).reshape(-1)
    payload, num_changed = _encode_sparse(flat_new, flat_old)
    if num_changed == 0:
        return EncodedCell(codec=NONE, payload=b"", num_changed=0)
    if payload is None:
        return EncodedCell(codec=DENSE, payload=byte_view(flat_new), num_changed=num_changed)
    return EncodedCell(codec=SPARSE, payload=payload, num_changed=num_changed)


def expected_bytes(num_elements: int, changed_fraction: float, *, itemsize: int) -> float:
    """Return about how many bytes ``encode`` makes of a cell whose elements change by chance, each alike and on its own.

    A changed element costs its bits, one gap byte and one escape byte for each 255 unchanged elements right before it. Changes
    that cluster leave longer gaps and cost more, by 1/255 byte an element of the cell at most.

    Args:
        num_elements: Of the cell.
        changed_fraction: The chance, 0 to 1.
        itemsize: Bytes of one element.

    Raises:
        ValueError: The fraction is no share.
    """
    if not 0 <= changed_fraction <= 1:
        message = f"changed_fraction must be between 0 and 1, got {changed_fraction}"
        raise ValueError(message)
    num_dense_bytes = float(num_elements * itemsize)
    if num_elements == 0 or changed_fraction in (0, 1):
        return num_dense_bytes * changed_fraction
    decay = -_ESCAPE * math.log1p(-changed_fraction)  # chance that k * 255 elements are unchanged: exp(-decay * k)
    runs = np.arange(1, 1 + min((num_elements - 1) // _ESCAPE, math.ceil(_NEGLIGIBLE / decay)))
    num_escapes = changed_fraction * float(np.sum((num_elements - _ESCAPE * runs) * np.exp(-decay * runs)))
    return min(num_dense_bytes, num_elements * changed_fraction * (1 + itemsize) + num_escapes)


def decode(
    payload: bytes | memoryview, *, codec: str, dtype: np.dtype[Any], shape: tuple[int, ...], num_changed: int
) -> Dense | Sparse:
    """Read a payload back without copying its bits.

    Raises:
        CorruptUpdateError: The payload cannot be what ``encode`` made for a cell of this shape and count.
    """
    num_elements = int(np.prod(shape, dtype=np.int64))
    if codec == DENSE:
        if len(payload) != num_elements * dtype.itemsize:
            message = f"a dense cell of shape {shape} needs {num_elements * dtype.itemsize} bytes, got {len(payload)}"
            raise CorruptUpdateError(message)
        return Dense(bits=np.frombuffer(payload, dtype=dtype).reshape(shape))
    if codec != SPARSE:
        message = f"codec {codec!r} has no payload to decode; allowed: dense, sparse"
        raise CorruptUpdateError(message)
    num_gap_bytes = len(payload) - num_changed * dtype.itemsize
    if num_gap_bytes < num_changed:
        message = f"{len(payload)} bytes are too few for {num_changed} changed elements"
        raise CorruptUpdateError(message)
    positions = _decode_gaps(np.frombuffer(payload, dtype=np.uint8, count=num_gap_bytes))
    if positions.size != num_changed or (num_changed and positions[-1] >= num_elements):
        message = f"gaps name {positions.size} positions of {num_elements}, the cell has {num_changed} changed elements"
        raise CorruptUpdateError(message)
    return Sparse(positions=positions, values=np.frombuffer(payload, dtype=dtype, offset=num_gap_bytes))


def _encode_sparse(new: Bits, old: Bits) -> tuple[bytes | None, int]:
    """Return the sparse payload and the number of changes; ``None`` and only the number when dense is no larger."""
    gaps: list[Bits] = []
    values: list[Bits] = []
    num_changed = num_bytes = 0
    last = -1
    for start in range(0, new.size, _BLOCK_ELEMENTS):
        block = new[start : start + _BLOCK_ELEMENTS]
        mask = block != old[start : start + _BLOCK_ELEMENTS]
        count = int(np.count_nonzero(mask))
        num_changed += count
        if count == 0 or num_bytes + count * (1 + new.itemsize) >= new.nbytes:
            num_bytes += count * (1 + new.itemsize)
            continue
        positions = np.flatnonzero(mask)
        gaps.append(_encode_gaps(positions, last - start))
        values.append(block[positions])
        num_bytes += gaps[-1].nbytes + values[-1].nbytes
        last = start + int(positions[-1])
    if num_bytes >= new.nbytes:
        return None, num_changed
    return b"".join([part.data for part in (*gaps, *values)]), num_changed


def _encode_gaps(positions: np.ndarray[Any, np.dtype[np.int64]], last: int = -1) -> Bits:
    """Return the coded gaps before each position; ``last`` is the changed position before the first of them."""
    gaps = np.diff(positions, prepend=last) - 1
    if int(gaps.max()) < _ESCAPE:
        return gaps.astype(np.uint8)
    ends = np.cumsum(gaps // _ESCAPE + 1) - 1
    coded = np.full(int(ends[-1]) + 1, _ESCAPE, dtype=np.uint8)
    coded[ends] = gaps % _ESCAPE
    return coded


def _decode_gaps(coded: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    ends = np.flatnonzero(coded != _ESCAPE)
    if coded.size and (not ends.size or ends[-1] != coded.size - 1):
        message = "the gaps end inside an escape"
        raise CorruptUpdateError(message)
    passed = np.cumsum(coded, dtype=np.int64)[ends]
    return passed + np.arange(ends.size, dtype=np.int64)
