"""The way of bytes between a device and the host: page-locked memory, one copy stream, events.

Page-locked blocks come from torch's caching allocator, so that asking for one again costs nothing. It rounds each up to a power of two and
never gives one back to the system, so what comes in one large piece goes through plain memory. On the device ``cpu`` all is plain
memory, and every copy is done when it was asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

MAX_PINNED_BYTES = 64 << 20
"""Of one copy to the host; a larger one is the driver's to cut."""
SIGNED_BY_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Array = np.ndarray[Any, np.dtype[Any]]
_UNSIGNED_BY_SIZE: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


def is_async(device: torch.device) -> bool:
    """Return whether copies to and from a device are queued."""
    return bool(device.type == "cuda")


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Let a device be the current one: another thread's choice does not hold in this one, and kernels start on the current one."""
    if not is_async(device):
        yield
        return
    with torch.cuda.device(device):
        yield


def wait_for(device: torch.device) -> None:
    """Wait until a device has done everything that was queued, on whatever stream."""
    if is_async(device):
        torch.cuda.synchronize(device)


def empty_pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory of the host that a device reads and writes by itself."""
    with on(device):
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=is_async(device))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, row-major; for a tensor of the host that is row-major already, itself."""
    if not is_async(tensor.device):
        return tensor.contiguous()
    if tensor.numel() * tensor.element_size() > MAX_PINNED_BYTES:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu").copy_(tensor)
    host = empty_pinned(tuple(tensor.shape), tensor.dtype, tensor.device)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def to_device(array: Array, device: torch.device) -> torch.Tensor:
    """Return a small array on a device, as the signed type of its width; ordered on the current stream."""
    signed = array.view(f"i{array.itemsize}")
    if not is_async(device):
        return torch.from_numpy(np.array(signed, order="C"))
    staged = empty_pinned(array.shape, SIGNED_BY_SIZE[array.itemsize], device)
    staged.numpy()[...] = signed
    return staged.to(device, non_blocking=True)  # the allocator frees the block only after the copy


def patterns(tensor: torch.Tensor) -> Array:
    """Return a tensor of the host as unsigned patterns that share its memory."""
    signed: Array = tensor.view(SIGNED_BY_SIZE[tensor.element_size()]).numpy()
    unsigned: Array = signed.view(_UNSIGNED_BY_SIZE[tensor.element_size()])
    return unsigned
