"""The codec of one cell: which bit patterns changed, and few exact bytes that say so.

Forms (``Codec``):

* ``none``: nothing changed, no bytes.
* ``dense``: the raw bits, row-major, little-endian.
* ``sparse``: gaps between changed positions, and by how much each bit pattern differs from the base, modulo 2^bits. Needs the base.
* ``overwrite``: gaps, and the new patterns. Larger, but applying it twice, or on other bits, gives the same patterns.

Values are never interpreted: 0.0 to -0.0 is a change, a NaN that keeps its payload is none. The streams of the two sparse forms
are described in ``rose.transfer.kernels``; ``blobs`` compresses them. Sparse wins as long as its streams are smaller than the cell,
before compression even.

Every state of a cell has a *sum* (see ``rose.transfer.kernels``): it moves with the changes alone, so keeping it costs nothing for
what did not change, and sums of parts add up to the sum of the whole.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import xxhash

from rose.errors import CorruptUpdateError
from rose.transfer import kernels
from rose.transfer.kernels import Array, ChangeStreams, Comparison, Kernels, Rows, Sum

Bits = Array

_MASK = (1 << 64) - 1
_CODED_BYTES_OF_DIFFERENCE = 0.3
"""Bytes that the difference of one changed bfloat16 takes after compression when most changes are of one or a few ulps."""


class Codec(enum.IntEnum):
    """How a cell is sent."""

    NONE = 0
    DENSE = 1
    SPARSE = 2
    OVERWRITE = 3


@attrs.frozen(kw_only=True, eq=False)
class EncodedCell:
    """What one cell sends.

    Attributes:
        codec: Its form.
        num_changed: Elements that differ from the base; all of them without a base.
        state_sum: Sum of the new state.
        streams: Of the sparse forms.
        bits: Of the dense form, ``[num_rows, row_len]``; may be a view of the encoded array.
    """

    codec: Codec
    num_changed: int
    state_sum: Sum
    streams: ChangeStreams | None = None
    bits: Bits | None = None

    @property
    def num_bytes(self) -> int:
        """Return the size before compression."""
        if self.streams is not None:
            return self.streams.num_bytes
        return 0 if self.bits is None else self.bits.nbytes


@attrs.frozen(kw_only=True, eq=False)
class Dense:
    """New bits of a whole cell, in the cell's shape."""

    bits: Bits


@attrs.frozen(kw_only=True, eq=False)
class Sparse:
    """Changes of some elements: ``positions`` (int32 or int64) ascending, flat row-major within the cell.

    ``values`` are new patterns, or differences to the base modulo 2^bits (``is_difference``).
    """

    positions: Array
    values: Bits
    is_difference: bool


def byte_view(bits: Bits) -> memoryview:
    """Return the row-major bytes of an array of any shape; a copy only when it is not contiguous."""
    return np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data


def digest(bits: Bits | bytes | bytearray | memoryview) -> str:
    """Return the xxh3_128 hex digest of the row-major bytes."""
    return str(xxhash.xxh3_128_hexdigest(byte_view(bits) if isinstance(bits, np.ndarray) else bits))


def as_rows(array: Bits, rows: Rows) -> Bits:
    """Return a cell's array as ``[num_rows, row_len]``: a view where its strides allow, else a copy."""
    shape = (rows.num_rows, rows.row_len)
    try:
        flat = np.reshape(array, shape, copy=False)
    except ValueError:
        return np.ascontiguousarray(array).reshape(shape)
    return flat if rows.row_len <= 1 or flat.strides[1] == flat.itemsize else np.ascontiguousarray(flat)


def add_sums(*sums: Sum) -> Sum:
    """Return the sum of disjoint parts, or of a state and a change."""
    return sum(a for a, _ in sums) & _MASK, sum(b for _, b in sums) & _MASK


def encode(
    new: Bits,
    old: Bits | None,
    rows: Rows,
    *,
    old_sum: Sum = (0, 0),
    is_overwrite: bool = False,
    with_: Kernels | None = None,
) -> EncodedCell:
    """Encode a cell in whichever form has fewer bytes.

    Args:
        new: Bit patterns of the cell now, ``[num_rows, row_len]``.
        old: Bit patterns last published, same shape and type; ``None`` sends the whole cell.
        rows: Where the cell lies in its tensor.
        old_sum: Sum of ``old``.
        is_overwrite: Send new patterns, not differences.
        with_: The inner loops; the fastest there are by default.
    """
    loops = with_ or kernels.load()
    if old is None:
        return EncodedCell(
            codec=Codec.DENSE, num_changed=rows.num_elements, state_sum=loops.state_sum(new, rows), bits=new
        )
    found = loops.compare(new, old, rows, is_overwrite=is_overwrite)
    return coded(found, old_sum=old_sum, is_overwrite=is_overwrite, read=lambda: new)


def coded(found: Comparison, *, old_sum: Sum, is_overwrite: bool, read: Callable[[], Bits]) -> EncodedCell:
    """Return what a compared cell sends; ``read`` gives its bits now, ``[num_rows, row_len]``, where they are sent whole."""
    if not found.num_changed:
        return EncodedCell(codec=Codec.NONE, num_changed=0, state_sum=old_sum)
    state_sum = add_sums(old_sum, found.sum_delta)
    if found.streams is None:
        return EncodedCell(codec=Codec.DENSE, num_changed=found.num_changed, state_sum=state_sum, bits=read())
    codec = Codec.OVERWRITE if is_overwrite else Codec.SPARSE
    return EncodedCell(codec=codec, num_changed=found.num_changed, state_sum=state_sum, streams=found.streams)


def decode(
    streams: ChangeStreams, *, codec: Codec, dtype: np.dtype[Any], num_elements: int, with_: Kernels | None = None
) -> Sparse:
    """Read the streams of a sparse form back.

    Raises:
        CorruptUpdateError: They cannot be what ``encode`` made for a cell of this size.
    """
    if codec not in (Codec.SPARSE, Codec.OVERWRITE):
        message = f"a cell sent as {codec.name.lower()} has no streams to decode"
        raise CorruptUpdateError(message)
    is_overwrite = codec is Codec.OVERWRITE
    loops = with_ or kernels.load()
    positions, values = loops.decode(streams, num_elements=num_elements, dtype=dtype, is_overwrite=is_overwrite)
    return Sparse(positions=positions, values=values, is_difference=not is_overwrite)


def expected_bytes(num_elements: int, changed_fraction: float, *, itemsize: int) -> float:
    """Return about how many bytes a cell takes when its elements change by chance, each alike and on its own, by a few ulps.

    Positions take their entropy; a difference takes what was measured for AdamW steps on bfloat16, or all its bytes for elements
    of four bytes and more.

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
    p, num_dense_bytes = changed_fraction, float(num_elements * itemsize)
    if num_elements == 0 or p == 0:
        return 0.0
    entropy_bits = 0.0 if p == 1 else -p * math.log2(p) - (1 - p) * math.log2(1 - p)
    value_bytes = _CODED_BYTES_OF_DIFFERENCE if itemsize <= 2 else itemsize  # noqa: PLR2004 - see the streams
    return min(num_dense_bytes, num_elements * (entropy_bits / 8 + p * value_bytes))
