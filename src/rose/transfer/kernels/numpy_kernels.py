"""The inner loops in numpy, block by block so that extra memory stays small beside a large cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from rose.errors import CorruptUpdateError
from rose.transfer.kernels import Array, ChangeStreams, Comparison, Rows, Sum
from rose.transfer.kernels.checks import (
    check_cell,
    check_columns,
    check_matrix,
    check_pair,
    check_positions,
    check_streams,
    check_values,
    check_writeable,
    checked_slabs,
    has_nibbles,
)
from rose.transfer.kernels.constants import SPAN, factors, shift_of, tables

_BLOCK = 1 << 20
"""Elements that are handled at once."""
_ESCAPE = 15
_NUM_CODES = 14
_RUN = 255
_STEPS = np.array([1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 7, -7, 0, 0], dtype=np.int8)
_MASK = (1 << 64) - 1


@attrs.define(kw_only=True)
class _Found:
    """Changes so far, a list item a block; nothing more is listed once streams cannot be smaller than the cell."""

    positions: list[Array] = attrs.field(factory=list)
    values: list[Array] = attrs.field(factory=list)
    num_changed: int = 0
    total: Sum = (0, 0)
    values_sum: Sum = (0, 0)


class NumpyKernels:
    """``Kernels`` in numpy."""

    name = "numpy"

    def compare(self, new: Array, old: Array, rows: Rows, *, is_overwrite: bool) -> Comparison:
        """Compare a cell with its old state; see ``Kernels``."""
        check_pair(new, old, rows)
        is_coded = has_nibbles(new.dtype, is_overwrite=is_overwrite)
        min_bytes = 1.5 if is_coded else 1 + new.itemsize  # of one change
        found = _Found()
        for start, fresh, stale in _blocks(new, old):
            self._compare_block(found, start, fresh, stale, rows, is_overwrite=is_overwrite)
            if found.num_changed * min_bytes >= new.nbytes:
                found.positions.clear()
                found.values.clear()
        streams = None
        if found.num_changed and found.num_changed * min_bytes < new.nbytes:
            positions, values = np.concatenate(found.positions), np.concatenate(found.values)
            streams = _encode(positions, values, rows.num_elements, found.values_sum, is_coded=is_coded)
            if streams.num_bytes >= new.nbytes:
                streams = None
        return Comparison(num_changed=found.num_changed, streams=streams, sum_delta=found.total)

    def compare_columns(
        self, pairs: Iterable[tuple[Array, Array]], cells: Sequence[Rows], *, is_overwrite: bool
    ) -> list[Comparison]:
        """Compare cells side by side; see ``Kernels``. Keeps all rows that it is given."""
        rows = check_columns(cells)
        slabs = list(checked_slabs(pairs, rows))
        news, olds = ([slab[i] for slab in slabs] for i in range(2))
        fresh, stale = (parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in (news, olds))
        found = []
        for cell in cells:
            columns = slice(cell.start - rows.start, cell.start - rows.start + cell.row_len)
            found.append(self.compare(fresh[:, columns], stale[:, columns], cell, is_overwrite=is_overwrite))
        return found

    def _compare_block(
        self, found: _Found, start: int, fresh: Array, stale: Array, rows: Rows, *, is_overwrite: bool
    ) -> None:
        offsets = np.flatnonzero(fresh != stale)
        if not offsets.size:
            return
        positions = offsets + start
        news, olds = fresh[offsets], stale[offsets]
        alone = Rows(num_rows=1, row_len=offsets.size, start=found.num_changed, stride=offsets.size)
        found.values_sum = _add(found.values_sum, self.state_sum(news.reshape(1, -1), alone))
        found.num_changed += offsets.size
        found.total = _add(found.total, self.changes_sum(positions, olds, news, rows))
        found.positions.append(positions)
        found.values.append(news if is_overwrite else news - olds)

    def decode(
        self, streams: ChangeStreams, *, num_elements: int, dtype: np.dtype[Any], is_overwrite: bool
    ) -> tuple[Array, Array]:
        """Read streams back; see ``Kernels``."""
        dtype = np.dtype(dtype)
        check_streams(streams, num_elements, dtype, is_overwrite=is_overwrite)
        positions = _decode_gaps(streams, num_elements)
        if has_nibbles(dtype, is_overwrite=is_overwrite):
            return positions, _decode_nibbles(streams, dtype)
        planes = np.frombuffer(streams.codes, dtype=np.uint8).reshape(dtype.itemsize, streams.num_changed)
        values = np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
        if not is_overwrite and not values.all():
            message = f"a difference of 0 among {streams.num_changed} changes"
            raise CorruptUpdateError(message)
        return positions, values

    def gather(self, array: Array, positions: Array) -> Array:
        """Return the elements at flat positions; see ``Kernels``."""
        check_matrix(array)
        check_positions(positions)
        values: Array = array[_indices(array, positions)]
        return values

    def scatter(self, array: Array, positions: Array, values: Array) -> None:
        """Overwrite the elements at flat positions; see ``Kernels``."""
        check_values(array, positions, values)
        array[_indices(array, positions)] = values

    def add(self, array: Array, positions: Array, differences: Array) -> None:
        """Add differences in place; see ``Kernels``."""
        check_values(array, positions, differences)
        check_writeable(array)
        np.add.at(array, _indices(array, positions), differences)

    def state_sum(self, bits: Array, rows: Rows) -> Sum:
        """Return the sum of a whole cell; see ``Kernels``."""
        check_cell(bits, rows)
        total = (0, 0)
        for start, block in _blocks(bits):
            positions = np.arange(start, start + block.size)
            total = _add(total, self.changes_sum(positions, np.zeros_like(block), block, rows))
        return total

    def changes_sum(self, positions: Array, old: Array, new: Array, rows: Rows) -> Sum:
        """Return by how much the sum moves; see ``Kernels``."""
        check_positions(positions)
        _check_range(positions, rows.num_elements)
        if not positions.size:
            return 0, 0
        places, moved = _places(positions, rows), new.astype(np.uint64) - old
        if new.itemsize == 8:  # noqa: PLR2004 - counts as two halves
            places = np.stack([2 * places, 2 * places + 1], axis=1).reshape(-1)
            halves = [np.ascontiguousarray(values).view(np.uint32).astype(np.uint64) for values in (new, old)]
            moved = halves[0] - halves[1]
        spans, inverse = np.unique(places // SPAN, return_inverse=True)
        keys = tables().astype(np.uint64)[:, places % SPAN] * factors(spans)[:, inverse]
        sums = (keys * moved).sum(axis=1, dtype=np.uint64)
        return int(sums[0]), int(sums[1])


def _add(one: Sum, other: Sum) -> Sum:
    return (one[0] + other[0]) & _MASK, (one[1] + other[1]) & _MASK


def _blocks(*arrays: Array) -> Iterator[tuple[Any, ...]]:
    """Yield ``(flat start, part of each array)``, one-dimensional, in the order of positions."""
    num_rows, row_len = arrays[0].shape
    if not num_rows * row_len:
        return
    if row_len >= _BLOCK:
        for row in range(num_rows):
            for start in range(0, row_len, _BLOCK):
                yield row * row_len + start, *(array[row, start : start + _BLOCK] for array in arrays)
        return
    num_at_once = _BLOCK // row_len
    for row in range(0, num_rows, num_at_once):
        yield row * row_len, *(array[row : row + num_at_once].reshape(-1) for array in arrays)


def _places(positions: Array, rows: Rows) -> Array:
    """Return global positions, uint64."""
    wide = positions.astype(np.int64)
    if rows.stride != rows.row_len:
        wide += wide // rows.row_len * (rows.stride - rows.row_len)
    return (wide + rows.start).astype(np.uint64)


def _check_range(positions: Array, num_elements: int) -> None:
    if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= num_elements):
        message = f"positions {positions.min()} to {positions.max()} in a cell of {num_elements} elements"
        raise IndexError(message)


def _indices(array: Array, positions: Array) -> tuple[Array, ...]:
    _check_range(positions, array.size)
    return tuple(np.divmod(positions, array.shape[1])) if positions.size else (positions, positions)


def _encode(positions: Array, values: Array, num_elements: int, values_sum: Sum, *, is_coded: bool) -> ChangeStreams:
    shift = shift_of(num_elements, positions.size)
    gaps = np.diff(positions, prepend=-1) - 1
    highs = gaps >> shift
    ends = np.cumsum(highs // _RUN + 1) - 1
    coded = np.full(int(ends[-1]) + 1, _RUN, dtype=np.uint8)
    coded[ends] = highs % _RUN
    lows = (gaps & ((1 << shift) - 1)).astype(np.uint8)
    codes, escapes = _encode_nibbles(values) if is_coded else (_planes(values), b"")
    return ChangeStreams(
        num_changed=positions.size,
        shift=shift,
        gaps=coded.tobytes(),
        lows={0: b"", 4: _pack(lows), 8: lows.tobytes()}[shift],
        codes=codes,
        escapes=escapes,
        values_sum=values_sum,
    )


def _encode_nibbles(differences: Array) -> tuple[bytes, bytes]:
    signed = differences.view(f"i{differences.itemsize}").astype(np.int32)
    codes = np.where(signed > 0, 2 * signed - 2, -2 * signed - 1)
    is_escape = codes >= _NUM_CODES
    codes[is_escape] = _ESCAPE
    return _pack(codes.astype(np.uint8)), differences[is_escape].tobytes()


def _planes(values: Array) -> bytes:
    return np.ascontiguousarray(values.view(np.uint8).reshape(values.size, -1).T).tobytes()


def _pack(nibbles: Array) -> bytes:
    if nibbles.size % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    packed: Array = nibbles[::2] | nibbles[1::2] << 4
    return packed.tobytes()


def _unpack(packed: bytes | memoryview, num: int) -> Array:
    pairs = np.frombuffer(packed, dtype=np.uint8)
    return np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:num]


def _decode_gaps(streams: ChangeStreams, num_elements: int) -> Array:
    coded = np.frombuffer(streams.gaps, dtype=np.uint8)
    ends = np.flatnonzero(coded != _RUN)
    if ends.size != streams.num_changed or ends[-1] != coded.size - 1:
        message = f"{coded.size} bytes hold {ends.size} gaps, not {streams.num_changed}"
        raise CorruptUpdateError(message)
    highs = _RUN * np.diff(ends, prepend=-1) - _RUN + coded[ends]
    gaps = highs << streams.shift
    if streams.shift:
        is_half = streams.shift == 4  # noqa: PLR2004
        gaps |= _unpack(streams.lows, gaps.size) if is_half else np.frombuffer(streams.lows, dtype=np.uint8)
    positions = np.cumsum(gaps + 1) - 1
    if positions[-1] >= num_elements:
        message = f"the last change is at {positions[-1]} in a cell of {num_elements} elements"
        raise CorruptUpdateError(message)
    return positions.astype(np.int32 if num_elements < 1 << 31 else np.int64)


def _decode_nibbles(streams: ChangeStreams, dtype: np.dtype[Any]) -> Array:
    codes = _unpack(streams.codes, streams.num_changed)
    is_escape = codes == _ESCAPE
    num_escapes = int(np.count_nonzero(is_escape))
    if len(streams.escapes) != num_escapes * dtype.itemsize:
        message = f"{num_escapes} escapes have {len(streams.escapes)} bytes, not {num_escapes * dtype.itemsize}"
        raise CorruptUpdateError(message)
    escapes = np.frombuffer(streams.escapes, dtype=dtype)
    small = np.count_nonzero(escapes + dtype.type(7) < _ESCAPE)
    if small or (codes == _NUM_CODES).any():
        message = f"{small} of {num_escapes} escapes have a code, or code {_NUM_CODES} was used"
        raise CorruptUpdateError(message)
    values: Array = _STEPS[codes].astype(dtype)
    values[is_escape] = escapes
    return values
