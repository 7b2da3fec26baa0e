"""What engines must know of the demo's two models. The checkpoints themselves are made in the engine tests."""

from __future__ import annotations

import json

from rose.reference.demo_models import policy_models
from rose.reference.environment import Step


class Corridor:
    words = ("left", "right", "wall", "free", "P")
    action_words = ("left", "right")
    max_turns = 5
    max_tokens_per_turn = 3

    def reset(self, seed: int) -> str:
        return "wall P free"

    def step(self, text: str | None) -> Step:
        return Step(observation="", reward=0.0, is_done=True)


def checkpoint(folder, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_lengths_and_kv_sizes_come_from_the_environment_and_the_checkpoints(tmp_path):
    policy = checkpoint(tmp_path / "policy", num_hidden_layers=2, num_key_value_heads=2, head_dim=32)
    serving = checkpoint(tmp_path / "serving", num_hidden_layers=1, num_key_value_heads=1, head_dim=32)
    models = policy_models(policy, serving, Corridor)
    assert (models.policy_kv_bytes, models.serving_kv_bytes) == (512, 128)
    assert models.policy_max_len == 64, "1 + 5 turns of at most 6 + 3 words, in whole blocks of 32"
    assert (models.policy, models.serving) == (policy, serving)
