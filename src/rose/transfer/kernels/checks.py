"""Refusals that both implementations share, before anything is read by address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rose.errors import CorruptUpdateError
from rose.transfer.kernels import MAX_COLUMNS_CELLS, MAX_COLUMNS_WIDTH, Array, ChangeStreams, Rows
from rose.transfer.kernels.constants import shift_of

_ITEMSIZES = (1, 2, 4, 8)


def check_matrix(array: Array) -> None:
    """Refuse an array whose rows cannot be read as plain unsigned integers.

    Raises:
        TypeError: The elements are not native unsigned integers.
        ValueError: It is not 2-D, or its rows are not contiguous.
    """
    dtype = array.dtype
    if dtype.kind != "u" or not dtype.isnative:
        message = f"bit patterns are native unsigned integers, not {dtype.str}"
        raise TypeError(message)
    if array.ndim != 2:  # noqa: PLR2004
        message = f"a cell is [num_rows, row_len], not {array.ndim}-dimensional: {array.shape}"
        raise ValueError(message)
    if array.size and array.shape[1] > 1 and array.strides[1] != dtype.itemsize:
        message = f"rows must be contiguous: elements of {dtype.itemsize} bytes lie {array.strides[1]} bytes apart"
        raise ValueError(message)


def check_cell(array: Array, rows: Rows) -> None:
    """Refuse an array that is not the cell which ``rows`` describes.

    Raises:
        TypeError: The elements are not native unsigned integers.
        ValueError: The shape differs, or rows are not contiguous.
    """
    check_matrix(array)
    if array.shape != (rows.num_rows, rows.row_len):
        message = f"an array {array.shape} was given for a cell {(rows.num_rows, rows.row_len)}"
        raise ValueError(message)


def check_pair(new: Array, old: Array, rows: Rows) -> None:
    """Refuse a pair of arrays that are not two states of one cell.

    Raises:
        TypeError: Types differ, or are not native unsigned integers.
        ValueError: A shape is not the cell's, or rows are not contiguous.
    """
    check_cell(new, rows)
    check_cell(old, rows)
    if new.dtype != old.dtype:
        message = f"new patterns are {new.dtype}, old ones {old.dtype}"
        raise TypeError(message)


def check_columns(cells: Sequence[Rows]) -> Rows:
    """Refuse cells that do not lie side by side; return where all of them lie.

    Raises:
        ValueError: There is none, one is empty, two of them are no neighbours, or they are too many or too wide.
    """
    width = sum(cell.row_len for cell in cells)
    is_beside = all(
        (one.num_rows, one.stride, one.start + one.row_len) == (other.num_rows, other.stride, other.start)
        for one, other in pairwise(cells)
    )
    if not cells or not is_beside or not all(cell.num_elements for cell in cells):
        message = f"cells to compare together must be neighbouring columns, none empty: {list(cells)}"
        raise ValueError(message)
    if len(cells) > MAX_COLUMNS_CELLS or width > MAX_COLUMNS_WIDTH:
        message = f"{len(cells)} cells, {width} elements wide: at most {MAX_COLUMNS_CELLS}, {MAX_COLUMNS_WIDTH} wide, go together"
        raise ValueError(message)
    first = cells[0]
    return Rows(num_rows=first.num_rows, row_len=width, start=first.start, stride=first.stride)


def checked_slabs(pairs: Iterable[tuple[Array, Array]], rows: Rows) -> Iterator[tuple[Array, Array]]:
    """Pass on pairs that are, one after the other, all rows of ``rows``, of one type; refuse others.

    Raises:
        TypeError: Types differ, or are not native unsigned integers.
        ValueError: A width is another one, or there are too many rows or too few.
    """
    num_rows, dtype = 0, None
    for new, old in pairs:
        num_rows += len(new)
        if num_rows > rows.num_rows:
            message = f"{num_rows} rows or more were given for cells of {rows.num_rows}"
            raise ValueError(message)
        check_pair(new, old, Rows(num_rows=len(new), row_len=rows.row_len, start=rows.start, stride=rows.stride))
        if dtype not in (None, new.dtype):
            message = f"patterns are {new.dtype}, those before {dtype}"
            raise TypeError(message)
        dtype = new.dtype
        yield new, old
    if num_rows != rows.num_rows:
        message = f"{num_rows} rows were given for cells of {rows.num_rows}"
        raise ValueError(message)


def check_writeable(array: Array) -> None:
    """Refuse an array that must not be written.

    Raises:
        ValueError: It is read-only.
    """
    if not array.flags.writeable:
        message = "assignment destination is read-only"
        raise ValueError(message)


def check_values(array: Array, positions: Array, values: Array) -> None:
    """Refuse positions and values that do not go with an array.

    Raises:
        TypeError: Positions are neither int32 nor int64, or values have another type than the array.
        ValueError: They are not equally many, in one dimension.
    """
    check_matrix(array)
    check_positions(positions)
    if values.dtype != array.dtype:
        message = f"values are {values.dtype}, the array {array.dtype}"
        raise TypeError(message)
    if values.shape != positions.shape:
        message = f"{positions.shape} positions were given for {values.shape} values"
        raise ValueError(message)


def check_positions(positions: Array) -> None:
    """Refuse what is no list of positions.

    Raises:
        TypeError: Neither int32 nor int64.
        ValueError: Not one-dimensional.
    """
    if positions.dtype not in (np.int32, np.int64):
        message = f"positions are int32 or int64, not {positions.dtype}"
        raise TypeError(message)
    if positions.ndim != 1:
        message = f"positions are one-dimensional, not {positions.shape}"
        raise ValueError(message)


def has_nibbles(dtype: np.dtype[Any], *, is_overwrite: bool) -> bool:
    """Return whether changes are 4-bit codes and escapes, not byte planes."""
    return dtype.itemsize <= 2 and not is_overwrite  # noqa: PLR2004 - see the package's text


def check_streams(streams: ChangeStreams, num_elements: int, dtype: np.dtype[Any], *, is_overwrite: bool) -> None:
    """Refuse streams whose counts, shift or lengths cannot be right for a cell of ``num_elements``.

    Raises:
        TypeError: The elements are not native unsigned integers.
        CorruptUpdateError: Says which number is wrong.
    """
    if dtype.kind != "u" or dtype.itemsize not in _ITEMSIZES or not dtype.isnative:
        message = f"bit patterns are native unsigned integers, not {dtype.str}"
        raise TypeError(message)
    num_changed, shift = streams.num_changed, streams.shift
    if not 1 <= num_changed <= num_elements:
        message = f"{num_changed} changes in a cell of {num_elements} elements"
        raise CorruptUpdateError(message)
    if shift != shift_of(num_elements, num_changed):
        message = f"shift {shift} with {num_changed} changes in {num_elements} elements"
        raise CorruptUpdateError(message)
    is_coded = has_nibbles(dtype, is_overwrite=is_overwrite)
    num_codes = (num_changed + 1) // 2 if is_coded else num_changed * dtype.itemsize
    _check_length("low parts of gaps", len(streams.lows), (num_changed * shift + 7) // 8)
    _check_length("codes", len(streams.codes), num_codes)
    if not is_coded:
        _check_length("escapes", len(streams.escapes), 0)
    is_odd = num_changed % 2 == 1
    if is_odd and ((is_coded and streams.codes[-1] >> 4) or (shift == 4 and streams.lows[-1] >> 4)):  # noqa: PLR2004
        message = f"the half byte after the last of {num_changed} changes is not 0"
        raise CorruptUpdateError(message)


def _check_length(name: str, num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        message = f"{name} have {num_bytes} bytes, not {expected}"
        raise CorruptUpdateError(message)
