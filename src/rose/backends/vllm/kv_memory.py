"""The KV memory of one vLLM worker on a CPU: laid out in large pages, given back page by page.

Invariants:

* Every layer starts on a large page, and the large pages are asked for before the first touch; small pools stay as vLLM
  makes them.
* A page is given back when every block in it is held back, and counts as given until one of them returns to the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from rose.backends.paging import HUGE_PAGE_BYTES, HugeBuffer

_LAYER_AT_LEAST_BYTES = 4 * HUGE_PAGE_BYTES
_SMALL_PAGE_BYTES = 4096

GivePages = Callable[..., int]


class KvPages:
    """Which pages the KV tensors lie in, and which of them are given back.

    Args:
        tensors: KV tensors whose first dimension counts blocks, possibly in equal parts; others are left alone, and so
            are tensors of a device.
        num_blocks: Blocks of the pool.
        give: As ``rose.backends.paging.give_back``.
    """

    def __init__(self, tensors: Sequence[Any], num_blocks: int, give: GivePages) -> None:
        self._give = give
        self._num_blocks = num_blocks
        layers = sorted(
            {
                (int(tensor.data_ptr()), int(tensor.stride(0)) * int(tensor.element_size()) * tensor.shape[0])
                for tensor in tensors
                if tensor.device.type == "cpu" and tensor.dim() > 1 and tensor.shape[0] % num_blocks == 0
            }
        )
        is_huge = bool(layers) and all(address % HUGE_PAGE_BYTES == 0 for address, _ in layers)
        self.page_bytes = HUGE_PAGE_BYTES if is_huge else _SMALL_PAGE_BYTES
        self.num_bytes = sum(size for _, size in layers)
        self.group_blocks = max((-(-self.page_bytes * num_blocks // size) for _, size in layers), default=1)
        parts = [self._pages_of(address, size) for address, size in layers]
        self._addresses = np.concatenate([part[0] for part in parts] or [np.zeros(0, np.int64)])
        self._first = np.concatenate([part[1] for part in parts] or [np.zeros(0, np.int64)])
        self._end = np.concatenate([part[2] for part in parts] or [np.zeros(0, np.int64)])
        self._is_given = np.zeros(len(self._addresses), bool)

    def _pages_of(self, address: int, size: int) -> tuple[Any, Any, Any]:
        """Return of every page that is a layer's alone: its address, its first block and the block after its last."""
        page, block = self.page_bytes, size // self._num_blocks
        end = address + size
        if page == HUGE_PAGE_BYTES:
            end += -end % page  # what is behind an aligned layer is nobody's
        starts = np.arange(-(-address // page) * page, end // page * page, page, dtype=np.int64)
        offsets = starts - address
        return starts, offsets // block, np.minimum(-(-(offsets + page) // block), self._num_blocks)

    @property
    def num_bytes_given(self) -> int:
        """Bytes that are with the operating system now."""
        return int(self._is_given.sum()) * self.page_bytes

    def hold(self, runs: Sequence[Sequence[int]]) -> int:
        """Give back the pages of the blocks that are held back, and forget those of blocks that returned.

        Args:
            runs: All held blocks, as ``(first, length)`` of each run.

        Returns:
            Bytes that are with the operating system now.
        """
        is_held = np.zeros(self._num_blocks + 1, np.int64)
        for first, length in runs:
            is_held[first : first + length] = 1
        before = np.concatenate([[0], np.cumsum(is_held[:-1])])
        may_go = before[self._end] - before[self._first] == self._end - self._first
        for address, num_pages in self._ranges(may_go & ~self._is_given):
            self._give(address, num_pages * self.page_bytes, page_bytes=self.page_bytes)
        self._is_given = may_go
        return self.num_bytes_given

    def _ranges(self, chosen: Any) -> list[tuple[int, int]]:
        """Return address and number of pages of each run of chosen pages that follow each other in memory."""
        addresses = self._addresses[chosen]
        if not len(addresses):
            return []
        breaks = np.flatnonzero(np.diff(addresses) != self.page_bytes) + 1
        return [(int(run[0]), len(run)) for run in np.split(addresses, breaks)]


def install() -> None:
    """Let the KV memory of ROSE's engines on CPUs be laid out in large pages. Call once a process."""
    from vllm.v1.worker import gpu_model_runner  # noqa: PLC0415 - heavy

    from rose.backends.vllm.plain_weights import is_rose_engine  # noqa: PLC0415 - only in vLLM processes

    plain = gpu_model_runner.allocate_kv_cache

    def allocate_kv_cache(config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        aligned = _aligned(config) if torch.device(device).type == "cpu" and is_rose_engine() else None
        if aligned is None:
            return plain(config, device, *args, **kwargs)
        with _HugeZeros():
            return plain(aligned, device, *args, **kwargs)

    gpu_model_runner.allocate_kv_cache = allocate_kv_cache


def _aligned(config: Any) -> Any:
    """Return the plan with every layer on a large page; ``None`` where layers are small or not laid out one after another."""
    if len(config.kv_cache_tensors) != 1:
        return None
    plan = config.kv_cache_tensors[0]
    layer_bytes = config.num_blocks * plan.block_stride
    is_layered = plan.offset == 0 and plan.layer_stride == layer_bytes and not plan.host_resident
    if not is_layered or layer_bytes < _LAYER_AT_LEAST_BYTES:
        return None
    stride = -(-layer_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    wider = replace(plan, layer_stride=stride, size=stride * len(plan.layers))
    return replace(config, kv_cache_tensors=[wider])


class _HugeZeros(TorchFunctionMode):  # type: ignore[misc] # torch is untyped here
    """Makes ``torch.zeros(size, dtype=int8)`` on large pages, for this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = kwargs or {}
        if func is not torch.zeros or call.get("dtype") is not torch.int8 or len(args) != 1:
            return func(*args, **call)
        buffer = HugeBuffer(args[0])
        whole = torch.frombuffer(buffer.memory, dtype=torch.int8, count=args[0], offset=buffer.offset)
        return whole.zero_()  # pages are taken here and not in the first steps
