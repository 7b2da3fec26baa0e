"""Compares the cells of a rank on their device, many at a time, and brings only the coded changes to the host.

Invariants: cells come out in the order they went in; of a group no more than ``max_elements`` are compared and no more than about
``max_changes`` coded at once, so the working memory is bounded: one byte an element (a cast or pinned one: its wire bytes too) and
about 250 bytes a change. A comparer serves one caller at a time. Its work is queued on the caller's current stream, behind the
optimizer step that made the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import attrs
import torch

from rose.backends.device_codec.finding import Finder, Pair, TorchFinder
from rose.backends.device_codec.keys import Keys
from rose.backends.device_codec.streams import Changes, code
from rose.backends.device_codec.triton_finder import TritonFinder
from rose.errors import TrainerError
from rose.transfer.kernels import Comparison
from rose.transfer.resident import Part

_MAX_ELEMENTS = 1 << 26
_MAX_CHANGES = 1 << 21


class DeviceComparer:
    """A ``Comparer`` of one device.

    Args:
        device: Where the weights are.
        finder: How changes are found; Triton's where it is installed and the device is a CUDA one, else torch's.
        max_elements: How many elements are compared at a time, one cell at least.
        max_changes: How many changes are coded at a time, one cell at least.

    Attributes:
        keys: The keys of the sums, on the device.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        finder: Finder | None = None,
        max_elements: int = _MAX_ELEMENTS,
        max_changes: int = _MAX_CHANGES,
    ) -> None:
        self.keys = Keys(device)
        self._finder = finder or _best_finder(device)
        self._max_elements, self._max_changes = max_elements, max_changes
        self._lock = threading.Lock()

    def compare(self, parts: Iterable[Part], *, is_overwrite: bool) -> Iterator[Comparison]:
        """Yield what ``Kernels.compare`` would find in each cell; see ``rose.transfer.resident``.

        Raises:
            TrainerError: A part's shard or base is none of this device's.
        """
        for group in self._groups(parts):
            with self._lock, torch.no_grad():
                found = self._finder.find(group)
                coded = [code(one, self.keys, is_overwrite=is_overwrite) for one in self._cut(found)]
            for comparisons in coded:
                yield from comparisons

    def _groups(self, parts: Iterable[Part]) -> Iterator[list[Pair]]:
        """Yield cells of one width, together no larger than may be compared at once."""
        group: list[Pair] = []
        num_elements = 0
        for part in parts:
            pair = _pair(part)
            num_elements += part.rows.num_elements
            if group and (num_elements > self._max_elements or pair.new.dtype != group[0].new.dtype):
                yield group
                group, num_elements = [], part.rows.num_elements
            group.append(pair)
        if group:
            yield group

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


_comparers: dict[torch.device, DeviceComparer] = {}
_comparers_lock = threading.Lock()


def comparer_of(device: torch.device) -> DeviceComparer:
    """Return this process's comparer of a device."""
    with _comparers_lock:
        if device not in _comparers:
            _comparers[device] = DeviceComparer(device)
        return _comparers[device]


def _pair(part: Part) -> Pair:
    shard: Any = part.shard
    base: Any = part.base
    if not (hasattr(shard, "live") and hasattr(base, "resident")):
        message = f"{type(shard).__name__} and {type(base).__name__} do not lie on one device, so they cannot be compared there"
        raise TrainerError(message)
    return Pair(new=shard.live(part.index), old=base.resident(part.index), rows=part.rows)


def _best_finder(device: torch.device) -> Finder:
    found = TritonFinder.open() if device.type == "cuda" else None
    return found or TorchFinder()
