"""What tests ask of a site while a trainer waits after a sync."""

from __future__ import annotations

import time
from typing import Any

from harness import digests
from rose.testing import PoolSite


def newest(site: PoolSite) -> str:
    """Return the version that the pool was brought to."""
    return str(site.status()["version"])


def wait_for(site: PoolSite, engine: str, version: str, timeout_s: float = 60.0) -> None:
    """Wait until an engine takes turns with a version."""
    give_up_s = time.monotonic() + timeout_s
    while (row := site.status()["engines"][engine])["version"] != version or row["state"] != "ready":
        assert time.monotonic() < give_up_s, f"{engine} is {row}, not ready at {version}"
        time.sleep(0.1)


def check_equal(site: PoolSite, weights: dict[str, Any], *engines: str) -> str:
    """Check, bit by bit, that engines hold the trainer's weights; returns the version that they say it is."""
    import torch

    version = newest(site)
    expected = site.expected(version)
    own = digests(weights, torch.float32)
    assert {name: expected[name] for name in own} == own  # what was published is what the trainer has
    for engine in engines:
        wait_for(site, engine, version)
        assert site.sums(engine) == expected, engine
    return version


def plain_differences(batches: list[dict[str, Any]], model: str, weights: dict[str, Any]) -> Any:
    """Return how far each sampled token's log-prob is from plain Hugging Face's in float32 on the weights that drew it."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    plain.load_state_dict({name: value.float() for name, value in weights.items()}, strict=True)
    parts = []
    for one in batches:
        with torch.no_grad():
            logits = plain(one["sequences"], attention_mask=one["attention_mask"]).logits[:, :-1]
        own = torch.log_softmax(logits, -1).gather(-1, one["sequences"][:, 1:, None])[..., 0]
        parts.append((own - one["rollout_log_probs"])[one["action_mask"] == 1].abs().numpy())
    return np.concatenate(parts)


def log_prob_differences(batches: list[dict[str, Any]]) -> Any:
    """Return how far each sampled token's log-prob is from the trainer's own, computed anew on the same tokens."""
    import numpy as np

    parts = [
        (one["rollout_log_probs"] - one["action_log_probs"])[one["action_mask"] == 1].float().abs().numpy()
        for one in batches
    ]
    return np.concatenate(parts)
