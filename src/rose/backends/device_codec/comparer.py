"""Compares the cells of a rank on their device, many at a time, and brings only the coded changes to the host.

Invariants: cells come out in the order they went in; of a group no more elements are compared at once than its way says, so the working
memory is bounded (a cast shard and a pinned base take their wire bytes of a group besides). A comparer serves one caller at a time.
Its work is queued on the caller's current stream, after whatever the trainer had queued: making a shard waited for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from rose.backends.device_codec.keys import Keys
from rose.backends.device_codec.pinned import on
from rose.backends.device_codec.torch_way import Pair, TorchWay, Way
from rose.backends.device_codec.triton_way import TritonWay
from rose.errors import TrainerError
from rose.transfer.kernels import Comparison
from rose.transfer.resident import Part


class DeviceComparer:
    """A ``Comparer`` of one device.

    Args:
        device: Where the weights are.
        make_way: Makes the way to compare, of the keys; by default Triton's where it works and the device is a CUDA one, else torch's.

    Attributes:
        keys: The keys of the sums, on the device.
    """

    def __init__(self, device: torch.device, *, make_way: Callable[[Keys], Way] | None = None) -> None:
        self._device, self.keys = device, Keys(device)
        self._way = make_way(self.keys) if make_way is not None else _best_way(device, self.keys)
        self._lock = threading.Lock()

    def compare(self, parts: Iterable[Part], *, is_overwrite: bool) -> Iterator[Comparison]:
        """Yield what ``Kernels.compare`` would find in each cell; see ``rose.transfer.resident``.

        Raises:
            OutOfMemoryError: The device has no room to compare a single cell.
            TrainerError: A part's shard or base is none of this device's.
        """
        for group in self._groups(parts):
            yield from self._compared(group, is_overwrite=is_overwrite)

    def _compared(self, group: Sequence[Pair], *, is_overwrite: bool) -> list[Comparison]:
        """Compare a group; where the device has no room for that, its halves, and smaller groups from then on."""
        try:
            with self._lock, torch.no_grad(), on(self._device):
                return self._way.compare(group, is_overwrite=is_overwrite)
        except torch.OutOfMemoryError:
            if len(group) == 1:
                raise
        self._way.max_elements //= 2
        half = len(group) // 2
        return [one for part in (group[:half], group[half:]) for one in self._compared(part, is_overwrite=is_overwrite)]

    def _groups(self, parts: Iterable[Part]) -> Iterator[list[Pair]]:
        """Yield cells of one width, together no larger than may be compared at once."""
        group: list[Pair] = []
        num_elements = 0
        for part in parts:
            pair = _pair(part)
            num_elements += part.rows.num_elements
            if group and (num_elements > self._way.max_elements or pair.new.dtype != group[0].new.dtype):
                yield group
                group, num_elements = [], part.rows.num_elements
            group.append(pair)
        if group:
            yield group


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


def _best_way(device: torch.device, keys: Keys) -> Way:
    found = TritonWay.open(keys, device) if device.type == "cuda" else None
    return found or TorchWay(keys)
