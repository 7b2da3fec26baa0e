"""A real serving engine and a real rollout engine of another model on one paced device."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from coserving_bounds import Latency, assert_slo_is_kept

from rose.backends.paced import PacedClock
from rose.backends.vllm import VllmEngine, VllmOptions
from rose.coserving.ledger import Ledger
from rose.policies.admission import Budget, Mode
from rose.testing.models import make_qwen3
from rose.types import EngineId, EngineRequest, FinishReason, RequestId, Sampling

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

NUM_REQUESTS = 24
NUM_TOKENS = 50
NUM_SLOTS = 8
M = 8
KV_BYTES_PER_WORD = 147_456 * M


@attrs.define
class Bench:
    clock: PacedClock
    ledger: Ledger
    serving: Any
    rollout: Any
    num_words: int = 0
    _num_ids: int = 0
    _token: int = 0

    def lend(self, mode: Mode, kv_cap_bytes: float = math.inf) -> None:
        self._token += 1
        self.ledger.publish_budget(
            Budget(mode=mode, kv_cap_bytes=kv_cap_bytes, fencing_token=self._token, expires_s=math.inf, is_granted=True)
        )

    def revoke(self) -> None:
        self._token += 1
        self.ledger.publish_budget(Budget(fencing_token=self._token))

    async def stream(self, engine: Any, prompt: list[int], max_tokens: int) -> AsyncIterator[Any]:
        self._num_ids += 1
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=False)
        request_id = RequestId(f"{engine.engine_id}-{self._num_ids}")
        async for chunk in engine.generate(EngineRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling)):
            yield chunk

    async def word_stream(self, max_tokens: int = 12) -> FinishReason | None:
        reason = None
        prompt = [random.randrange(3, 32) for _ in range(60)]
        async for chunk in self.stream(self.rollout, prompt, max_tokens):
            self.num_words += len(chunk.token_ids)
            reason = chunk.finish_reason
        return reason

    @contextlib.asynccontextmanager
    async def rollouts(self, max_tokens: int = 12) -> AsyncIterator[list[FinishReason | None]]:
        """Keep every slot busy; collects how the streams end."""
        ended: list[FinishReason | None] = []

        async def slot() -> None:
            while True:
                ended.append(await self.word_stream(max_tokens))
                await asyncio.sleep(0.02)

        tasks = [asyncio.create_task(slot()) for _ in range(NUM_SLOTS)]
        try:
            yield ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(self, seed: str) -> Latency:
        """Answer the same arrivals with fresh prompts; latencies in modelled seconds."""
        latency, arrivals, tokens = Latency(), random.Random(0), random.Random(seed)

        async def one(num_prompt: int) -> None:
            sent_s = self.clock.now()
            prompt = [tokens.randrange(3, 500) for _ in range(num_prompt)]
            times = [self.clock.now() async for _ in self.stream(self.serving, prompt, NUM_TOKENS)]
            latency.ttft_s.append(times[0] - sent_s)
            latency.tpot_s.append((times[-1] - times[0]) / (NUM_TOKENS - 1))

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_REQUESTS):
                await self.clock.sleep(arrivals.expovariate(5.0))
                group.create_task(one(arrivals.randrange(50, 1500)))
        return latency


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder, shm = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("shm")
    models = {
        "serving": make_qwen3(folder / "serving", layers=1, vocab=512, max_positions=4096),
        "rollout": make_qwen3(folder / "rollout", layers=2, hidden=128, heads=4, kv_heads=2, vocab=32),
    }
    clock = PacedClock.create(shm / "clock", k=2.0)
    ledger = Ledger.create(shm / "ledger")

    def options(role: str, profile: str, scale: int) -> VllmOptions:
        return VllmOptions(
            engine_id=EngineId(role),
            model=str(models[role]),
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            kv_cache_bytes=32 << 20,
            rose={
                "role": role,
                "device": {
                    "kind": "paced",
                    "path": str(shm / "device"),
                    "clock": str(shm / "clock"),
                    "profile": profile,
                    "tokens_per_token": scale,
                },
                "ledger": str(shm / "ledger"),
                "memory": {"pool_bytes": 42_000_000_000},
            },
        )

    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for chosen in (options("serving", "h100:qwen2.5-7b", 1), options("rollout", "h100:qwen3-8b", M)):
            engines.append(await VllmEngine.create(chosen, clock=clock))
            stack.push_async_callback(engines[-1].close)
        yield Bench(clock, ledger, *engines)


async def test_latency(bench: Bench) -> None:
    """Alone, lent up to the SLO, and first come first served, on the same arrivals."""
    arms: dict[Mode, Latency] = {}
    words: dict[Mode, float] = {}
    start_s = bench.clock.now()
    for mode in (Mode.CLOSED, Mode.SLO, Mode.UNGATED):
        bench.lend(mode)
        async with bench.rollouts():
            before, begin_s = bench.num_words, bench.clock.now()
            arms[mode] = await bench.serve(mode.value)
            words[mode] = (bench.num_words - before) / (bench.clock.now() - begin_s)
    reports = [await engine.pacing_report(start_s) for engine in (bench.serving, bench.rollout)]
    if not all(report["is_valid"] for report in reports):
        pytest.skip(f"the machine disturbed the pacing, so latencies prove nothing: {reports}")
    assert_slo_is_kept(arms, {mode: M * rate for mode, rate in words.items()})


async def test_memory(bench: Bench) -> None:
    """A smaller cap evicts at once, with tokens delivered; a larger one lets them all run again."""
    bench.lend(Mode.UNGATED)
    async with bench.rollouts(max_tokens=100) as ended:
        await asyncio.sleep(1.5)
        assert (await bench.rollout.snapshot()).num_running == NUM_SLOTS
        words = bench.num_words
        bench.lend(Mode.UNGATED, kv_cap_bytes=7 * 32 * KV_BYTES_PER_WORD + (256 << 20))
        await asyncio.sleep(1.0)
        snapshot = await bench.rollout.snapshot()
        assert snapshot.num_running in (1, 2), "each request may grow to 5 blocks of 7 or so"
        assert FinishReason.EVICTED in ended
        assert bench.num_words > words
        bench.lend(Mode.UNGATED)
        async with asyncio.timeout(20):
            while (await bench.rollout.snapshot()).num_running < NUM_SLOTS:
                await asyncio.sleep(0.1)


async def test_revocation(bench: Bench) -> None:
    """Without a lease every request ends as evicted within half a second, and new ones too."""
    bench.lend(Mode.UNGATED)
    async with bench.rollouts(max_tokens=100) as ended:
        await asyncio.sleep(0.5)
        ended.clear()
        bench.revoke()
        revoked_s = time.monotonic()
        while len(ended) < NUM_SLOTS:
            await asyncio.sleep(0.01)
        assert time.monotonic() - revoked_s < 2.0
        assert set(ended) == {FinishReason.EVICTED}


async def test_frozen(bench: Bench) -> None:
    """While time stands still rollouts run unpaced, serving waits, and both answer calls."""
    bench.lend(Mode.SLO)
    bench.clock.freeze()
    frozen_s = bench.clock.now()
    waiting = asyncio.create_task(anext(bench.stream(bench.serving, [5] * 20, 4)))
    async with asyncio.timeout(10):
        assert await bench.word_stream(20) is FinishReason.LENGTH
        await bench.serving.snapshot()
    assert bench.clock.now() == frozen_s
    assert not waiting.done()
    bench.clock.unfreeze()
    async with asyncio.timeout(10):
        await waiting
