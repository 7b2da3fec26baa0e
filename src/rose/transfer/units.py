"""What one thread of the encoder works on at a time: a few small cells, one large one, or cells that lie side by side.

A cell of a weight that is cut along its columns is many short rows far apart in memory, which is slow to read. Its neighbours to the
left and right are the rest of the same rows, so that all of them together are read as they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rose.interfaces.trainer import ShardSpec
from rose.transfer.delta import Bits
from rose.transfer.kernels import MAX_COLUMNS_CELLS, MAX_COLUMNS_WIDTH, Rows
from rose.transfer.layout import split_to_size
from rose.transfer.plan import Cell

_BATCH_ELEMENTS = 1 << 20
"""Small cells are handed to a thread, and slabs of cells side by side are read, this many elements at a time."""
_NARROW_BYTES = 1 << 14
"""Rows from here on are long enough to be compared at the speed of memory, cell by cell."""


@attrs.frozen(kw_only=True, eq=False)
class Slot:
    """Where one cell is: its index into the rank's box and its rows in the tensor."""

    cell: Cell
    index: tuple[slice, ...]
    rows: Rows

    def view(self, box: Bits) -> Bits:
        """Return the cell in the rank's box of its tensor, as a view."""
        index: Any = (*self.index, ...)  # the ellipsis keeps a scalar a view
        view: Bits = box[index]
        return view


@attrs.frozen(kw_only=True)
class SideBySide:
    """The box around cells that lie side by side, in the rank's box.

    Attributes:
        tensor: Its name.
        box: The box, in the rank's box.
        rows: Where it lies in the tensor.
    """

    tensor: str
    box: ShardSpec
    rows: Rows

    @classmethod
    def around(cls, slots: Sequence[Slot]) -> SideBySide | None:
        """Return the box around neighbours, left to right; ``None`` where they are no box."""
        first, edges = slots[0], list(zip(slots[0].index, slots[-1].index, strict=True))
        box = ShardSpec(offset=tuple(a.start for a, _ in edges), shape=tuple(b.stop - a.start for a, b in edges))
        rows = attrs.evolve(first.rows, row_len=sum(slot.rows.row_len for slot in slots))
        if box.num_elements != rows.num_elements:
            return None
        return cls(tensor=first.cell.tensor, box=box, rows=rows)

    def slabs(self) -> Iterator[tuple[tuple[slice, ...], Rows]]:
        """Yield the box in parts of at most ``_BATCH_ELEMENTS``, whole rows in their order, and the rows of each."""
        for part in split_to_size(self.box, max(_BATCH_ELEMENTS, self.rows.row_len)):
            index = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
            yield index, attrs.evolve(self.rows, num_rows=part.num_elements // self.rows.row_len)


@attrs.frozen(kw_only=True)
class Unit:
    """Cells that one thread encodes one after the other, or, with ``columns``, together."""

    numbers: Sequence[int]
    columns: SideBySide | None = None


def plan_units(slots: Sequence[Slot], dtypes: Mapping[str, np.dtype[Any]]) -> list[Unit]:
    """Return what is handed to a thread at a time, by first cell: cells side by side, or neighbours of about ``_BATCH_ELEMENTS``."""
    found = [(group, SideBySide.around([slots[n] for n in group])) for group in _side_by_side(slots, dtypes)]
    groups = {group[0]: Unit(numbers=group, columns=columns) for group, columns in found if columns is not None}
    grouped = {number for unit in groups.values() for number in unit.numbers}
    units: list[Unit] = []
    batch: list[int] = []
    filled = 0

    def end_batch() -> None:
        nonlocal batch, filled
        if batch:
            units.append(Unit(numbers=batch))
        batch, filled = [], 0

    for number, slot in enumerate(slots):
        if number in groups:
            end_batch()
            units.append(groups[number])
        elif number not in grouped:
            batch.append(number)
            filled += slot.rows.num_elements
            if filled >= _BATCH_ELEMENTS:
                end_batch()
    end_batch()
    return units


def _side_by_side(slots: Sequence[Slot], dtypes: Mapping[str, np.dtype[Any]]) -> Iterator[list[int]]:
    """Yield the cells that are neighbouring columns of the same rows and so narrow that each alone is slow to compare."""
    begins = {(slot.cell.tensor, slot.rows.start): number for number, slot in enumerate(slots)}
    taken: set[int] = set()
    for number, first in enumerate(slots):
        limit = _NARROW_BYTES // dtypes[first.cell.tensor].itemsize
        group: list[int] = []
        width, slot = 0, first
        following: int | None = number
        while following is not None and following not in taken:
            slot = slots[following]
            width += slot.rows.row_len
            if not _goes_with(first.rows, slot.rows, width, limit) or len(group) == MAX_COLUMNS_CELLS:
                break
            group.append(following)
            following = begins.get((slot.cell.tensor, slot.rows.start + slot.rows.row_len))
        if len(group) > 1:
            taken.update(group)
            yield group


def _goes_with(first: Rows, rows: Rows, width: int, limit: int) -> bool:
    """Return whether a cell, with which a group is as wide as ``width``, has the rows of the first one."""
    is_alike = (rows.num_rows, rows.stride) == (first.num_rows, first.stride)
    return is_alike and rows.num_rows > 1 and 0 < rows.row_len < limit and width <= min(MAX_COLUMNS_WIDTH, first.stride)
