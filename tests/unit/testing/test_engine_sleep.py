"""The scripted engine sleeps and runs out of memory as real ones do: cases C07 and C02."""

from __future__ import annotations

import asyncio
import time

import pytest

from rose.errors import EngineBusyError, EngineFencedError, RequestRefusedError
from rose.interfaces import SupportsSleep
from rose.testing import FakeEngine
from rose.testing.contracts.streams import collect, reading
from rose.types import EngineRequest, FinishReason, RequestId, Sampling, WeightVersion

PAGE_TOKENS = 16


def request(name: str, num_tokens: int, num_prompt: int = 4) -> EngineRequest:
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id=RequestId(name), prompt_ids=range(1, num_prompt + 1), sampling=sampling)


async def test_release_with_requests_in_flight_returns_all_of_them() -> None:
    """Case C07: three running, two waiting; memory is released, and resumed later."""
    engine = FakeEngine(max_running=3, token_s=0.005)
    assert isinstance(engine, SupportsSleep)
    tasks = [asyncio.create_task(collect(engine, request(f"r{i}", 1000))) for i in range(5)]
    await asyncio.sleep(0.05)
    snapshot = await engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (3, 2)
    start_s = time.monotonic()
    assert (await engine.sleep()).num_evicted == 5
    async with asyncio.timeout(1):
        ended = await asyncio.gather(*tasks)
    assert time.monotonic() - start_s <= 0.2
    assert {stream.finish_reason for stream in ended} == {FinishReason.EVICTED}
    assert [bool(stream.token_ids) for stream in ended] == [True, True, True, False, False]
    with pytest.raises(EngineBusyError, match="asleep"):
        await collect(engine, request("late", 2))
    assert (await engine.snapshot()).is_paused
    assert not (await engine.wake()).is_stale
    assert (await collect(engine, request("again", 2))).finish_reason is FinishReason.LENGTH


async def test_dropped_weights_fence_the_engine() -> None:
    engine = FakeEngine(weight_version=WeightVersion("r", 1))
    await engine.sleep(keeps_weights=False)
    await engine.sleep()
    woken = await engine.wake()
    assert (woken.is_stale, woken.version) == (True, None)
    with pytest.raises(EngineFencedError):
        await collect(engine, request("r", 2))


async def test_a_request_that_fits_later_waits_and_one_that_never_fits_is_refused() -> None:
    """Case C02: a pool of 100 pages of 16 tokens of which serving holds 90; one rollout needs 12 pages, another 120."""
    engine = FakeEngine(kv_total_tokens=100 * PAGE_TOKENS, max_model_len=4096)
    await engine.set_kv_budget(10 * PAGE_TOKENS)
    with pytest.raises(RequestRefusedError, match="1920 KV tokens"):
        await collect(engine, request("never", 8, num_prompt=120 * PAGE_TOKENS - 8))
    async with asyncio.timeout(5), reading(engine, request("later", 8, num_prompt=12 * PAGE_TOKENS - 8)) as stream:
        await asyncio.sleep(0.05)
        assert not stream.chunks, "there are two pages too few"
        await engine.set_kv_budget(12 * PAGE_TOKENS)
        await stream.finish()
    assert stream.finish_reason is FinishReason.LENGTH
    assert len(stream.token_ids) == 8
