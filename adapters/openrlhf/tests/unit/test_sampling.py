"""Settings to a turn's: exactly, or refused by name."""

import pytest

from doubles import Letters, openrlhf_params
from rose.errors import ConfigError
from rose.types import Sampling
from rose_openrlhf.sampling import TextRules, read_request


def read(num_prompt_tokens=10, **given):
    return read_request(
        openrlhf_params(**given), num_prompt_tokens=num_prompt_tokens, max_model_len=64, codec=Letters()
    )


def test_what_openrlhf_asks_for():
    request = read()
    assert request.sampling == Sampling(max_tokens=16, temperature=1.0, top_p=1.0, logprobs=True)
    assert request.text == TextRules(min_tokens=1, skips_special=False)


@pytest.mark.parametrize(("given", "field", "value"), [
    ({"temperature": 0.6}, "temperature", 0.6),
    ({"temperature": 1e-6}, "temperature", 0.0),
    ({"top_p": 0.9}, "top_p", 0.9),
    ({"stop_token_ids": [7, 9]}, "stop_token_ids", (7, 9)),
    ({"ignore_eos": True}, "ignore_eos", True),
    ({"seed": 3}, "seed", 3),
    ({"logprobs": None}, "logprobs", False),
    ({"logprobs": 0}, "logprobs", True),
    ({"max_tokens": None}, "max_tokens", 54),
    ({"max_tokens": 60}, "max_tokens", 54),
])  # fmt: skip
def test_a_setting_reaches_the_turn(given, field, value):
    assert getattr(read(**given).sampling, field) == value


@pytest.mark.parametrize(("name", "value"), [
    ("n", 2), ("top_k", 20), ("min_p", 0.1), ("presence_penalty", 0.5), ("frequency_penalty", -0.5), ("repetition_penalty", 1.1),
    ("logit_bias", {3: 1.0}), ("bad_words", ["no"]), ("allowed_token_ids", [1]), ("structured_outputs", object()), ("prompt_logprobs", 1),
    ("extra_args", {"a": 1}), ("logprobs", 5), ("min_tokens", 2), ("something_new", 1), ("stop", [""]), ("prompt_logprobs", 0), ("use_beam_search", True),
])  # fmt: skip
def test_what_a_pool_lacks_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"SamplingParams\.{name}="):
        read(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "hint"), [("top_k", 20, "0"), ("n", 2, "1"), ("repetition_penalty", 1.1, "1")]
)
def test_a_refusal_says_what_changes_nothing(name, value, hint):
    with pytest.raises(ConfigError, match=f"leave it at {hint}$"):
        read(**{name: value})
    read(**{name: float(hint)})


def test_no_room_is_said():
    with pytest.raises(ConfigError, match="leaves no room"):
        read(num_prompt_tokens=64, max_tokens=None)


def test_stop_texts_of_one_token_end_at_the_engine():
    request = read(stop=["x", "yz"], stop_token_ids=[9])
    assert request.sampling.stop_token_ids == (9, ord("x"))
    assert request.text.stop == ("x", "yz")
    assert request.text.stop_ids == {ord("x")}


def test_defaults_of_a_declared_class_are_no_wishes():
    class Params:
        __struct_fields__ = ("max_tokens", "temperature", "top_p", "new_knob")

        def __init__(self, new_knob=3):
            self.max_tokens, self.temperature, self.top_p, self.new_knob = 4, 1.0, 1.0, new_knob

    assert read_request(Params(), num_prompt_tokens=1, max_model_len=9, codec=Letters()).sampling.max_tokens == 4
    with pytest.raises(ConfigError, match="new_knob=4"):
        read_request(Params(4), num_prompt_tokens=1, max_model_len=9, codec=Letters())
