"""RoseScheduler's KV budget on a real vLLM engine in this process."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import psutil
import pytest

from rose.backends.vllm.environment import import_vllm

pytest.importorskip("vllm")
vllm = import_vllm()

from vllm.v1.engine.llm_engine import LLMEngine

from rose.backends.paging import HUGE_PAGE_BYTES
from rose.backends.wire import unwrap
from rose.policies.memory import MemoryConfig
from rose.testing.models import make_qwen3

pytestmark = pytest.mark.engine

BLOCK = 32
KV_BYTES = 64 << 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_qwen3(
        tmp_path_factory.mktemp("policy"), layers=2, hidden=128, heads=4, kv_heads=2, vocab=32, max_positions=4096
    )
    engine = LLMEngine.from_engine_args(
        vllm.EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            block_size=BLOCK,
            kv_cache_memory_bytes=KV_BYTES,
            max_model_len=4096,
            max_num_seqs=16,
            seed=0,
            scheduler_cls="rose.backends.vllm.scheduler.RoseScheduler",
            worker_extension_cls="rose.backends.vllm.worker.RoseWorkerExtension",
            weight_transfer_config=vllm.config.WeightTransferConfig(backend="rose"),
        )
    )
    unwrap(engine.engine_core.engine_core.rose_init(None))
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


def test_a_budget_that_is_too_small_now_holds_one_and_what_can_never_fit_is_refused(
    engine: Any, scheduler: Any
) -> None:
    """Case C02, with this backend's pages of 32 tokens: 100 pages of which serving holds 90."""
    settings, control = scheduler.settings, scheduler.control
    scheduler.settings = attrs.evolve(settings, memory=MemoryConfig(pool_bytes=1))
    object.__setattr__(
        scheduler.settings, "role", "rollout"
    )  # without a device, which the scheduler does not ask for here
    scheduler.control = SimpleNamespace(**{name: getattr(control, name) for name in dir(control) if name[0] != "_"})
    scheduler.control.possible_kv_tokens = lambda: 100 * BLOCK
    try:
        scheduler.set_kv_budget_tokens(10 * BLOCK)
        add(engine, "now", prompt=8 * BLOCK, max_tokens=4 * BLOCK)  # 12 pages at its longest
        add(engine, "never", prompt=120 * BLOCK - 10, max_tokens=10)
        ended = collect(engine, 5)
        assert (ended["never"].finish_reason, ended["never"].stop_reason) == ("abort", "rose:refused")
        assert "now" not in ended
        assert scheduler.get_request_counts() == (0, 1)
        scheduler.set_kv_budget_tokens(12 * BLOCK)
        assert collect(engine)["now"].finish_reason == "length"
    finally:
        scheduler.settings, scheduler.control = settings, control


def check_blocks(scheduler: Any) -> None:
    """Every block is one of used, free and held, and is counted as often as it is used."""
    pool = scheduler.kv_cache_manager.block_pool
    uses: Counter[int] = Counter()
    for request in scheduler.requests.values():
        groups = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        uses.update(block.block_id for group in groups for block in group)
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    held = set(np.flatnonzero(scheduler._held._is_held).tolist())
    assert len(free) + len(uses) + len(held) == scheduler._held.num_blocks
    assert set(free) | set(uses) | held == set(range(1, pool.num_gpu_blocks))
    assert all(block.ref_cnt == uses[block.block_id] + (block.block_id in held) for block in pool.blocks[1:])
    assert not any(pool.blocks[i].block_hash for i in held), "a held block may be found by its prefix"
    assert scheduler._held.num_used == len(uses)


@pytest.mark.parametrize("seed", range(3))
def test_no_block_leaks_whatever_is_cut_evicted_aborted_or_put_to_sleep(engine: Any, scheduler: Any, seed: int) -> None:
    draw = random.Random(seed)
    num_added = 0
    for _ in range(120):
        match draw.choice(["add", "add", "step", "step", "step", "budget", "abort", "sleep"]):
            case "add":
                num_added += 1
                add(engine, f"r{num_added}", prompt=draw.randrange(1, 300), max_tokens=draw.randrange(1, 120))
            case "step":
                collect(engine, draw.randrange(1, 6))
            case "budget":
                scheduler.set_kv_budget_tokens(draw.choice([0, 2, 5, 20, 60, 10_000]) * BLOCK)
            case "abort" if scheduler.requests:
                engine.abort_request([draw.choice(list(scheduler.requests))], internal=True)
            case "sleep" if draw.random() < 0.3:
                scheduler.fall_asleep()
                collect(engine, 2)
                assert not scheduler.requests
                scheduler.wake()
        check_blocks(scheduler)
    scheduler.set_kv_budget_tokens(scheduler.num_kv_tokens)
    collect(engine, 3000)
    check_blocks(scheduler)
    assert num_added > 10
    assert scheduler.num_kv_tokens_used == 0


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
    assert all(tensor.data_ptr() % HUGE_PAGE_BYTES == 0 for tensor in tensors)
    for tensor in tensors:
        tensor.fill_(0)
    full = psutil.Process().memory_info().rss
    scheduler.set_kv_budget_tokens(16 * BLOCK)
    assert full - psutil.Process().memory_info().rss > 0.8 * KV_BYTES
    assert scheduler.rose_snapshot()["kv_given_bytes"] > 0.8 * KV_BYTES
    scheduler.set_kv_budget_tokens(scheduler.num_kv_tokens)
    assert scheduler.rose_snapshot()["kv_given_bytes"] == 0
    add(engine, "after", max_tokens=10)
    assert len(collect(engine)["after"].token_ids) == 10
