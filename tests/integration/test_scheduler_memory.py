"""RoseScheduler's KV budget on a real vLLM engine in this process."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from rose.backends.vllm.environment import prepare_environment

prepare_environment()
vllm = pytest.importorskip("vllm")

from vllm.v1.engine.llm_engine import LLMEngine

from rose.testing.models import make_qwen3

pytestmark = pytest.mark.engine

BLOCK = 32
KV_BYTES = 64 << 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_qwen3(tmp_path_factory.mktemp("policy"), layers=2, hidden=128, heads=4, kv_heads=2, vocab=32)
    engine = LLMEngine.from_engine_args(
        vllm.EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            block_size=BLOCK,
            kv_cache_memory_bytes=KV_BYTES,
            max_model_len=512,
            max_num_seqs=16,
            seed=0,
            scheduler_cls="rose.backends.vllm.scheduler.RoseScheduler",
        )
    )
    yield engine
    engine.engine_core.shutdown()


@pytest.fixture
def scheduler(engine: Any) -> Any:
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.set_kv_budget_tokens(scheduler.num_kv_tokens)
    yield scheduler
    scheduler.set_gate(True)
    scheduler.set_kv_budget_tokens(scheduler.num_kv_tokens)
    engine.abort_request(list(scheduler.requests), internal=True)
    collect(engine, 3)
    assert not scheduler.requests


def add(engine: Any, request_id: str, *, prompt: int = 40, max_tokens: int = 100) -> None:
    token = 3 + sum(map(ord, request_id)) % 20
    engine.add_request(
        request_id,
        {"prompt_token_ids": [token] * prompt},
        vllm.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False),
    )


def collect(engine: Any, num_steps: int = 10_000) -> dict[str, Any]:
    """Step until all is done or ``num_steps``; the last output of each request."""
    last = {}
    while num_steps and engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output.outputs[0]
        num_steps -= 1
    return last


def test_a_cut_evicts_the_youngest_with_their_tokens(engine: Any, scheduler: Any) -> None:
    """Four requests hold two or three blocks each; with four blocks left the two youngest go."""
    for name in ("a", "b", "c", "d"):
        add(engine, name)
        collect(engine, 2)
    seen = collect(engine, 6)
    num_before = {name: len(output.token_ids) for name, output in seen.items()}
    assert scheduler.set_kv_budget_tokens(4 * BLOCK) == 4 * BLOCK
    ended = collect(engine, 1)
    for name in ("c", "d"):
        assert ended[name].finish_reason == "abort"
        assert ended[name].stop_reason == "rose:evicted"
        assert len(ended[name].token_ids) == num_before[name] > 0, "tokens were lost or invented"
    assert {request.request_id[0] for request in scheduler.running} == {"a", "b"}
    assert scheduler.num_evicted >= 2


def test_growth_lets_the_waiting_run_to_the_same_tokens(engine: Any, scheduler: Any) -> None:
    add(engine, "w", max_tokens=30)
    expected = collect(engine)["w"].token_ids
    scheduler.set_kv_budget_tokens(0)
    add(engine, "w", max_tokens=30)
    assert collect(engine, 5) == {}, "a request ran without any KV budget"
    assert scheduler.get_request_counts() == (0, 1)
    scheduler.set_kv_budget_tokens(scheduler.num_kv_tokens)
    output = collect(engine)["w"]
    assert (output.finish_reason, output.token_ids) == ("length", expected)


def test_what_can_never_fit_is_refused_at_once(engine: Any, scheduler: Any) -> None:
    possible, scheduler.control.possible_kv_tokens = scheduler.control.possible_kv_tokens, lambda: 4 * BLOCK
    try:
        add(engine, "huge", prompt=100, max_tokens=100)
        output = collect(engine, 3)["huge"]
    finally:
        scheduler.control.possible_kv_tokens = possible
    assert (output.finish_reason, output.stop_reason) == ("abort", "rose:refused")


def test_evictions_are_delivered_while_paused(engine: Any, scheduler: Any) -> None:
    add(engine, "p")
    collect(engine, 5)
    core = engine.engine_core.engine_core
    core.pause_scheduler("keep", clear_cache=False)
    try:
        scheduler.set_kv_budget_tokens(0)
        assert scheduler.has_requests()
        assert collect(engine, 3)["p"].stop_reason == "rose:evicted"
    finally:
        core.resume_scheduler()


def test_usage_counts_the_budget_and_the_cache_can_be_reset(engine: Any, scheduler: Any) -> None:
    scheduler.set_kv_budget_tokens(8 * BLOCK)
    assert scheduler.get_kv_cache_usage() == 0.0
    assert scheduler.reset_prefix_cache()
    assert scheduler.kv_budget_tokens == 8 * BLOCK
    add(engine, "u")
    collect(engine, 3)
    assert scheduler.get_kv_cache_usage() == pytest.approx(2 / 8)
    assert scheduler.make_stats() is None or scheduler.make_stats().kv_cache_usage == pytest.approx(2 / 8)


def test_a_closed_gate_holds_and_serves_aborts(engine: Any, scheduler: Any) -> None:
    add(engine, "g")
    scheduler.set_gate(False)
    assert collect(engine, 5) == {}
    assert scheduler.rose_snapshot()["is_gate_open"] is False
    scheduler.set_gate(True)
    assert collect(engine, 3)["g"].token_ids


def test_held_blocks_give_their_pages_back(engine: Any, scheduler: Any) -> None:
    core = engine.engine_core.engine_core
    tensors = core.model_executor.driver_worker.worker.model_runner.kv_caches
    for tensor in tensors:
        tensor.fill_(0)
    full = psutil.Process().memory_info().rss
    scheduler.attach_kv_tensors(tensors)
    scheduler.set_kv_budget_tokens(16 * BLOCK)
    assert full - psutil.Process().memory_info().rss > 0.8 * KV_BYTES
    assert scheduler.rose_snapshot()["kv_given_bytes"] > 0.8 * KV_BYTES
    scheduler.set_kv_budget_tokens(scheduler.num_kv_tokens)
    add(engine, "after", max_tokens=10)
    assert len(collect(engine)["after"].token_ids) == 10
