"""Requests and outputs at the border to vLLM; the outputs here are stand-ins with vLLM's field names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rose.backends.answers import EVICTED, REFUSED
from rose.backends.vllm.streams import ChunkReader, RequestLimits, as_rose_error
from rose.errors import EngineBusyError, EngineError, RequestRefusedError
from rose.types import EngineRequest, FinishReason, RequestId, Sampling, WeightVersion

LIMITS = RequestLimits(vocab_size=100, max_model_len=16)
V0, V1 = WeightVersion("r", 0), WeightVersion("r", 1)


def request(*prompt: int, max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(request_id=RequestId("q"), prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens))


def output(*ids: int, finish: str | None = None, stop: Any = None, spans: Any = None, logprobs: bool = True) -> Any:
    entries = [{token: SimpleNamespace(logprob=-float(token))} for token in ids] if logprobs else None
    completion = SimpleNamespace(
        token_ids=list(ids), logprobs=entries, finish_reason=finish, stop_reason=stop, weight_versions=spans
    )
    return SimpleNamespace(request_id="q", outputs=[completion], finished=finish is not None)


def test_requests_that_fit_pass() -> None:
    LIMITS.refuse(request(0, 99, max_tokens=14))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (request(*range(13)), "13 prompt tokens and 4 new ones are more than the model's 16"),
        (request(1, 100), r"token id 100 is outside the vocabulary \[0, 100\)"),
        (request(-1, 2), "token id -1"),
    ],
)
def test_requests_that_never_fit_are_refused(bad: EngineRequest, says: str) -> None:
    with pytest.raises(RequestRefusedError, match=says):
        LIMITS.refuse(bad)


def test_tokens_and_logprobs_of_a_delta() -> None:
    (chunk,) = ChunkReader([("r:0", 0)]).read(output(4, 5))
    assert (chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish_reason) == ((4, 5), (-4.0, -5.0), V0, None)


def test_no_logprobs_stay_empty() -> None:
    (chunk,) = ChunkReader([("r:0", 0)]).read(output(4, logprobs=False))
    assert chunk.logprobs == ()


def test_outputs_are_cut_where_the_version_changes() -> None:
    """vLLM merges deltas when the reader is slow, so one output may hold tokens of several versions."""
    starts = [("r:0", 0)]
    reader = ChunkReader(starts)
    reader.read(output(1, 2, 3))
    starts.append(("r:1", 5))
    chunks = reader.read(output(4, 5, 6, 7, finish="length"))
    assert [(c.token_ids, c.logprobs, c.version, c.finish_reason) for c in chunks] == [
        ((4, 5), (-4.0, -5.0), V0, None),
        ((6, 7), (-6.0, -7.0), V1, FinishReason.LENGTH),
    ]


def test_spans_of_the_last_output_do_where_the_state_is_gone() -> None:
    spans = [SimpleNamespace(version="r:0", start=0, end=1), SimpleNamespace(version="r:1", start=1, end=3)]
    chunks = ChunkReader([]).read(output(1, 2, 3, finish="stop", spans=spans))
    assert [(c.token_ids, c.version) for c in chunks] == [((1,), V0), ((2, 3), V1)]


def test_labels_that_are_no_version_give_none() -> None:
    (chunk,) = ChunkReader([("default", 0)]).read(output(1))
    assert chunk.version is None


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", 7, FinishReason.STOP),
        ("length", None, FinishReason.LENGTH),
        ("abort", None, FinishReason.ABORTED),
        ("abort", EVICTED, FinishReason.EVICTED),
    ],
)
def test_finish_reasons(finish: str, stop: Any, reason: FinishReason) -> None:
    chunks = ChunkReader([("r:0", 0)]).read(output(finish=finish, stop=stop))
    assert [(c.token_ids, c.finish_reason) for c in chunks] == [((), reason)]


def test_failures_in_the_engine_are_errors() -> None:
    with pytest.raises(RequestRefusedError, match="KV memory"):
        ChunkReader([]).read(output(finish="abort", stop=REFUSED))
    with pytest.raises(EngineError, match="'error'"):
        ChunkReader([]).read(output(finish="error"))


def test_vllms_own_refusals_become_ours() -> None:
    """A full queue is busy (the engine lives, try elsewhere), a bad parameter is refused, the rest stays what it is."""
    exceptions = pytest.importorskip("vllm.exceptions", reason="vLLM is not installed")
    assert isinstance(as_rose_error(exceptions.QueueOverflowError(), "e"), EngineBusyError)
    assert isinstance(as_rose_error(exceptions.VLLMValidationError("bad"), "e"), RequestRefusedError)
    assert isinstance(as_rose_error(ValueError("bad"), "e"), RequestRefusedError)
    other = exceptions.GenerationError()
    assert as_rose_error(other, "e") is other
