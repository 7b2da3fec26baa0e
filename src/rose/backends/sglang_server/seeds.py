"""Sampling seeds on a CPU, where SGLang has none of its own.

SGLang lets a request's seed reach its sampler only together with kernels that make a step independent of what is in its batch, and those need a
GPU. Here the seed alone reaches it: with ``ROSE_SGLANG_SEEDS=1`` in the server's environment each drawn token depends on the request's
seed, the token's position and the model's distribution, and on nothing else that is random.

Invariants: every rank draws the same; a request without a seed has one of its own, from its name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

SWITCH = "ROSE_SGLANG_SEEDS"
"""The environment variable that turns seeds on."""

HAS_SEEDS = "rose_has_seeds"
"""What the server's internal state has where they are on."""

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_MASK = 0xFFFFFFFF
_LENGTH = 16  # bytes of what is hashed: the seed, the position, the column


def install(registry: Any) -> None:
    """Register the hooks, where the environment asks for them."""
    if os.environ.get(SWITCH) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookType  # noqa: PLC0415 - only in SGLang's processes

    registry.register(f"{_SCHEDULER}.run_batch", _run_batch, HookType.AROUND)
    registry.register(f"{_SCHEDULER}.get_internal_state", _get_state, HookType.AROUND)
    registry.register("sglang.srt.layers.sampler.murmur_hash32", _hash, HookType.AROUND)


def seed_of(req: Any) -> int:
    """Return a request's seed, or one that its name gives on every rank alike."""
    seed = req.sampling_params.sampling_seed
    if seed is not None:
        return int(seed)
    return int.from_bytes(hashlib.blake2b(req.rid.encode(), digest_size=8).digest(), "little", signed=True)


def murmur_hash(words: Iterable[Any], columns: Any) -> Any:
    """Return MurmurHash3 (32 bits) of each row's words and each column, as int64 tensor ``[rows, columns]``.

    Args:
        words: int64 tensors ``[rows]``, of 32 bits each.
        columns: int64 tensor ``[columns]``.
    """
    found: Any = 0
    for word in words:
        found = _mix(found, word)
    found = _mix(found[:, None], columns[None, :]) ^ _LENGTH
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = ((found ^ (found >> shift)) * factor) & _MASK
    return found ^ (found >> 16)


def _mix(found: Any, word: Any) -> Any:
    word = _rotated((word * 0xCC9E2D51) & _MASK, 15) * 0x1B873593 & _MASK
    return (_rotated(found ^ word, 13) * 5 + 0xE6546B64) & _MASK


def _rotated(word: Any, bits: int) -> Any:
    return ((word << bits) | (word >> (32 - bits))) & _MASK


def _run_batch(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    import torch  # noqa: PLC0415 - heavy

    info = batch.sampling_info
    if (
        info is not None and info.temperatures.device.type == "cpu" and not info.need_min_p_sampling
    ):  # with min_p SGLang has no seeds
        info.sampling_seed = torch.tensor([seed_of(req) for req in batch.reqs], dtype=torch.int64)
    return original(scheduler, batch, *args, **kwargs)


def _hash(original: Any, seed: Any, positions: Any, columns: Any) -> Any:
    import torch  # noqa: PLC0415 - heavy

    if seed.device.type != "cpu":
        return original(seed, positions, columns)
    seed = seed.view(torch.int64)
    return murmur_hash((seed & _MASK, (seed >> 32) & _MASK, positions.to(torch.int64) & _MASK), columns)


def _get_state(original: Any, scheduler: Any, recv_req: Any) -> Any:
    answer = original(scheduler, recv_req)
    answer.internal_state[HAS_SEEDS] = True
    return answer
