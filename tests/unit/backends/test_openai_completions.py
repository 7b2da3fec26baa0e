"""The reader of completion events, without a server: cases E03, E04 and E09 of the field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.backends.answers import EVICTED, REFUSED
from rose.backends.openai.completions import CompletionReader, request_body
from rose.backends.openai.load import parse_load
from rose.errors import EngineError, RequestRefusedError
from rose.testing.openai_server import completion_event
from rose.types import EngineRequest, FinishReason, RequestId, Sampling, TokenChunk, WeightVersion


def request(max_tokens=8, prompt=(1, 2, 3), priority=0, **sampling):
    return EngineRequest(
        request_id=RequestId("r"),
        prompt_ids=prompt,
        priority=priority,
        sampling=Sampling(max_tokens=max_tokens, **sampling),
    )


def event(token_ids=(7,), logprobs=(-0.5,), finish_reason=None, num_told=None, **more):
    found = {"token_logprobs": list(logprobs)} if isinstance(logprobs, tuple) else logprobs
    choice = {"token_ids": list(token_ids), "logprobs": found, "finish_reason": finish_reason, **more}
    usage = {} if num_told is None else {"usage": {"completion_tokens": num_told}}
    return b"data: " + json.dumps({"choices": [choice], **usage}).encode() + b"\n\n"


def read(reader, *events):
    chunks = [reader.feed(each) for each in events]
    return [token for chunk in chunks if chunk for token in chunk.token_ids]


def test_the_body_asks_for_token_ids_and_the_running_count():
    wanted = request(5, temperature=0.0, stop_token_ids=(9,), seed=3, priority=2)
    body = json.loads(request_body(wanted, model="m"))
    assert (body["prompt"], body["max_tokens"], body["model"], body["stream"]) == ([1, 2, 3], 5, "m", True)
    assert (body["stop_token_ids"], body["seed"], body["priority"], body["temperature"]) == ([9], 3, 2, 0.0)
    assert body["return_token_ids"]
    assert body["stream_options"]["continuous_usage_stats"]
    assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (0, True)


def test_the_body_leaves_nothing_to_the_models_generation_config():
    """A model's own top_k, say, would draw from another distribution than the trainer computes log-probs of."""
    body = json.loads(request_body(request()))
    neutral = {"top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    assert {name: body[name] for name in neutral} == neutral
    assert {"temperature", "top_p"} <= body.keys()


def test_the_body_leaves_out_what_was_not_asked_for():
    body = json.loads(request_body(request(logprobs=False)))
    assert {"logprobs", "seed", "priority", "stop_token_ids", "model"}.isdisjoint(body)


def test_events_of_one_read_are_one_chunk():
    reader = CompletionReader(request(), WeightVersion("run", 3))
    chunk = reader.feed(event((7,), (-1.0,)) + event((8, 9), (0.0, -2)))
    assert chunk == TokenChunk(token_ids=(7, 8, 9), logprobs=(-1.0, 0.0, -2), version=WeightVersion("run", 3))
    assert reader.feed(b": a comment\n\n") is None


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", None, FinishReason.STOP),
        ("length", None, FinishReason.LENGTH),
        ("abort", None, FinishReason.ABORTED),
        ("stop", EVICTED, FinishReason.EVICTED),
    ],
)
def test_finish_reasons(finish, stop, reason):
    reader = CompletionReader(request())
    reader.feed(event(finish_reason=finish, stop_reason=stop) + b"data: [DONE]\n\n")
    assert (reader.finish_reason, reader.is_done, reader.num_tokens) == (reason, True, 1)


def test_an_end_token_alone_is_one_token_and_an_abort_in_the_queue_none():
    """E03."""
    reader = CompletionReader(request())
    assert read(reader, event((1,), (-0.1,), "stop", 1)) == [1]
    reader = CompletionReader(request())
    assert read(reader, event((), (), "abort", 0)) == []
    assert reader.finish_reason is FinishReason.ABORTED
    assert reader.error is None


@pytest.mark.parametrize(
    "logprobs",
    [
        {"token_logprobs": [-0.1, -0.2, None, -0.1, -0.1]},
        {"token_logprobs": [-0.1] * 4},
        {"token_logprobs": [-0.1] * 6},
        {"token_logprobs": [-0.1, -0.2, float("nan"), -0.1, -0.1]},
        {"token_logprobs": [-0.1, -0.2, 0.1, -0.1, -0.1]},
        {"token_logprobs": [-0.1, -0.2, float("-inf"), -0.1, -0.1]},
        {"token_logprobs": [-0.1, -0.2, True, -0.1, -0.1]},
        {"token_logprobs": [-0.1, -0.2, "x", -0.1, -0.1]},
        {"top_logprobs": [{"8": -0.1}] * 5},
        {},
        None,
        "none",
    ],
)
def test_logprobs_that_cannot_be_are_refused_and_never_filled_in(logprobs):
    """E04."""
    reader = CompletionReader(request())
    chunk = reader.feed(event((7,), (-0.5,)) + event((7,) * 5, logprobs))
    assert chunk == TokenChunk(token_ids=(7,), logprobs=(-0.5,)), "what came before it is kept"
    assert isinstance(reader.error, EngineError)
    assert "log-prob" in str(reader.error)


@pytest.mark.parametrize(
    "top",
    [
        [{"token_id:5": -9.0, "token_id:7": 0.0}],
        [{"5": -9.0, "7": 0.0}],
    ],
)
def test_of_a_table_the_sampled_tokens_value_is_taken(top):
    """E04: the first key is another token's; exactly 0.0 is a log-prob."""
    reader = CompletionReader(request())
    chunk = reader.feed(event((7,), {"top_logprobs": top}))
    assert chunk is not None
    assert chunk.logprobs == (0.0,)


def test_logprobs_are_not_looked_at_unless_asked_for():
    reader = CompletionReader(request(logprobs=False))
    assert reader.feed(event((7,), None)) == TokenChunk(token_ids=(7,))


def test_ids_are_read_from_the_names_of_logprobs_where_there_are_no_others():
    reader = CompletionReader(request())
    choice = {"text": "ab", "logprobs": {"tokens": ["token_id:7", "token_id:8"], "token_logprobs": [-1.0, -2.0]}}
    chunk = reader.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n")
    assert chunk is not None
    assert chunk.token_ids == (7, 8)


@pytest.mark.parametrize(
    ("events", "kept", "complaint"),
    [
        (event() + b"data: {broken\n\n", [7], "no JSON"),
        (event((8,) * 9, (-1.0,) * 9), [], "9 tokens came of the 8"),
        (event() + b'data: {"choices": [{"text": "hello"}]}\n\n', [7], "text without token ids"),
        (event() + b'data: {"choices": [{"token_ids": ["a"]}]}\n\n', [7], "malformed"),
        (event() + b'data: {"choices": [7]}\n\n', [7], "malformed"),
        (event() + b"data: 7\n\n", [7], "no object"),
        (event(prompt_token_ids=[1, 2]), [], "other prompt ids"),
        (event(num_told=1) + event(num_told=3), [7], "tokens were lost"),
        (event(finish_reason="stop") + event(), [7], "more after the finish reason"),
        (event(finish_reason="tool_calls"), [7], "tool_calls"),
        (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', [], "out of memory"),
    ],
)
def test_what_is_wrong_is_told_after_the_tokens_before_it(events, kept, complaint):
    reader = CompletionReader(request())
    assert read(reader, events) == kept
    assert complaint in str(reader.error)


def test_the_prompt_that_the_server_took_may_be_told():
    reader = CompletionReader(request())
    assert read(reader, event(prompt_token_ids=[1, 2, 3])) == [7]
    assert reader.error is None


@pytest.mark.parametrize("code", [400, 404])
def test_a_refusal_within_the_stream_is_one(code):
    reader = CompletionReader(request())
    reader.feed(b"data: " + json.dumps({"error": {"message": "too long", "code": code}}).encode() + b"\n")
    assert isinstance(reader.error, RequestRefusedError)


def test_a_request_that_never_fits_is_refused():
    reader = CompletionReader(request())
    reader.feed(event((), (), "stop", stop_reason=REFUSED))
    assert isinstance(reader.error, RequestRefusedError)


def test_a_repeated_event_is_dropped():
    """E09: event 7 comes twice."""
    events = [event((token,), (-0.1,), num_told=token) for token in range(1, 8)]
    reader = CompletionReader(request())
    assert read(reader, *events, events[-1], event((8,), (-0.1,), "length", 8)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert reader.error is None


def test_half_an_event_is_no_event():
    """E09: the connection closes in the middle of a JSON text."""
    reader = CompletionReader(request())
    cut = event((8,))
    assert read(reader, event(), cut[: len(cut) // 2]) == [7]
    assert (reader.error, reader.finish_reason) == (None, None)


@given(st.data())
def test_it_does_not_matter_where_the_reads_are_cut(data):
    ids = data.draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=30))
    chunks = [TokenChunk(token_ids=(token,), logprobs=(-0.25,)) for token in ids]
    text = b"".join(completion_event(chunk, i + 1) for i, chunk in enumerate(chunks))
    text += completion_event(TokenChunk(finish_reason=FinishReason.STOP), len(ids)) + b"data: [DONE]\n\n"
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    reader = CompletionReader(request(max_tokens=30))
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(reader, *parts) == ids
    assert (reader.finish_reason, reader.is_done, reader.error) == (FinishReason.STOP, True, None)


METRICS = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="1000"} 1.0
"""


def test_the_load_of_all_engines_of_a_server():
    load = parse_load(METRICS)
    assert load is not None
    assert (load.num_running, load.num_waiting) == (4, 2)
    assert (load.kv_used_tokens, load.kv_total_tokens) == (12_000, 32_000)


def test_metrics_of_something_else_are_none():
    assert parse_load(b"sglang:num_running_reqs 3\n") is None


def test_a_server_without_kv_metrics_says_nothing_of_kv():
    load = parse_load(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n")
    assert load is not None
    assert (load.kv_used_tokens, load.kv_total_tokens) == (0, 0)
