"""Changes found by Triton: one kernel reads everything once, a second brings the changes together.

A block of a cell compares its elements and puts what changed, in order, into its own slots; how many there were goes into a table. The
table's running sum tells where each block's changes belong, and the second kernel moves them there, reading slots only. A block
with more changes than it has slots for sends its group to torch's way. Blocks do not wait for one another, so the order is that of
positions, whatever order they run in.

What it takes: cells whose rows are contiguous in both arrays, of fewer than 2^31 elements; others go torch's way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from rose.backends.device_codec.finding import Pair, TorchFinder
from rose.backends.device_codec.streams import Changes
from rose.backends.device_codec.strides import is_rows, row_step

BLOCK = 4096
NUM_SLOTS = 512
"""Changes a block has room for: one element in eight."""
_MAX_ELEMENTS = 1 << 31


class TritonFinder:
    """Finds changes in one pass over both states."""

    def __init__(self, *, block: int = BLOCK, num_slots: int = NUM_SLOTS) -> None:
        """Load the kernels.

        Args:
            block: Elements of a block, a power of 2.
            num_slots: Changes a block has room for, a power of 2.
        """
        from rose.backends.device_codec import triton_kernels  # noqa: PLC0415 - needs triton

        self._kernels: Any = triton_kernels
        self._block, self._num_slots = block, num_slots
        self._torch = TorchFinder()

    @classmethod
    def open(cls) -> TritonFinder | None:
        """Return a finder, or ``None`` where Triton is not installed."""
        return cls() if importlib.util.find_spec("triton") is not None else None

    def find(self, pairs: Sequence[Pair]) -> Changes:
        """Return the changes of cells of one width; waits for the device once."""
        if not all(_is_plain(pair) for pair in pairs):
            return self._torch.find(pairs)
        device, dtype = pairs[0].new.device, pairs[0].new.dtype
        edges = [0]
        for pair in pairs:
            edges.append(edges[-1] + -(-pair.rows.num_elements // self._block))
        counts = torch.empty(edges[-1], dtype=torch.int32, device=device)
        shape = (edges[-1], self._num_slots)
        slots = [torch.empty(shape, dtype=kind, device=device) for kind in (torch.int32, dtype, dtype)]
        for pair, first, last in zip(pairs, edges, edges[1:], strict=False):
            self._find_one(pair, counts[first:last], [one[first:last] for one in slots])
        ends = counts.cumsum(dim=0, dtype=torch.int64)
        cell_ends = ends[torch.tensor(edges[1:], dtype=torch.int64).to(device) - 1]
        *bounds, most = torch.cat([cell_ends, counts.max().to(torch.int64).view(1)]).tolist()
        if most > self._num_slots:
            return self._torch.find(pairs)
        return self._gathered([pair.rows for pair in pairs], [0, *bounds], slots, counts, ends)

    def _find_one(self, pair: Pair, counts: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
        row_len = max(1, pair.new.shape[-1]) if pair.new.dim() else 1
        new_step, old_step = row_step(pair.new), row_step(pair.old)
        self._kernels.find_changes[(counts.numel(),)](
            pair.new,
            pair.old,
            *slots,
            counts,
            pair.rows.num_elements,
            row_len,
            new_step,
            old_step,
            IS_FLAT=pair.new.is_contiguous() and pair.old.is_contiguous(),
            BLOCK=self._block,
            NUM_SLOTS=self._num_slots,
        )

    def _gathered(
        self,
        cells: Sequence[Any],
        bounds: Sequence[int],
        slots: Sequence[torch.Tensor],
        counts: torch.Tensor,
        ends: torch.Tensor,
    ) -> Changes:
        num = bounds[-1]
        positions, new, old = (torch.empty(num, dtype=one.dtype, device=one.device) for one in slots)
        self._kernels.gather_changes[(counts.numel(),)](
            *slots, counts, ends, positions, new, old, NUM_SLOTS=self._num_slots
        )
        return Changes(
            cells=cells,
            counts=[last - first for first, last in pairwise(bounds)],
            positions=positions.to(torch.int64),
            new=new,
            old=old,
        )


def _is_plain(pair: Pair) -> bool:
    return pair.rows.num_elements < _MAX_ELEMENTS and is_rows(pair.new) and is_rows(pair.old)
