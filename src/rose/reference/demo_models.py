"""The demo's two tiny models: the policy that learns, and a serving model of another shape."""

from __future__ import annotations

import json
from pathlib import Path

from rose.reference.engines import BLOCK_TOKENS
from rose.reference.environment import Environment, longest_episode
from rose.reference.fleet import SERVING_MAX_MODEL_LEN, SERVING_VOCAB, Models
from rose.testing.models import make_qwen3

_BFLOAT16_BYTES = 2


def make_serving_model(folder: Path, *, seed: int) -> Path:
    """Write a one-layer model with one KV head; its forward pass is short, so that pacing has room on a CPU."""
    return make_qwen3(
        folder,
        layers=1,
        hidden=64,
        heads=2,
        kv_heads=1,
        head_dim=32,
        vocab=SERVING_VOCAB,
        seed=seed,
        max_positions=SERVING_MAX_MODEL_LEN,
        is_tied=False,
    )


def policy_models(policy: Path, serving: Path, environment: type[Environment]) -> Models:
    """Return what engines must know of the two checkpoints."""
    longest = longest_episode(environment)
    return Models(
        policy=policy,
        serving=serving,
        policy_max_len=-(-longest // BLOCK_TOKENS) * BLOCK_TOKENS,
        policy_kv_bytes=_kv_bytes_per_token(policy),
        serving_kv_bytes=_kv_bytes_per_token(serving),
    )


def _kv_bytes_per_token(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * _BFLOAT16_BYTES)
