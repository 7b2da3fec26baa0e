"""KV memory of the device given back and taken again, by what is installed: kvcached's limits, or vLLM's sleep."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rose.backends.cuda import KvLimiter
from rose.bench.gpu_check.outcome import Figure
from rose.bench.gpu_check.part import Bench, MismatchError, Part, lacking
from rose.errors import BackendUnavailableError

_GIB = 1 << 30
_AIM_MS = 40.0
_SLACK = 0.95
"""Of what should be free afterwards: the driver keeps a little for itself."""
_WAIT_S = 20.0
_BLOCK_TOKENS, _HEADS, _HEAD_DIM, _NUM_LAYERS = 16, 8, 128, 16
_CELL_BYTES = _HEADS * _HEAD_DIM * 2
_NUM_BLOCKS = 2 * _GIB // (2 * _NUM_LAYERS * _BLOCK_TOKENS * _CELL_BYTES)
"""Of a pool of 2 GiB, K and V."""


class KvcachedMemory(Part):
    """A pool of kvcached without an engine, its limit moved by ``KvLimiter``."""

    name = "memory-kvcached"
    shows = "1 GiB of a KV pool given back to the card and taken again, by a limit of kvcached"

    def problem(self, bench: Bench) -> str:
        """It needs a GPU and kvcached in a version whose limits are known."""
        if not bench.is_gpu:
            return "needs a GPU"
        if reason := lacking("kvcached"):
            return reason
        try:
            KvLimiter.open()
        except BackendUnavailableError as error:
            return str(error)
        return ""

    def run(self, bench: Bench) -> Sequence[Figure]:
        """Fill a pool of 2 GiB, cut its limit to the half that stays in use, free the other half, and fill the pool again."""
        manager = _kvcached_pool(bench.device)
        limiter = KvLimiter.open()
        limiter.limit(2 * _GIB)
        blocks = sorted(manager.alloc(int(manager.available_size())))
        upper = blocks[-(_NUM_BLOCKS // 2) :]

        def give() -> None:
            limiter.limit(_GIB)  # deferred: pages that come free without a cut may stay mapped for the next request
            manager.free(upper)

        give_ms = _moved(bench, give, -_GIB)
        limiter.limit(2 * _GIB)
        take_ms = _moved(bench, lambda: manager.alloc(int(manager.available_size())), _GIB // 2)
        return [
            Figure.at_most("1 GiB of KV memory given back", give_ms, "ms", _AIM_MS),
            Figure(name="the pool filled again", value=take_ms, unit="ms"),
        ]


class VllmMemory(Part):
    """vLLM's own allocator, without an engine: what its sleep does to the KV memory."""

    name = "memory-vllm"
    shows = "1 GiB given back to the card and taken again, by the allocator behind vLLM's sleep"

    def problem(self, bench: Bench) -> str:
        """It needs a GPU and a vLLM with that allocator."""
        if not bench.is_gpu:
            return "needs a GPU"
        if reason := lacking("vllm"):
            return reason
        cumem = importlib.import_module("vllm.device_allocator.cumem")
        return "" if cumem.cumem_available else "this vLLM was built without the allocator behind its sleep"

    def run(self, bench: Bench) -> Sequence[Figure]:
        """Put a tensor into the pool that sleeps, and let it sleep and wake."""
        cumem = importlib.import_module("vllm.device_allocator.cumem")
        allocator = cumem.CuMemAllocator.get_instance()
        with torch.cuda.device(bench.device), allocator.use_memory_pool(tag="kv_cache"):
            held = torch.zeros(_GIB, dtype=torch.uint8, device=bench.device)
        give_ms = _moved(bench, lambda: allocator.sleep(offload_tags=()), -_GIB)
        take_ms = _moved(bench, lambda: allocator.wake_up(["kv_cache"]), _GIB)
        held.fill_(1)
        bench.wait()
        return [
            Figure.at_most("1 GiB of KV memory given back", give_ms, "ms", _AIM_MS),
            Figure(name="1 GiB taken again", value=take_ms, unit="ms"),
        ]


def _moved(bench: Bench, work: Callable[[], Any], num_bytes: int) -> float:
    """Return how long it took until this process had so much more (or less) of the card, in milliseconds.

    Raises:
        MismatchError: It did not come to that.
    """
    bench.wait()
    before = torch.cuda.mem_get_info(bench.device)[0]
    started = time.perf_counter()
    work()
    while (before - torch.cuda.mem_get_info(bench.device)[0]) / num_bytes < _SLACK:
        if time.perf_counter() - started > _WAIT_S:
            free = torch.cuda.mem_get_info(bench.device)[0]
            message = f"{before} bytes of the card were free, then {free}: {num_bytes} were to move"
            raise MismatchError(message)
        time.sleep(1e-4)
    return 1e3 * (time.perf_counter() - started)


def _kvcached_pool(device: torch.device) -> Any:
    """Return the manager of a pool of 2 GiB; without a number of blocks kvcached would make it as large as the card."""
    interfaces = importlib.import_module("kvcached.integration.vllm.interfaces")
    interfaces.init_kvcached(device=str(device), is_worker=True)
    shape = (2, _NUM_BLOCKS, _BLOCK_TOKENS, _HEADS, _HEAD_DIM)
    interfaces.alloc_kv_cache(shape, _BLOCK_TOKENS, torch.float16, str(device), _NUM_LAYERS)
    return interfaces.get_kv_cache_manager(_NUM_BLOCKS, _BLOCK_TOKENS, _CELL_BYTES, _NUM_LAYERS)
