"""Bits of a rank's shard, cast to the wire dtype slice by slice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from rose.backends.fsdp.bits import bits_of, dtype_name
from rose.interfaces.trainer import ShardBits
from rose.transfer.delta import Bits
from rose.transfer.layout import bits_dtype, read_whole
from rose.transfer.resident import SupportsResidentBase
from rose.transfer.source_views import HeldBits, HeldTensor

BaseIn = Literal["device", "pinned", "host"]
"""Where the last published bits of a shard on a GPU are kept, and compared: see ``rose.backends.device_codec``. With ``host`` the shard is
brought to the host for every version and compared there."""


def shard_bits(local: torch.Tensor, dtype: torch.dtype, *, base_in: BaseIn = "device") -> ShardBits:
    """Return the bits of a local tensor in a wire dtype: a view of its memory where that fits, else cast when a slice is read.

    Args:
        local: The live tensor, without gradient.
        dtype: The wire dtype.
        base_in: Where the base of a tensor on a GPU is kept; without meaning for a tensor of this machine.
    """
    if local.device.type == "cuda" and base_in != "host":
        from rose.backends.device_codec import DeviceBits  # noqa: PLC0415 - it uses this package

        return DeviceBits(local, dtype, base_in=base_in)
    is_ready = local.dtype == dtype and local.is_contiguous() and local.device.type == "cpu"
    return bits_of(local) if is_ready else CastBits(local, dtype)


def held_bits(held: HeldTensor, parameters: Mapping[str, ShardBits]) -> ShardBits:
    """Return the bits of a tensor that lies in pieces of parameters, whose bits ``shard_bits`` gave."""
    sources = {piece.parameter: parameters[piece.parameter] for piece in held.pieces}
    if all(isinstance(one, SupportsResidentBase) for one in sources.values()):
        from rose.backends.device_codec.bits import (  # noqa: PLC0415 - it uses this package
            DeviceHeldBits,
            ShardOnDevice,
        )

        resident = {name: one for name, one in sources.items() if isinstance(one, ShardOnDevice)}
        if len(resident) == len(sources) and len({one.device for one in resident.values()}) == 1:
            return DeviceHeldBits(held, resident)
    return HeldBits(held, parameters)


class CastBits:
    """Bits of a tensor that is of another dtype, on another device or not row-major (a ``ShardBits``).

    Every slice is an array of its own, so threads may read at once and nothing as large as the shard is kept.

    Args:
        local: The live tensor, without gradient.
        dtype: What a slice is cast to.
    """

    def __init__(self, local: torch.Tensor, dtype: torch.dtype) -> None:
        self.shape = tuple(local.shape)
        self.dtype = bits_dtype(dtype_name(dtype))
        self._local = local
        self._wire_dtype = dtype

    def __getitem__(self, index: tuple[slice, ...], /) -> Bits:
        """Return the bits of a part, row-major."""
        part = self._local[index]
        # A copy into a fresh row-major tensor: .to() would keep the strides of a transposed parameter.
        return bits_of(torch.empty(part.shape, dtype=self._wire_dtype, device="cpu").copy_(part))

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Bits:  # noqa: FBT001 - numpy's
        """Return the bits of the whole box; a fresh array, whatever ``copy`` says."""
        return np.asarray(read_whole(self), dtype=dtype)
