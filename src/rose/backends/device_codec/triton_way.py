"""Comparing a group of cells with Triton: everything is read once, and three kernels do the rest over what changed.

1. *find*: a block of a cell compares its elements and puts what changed, in order, into its own slots; a table has how many. [WAIT:
   changes of each cell, from which the host knows shifts and where low parts and codes lie.]
2. *measure*: each block says how many bytes its gaps take and how many escapes it has, and its share of the sums. [WAIT: totals.]
3. *emit*: each block writes its part of the streams. [WAIT: the streams.]

Between them torch sums over blocks, a few thousand numbers. Blocks do not wait for one another, so that the order is that of positions,
whatever order they run in. Where a block had more changes than slots, the group is compared again with more, and from then on.

What it takes: cells whose rows are contiguous in both arrays, of fewer than 2^31 elements; groups with others go torch's way. Cells that
are one run of memory are compared apart from those that are cut in columns: only where a launch has no others it reads 16 bytes at a time.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from rose.backends.device_codec.keys import Keys
from rose.backends.device_codec.pinned import Array, on, to_device
from rose.backends.device_codec.streams import Coded, Layout, comparisons, packed
from rose.backends.device_codec.strides import is_rows, row_step
from rose.backends.device_codec.torch_way import Pair, TorchWay
from rose.transfer.kernels import Comparison, Rows
from rose.transfer.kernels.constants import tables

_logger = logging.getLogger(__name__)
BLOCK = 4096
NUM_SLOTS = 512
"""Changes a block has room for at first: one element in eight."""
_MAX_CELL_ELEMENTS = 1 << 31
_ALIGNMENT = 16


class TritonWay:
    """Compares in one pass over both states.

    Args:
        keys: Keys of the sums, for what goes torch's way.
        block: Elements of a block, a power of 2.
        num_slots: Changes a block has room for at first, a power of 2.
        max_elements: How many elements a group should have at most; with ``num_slots`` a block, two bytes an element take one byte of
            working memory each.
    """

    def __init__(
        self, keys: Keys, *, block: int = BLOCK, num_slots: int = NUM_SLOTS, max_elements: int = 1 << 28
    ) -> None:
        from rose.backends.device_codec import triton_kernels  # noqa: PLC0415 - needs triton

        self._kernels: Any = triton_kernels
        self._block, self._num_slots = block, num_slots
        self._first_num_slots, self.max_elements = num_slots, max_elements
        self._torch = TorchWay(keys)
        self._tables: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def open(cls, keys: Keys, device: torch.device) -> TritonWay | None:
        """Return a way; ``None`` where Triton is not installed, or does not compile or compares wrongly on this device, with a warning.

        Triton compiles when a kernel is first called, which needs a C compiler and Python's headers: a small comparison shows it here.
        """
        if importlib.util.find_spec("triton") is None:
            return None
        way, problem = None, "it did not find the changes of a small cell"
        try:
            made = cls(keys)
            way = made if _is_right(made, TorchWay(keys), device) else None
        except Exception as error:  # noqa: BLE001 - a compiler's failures are of any kind
            problem = f"{type(error).__name__}: {error}"
        if way is None:
            _logger.warning("Triton is installed but of no use on %s, torch compares instead: %s", device, problem)
        return way

    def compare(self, pairs: Sequence[Pair], *, is_overwrite: bool) -> list[Comparison]:
        """Return what changed in cells of one width, coded, on the host."""
        if not all(_is_plain(pair) for pair in pairs):
            return self._torch.compare(pairs, is_overwrite=is_overwrite)
        are_runs = [_is_run(pair) for pair in pairs]
        if any(are_runs) and not all(are_runs):
            return self._apart(pairs, are_runs, is_overwrite=is_overwrite)
        num_elements = sum(pair.rows.num_elements for pair in pairs)
        if len(pairs) > 1 and num_elements * self._num_slots > self.max_elements * self._first_num_slots:
            half = len(pairs) // 2
            return [
                one for part in (pairs[:half], pairs[half:]) for one in self.compare(part, is_overwrite=is_overwrite)
            ]
        group = _Group(pairs, self._block, self._num_slots, self._kernels)
        counts, most = group.find()
        if most > self._num_slots:
            self._num_slots = 1 << (most - 1).bit_length()
            return self.compare(pairs, is_overwrite=is_overwrite)
        if not any(counts):
            return [Comparison(num_changed=0, streams=None, sum_delta=(0, 0)) for _ in pairs]
        layout = Layout.of(group.cells, counts, group.itemsize, is_overwrite=is_overwrite)
        coded = group.code(layout, self._table_on(pairs[0].new.device), is_overwrite=is_overwrite)
        return comparisons(group.cells, group.itemsize, layout, coded)

    def _apart(self, pairs: Sequence[Pair], are_runs: Sequence[bool], *, is_overwrite: bool) -> list[Comparison]:
        """Compare cells that are one run of memory, which are read 16 bytes at a time, and the others each for themselves."""
        found: dict[int, Comparison] = {}
        for kind in (True, False):
            chosen = [i for i, one in enumerate(are_runs) if one is kind]
            found |= zip(chosen, self.compare([pairs[i] for i in chosen], is_overwrite=is_overwrite), strict=True)
        return [found[i] for i in range(len(pairs))]

    def _table_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._tables:
            self._tables[device] = torch.from_numpy(tables().astype("int64")).to(device)
        return self._tables[device]


class _Group:
    """One group of cells and its blocks."""

    def __init__(self, pairs: Sequence[Pair], block: int, num_slots: int, kernels: Any) -> None:
        self._pairs, self._block, self._num_slots, self._kernels = pairs, block, num_slots, kernels
        self.cells = [pair.rows for pair in pairs]
        self._device, dtype = pairs[0].new.device, pairs[0].new.dtype
        self.itemsize = dtype.itemsize
        sizes = np.array([rows.num_elements for rows in self.cells], dtype=np.int64)
        num_blocks_c = -(-sizes // block)
        self._first_blocks_c = np.cumsum(num_blocks_c) - num_blocks_c
        self.num_blocks = int(num_blocks_c.sum())
        self._numbers = self._numbers_of_cells(sizes)
        owners = np.repeat(np.arange(len(pairs), dtype=np.int32), num_blocks_c)
        self._owner_b = to_device(owners, self._device)
        self._last_c = to_device(self._first_blocks_c + num_blocks_c - 1, self._device)
        shape = (self.num_blocks, num_slots)
        self._slots = [torch.empty(shape, dtype=kind, device=self._device) for kind in (torch.int32, dtype, dtype)]
        self._count_b = torch.empty(self.num_blocks, dtype=torch.int32, device=self._device)
        self._end_b = torch.zeros(1 + self.num_blocks, dtype=torch.int64, device=self._device)

    def find(self) -> tuple[list[int], int]:
        """Compare; return how many changes each cell has, and the most that a block has."""
        self._kernels.find_changes[(self.num_blocks,)](
            to_device(self._numbers, self._device),
            self._owner_b,
            len(self.cells),
            *self._slots,
            self._count_b,
            IS_PLAIN=all(map(_is_run, self._pairs)),
            BLOCK=self._block,
            NUM_SLOTS=self._num_slots,
        )
        torch.cumsum(self._count_b, dim=0, dtype=torch.int64, out=self._end_b[1:])
        most = self._count_b.max().to(torch.int64).view(1)
        *ends, most_number = torch.cat([self._end_b[1:][self._last_c], most]).tolist()
        return np.diff(ends, prepend=0).tolist(), most_number

    def code(self, layout: Layout, table: torch.Tensor, *, is_overwrite: bool) -> Coded:
        """Code the changes that were found."""
        self._numbers[9], self._numbers[10], self._numbers[11] = layout.shifts_c, layout.counts_c, layout.firsts_c
        self._numbers[12] = 2 * layout.low_starts_c
        self._numbers[13] = layout.code_starts_c * (2 if layout.has_nibbles else 1)
        cells = to_device(self._numbers, self._device)
        before_b = self._reached()
        totals = torch.empty((6, self.num_blocks), dtype=torch.int64, device=self._device)
        shared = (cells, self._owner_b, len(self.cells), *self._slots, self._end_b, before_b)
        kinds = {"WIDTH": self.itemsize, "HAS_NIBBLES": layout.has_nibbles, "NUM_SLOTS": self._num_slots}
        self._kernels.measure_changes[(self.num_blocks,)](*shared, table, totals, self.num_blocks, **kinds)
        ends = totals.cumsum(dim=1)
        numbers = ends[:, self._last_c].cpu().numpy()
        gaps, lows, codes, escapes = self._buffers(layout, int(numbers[0, -1]), int(numbers[1, -1]))
        self._kernels.emit_changes[(self.num_blocks,)](
            *shared, totals, ends, self.num_blocks, gaps, lows, codes, escapes, IS_OVERWRITE=is_overwrite, **kinds
        )
        return Coded(
            gaps=gaps,
            lows=packed(lows),
            codes=packed(codes) if layout.has_nibbles else codes,
            escapes=escapes,
            gap_ends_c=numbers[0],
            escape_ends_c=numbers[1],
            sums_c=np.diff(numbers[2:], axis=1, prepend=0),
        )

    def _numbers_of_cells(self, sizes: Array) -> Array:
        """Return the table of the kernels, as far as it is known before anything was compared."""
        numbers = np.zeros((15, len(self.cells)), dtype=np.int64)
        for i, (pair, rows) in enumerate(zip(self._pairs, self.cells, strict=True)):
            row_len = max(1, pair.new.shape[-1]) if pair.new.dim() else 1
            numbers[:2, i] = pair.new.data_ptr(), pair.old.data_ptr()
            numbers[3:6, i] = row_len, row_step(pair.new), row_step(pair.old)
            numbers[7:9, i] = rows.stride - rows.row_len, rows.start
            numbers[14, i] = rows.row_len
        numbers[2], numbers[6] = sizes, self._first_blocks_c
        return numbers

    def _reached(self) -> torch.Tensor:
        """Return for each block where the last change before it lies in its cell; -1 for none."""
        last = (self._count_b.to(torch.int64) - 1).clamp(min=0)
        position = self._slots[0].gather(1, last.view(-1, 1)).view(-1).to(torch.int64)
        owner = self._owner_b.to(torch.int64)
        marked = (owner << 32) | torch.where(self._count_b > 0, position + 1, 0)
        reached = torch.cat([marked.new_full((1,), -1), marked.cummax(dim=0).values[:-1]])
        return torch.where(reached >> 32 == owner, (reached & 0xFFFFFFFF) - 1, -1)

    def _buffers(self, layout: Layout, num_gap_bytes: int, num_escapes: int) -> tuple[torch.Tensor, ...]:
        def zeros(num: int) -> torch.Tensor:
            return torch.zeros(num, dtype=torch.uint8, device=self._device)

        return (
            torch.full((num_gap_bytes,), 255, dtype=torch.uint8, device=self._device),
            zeros(2 * int(layout.low_ends_c[-1])),
            zeros(int(layout.code_ends_c[-1]) * (2 if layout.has_nibbles else 1)),
            torch.empty(num_escapes, dtype=self._slots[1].dtype, device=self._device),
        )


def _is_right(way: TritonWay, reference: TorchWay, device: torch.device) -> bool:
    """Compare a small cell both ways."""
    old = torch.arange(2 * BLOCK, dtype=torch.int16, device=device).view(2, BLOCK)
    new = old.clone()
    new[:, ::37] += 1
    new[1, 5] -= 1000
    pair = Pair(new=new, old=old, rows=Rows(num_rows=2, row_len=BLOCK, start=0, stride=BLOCK))
    with on(device):
        (mine,), (expected,) = (one.compare([pair], is_overwrite=False) for one in (way, reference))
    return _facts(mine) == _facts(expected)


def _facts(found: Comparison) -> tuple[Any, ...]:
    return found.num_changed, found.sum_delta, found.streams and attrs.astuple(found.streams)


def _is_run(pair: Pair) -> bool:
    """Return whether a cell lies in one run of memory in both states, of a size and at addresses that are multiples of 16."""
    numbers = (pair.new.data_ptr(), pair.old.data_ptr(), pair.rows.num_elements)
    return pair.new.is_contiguous() and pair.old.is_contiguous() and not any(one % _ALIGNMENT for one in numbers)


def _is_plain(pair: Pair) -> bool:
    return pair.rows.num_elements < _MAX_CELL_ELEMENTS and is_rows(pair.new) and is_rows(pair.old)
