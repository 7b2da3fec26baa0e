"""Which requests an SGLang server gets to see, and in which words."""

from __future__ import annotations

import json

import pytest

from rose.backends.sglang.facts import ServerFacts, read_facts
from rose.backends.sglang.requests import fresh_rid, own_stops, refuse_impossible, request_body
from rose.errors import EngineUnsupportedError, RequestRefusedError
from rose.types import EngineRequest, RequestId, Sampling

INFO = {
    "version": "0.5.23",
    "model_path": "/models/policy",
    "startup_time": {"tokenizer_e2e": 10.5},
    "max_req_input_len": 506,
    "max_total_num_tokens": 4096,
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "incremental_streaming_output": True,
    "enable_priority_scheduling": False,
    "schedule_low_priority_values_first": False,
    "enable_deterministic_inference": False,
    "enable_memory_saver": False,
    "internal_states": [{}],
}


def facts(**changes) -> ServerFacts:
    return read_facts({**INFO, **changes})


def request(prompt=(1, 2, 3), priority=0, **sampling) -> EngineRequest:
    options = {"max_tokens": 8, **sampling}
    return EngineRequest(request_id=RequestId("r"), prompt_ids=prompt, sampling=Sampling(**options), priority=priority)


def body(asked: EngineRequest, known: ServerFacts | None = None) -> dict:
    return json.loads(request_body(asked, "rid", known or facts()))


def test_a_body_says_everything_that_a_server_could_prefer_otherwise():
    found = body(request(temperature=0.5, top_p=0.9))
    assert found["rid"] == "rid"
    assert found["input_ids"] == [1, 2, 3]
    assert found["stream"]
    assert found["return_logprob"]
    assert "priority" not in found
    assert found["sampling_params"] == {
        "max_new_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_new_tokens": 0,
        "n": 1,
        "ignore_eos": False,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def test_stop_ids_are_the_servers_unless_it_would_ignore_them():
    natural = request(stop_token_ids=(7, 9))
    assert body(natural)["sampling_params"]["stop_token_ids"] == [7, 9]
    assert own_stops(natural.sampling) == frozenset()
    ignoring = request(stop_token_ids=(7, 9), ignore_eos=True)
    assert "stop_token_ids" not in body(ignoring)["sampling_params"]
    assert own_stops(ignoring.sampling) == {7, 9}


@pytest.mark.parametrize(("is_low_first", "sent"), [(True, 3), (False, -3)])
def test_lower_priorities_go_first_whatever_the_servers_order(is_low_first, sent):
    known = facts(enable_priority_scheduling=True, schedule_low_priority_values_first=is_low_first)
    assert body(request(priority=3), known)["priority"] == sent


def test_what_fits_to_the_last_token_is_not_refused():
    refuse_impossible(request(prompt=(1,) * 498), facts(), 320)
    refuse_impossible(request(prompt=(0, 319)), facts(), 320)


def test_more_than_the_server_takes_is_refused():
    with pytest.raises(RequestRefusedError, match="499 prompt tokens and 8 new ones are more than the 506"):
        refuse_impossible(request(prompt=(1,) * 499), facts(), 320)


@pytest.mark.parametrize("asked", [request(prompt=(1, 320)), request(stop_token_ids=(320,))])
def test_an_id_outside_the_vocabulary_is_refused(asked):
    with pytest.raises(RequestRefusedError, match=r"token id 320 is outside the vocabulary \[0, 320\)"):
        refuse_impossible(asked, facts(), 320)


def test_a_seed_is_refused_where_the_server_would_ignore_it():
    with pytest.raises(RequestRefusedError, match="--enable-deterministic-inference") as caught:
        refuse_impossible(request(seed=3), facts(), 320)
    assert isinstance(caught.value, EngineUnsupportedError)


def test_a_seed_is_sent_where_it_reaches_the_sampler():
    known = facts(enable_deterministic_inference=True)
    refuse_impossible(request(seed=3), known, 320)
    assert body(request(seed=3), known)["sampling_params"]["sampling_seed"] == 3
    with pytest.raises(RequestRefusedError, match="64 bits"):
        refuse_impossible(request(seed=2**63), known, 320)


def test_a_greedy_request_needs_no_seed():
    refuse_impossible(request(seed=2**70, temperature=0.0), facts(), 320)


def test_no_name_begins_with_another():
    names = [fresh_rid(RequestId(text)) for text in ("a", "a", "ab", "", "a-b") for _ in range(20)]
    assert not [one for one in names for other in names if one is not other and other.startswith(one)]
