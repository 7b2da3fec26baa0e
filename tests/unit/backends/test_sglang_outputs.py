"""What is made of the events of an SGLang server, the odd ones in particular."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.backends.sglang.outputs import EventReader
from rose.errors import EngineBusyError, EngineError, RequestRefusedError
from rose.types import EngineRequest, FinishReason, RequestId, Sampling, WeightVersion

DONE = b"data: [DONE]\n\n"
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
LENGTH = {"type": "length", "length": 4}
V1, V2 = WeightVersion("run", 1), WeightVersion("run", 2)


def reader(max_tokens=100, *, logprobs=True, **options) -> EventReader:
    sampling = Sampling(max_tokens=max_tokens, logprobs=logprobs)
    return EventReader(EngineRequest(request_id=RequestId("r"), prompt_ids=(1,), sampling=sampling), **options)


def event(ids, count, finish=None, *, label="run:1", spans=None, rows=None) -> bytes:
    meta = {"finish_reason": finish, "weight_version": label, "completion_tokens": count}
    meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids] if rows is None else rows
    if spans is not None:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


def read(found: EventReader, *events: bytes):
    """Return the chunks of each event."""
    return [found.feed(each) for each in events]


def tokens(chunks) -> list[int]:
    return [token for each in chunks for chunk in each for token in chunk.token_ids]


def test_increments_become_chunks():
    found = reader()
    chunks = read(found, event([5], 1), event([6, 7], 3), event([8], 4, LENGTH, spans=[("run:1", 0, 4)]) + DONE)
    assert tokens(chunks) == [5, 6, 7, 8]
    assert [len(chunk.logprobs) for each in chunks for chunk in each] == [1, 2, 1]
    assert {chunk.version for each in chunks for chunk in each} == {V1}
    assert found.finish_reason is FinishReason.LENGTH
    assert found.is_done
    assert found.num_events == 3


def test_everything_so_far_becomes_increments():
    found = reader(is_incremental=False)
    assert tokens(
        read(found, event([5], 1), event([5, 6, 7], 3), event([5, 6, 7], 3), event([5, 6, 7, 8], 4, LENGTH))
    ) == [5, 6, 7, 8]
    assert found.error is None


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.integers(1, 4), max_size=6),
    st.lists(st.integers(1, 40), max_size=30),
)
def test_bytes_may_come_in_any_pieces(ids, sizes, cuts):
    data, at = b"", 0
    for size in [*sizes, len(ids)]:
        part = ids[at : at + size]
        at += len(part)
        data += event(part, at, LENGTH if at == len(ids) and part else None)
        if at == len(ids):
            break
    found, chunks = reader(), []
    for size in [*cuts, len(data)]:
        chunks.append(found.feed(data[:size]))
        data = data[size:]
    assert found.error is None
    assert tokens(chunks) == ids
    assert found.finish_reason is FinishReason.LENGTH


def test_the_abort_of_a_request_that_waits_repeats_nothing_here():
    found = reader()
    whole = [[-0.5, token, None] for token in (5, 6)]
    waiting = {"type": "abort", "message": "Abort in waiting queue"}
    assert tokens(read(found, event([5], 1), event([6], 2), event([6], 2, waiting, rows=whole))) == [5, 6]
    assert found.finish_reason is FinishReason.ABORTED


def test_nor_when_it_was_joined_with_tokens_before_it():
    found = reader()
    rows = [[-0.6, 6, None], [-0.7, 7, None], *([-0.5, token, None] for token in (5, 6, 7))]
    waiting = {"type": "abort", "message": "Abort in waiting queue"}
    chunks = read(found, event([5], 1), event([6, 7, 7], 3, waiting, rows=rows))
    assert tokens(chunks) == [5, 6, 7]
    assert chunks[1][0].logprobs == (-0.6, -0.7)


def test_an_abort_without_tokens():
    found = reader()
    assert tokens(read(found, event([], 0, ABORTED))) == []
    assert found.finish_reason is FinishReason.ABORTED


@pytest.mark.parametrize(
    ("message", "reason"), [("rose:evicted", FinishReason.EVICTED), ("Aborted", FinishReason.ABORTED)]
)
def test_evictions_are_told_apart(message, reason):
    found = reader()
    read(found, event([5], 1, {"type": "abort", "message": message}))
    assert found.finish_reason is reason


@pytest.mark.parametrize(
    ("finish", "kind"),
    [
        ({"type": "abort", "message": "rose:refused"}, RequestRefusedError),
        ({"type": "abort", "message": "queue is full", "status_code": 503}, EngineBusyError),
        ({"type": "abort", "message": "too long", "status_code": 400}, RequestRefusedError),
        ({"type": "abort", "message": "oh", "status_code": 500}, EngineError),
        ({"type": "whatever"}, EngineError),
    ],
)
def test_other_ends_are_errors_after_the_tokens(finish, kind):
    found = reader()
    assert tokens(read(found, event([5], 1), event([6], 2, finish))) == [5, 6]
    assert type(found.error) is kind


def test_an_error_event():
    found = reader()
    read(found, b'data: {"error":{"message":"too long","code":400}}\n\n' + DONE)
    assert type(found.error) is RequestRefusedError


def test_versions_follow_the_labels():
    found = reader()
    spans = [("run:1", 0, 2), ("run:2", 2, 4)]
    chunks = read(
        found, event([5, 6], 2), event([7], 3, label="run:2"), event([8], 4, LENGTH, label="run:2", spans=spans)
    )
    assert [chunk.version for each in chunks for chunk in each] == [V1, V2, V2]
    assert found.error is None


def test_spans_cut_an_event():
    found = reader()
    chunks = read(found, event([5, 6, 7], 3, LENGTH, label="run:2", spans=[("run:1", 0, 1), ("run:2", 1, 3)]))
    assert [(chunk.version, chunk.token_ids) for chunk in chunks[0]] == [(V1, (5,)), (V2, (6, 7))]


def test_spans_in_every_event_go_before_labels():
    found = reader()
    events = [
        event([5], 1, label="run:1", spans=[("run:1", 0, 1)]),
        event([6], 2, label="run:1", spans=[("run:1", 0, 1), ("run:2", 1, 2)]),
        event([7], 3, LENGTH, spans=[("run:1", 0, 1), ("run:2", 1, 3)]),
    ]
    assert [chunk.version for each in read(found, *events) for chunk in each] == [V1, V2, V2]
    assert found.error is None


def test_tokens_under_a_wrong_label_are_an_error():
    found = reader()
    read(
        found,
        event([5, 6], 2, label="run:2"),
        event([7], 3, LENGTH, label="run:2", spans=[("run:1", 0, 1), ("run:2", 1, 3)]),
    )
    assert "under the weight labels" in str(found.error)


def test_labels_that_are_no_version():
    found = reader(labels={"default": V2})
    chunks = read(found, event([5], 1, label="default"), event([6], 2, label="other"))
    assert [chunk.version for each in chunks for chunk in each] == [V2, None]


def test_own_stops_cut_the_stream_behind_themselves():
    found = reader(own_stops=frozenset({7}))
    chunks = read(found, event([5, 6], 2), event([7, 8], 4) + event([9], 5))
    assert tokens(chunks) == [5, 6, 7]
    assert found.finish_reason is FinishReason.STOP
    assert found.is_cut
    assert found.error is None


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (event([7], 4), "tokens were lost"),
        (event([7], 1), "tokens were lost"),
        (event([7] * 99, 101), "of the 100 that were asked for"),
        (event(["a"], 3), "malformed token ids"),
        (event([True], 3), "malformed token ids"),
        (event([7], None), "malformed token ids"),
        (event([7], 3, rows=[]), "without one log-prob each"),
        (event([7], 3, rows=[[-0.5, 8, None]]), "of other tokens"),
        (event([7], 3, rows=[[0.5, 7, None]]), "not above 0"),
        (event([7], 3, rows=[[None, 7, None]]), "a log-prob is None"),
        (event([7], 3, "end"), "malformed field"),
        (event([7], 3, LENGTH, spans=[("run:1", 0, 2)]), "weight_versions end at token 2 of 3"),
        (event([7], 3, LENGTH, spans=[("run:1", 0, "x")]), "malformed weight_versions"),
        (b"data: {\n\n", "no JSON"),
        (b'data: {"text": "a"}\n\n', "no meta_info"),
    ],
)
def test_what_is_wrong_is_told_after_what_came_before(broken, what):
    found = reader()
    assert tokens(read(found, event([5], 1) + event([6], 2) + broken)) == [5, 6]
    assert type(found.error) is EngineError
    assert what in str(found.error)
    assert found.is_over


def test_more_after_the_end_is_an_error():
    found = reader()
    read(found, event([5], 1, LENGTH) + event([6], 2))
    assert "more after the finish reason" in str(found.error)


def test_no_logprobs_unless_asked():
    found = reader(logprobs=False)
    assert read(found, event([5], 1, rows=[]))[0][0].logprobs == ()
