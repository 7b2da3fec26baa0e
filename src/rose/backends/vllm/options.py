"""The options of a vLLM engine, and their translation to vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import validators as v
from xxhash import xxh32_intdigest

from rose.types import EngineId, WeightVersion

ROSE_SCHEDULER = "rose.backends.vllm.scheduler.RoseScheduler"
ROSE_WORKER = "rose.backends.vllm.worker.RoseWorkerExtension"
_LEAST_SHARE = 0.01
"""Of a GPU's memory, that vLLM wants to find free before it starts, 0.92 by default, although the size of the KV cache is given: the second
engine on a card would not start."""


@attrs.frozen(kw_only=True)
class VllmOptions:
    """One vLLM engine.

    Attributes:
        engine_id: The name by which ROSE knows the engine.
        model: Directory of a Hugging Face checkpoint (safetensors), or a hub id.
        initial_version: The published version that the checkpoint is; ``None`` when it is none.
        max_model_len: Longest prompt plus answer, in tokens; ``None`` is the model's own limit.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Tokens of one step; ``None`` leaves it to vLLM.
        kv_cache_bytes: Size of the KV cache.
        block_size: Tokens of a KV block; the CPU attention wants a multiple of 32.
        dtype: Of weights and activations. Weight updates travel in it.
        seed: Of vLLM's sampler; a request's own seed goes before it. ``None`` makes one of ``engine_id``: engines of one seed that are given
            the same prompt may draw the same answer, and a group of such answers teaches nothing.
        tensor_parallel_size: Number of devices that the model is cut over.
        is_priority_scheduled: Order requests by ``EngineRequest.priority`` (lower first) instead of arrival.
        has_prefix_cache: Keep the KV of prompts for later requests.
        park_directory: Where the weights of a sleeping engine on a CPU are kept; ``None`` is the system's folder for temporary
            files. It should not be one that is kept in memory.
        rose: Settings of ``RoseScheduler`` (``additional_config["rose"]``); empty for a plain engine.
        scheduler_cls: Import path of the scheduler; ``None`` is vLLM's own.
        engine_args: Further ``vllm.EngineArgs`` fields; they win over the rest.
    """

    engine_id: EngineId = attrs.field(validator=v.min_len(1), converter=EngineId)
    model: str = attrs.field(converter=str, validator=v.min_len(1))
    initial_version: WeightVersion | None = None
    max_model_len: int | None = attrs.field(default=None, validator=v.optional(v.gt(0)))
    max_num_seqs: int = attrs.field(default=16, validator=v.gt(0))
    max_num_batched_tokens: int | None = attrs.field(default=None, validator=v.optional(v.gt(0)))
    kv_cache_bytes: int = attrs.field(default=64 << 20, validator=v.gt(0))
    block_size: int = attrs.field(default=32, validator=v.gt(0))
    dtype: str = "bfloat16"
    seed: int | None = None
    tensor_parallel_size: int = attrs.field(default=1, validator=v.gt(0))
    is_priority_scheduled: bool = False
    has_prefix_cache: bool = True
    park_directory: str | None = None
    rose: Mapping[str, Any] = attrs.field(factory=dict)
    scheduler_cls: str | None = ROSE_SCHEDULER
    engine_args: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def is_local(self) -> bool:
        """Return whether the model is a directory of this machine."""
        return Path(self.model).is_dir()

    def start_failure(self, error: Exception) -> str:
        """Return what to tell of a start that failed: vLLM's own words, and the option of ours that they may be about.

        vLLM advises to raise gpu_memory_utilization, which has no part in the size of the KV cache here, and does not say which model it looked for.
        """
        advice = ""
        if any(words in str(error) for words in ("KV cache", "root cause above")):
            advice = f"; if it is the KV cache: raise the option kv_cache_bytes (now {self.kv_cache_bytes}) or lower max_model_len"
        elif "huggingface.co" in str(error) and not self.is_local:
            advice = f"; model {self.model!r} is no folder here, so it was looked for at the hub"
        return f"engine {self.engine_id} did not start: {error}{advice}"

    def to_engine_args(self) -> dict[str, Any]:
        """Return the keyword arguments of ``vllm.EngineArgs`` (vLLM must be importable)."""
        from vllm.config import WeightTransferConfig  # noqa: PLC0415 - heavy

        args: dict[str, Any] = {
            "model": self.model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": self.dtype,
            "seed": xxh32_intdigest(self.engine_id.encode()) if self.seed is None else self.seed,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "block_size": self.block_size,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": self.has_prefix_cache,
            "scheduling_policy": "priority" if self.is_priority_scheduled else "fcfs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "weight_transfer_config": WeightTransferConfig(backend="rose"),
            "worker_extension_cls": ROSE_WORKER,
        }
        if self.scheduler_cls is not None:
            args["scheduler_cls"] = self.scheduler_cls
        if self.rose:
            args["additional_config"] = {"rose": dict(self.rose)}
        args |= dict(self.engine_args)
        if args["kv_cache_memory_bytes"] is not None:
            args.setdefault("gpu_memory_utilization", _LEAST_SHARE)
        return args
