"""Shared value objects check what they are given."""

from __future__ import annotations

import pytest

from rose.types import AtLeast, EngineRequest, RequestId, Sampling, TransportAddress, Turn, WeightUpdate, WeightVersion


def test_weight_versions_render_parse_and_order():
    version = WeightVersion("grpo.a-1", 12)
    assert str(version) == "grpo.a-1:12"
    assert WeightVersion.parse("grpo.a-1:12") == version
    assert WeightVersion("r", 9) < WeightVersion("r", 10)


@pytest.mark.parametrize("text", ["grpo", "grpo:", "grpo:x", "grpo:-1", ":3", "a b:3", ""])
def test_bad_weight_versions_are_refused(text):
    with pytest.raises(ValueError, match=r"run:n|matches|regex"):
        WeightVersion.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": 1, "temperature": -0.1},
        {"max_tokens": 1, "top_p": 0.0},
        {"max_tokens": 1, "top_p": 1.1},
    ],
)
def test_bad_sampling_is_refused(wrong):
    with pytest.raises((ValueError, TypeError)):
        Sampling(**wrong)


def test_prompts_become_tuples_and_may_not_be_empty():
    sampling = Sampling(max_tokens=1, stop_token_ids=[3])
    assert sampling.stop_token_ids == (3,)
    assert Turn(trajectory_id="t", group_id="g", prompt_ids=[1, 2], sampling=sampling).prompt_ids == (1, 2)
    with pytest.raises(ValueError, match="prompt_ids"):
        Turn(trajectory_id="t", group_id="g", prompt_ids=(), sampling=sampling)
    with pytest.raises(ValueError, match="prompt_ids"):
        EngineRequest(request_id=RequestId("r"), prompt_ids=(), sampling=sampling)


def test_other_bounds():
    with pytest.raises(ValueError, match="'n' must be >= 0"):
        AtLeast(-1)
    with pytest.raises(ValueError, match="manifest_keys"):
        WeightUpdate(target=WeightVersion("r", 1), manifest_keys=(), address=TransportAddress(name="memory"))
