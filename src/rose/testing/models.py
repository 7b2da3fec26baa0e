"""Tiny random models for tests of engines: made by code in a second, no download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COMMON: Mapping[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.2,  # wide enough that greedy answers depend on every weight
}


def make_qwen3(
    path: str | Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    vocab: int = 128,
    seed: int = 0,
    max_positions: int = 512,
    is_tied: bool = True,
) -> Path:
    """Write a random Qwen3 checkpoint (safetensors, bfloat16, no tokenizer) and return its directory.

    Args:
        path: Directory to make.
        layers: Decoder layers.
        hidden: Width; the MLP is twice as wide.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head; the CPU attention of vLLM takes 32, 64 or 128, not 16.
        vocab: Vocabulary; ids 0 and 1 are begin and end of sequence.
        seed: Of the weights. The caller's random state is left alone.
        max_positions: Longest sequence.
        is_tied: Share the embedding with the output layer.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 - heavy

    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=is_tied,
        **_COMMON,
    )
    return _save(Qwen3ForCausalLM, config, Path(path), seed)


def make_qwen3_moe(
    path: str | Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 129,
    experts: int = 4,
    experts_per_token: int = 2,
    expert_width: int = 32,
    seed: int = 0,
    max_positions: int = 512,
) -> Path:
    """Write a random Qwen3-MoE checkpoint as ``make_qwen3`` does, one tensor an expert and projection; returns its directory.

    Args:
        path: Directory to make.
        layers: Decoder layers, each with experts.
        hidden: Width; the CPU kernels of vLLM take multiples of 32.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head; the CPU attention of vLLM takes 32, 64 or 128, not 16.
        vocab: Vocabulary; ids 0 and 1 are begin and end of sequence. 129 is one that vLLM pads.
        experts: Experts of a layer.
        experts_per_token: Of them, those that compute a token.
        expert_width: Intermediate width of an expert.
        seed: Of the weights. The caller's random state is left alone.
        max_positions: Longest sequence.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415 - heavy

    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=expert_width,
        num_experts=experts,
        num_experts_per_tok=experts_per_token,
        norm_topk_prob=True,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        **_COMMON,
    )
    return _save(Qwen3MoeForCausalLM, config, Path(path), seed)


def _save(model_class: Any, config: Any, path: Path, seed: int) -> Path:
    import torch  # noqa: PLC0415 - heavy

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.bfloat16)
    model.save_pretrained(path)
    return path
