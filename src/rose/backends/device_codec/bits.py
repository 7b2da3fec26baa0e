"""A shard on a device, and its last published bits beside it.

The base takes as much memory as the shard in its wire dtype: 2 bytes a parameter held by this rank in bfloat16. ``base_in="device"``
keeps it there; ``"pinned"`` keeps it in page-locked memory of the host, where torch rounds each tensor up to a power of two, and each
comparison brings it over piece by piece: whole rows at the speed of the bus, columns (of a tensor that engines cut so) at that of the host's
copies. Where the device has no room, the base is pinned, with a warning.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import numpy as np
import torch

from rose.backends.device_codec.comparer import DeviceComparer, comparer_of
from rose.backends.device_codec.pinned import (
    SIGNED_BY_SIZE,
    Array,
    empty_pinned,
    patterns,
    to_device,
    to_host,
    wait_for,
)
from rose.backends.fsdp.bits import dtype_name
from rose.errors import ConfigError
from rose.interfaces.trainer import ShardBits, ShardSpec
from rose.transfer.kernels import Rows, Sum
from rose.transfer.layout import bits_dtype, read_whole, slices_in, whole_box
from rose.transfer.source_views import HeldTensor, pieces_in

_logger = logging.getLogger(__name__)
BasePlace = Literal["device", "pinned"]
"""Where the last published bits of a shard on a device are kept."""


class ShardOnDevice(ABC):
    """A ``ShardBits`` that ``SupportsResidentBase``: a subclass gives parts of it on the device.

    A slice is an array of its own on the host, cast on the device and brought through page-locked memory.

    Attributes:
        shape: Of the shard.
        dtype: Unsigned type of its patterns.
        comparer: What compares it.
        device: Where it lies.
        base_in: Where its base is kept.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    comparer: DeviceComparer
    device: torch.device
    base_in: BasePlace

    @abstractmethod
    def live(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a part as signed patterns on the device: a view, or a row-major copy."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Array:
        """Return the bits of a part, row-major, on the host."""
        return patterns(to_host(self.live(index)))

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:  # noqa: FBT001 - numpy's
        """Return the bits of the whole box; a fresh array, whatever ``copy`` says."""
        return np.asarray(read_whole(self), dtype=dtype)

    def new_base(self) -> DeviceBase:
        """Return memory for the base, where ``base_in`` says."""
        signed, device = SIGNED_BY_SIZE[self.dtype.itemsize], self.device
        if self.base_in == "device":
            try:
                return DeviceBase(torch.empty(self.shape, dtype=signed, device=device), device, self.dtype)
            except torch.OutOfMemoryError:
                num_bytes = prod(self.shape) * self.dtype.itemsize
                _logger.warning("no room on %s for %d bytes of published weights; they are pinned", device, num_bytes)
        return DeviceBase(empty_pinned(self.shape, signed, device), device, self.dtype)


class DeviceBits(ShardOnDevice):
    """Bits of a tensor on a device, in a wire dtype. Making it waits until the device has done what the trainer queued for it.

    Args:
        local: The live tensor, without gradient, of any strides.
        dtype: What it travels in.
        base_in: Where its base is kept.
        comparer: What compares it, the one of its device by default.

    Raises:
        ConfigError: There is no such place.
    """

    def __init__(
        self,
        local: torch.Tensor,
        dtype: torch.dtype,
        *,
        base_in: BasePlace = "device",
        comparer: DeviceComparer | None = None,
    ) -> None:
        if base_in not in {"device", "pinned"}:
            message = f"the base of a shard on a device is kept in 'device' or 'pinned', not {base_in!r}"
            raise ConfigError(message)
        wait_for(local.device)
        self.shape = tuple(local.shape)
        self.dtype = bits_dtype(dtype_name(dtype))
        self.comparer = comparer or comparer_of(local.device)
        self.device, self.base_in = local.device, base_in
        self._local, self._wire_dtype = local, dtype

    def live(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a part as signed patterns on the device: a view, or, where it must be cast, a row-major copy."""
        part = self._local[index]
        if part.dtype != self._wire_dtype:
            # into a fresh row-major tensor: .to() would keep the strides of a transposed parameter
            part = torch.empty(part.shape, dtype=self._wire_dtype, device=part.device).copy_(part)
        return part.view(SIGNED_BY_SIZE[part.element_size()])


class DeviceHeldBits(ShardOnDevice):
    """Bits of a checkpoint tensor that lies in pieces of parameters on a device (``rose.transfer.source_views``).

    Args:
        held: What the rank holds.
        parameters: Bits of the rank's box of each parameter named in the pieces, all of one device.
    """

    def __init__(self, held: HeldTensor, parameters: Mapping[str, ShardOnDevice]) -> None:
        self._held = held
        self._sources = [parameters[piece.parameter] for piece in held.pieces]
        first = self._sources[0]
        self.shape, self.dtype, self.comparer = held.box.shape, first.dtype, first.comparer
        self.device, self.base_in = first.device, first.base_in

    def live(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a part as signed patterns on the device: a view where it lies in one piece, else put together."""
        base = self._held.box.offset
        offset = tuple(start + one.start for start, one in zip(base, index, strict=True))
        wanted = ShardSpec(offset=offset, shape=tuple(one.stop - one.start for one in index))
        found = []
        for number, part, box in pieces_in(self._held, wanted):
            source = self._sources[number]
            found.append((part, source.live(slices_in(box, whole_box(source.shape))).reshape(part.shape)))
        if len(found) == 1:
            return found[0][1]
        whole = torch.empty(wanted.shape, dtype=SIGNED_BY_SIZE[self.dtype.itemsize], device=self.device)
        for part, bits in found:
            whole[slices_in(part, wanted)] = bits
        return whole


class DeviceBase:
    """The last published bits of one shard (a ``ResidentBase``).

    Args:
        held: Signed patterns, row-major, on the device or pinned.
        device: Where they are compared.
        dtype: The unsigned type of the patterns.
    """

    def __init__(self, held: torch.Tensor, device: torch.device, dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = tuple(held.shape), dtype
        self._held, self._device = held, device

    def __getitem__(self, index: tuple[slice, ...], /) -> Array:
        """Return the patterns of a part, on the host."""
        return patterns(to_host(self._held[index]))

    def take(self, shard: ShardBits, index: tuple[slice, ...]) -> None:
        """Take a part of a shard as published; it is queued, ``settle`` waits."""
        if isinstance(shard, ShardOnDevice):
            self._held[index].copy_(shard.live(index))
        else:
            self._held[index].copy_(to_device(np.asarray(shard[index]), self._device).view(self._held[index].shape))

    def settle(self) -> None:
        """Return once all that was taken is here, so that the trainer may change its weights, on whatever stream."""
        wait_for(self._device)

    def state_sum(self, index: tuple[slice, ...], rows: Rows) -> Sum:
        """Return the sum of a cell, computed on the device."""
        return comparer_of(self._device).keys.state_sum(self.resident(index), rows)

    def resident(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a part as signed patterns on the device: a view, or a copy of what is pinned."""
        return self._held[index].to(self._device, non_blocking=True)
