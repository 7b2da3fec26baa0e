"""The policy: a small Qwen3 from transformers, its log-probs, and its checkpoint. Loads torch; for learner processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from rose.reference.learner_config import PolicyConfig
from rose.reference.tokenizer import BOS_ID, EOS_ID, PAD_ID, WordTokenizer


def build_policy(config: PolicyConfig, *, num_ids: int, seed: int) -> Any:
    """Return a freshly initialised float32 model, the same for the same ``seed``; weights of in and output are not tied."""
    torch.manual_seed(seed)
    architecture = Qwen3Config(
        vocab_size=num_ids,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        initializer_range=config.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(architecture).float()


def pad_rows(rows: Sequence[Sequence[float]], *, fill: float, dtype: torch.dtype) -> torch.Tensor:
    """Return ``[rows, longest]``, padded on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=dtype)


def token_logprobs(logits_of: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, tokens]``: log-prob of each token given those before it; 0 for the first, which has none.

    Padding on the right needs no attention mask: a causal model does not see it from the tokens before it.

    Args:
        logits_of: From ids ``[rows, tokens]`` to logits ``[rows, tokens, vocabulary]``.
        ids: ``[rows, tokens]``.
    """
    logits = logits_of(ids[:, :-1]).float()
    chosen = functional.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
    return functional.pad(chosen, (1, 0))


def save_checkpoint(
    folder: Path, *, architecture: Any, weights: Mapping[str, torch.Tensor], tokenizer: WordTokenizer
) -> None:
    """Write a Hugging Face checkpoint: bfloat16 safetensors, config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    saved = architecture.__class__.from_dict(architecture.to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    saved.dtype = torch.bfloat16
    saved.save_pretrained(folder)
    tokenizer.save(folder)
