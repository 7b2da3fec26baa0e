"""Which elements changed, found on the device: the torch way, which runs on any device and for any strides.

A *finder* compares the cells of a group and gives their changes, cell after cell. ``triton_finder`` has one that reads everything
once; it takes what it can and leaves the rest to this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import attrs
import torch

from rose.backends.device_codec.streams import Changes
from rose.transfer.kernels import Rows


@attrs.frozen(kw_only=True, eq=False)
class Pair:
    """One cell's patterns on a device, as signed integers of the wire dtype's width; any strides, of the cell's shape."""

    new: torch.Tensor
    old: torch.Tensor
    rows: Rows


class Finder(Protocol):
    """Finds changes. Everything it queues is on the current stream."""

    def find(self, pairs: Sequence[Pair]) -> Changes:
        """Return the changes of cells of one width."""


class TorchFinder:
    """Compares with torch's own operations: a mask, the places where it is set, and what lies there."""

    def find(self, pairs: Sequence[Pair]) -> Changes:
        """Return the changes of cells of one width; waits for the device twice."""
        device, dtype = pairs[0].new.device, pairs[0].new.dtype
        edges = [0]
        for pair in pairs:
            edges.append(edges[-1] + pair.rows.num_elements)
        mask = torch.empty(edges[-1], dtype=torch.bool, device=device)
        flats = [(pair.new.reshape(-1), pair.old.reshape(-1)) for pair in pairs]
        for (new, old), (start, end) in zip(flats, pairwise(edges), strict=True):
            torch.ne(new, old, out=mask[start:end])
        found = mask.nonzero().squeeze(1)
        starts = torch.tensor(edges, dtype=torch.int64).to(device)
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
