"""SGLang's batches as the step control sees them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_stand_in import Batch, Req, Scheduler, stepping_for

from rose.backends.sglang_server.steps import SglangSteps, running
from rose.policies.compute import StepShape


def engine(scheduler: Scheduler) -> Any:
    return stepping_for(scheduler)


def test_a_prefill_batch_is_its_new_tokens() -> None:
    """A whole prompt behind a cached prefix of 10, and a chunk that is not the last of its prompt."""
    scheduler = Scheduler()
    whole = Req("a", prompt=50, extend_end=50, extend_len=40)
    chunk = Req("b", prompt=300, extend_end=128, extend_len=64)
    scheduler.chunked_req = chunk
    shape = SglangSteps().measure(engine(scheduler), Batch("extend", whole, chunk))
    assert shape == StepShape(
        num_prefill_tokens=104,
        prefill_positions=40 * (50 - 20) + 64 * (128 - 32),
        num_completed=1,
        completed_context_tokens=50,
    )


def test_a_decode_batch_is_its_contexts() -> None:
    batch = Batch("decode", Req("a", prompt=5, output=3), Req("b", prompt=7, output=1))
    shape = SglangSteps().measure(engine(Scheduler()), batch)
    assert shape == StepShape(num_decodes=2, decode_context_tokens=16)


def test_a_mixed_batch_is_both() -> None:
    decode = Req("a", prompt=5, output=3, extend_end=8, extend_len=1)
    batch = Batch("extend", Req("b", prompt=9, extend_end=9, extend_len=9), decode)
    batch.decoding_reqs = [decode]  # type: ignore[attr-defined] # SGLang's
    shape = SglangSteps().measure(engine(Scheduler()), batch)
    assert (shape.num_prefill_tokens, shape.num_decodes, shape.num_completed) == (9, 1, 1)


def test_requests_of_the_last_prefill_run_although_they_are_not_merged_yet() -> None:
    scheduler = Scheduler()
    scheduler.run(Req("a"))
    chunked = Req("c", prompt=300, extend_end=64)
    scheduler.chunked_req = chunked
    scheduler.last_batch = Batch("extend", Req("b", prompt=4, output=1), chunked, Req("over", finished_reason="length"))
    assert [req.rid for req in running(scheduler)] == ["a", "b", "c"]
    outlook = SglangSteps().outlook(engine(scheduler))
    assert (outlook.decode_contexts, outlook.prefill_contexts) == ([8, 5], [64])
    assert outlook.has_prompts
    assert not outlook.is_mixed


def test_a_decode_batch_that_was_the_last_one_counts_once() -> None:
    scheduler = Scheduler()
    scheduler.run(Req("a"))
    scheduler.last_batch = scheduler.running_batch
    assert [req.rid for req in running(scheduler)] == ["a"]


def test_chunks_are_capped_but_never_below_what_sglang_aligns_to() -> None:
    scheduler = Scheduler()
    steps, face = SglangSteps(), engine(scheduler)
    assert steps.chunk_tokens(face) == 2048
    steps.cap_prompts(face, 128, num_decodes=0)
    assert scheduler.chunked_prefill_size == 128
    scheduler.truncation_align_size = 512  # type: ignore[assignment] # a stand-in's
    steps.cap_prompts(face, 128, num_decodes=0)
    assert scheduler.chunked_prefill_size == 512
    scheduler.chunked_prefill_size = None  # type: ignore[assignment] # chunks are off
    assert steps.chunk_tokens(face) == scheduler.max_prefill_tokens


def test_serving_s_load() -> None:
    """Prompts until their first token; retracted ones wait; one that its client gave up is no decoding request."""
    scheduler = Scheduler()
    scheduler.run(Req("d", prompt=4, output=2))
    scheduler.run(Req("gone", prompt=4, output=2, to_finish="abort"))
    chunked = Req("c", prompt=300, extend_end=64)
    scheduler.chunked_req = chunked
    scheduler.waiting_queue = [Req("w"), Req("retracted", output=5)]
    load = SglangSteps().serving_load(engine(scheduler), 10, is_decode=False)
    assert load.waiting_ids == ("w", "retracted", "c")
    assert load.decoding == [("d", 2)]
    assert (load.num_running, load.decode_context_tokens, load.kv_used_bytes) == (2, 6, 80)


def test_a_prompt_names_its_class() -> None:
    steps = SglangSteps()
    assert steps.prompt(Req("r", prompt=3, custom_params={"slo_class": "chat"})) == ("r", 3, "chat")
    assert steps.prompt(Req("r", custom_params={"slo_class": 5}))[2] is None
    assert steps.prompt(Req("r"))[2] is None


def test_kv_bytes_of_a_token() -> None:
    scheduler = Scheduler(100)
    pool = SimpleNamespace(get_kv_size_bytes=lambda: (3000, 1000))
    scheduler.token_to_kv_pool_allocator.get_kvcache = lambda: pool  # type: ignore[attr-defined] # SGLang's
    assert SglangSteps().token_bytes(engine(scheduler)) == 40
