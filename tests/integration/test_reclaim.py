"""KV pages of a borrowed engine return to the machine at once: while its rollouts run, and while it has nothing to do."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from rose.backends.paging import reclaim_ms_per_gib, resident_bytes
from rose.backends.vllm import VllmEngine, VllmOptions
from rose.coserving.ledger import Ledger
from rose.policies.admission import Budget, Mode
from rose.testing.contracts.streams import Stream, collect, until
from rose.testing.models import make_qwen3
from rose.types import EngineId, EngineRequest, FinishReason, RequestId, Sampling

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.asyncio(loop_scope="module")]

BLOCK_TOKENS = 128
BLOCK_BYTES = 2 << 20  # over all layers, about that of an 8 B model
NUM_BLOCKS = 192
NUM_SLOTS = 8


class Lent:
    """A rollout engine in its own process on a host device, and the lender's end of its ledger."""

    def __init__(self, engine: Any, ledger: Ledger) -> None:
        self.engine, self.ledger, self._token = engine, ledger, 0

    def lend(self, num_blocks: float | None) -> None:
        self._token += 1
        budget = Budget(fencing_token=self._token)
        if num_blocks is not None:
            budget = Budget(
                mode=Mode.UNGATED,
                kv_cap_bytes=num_blocks * BLOCK_BYTES,
                fencing_token=self._token,
                expires_s=math.inf,
                is_granted=True,
            )
        self.ledger.publish_budget(budget)

    def resident_bytes(self) -> int:
        return resident_bytes(self.engine.pid)

    async def given_bytes(self) -> int:
        return int((await self.engine._ask("rose_snapshot"))["kv_given_bytes"])

    async def until(self, condition: Any, limit_s: float) -> float:
        """Poll; returns the seconds it took."""
        start_s = time.perf_counter()
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.001)
        return time.perf_counter() - start_s


def request(prompt: tuple[int, ...], num_tokens: int = 2) -> Any:
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id=RequestId(f"r{time.monotonic_ns()}"), prompt_ids=prompt, sampling=sampling)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lent(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lent]:
    folder = tmp_path_factory.mktemp("reclaim")
    model = make_qwen3(
        folder / "model", layers=4, hidden=64, heads=8, kv_heads=8, head_dim=128, vocab=64, max_positions=4096
    )
    ledger = Ledger.create(folder / "ledger")
    options = VllmOptions(
        engine_id=EngineId("rollout"),
        model=str(model),
        block_size=BLOCK_TOKENS,
        kv_cache_bytes=NUM_BLOCKS * BLOCK_BYTES,
        max_num_seqs=NUM_SLOTS,
        rose={
            "role": "rollout",
            "device": {"kind": "host", "path": str(folder / "device")},
            "ledger": str(folder / "ledger"),
            "memory": {
                "pool_bytes": NUM_BLOCKS * BLOCK_BYTES,
                "headroom_bytes": 0,
                "granule_bytes": BLOCK_BYTES,
                "growth_fraction": 1.0,
                "growth_interval_s": 0.0,
            },
        },
    )
    engine = await VllmEngine.create(options)
    yield Lent(engine, ledger)
    await engine.close()


async def test_pages_return_within_40_ms_a_gib() -> None:
    assert reclaim_ms_per_gib(128 << 20) <= 40


async def test_an_idle_engine_follows_its_lease(lent: Lent) -> None:
    """Nobody calls it and it has no request; its pages still go when the lease ends."""
    lent.lend(math.inf)
    async with asyncio.timeout(10):
        while await lent.given_bytes():
            await asyncio.sleep(0.01)
    prompt = tuple(3 + i % 60 for i in range(3800))
    for i in range(4):
        await collect(lent.engine, request((i, *prompt)))
    before = lent.resident_bytes()
    lent.lend(None)
    await lent.until(lambda: before - lent.resident_bytes() > 100 * BLOCK_BYTES, 5)


async def test_a_cut_frees_pages_while_rollouts_run(lent: Lent) -> None:
    """The youngest end with their tokens, and no page waits for a rollout to finish."""
    lent.lend(math.inf)
    streams = [Stream() for _ in range(NUM_SLOTS)]
    tasks = [
        asyncio.create_task(stream.read(lent.engine.generate(request((i, *range(3, 60)) * 20, 1400))))
        for i, stream in enumerate(streams)
    ]
    async with asyncio.timeout(30):
        await until(lambda: all(stream.token_ids for stream in streams))
    kept_blocks, cut_s = 40, time.monotonic()
    lent.lend(kept_blocks)
    async with asyncio.timeout(5):
        while await lent.given_bytes() < 0.9 * (NUM_BLOCKS - kept_blocks) * BLOCK_BYTES:
            await asyncio.sleep(0.005)
    steps = await lent.engine.step_log(cut_s)
    assert all(row[6] < NUM_SLOTS for row in steps[1:]), "more than the step that ran already was made with all of them"
    running = (await lent.engine.snapshot()).num_running
    ended = [stream for stream in streams if stream.finish_reason is not None]
    assert 0 < running < NUM_SLOTS
    assert {stream.finish_reason for stream in ended} == {FinishReason.EVICTED}
    assert all(stream.token_ids for stream in ended)
    lent.lend(None)
    await asyncio.gather(*tasks)
    assert {stream.finish_reason for stream in streams} == {FinishReason.EVICTED}
