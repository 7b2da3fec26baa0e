"""Comparing a group of cells the torch way, which runs on any device and for any strides.

A *way* compares the cells of a group and gives what ``Kernels.compare`` would. ``triton_way`` has one that reads everything once; what
it does not take goes this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import attrs
import torch

from rose.backends.device_codec.keys import Keys
from rose.backends.device_codec.streams import Changes, code
from rose.transfer.kernels import Comparison, Rows

_MAX_CHANGES = 1 << 21


@attrs.frozen(kw_only=True, eq=False)
class Pair:
    """One cell's patterns on a device, as signed integers of the wire dtype's width; any strides, of the cell's shape."""

    new: torch.Tensor
    old: torch.Tensor
    rows: Rows


class Way(Protocol):
    """Compares cells. Everything it queues is on the current stream."""

    max_elements: int
    """How many elements a group should have at most, unless it is one cell."""

    def compare(self, pairs: Sequence[Pair], *, is_overwrite: bool) -> list[Comparison]:
        """Return what changed in cells of one width, coded, on the host."""


class TorchWay:
    """Compares with torch's own operations: a mask, the places where it is set, and what lies there.

    Args:
        keys: Keys of the sums.
        max_elements: See ``Way``; one byte of working memory each.
        max_changes: How many changes are coded at a time, one cell at least; about 250 bytes each.
    """

    def __init__(self, keys: Keys, *, max_elements: int = 1 << 26, max_changes: int = _MAX_CHANGES) -> None:
        self._keys, self.max_elements, self._max_changes = keys, max_elements, max_changes

    def compare(self, pairs: Sequence[Pair], *, is_overwrite: bool) -> list[Comparison]:
        """Return what changed in cells of one width; waits for the device twice, and twice a part that is coded."""
        found = find_changes(pairs)
        return [one for part in self._cut(found) for one in code(part, self._keys, is_overwrite=is_overwrite)]

    def _cut(self, found: Changes) -> Iterator[Changes]:
        """Yield the changes of a group in as many parts as its changes need, whole cells each."""
        cuts, held = [0], 0
        for i, count in enumerate(found.counts):
            if held and held + count > self._max_changes:
                cuts.append(i)
                held = 0
            held += count
        first = 0
        for start, end in pairwise([*cuts, len(found.counts)]):
            last = first + sum(found.counts[start:end])
            yield attrs.evolve(
                found,
                cells=found.cells[start:end],
                counts=found.counts[start:end],
                positions=found.positions[first:last],
                new=found.new[first:last],
                old=found.old[first:last],
            )
            first = last


def find_changes(pairs: Sequence[Pair]) -> Changes:
    """Return where cells of one width changed, and from what to what."""
    device, dtype = pairs[0].new.device, pairs[0].new.dtype
    edges = [0]
    for pair in pairs:
        edges.append(edges[-1] + pair.rows.num_elements)
    mask = torch.empty(edges[-1], dtype=torch.bool, device=device)
    flats = [(pair.new.reshape(-1), pair.old.reshape(-1)) for pair in pairs]
    for (new, old), (start, end) in zip(flats, pairwise(edges), strict=True):
        torch.ne(new, old, out=mask[start:end])
    found = mask.nonzero().squeeze(1)
    starts = torch.tensor(edges, dtype=torch.int64, device=device)
    bounds = torch.searchsorted(found, starts).tolist()
    positions, news, olds = [], [], []
    for (new, old), start, (first, last) in zip(flats, edges[:-1], pairwise(bounds), strict=True):
        at = found[first:last] - start
        positions.append(at)
        news.append(new[at])
        olds.append(old[at])
    return Changes(
        cells=[pair.rows for pair in pairs],
        counts=[last - first for first, last in pairwise(bounds)],
        positions=torch.cat(positions),
        new=torch.cat(news).to(dtype),
        old=torch.cat(olds),
    )
