"""veRL's fields to ROSE's and back."""

import pytest

from rose.errors import RequestRefusedError, TurnFailedError
from rose.frameworks import PoolPlace
from rose.types import EngineId, FinishReason, Hop, HopEnd, RouteReason, TurnResult, VersionSpan, WeightVersion
from rose_verl.fields import answer_of, group_of, joined, refuse_media, sampling_of
from rose_verl.settings import RoseOptions, Settings


def settings(**more):
    fields = {
        "prompt_length": 10,
        "response_length": 6,
        "max_model_len": None,
        "ignore_eos": False,
        "dtype": "bfloat16",
    }
    place = PoolPlace(url="http://127.0.0.1:1")
    return Settings(place=place, options=RoseOptions(), **{**fields, **more})


STOCK = {"temperature": 1.0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def test_what_stock_agent_loops_ask_for():
    params = dict(STOCK)
    drawn = sampling_of(params, 8, settings())
    assert (drawn.max_tokens, drawn.temperature, drawn.top_p, drawn.logprobs) == (6, 1.0, 1.0, True)
    assert params == STOCK  # agent loops use one mapping for many turns


@pytest.mark.parametrize(
    ("params", "num_prompt", "max_model_len", "limit"),
    [
        ({}, 4, None, 6),  # the answer's length
        ({}, 12, None, 4),  # what prompt and answer leave
        ({}, 16, None, 1),  # never less than one
        ({"max_tokens": 20}, 12, None, 20),  # what is said goes
        ({"max_new_tokens": 3}, 12, None, 3),
        ({"max_tokens": 20}, 12, 15, 3),  # but never beyond the context
        ({}, 4, 6, 2),
    ],
)
def test_the_limit_is_that_of_verls_own_servers(params, num_prompt, max_model_len, limit):
    assert sampling_of(params, num_prompt, settings(max_model_len=max_model_len)).max_tokens == limit


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(RequestRefusedError, match="leaves no room"):
        sampling_of({}, 6, settings(max_model_len=6))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.2),
        ("presence_penalty", 0.5),
        ("n", 2),
        ("stop", ["\n"]),
        ("logit_bias", {3: 1.0}),
        ("prompt_logprobs", 1),
        ("guided_json", "{}"),
        ("logprobs", 5),
    ],
)
def test_what_would_change_the_draw_is_refused_by_its_name(name, value):
    with pytest.raises(RequestRefusedError, match=name):
        sampling_of({**STOCK, name: value}, 4, settings())


def test_what_changes_nothing_is_taken():
    neutral = {"top_k": 0, "min_p": 0.0, "stop": None, "n": 1, "skip_special_tokens": True, "presence_penalty": 0.0}
    drawn = sampling_of({**neutral, "stop_token_ids": [7, 9], "seed": 3, "ignore_eos": True}, 4, settings())
    assert (drawn.stop_token_ids, drawn.seed, drawn.ignore_eos, drawn.logprobs) == ((7, 9), 3, True, False)


def test_end_tokens_are_ignored_where_the_job_says_so():
    assert sampling_of({}, 4, settings(ignore_eos=True)).ignore_eos
    assert not sampling_of({"ignore_eos": False}, 4, settings(ignore_eos=True)).ignore_eos


def test_media_are_refused_and_empty_ones_are_none():
    refuse_media({"image_data": None, "video_data": [], "mm_processor_kwargs": {"fps": 2}})
    with pytest.raises(RequestRefusedError, match="audio_data, image_data"):
        refuse_media({"image_data": [object()], "audio_data": [1]})


V3, V4 = WeightVersion("r", 3), WeightVersion("r", 4)
STEPS = {V3: 30, V4: 31}


def result(num_tokens=5, finish=FinishReason.STOP, **more):
    fields = {
        "token_ids": tuple(range(num_tokens)),
        "logprobs": tuple(-0.5 * one for one in range(num_tokens)),
        "finish_reason": finish,
        "versions": (VersionSpan(version=V3, start=0, end=2), VersionSpan(version=V4, start=2, end=num_tokens)),
        "hops": (
            Hop(engine_id=EngineId("a"), reason=RouteReason.BORROWED, num_tokens=2, ended=HopEnd.EVICTED),
            Hop(engine_id=EngineId("b"), reason=RouteReason.REROUTED_EVICTED, num_tokens=3, ended=HopEnd.FINISHED),
        ),
    }
    return TurnResult(**{**fields, **more})


def test_an_answer_says_which_step_made_which_token():
    answer = answer_of(result(), steps=STEPS, now=31, has_logprobs=True)
    assert answer.token_ids == [0, 1, 2, 3, 4]
    assert answer.log_probs == [0.0, -0.5, -1.0, -1.5, -2.0]
    assert (answer.stop_reason, answer.num_preempted) == ("completed", 1)
    assert answer.extra_fields == {
        "global_steps": 30,
        "min_global_steps": 30,
        "max_global_steps": 31,
        "version_spans": [[0, 2, 30], [2, 5, 31]],
        "hops": [["a", "borrowed", 2, "evicted"], ["b", "rerouted_evicted", 3, "finished"]],
    }


def test_log_probs_are_never_invented():
    with pytest.raises(TurnFailedError, match="5 tokens came with 4 log-probs"):
        answer_of(result(logprobs=(-1.0,) * 4), steps=STEPS, now=31, has_logprobs=True)
    assert answer_of(result(logprobs=()), steps=STEPS, now=31, has_logprobs=False).log_probs is None


def test_tokens_of_foreign_weights_are_an_error():
    with pytest.raises(TurnFailedError, match="r:4"):
        answer_of(result(), steps={V3: 30}, now=30, has_logprobs=True)


def test_an_aborted_turn_says_so_and_one_without_tokens_is_of_now():
    aborted = answer_of(result(finish=FinishReason.ABORTED), steps=STEPS, now=31, has_logprobs=True)
    assert aborted.stop_reason == "aborted"
    empty = result(num_tokens=0, finish=FinishReason.ABORTED, versions=(), hops=())
    assert answer_of(empty, steps=STEPS, now=31, has_logprobs=True).extra_fields["min_global_steps"] == 31


def test_parts_of_a_turn_are_joined_with_their_spans():
    first = answer_of(result(finish=FinishReason.ABORTED), steps=STEPS, now=31, has_logprobs=True)
    second = answer_of(
        result(num_tokens=3, versions=(VersionSpan(version=V4, start=0, end=3),)),
        steps=STEPS,
        now=31,
        has_logprobs=True,
    )
    whole = joined([first, second])
    assert whole.token_ids == [0, 1, 2, 3, 4, 0, 1, 2]
    assert len(whole.log_probs) == 8
    assert whole.extra_fields["version_spans"] == [[0, 2, 30], [2, 5, 31], [5, 8, 31]]
    assert (whole.extra_fields["min_global_steps"], whole.extra_fields["max_global_steps"]) == (30, 31)
    assert whole.num_preempted == 2
    assert joined([first]) is first


def test_trajectories_of_one_prompt_are_a_group():
    assert group_of([1, 2, 3]) == group_of((1, 2, 3)) != group_of([1, 2, 4])
