"""A live parameter as bit patterns of the wire dtype, read slice by slice."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rose.backends.fsdp.bits import bits_of, dtype_name
from rose.transfer.delta import Bits
from rose.transfer.layout import bits_dtype


class LiveBits:
    """This rank's part of a parameter (a ``ShardBits``). Only the slice that is asked for is cast or brought from a device.

    Args:
        parameter: The parameter, on any device.
        wire: The dtype it travels in.
    """

    def __init__(self, parameter: torch.Tensor, wire: torch.dtype) -> None:
        self._parameter, self._wire = parameter.detach(), wire

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the parameter's shape on this rank."""
        return tuple(self._parameter.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of the patterns."""
        return bits_dtype(dtype_name(self._wire))

    def __getitem__(self, index: tuple[slice, ...], /) -> Bits:
        """Return the patterns of a part, one slice a dimension."""
        return bits_of(self._parameter[index].to(self._wire))
