"""How a tensor lies in memory, as far as kernels and index operations must know."""

from __future__ import annotations

import torch


def row_step(bits: torch.Tensor) -> int:
    """Return how far one row of a tensor lies from the next."""
    return int(bits.stride(-2) if bits.dim() > 1 else bits.numel())


def is_rows(bits: torch.Tensor) -> bool:
    """Return whether a tensor is rows of contiguous elements at equal distances."""
    if bits.dim() == 0:
        return True
    if bits.shape[-1] > 1 and bits.stride(-1) != 1:
        return False
    step = row_step(bits) * (bits.shape[-2] if bits.dim() > 1 else 1)
    for size, stride in zip(bits.shape[-3::-1], bits.stride()[-3::-1], strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
