"""Shared value objects check what they are given."""

from __future__ import annotations

import numpy as np
import pytest

from rose.types import (
    AnyVersion,
    AtLeast,
    EngineRequest,
    Exactly,
    RequestId,
    Sampling,
    TransportAddress,
    Turn,
    WeightUpdate,
    WeightVersion,
)


def test_weight_versions_render_parse_and_order():
    version = WeightVersion("grpo.a-1", 12)
    assert str(version) == "grpo.a-1:12"
    assert WeightVersion.parse("grpo.a-1:12") == version
    assert WeightVersion("r", 9) < WeightVersion("r", 10)


@pytest.mark.parametrize("text", ["grpo", "grpo:", "grpo:x", "grpo:-1", ":3", "a b:3", "", "a:²", 3, None])
def test_bad_weight_versions_are_refused(text):
    with pytest.raises(ValueError, match=r"run:n|run must be a string like"):
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
    with pytest.raises(ValueError, match=r"^n must be an integer >= 0, got -1$"):
        AtLeast(-1)
    with pytest.raises(ValueError, match="manifest_keys"):
        WeightUpdate(target=WeightVersion("r", 1), manifest_keys=(), address=TransportAddress(name="memory"))


def test_versions_of_two_runs_have_no_order():
    assert WeightVersion("a", 1) >= WeightVersion("a", 1)
    assert WeightVersion("a", 0) != WeightVersion("b", 0)
    with pytest.raises(TypeError, match="within one run only; a:1 and b:0 are of two"):
        assert WeightVersion("a", 1) < WeightVersion("b", 0)
    with pytest.raises(TypeError, match="not supported"):
        assert WeightVersion("a", 1) < 2


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        ({"max_tokens": True}, "max_tokens must be an integer >= 1, got True"),
        ({"max_tokens": "8"}, "max_tokens must be an integer >= 1, got '8'"),
        ({"temperature": float("nan")}, "temperature must be a finite number >= 0, got nan"),
        ({"temperature": float("inf")}, "temperature must be a finite number >= 0, got inf"),
        ({"temperature": None}, "temperature must be a finite number >= 0, got None"),
        ({"top_p": 2}, "top_p must be a finite number > 0 and <= 1, got 2"),
        ({"stop_token_ids": 3}, "stop_token_ids must be token ids, plain integers .*, got 3"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"logprobs": 1}, "logprobs must be True or False, got 1"),
        ({"seed": 1.0}, "seed must be an integer or None, got 1.0"),
    ],
)
def test_wrong_sampling_is_named_in_one_line(wrong, got):
    with pytest.raises(ValueError, match=f"^{got}$") as caught:
        Sampling(**{"max_tokens": 1, **wrong})
    assert len(caught.value.args) == 1


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        ({"sampling": None}, "sampling must be an instance of Sampling, got None"),
        ({"prompt_ids": "abc"}, "prompt_ids must be .*, got 'abc'"),
        ({"prompt_ids": b"abc"}, "prompt_ids must be .*, got an object of type bytes"),
        ({"prompt_ids": [1, 1.5]}, "prompt_ids must be .*, got 1.5 at place 1"),
        ({"prompt_ids": [True]}, "prompt_ids must be .*, got True at place 0"),
        ({"prompt_ids": np.array([1])}, "prompt_ids must be .*tolist.*, got an object of type int64 at place 0"),
        ({"prompt_ids": None}, "prompt_ids must be .*, got None"),
        ({"prompt_ids": []}, "prompt_ids must be at least 1 token ids, .*, got 0 of them"),
        ({"trajectory_id": []}, "trajectory_id must be a string, got an object of type list"),
        ({"group_id": 3}, "group_id must be a string, got 3"),
        ({"versions": 3}, "versions must be an instance of AnyVersion or AtLeast or Exactly, got 3"),
        ({"versions": AnyVersion}, "versions must be .*, got the class AnyVersion"),
        ({"deadline_s": float("inf")}, "deadline_s must be a finite number > 0 or None, got inf"),
        ({"deadline_s": "1"}, "deadline_s must be a finite number > 0 or None, got '1'"),
    ],
)
def test_a_malformed_turn_is_refused_when_it_is_made(wrong, got):
    good = {"trajectory_id": "t", "group_id": "g", "prompt_ids": [1], "sampling": Sampling(max_tokens=1)}
    with pytest.raises(ValueError, match=f"^{got}$"):
        Turn(**{**good, **wrong})


@pytest.mark.parametrize("wrong", [{"request_id": 3}, {"sampling": {}}, {"prompt_ids": ["a"]}, {"priority": "high"}])
def test_a_malformed_request_is_refused(wrong):
    good = {"request_id": RequestId("r"), "prompt_ids": [1], "sampling": Sampling(max_tokens=1)}
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
        EngineRequest(**{**good, **wrong})


def test_the_request_that_begins_a_turn_is_as_if_made_by_hand():
    sampling = Sampling(max_tokens=3, seed=1)
    turn = Turn(trajectory_id="t", group_id="g", prompt_ids=[1, 2], sampling=sampling)
    by_hand = EngineRequest(request_id=RequestId("r"), prompt_ids=(1, 2), sampling=sampling)
    begun = EngineRequest.begin(turn, RequestId("r"))
    assert begun == by_hand
    assert repr(begun) == repr(by_hand)
    assert hash(begun) == hash(by_hand)


@pytest.mark.parametrize("kind", [AtLeast, Exactly])
@pytest.mark.parametrize("wrong", [True, 1.0, "1", WeightVersion("r", 1)])
def test_constraints_take_plain_numbers(kind, wrong):
    with pytest.raises(ValueError, match=r"^n must be an integer >= 0, got"):
        kind(wrong)
