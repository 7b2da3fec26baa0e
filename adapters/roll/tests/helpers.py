"""What several tests make of ROLL's objects; over doubles and over ROLL itself alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict

SETTINGS: dict[str, Any] = {
    "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "num_beams": 1, "max_new_tokens": 8, "repetition_penalty": 1.0,
    "length_penalty": 1.0, "num_return_sequences": 1, "stop_strings": None, "logprobs": 0,
}  # fmt: skip


def prompt(ids: list[int], *, width: int | None = None, src_rank: int = 0) -> Any:
    """Return a prompt as ROLL's managers make it, left-padded to a width."""
    from roll.distributed.scheduler.protocol import DataProto

    pad = (width or len(ids)) - len(ids)
    mask = torch.tensor([[0] * pad + [1] * len(ids)])
    batch = {
        "input_ids": torch.tensor([[0] * pad + ids]),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=-1) - 1).clip(min=0),
    }
    return DataProto(batch=TensorDict(batch, batch_size=1), meta_info={"src_rank": src_rank})


def make_proxy(url: str, tokenizer: Any, *, router: Any = None, **options: Any) -> Any:
    """Return a proxy of a pool."""
    from rose_roll import RoseProxy

    config = SimpleNamespace(proxy_type="rose", proxy_config={"pool": url, **options})
    return RoseProxy(router, config, tokenizer, None)


def worker_config(**more: Any) -> Any:
    """Return what the adapter reads of a worker's configuration."""
    values: dict[str, Any] = {
        "model_args": SimpleNamespace(lora_target=None, dtype="fp32", model_name_or_path=None),
        "num_gpus_per_worker": 1,
        "strategy_args": SimpleNamespace(strategy_name="vllm", strategy_config={}),
        "worker_cls": "rose_roll.RoseInferWorker",
        "system_envs": {},
    }
    return SimpleNamespace(**values | more)
