from __future__ import annotations

from typing import Any

import pytest

from rose.errors import ConfigError
from rose_roll.sampling import count_sequences, to_sampling

AGENTIC: dict[str, Any] = {
    "do_sample": True, "temperature": 0.99, "top_p": 0.9, "top_k": -1, "num_beams": 1, "max_new_tokens": 64,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "num_return_sequences": 1, "stop_strings": None, "logprobs": 0,
}  # fmt: skip
VLLM: dict[str, Any] = {
    "max_tokens": 32, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [7, 0], "repetition_penalty": 1.0, "n": 4,
    "stop": None, "logprobs": 0, "output_kind": object(), "include_stop_str_in_output": True,
}  # fmt: skip


def test_settings_of_an_environment() -> None:
    sampling = to_sampling({**AGENTIC, "eos_token_id": [1, 0]})
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (64, 0.99, 0.9)
    assert sampling.stop_token_ids == (1, 0)
    assert sampling.logprobs


def test_settings_that_the_router_made_for_vllm() -> None:
    sampling = to_sampling(VLLM)
    assert (sampling.max_tokens, sampling.temperature, sampling.stop_token_ids) == (32, 0.0, (7, 0))
    assert count_sequences(VLLM) == 4


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"top_k": 50}, "top_k: 50: there is no top_k; set top_k: -1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: 1.1"),
        ({"num_beams": 2}, "num_beams: 2: there is no beam search; set num_beams: 1"),
        ({"use_beam_search": True}, "use_beam_search: True: there is no beam search"),
        ({"do_sample": False}, "do_sample: false with temperature: 0.99"),
        ({"include_stop_str_in_output": False}, "include_stop_str_in_output: false"),
        ({"stop_strings": ["two words"]}, "stop_strings: 'two words'"),
        ({"min_p": 0.1}, "min_p: 0.1: not known here"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1; got 0"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_name(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_sampling({**AGENTIC, **setting}, encode=lambda text: [3] * len(text.split()))
    assert words in str(caught.value)


def test_all_that_cannot_be_kept_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        to_sampling({**AGENTIC, "top_k": 50, "repetition_penalty": 1.2})
    assert "top_k" in str(caught.value)
    assert "repetition_penalty" in str(caught.value)


def test_what_changes_nothing_is_kept() -> None:
    neutral = {
        "min_p": 0.0,
        "presence_penalty": 0,
        "use_beam_search": False,
        "skip_special_tokens": True,
        "best_of": None,
    }
    assert to_sampling({**AGENTIC, **neutral}) == to_sampling(AGENTIC)


def test_a_stop_string_of_one_token_stops() -> None:
    assert to_sampling({**AGENTIC, "stop_strings": ["end"]}, encode=lambda _: [9]).stop_token_ids == (9,)


def test_no_logprobs_are_asked_for_where_roll_wants_none() -> None:
    assert not to_sampling({**AGENTIC, "logprobs": None}).logprobs


def test_greedy_may_be_said_twice() -> None:
    assert to_sampling({**AGENTIC, "do_sample": False, "temperature": 0}).temperature == 0
