"""Torch tensors as unsigned-integer bit patterns."""

from __future__ import annotations

import numpy as np
import torch

from rose.errors import LayoutMismatchError
from rose.transfer.delta import Bits
from rose.transfer.layout import bits_dtype

_SIGNED_BY_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name a dtype travels under, for example ``bfloat16``.

    Raises:
        LayoutMismatchError: ROSE does not carry it.
    """
    name = str(dtype).removeprefix("torch.")
    bits_dtype(name)
    return name


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return a tensor's bit patterns in its own shape: element order is the tensor's, whatever its strides and offset.

    A view of the same memory for a CPU tensor, a copy from a device. Scalars keep shape ``()``.

    Raises:
        LayoutMismatchError: The dtype is not one that ROSE carries.
    """
    wire = bits_dtype(dtype_name(tensor.dtype))
    plain = tensor.detach().to("cpu")
    signed: np.ndarray = plain.view(_SIGNED_BY_SIZE[plain.element_size()]).numpy()
    return signed.view(wire)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a wire dtype.

    Raises:
        LayoutMismatchError: There is no such dtype.
    """
    bits_dtype(name)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        message = f"this torch has no dtype {name!r}"
        raise LayoutMismatchError(message)
    return dtype
