"""Tiny random models for tests of engines: made by code in a second, no download."""

from __future__ import annotations

from pathlib import Path


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
    import torch  # noqa: PLC0415 - heavy
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
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,  # wide enough that greedy answers depend on every weight
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path)
    return Path(path)
