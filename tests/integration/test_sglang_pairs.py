"""A serving and a rollout engine of two libraries on one paced device with one ledger: SGLang and vLLM in each place, SGLang in both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from coserving_bounds import Latency, assert_slo_is_kept
from sglang_site import Server, sglang_server

from rose.backends.paced import PacedClock
from rose.backends.sglang import commands
from rose.backends.vllm import VllmEngine, VllmOptions
from rose.coserving.ledger import Ledger
from rose.policies.admission import Budget, Mode
from rose.testing.models import make_qwen3
from rose.types import EngineId, EngineRequest, RequestId, Sampling

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.engine,
    pytest.mark.alone,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

NUM_REQUESTS = 20
NUM_TOKENS = 50
NUM_SLOTS = 8
M = 8
SERVING_VOCAB, ROLLOUT_VOCAB = 512, 256

_logger = logging.getLogger(__name__)

Times = list[tuple[int, float]]
"""``(token, when it came)``."""


@attrs.define
class VllmSide:
    """A vLLM engine."""

    engine: Any
    _ids: Any = attrs.field(factory=itertools.count)

    async def tokens(self, prompt: Sequence[int], max_tokens: int, note: Callable[[int], None]) -> None:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=False)
        request_id = RequestId(f"{self.engine.engine_id}-{next(self._ids)}")
        request = EngineRequest(request_id=request_id, prompt_ids=tuple(prompt), sampling=sampling)
        async for chunk in self.engine.generate(request):
            for token in chunk.token_ids:
                note(token)

    async def pacing(self, since_s: float) -> Any:
        return await self.engine.pacing_report(since_s)


@attrs.define
class SglangSide:
    """An SGLang server."""

    server: Server

    async def tokens(self, prompt: Sequence[int], max_tokens: int, note: Callable[[int], None]) -> None:
        async for event in self.server.stream(f"{random.getrandbits(64):016x}", prompt, max_tokens):
            for token in event.tokens:
                note(token)

    async def pacing(self, since_s: float) -> Any:
        return await commands.pacing_report(self.server.http, since_s)


@attrs.define
class Pair:
    clock: PacedClock
    ledger: Ledger
    serving: VllmSide | SglangSide
    rollout: VllmSide | SglangSide
    num_words: int = 0
    _token: int = 0

    def lend(self, mode: Mode) -> None:
        self._token += 1
        self.ledger.publish_budget(Budget(mode=mode, fencing_token=self._token, expires_s=math.inf, is_granted=True))

    async def answer(self, side: VllmSide | SglangSide, prompt: Sequence[int], max_tokens: int) -> Times:
        found: Times = []
        await side.tokens(prompt, max_tokens, lambda token: found.append((token, self.clock.now())))
        assert len(found) == max_tokens
        return found

    @contextlib.asynccontextmanager
    async def rollouts(self) -> AsyncIterator[None]:
        """Keep every slot busy."""

        def note(_: int) -> None:
            self.num_words += 1

        async def slot() -> None:
            while True:
                await self.rollout.tokens([random.randrange(3, ROLLOUT_VOCAB) for _ in range(60)], 12, note)
                await asyncio.sleep(0.02)

        tasks = [asyncio.create_task(slot()) for _ in range(NUM_SLOTS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(self, seed: str) -> Latency:
        """Answer the same arrivals with fresh prompts; latencies in modelled seconds."""
        latency, arrivals, tokens = Latency(), random.Random(0), random.Random(seed)

        async def one(num_prompt: int) -> None:
            sent_s = self.clock.now()
            times = await self.answer(
                self.serving, [tokens.randrange(3, SERVING_VOCAB) for _ in range(num_prompt)], NUM_TOKENS
            )
            latency.ttft_s.append(times[0][1] - sent_s)
            latency.tpot_s.append((times[-1][1] - times[0][1]) / (NUM_TOKENS - 1))

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_REQUESTS):
                await self.clock.sleep(arrivals.expovariate(5.0))
                group.create_task(one(arrivals.randrange(50, 1500)))
        return latency


@attrs.frozen
class Site:
    root: Path
    stack: contextlib.AsyncExitStack
    clock: PacedClock
    models: dict[str, Path]

    def rose(self, role: str) -> dict[str, Any]:
        return {
            "role": role,
            "device": {
                "kind": "paced",
                "path": str(self.root / "device"),
                "clock": self.clock.path,
                "profile": {"serving": "h100:qwen2.5-7b", "rollout": "h100:qwen3-8b"}[role],
                "tokens_per_token": {"serving": 1, "rollout": M}[role],
            },
            "ledger": str(self.root / "ledger"),
            "memory": {"pool_bytes": 42_000_000_000},
            "timing": {"watchdog_s": 2.0},  # a busy machine is no frozen engine
        }

    async def start(self, library: str, role: str) -> VllmSide | SglangSide:
        if library == "vllm":
            options = VllmOptions(
                engine_id=EngineId(role),
                model=str(self.models[role]),
                dtype="float32",
                max_num_seqs=32,
                max_num_batched_tokens=2048,
                kv_cache_bytes=64 << 20,
                rose=self.rose(role),
            )
            engine = await VllmEngine.create(options, clock=self.clock)
            self.stack.push_async_callback(engine.close)
            return VllmSide(engine)
        pool = ("--max-total-tokens", "16384", "--max-running-requests", "32", "--chunked-prefill-size", "2048")
        starting = sglang_server(self.root, self.models[role], self.rose(role), *pool, name=role)
        return SglangSide(await self.stack.enter_async_context(starting))


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[("sglang", "sglang"), ("sglang", "vllm"), ("vllm", "sglang")],
    ids=lambda pair: f"{pair[0]}-serves-{pair[1]}",
)
async def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    root = tmp_path_factory.mktemp("pair")
    models = {
        "serving": make_qwen3(root / "serving", layers=1, vocab=SERVING_VOCAB, max_positions=4096),
        "rollout": make_qwen3(
            root / "rollout", layers=2, hidden=128, heads=4, kv_heads=2, vocab=ROLLOUT_VOCAB, is_tied=False
        ),
    }
    clock, ledger = PacedClock.create(root / "clock", k=3.0), Ledger.create(root / "ledger")
    async with contextlib.AsyncExitStack() as stack:
        site = Site(root, stack, clock, models)
        serving, rollout = [
            await site.start(library, role) for library, role in zip(request.param, ("serving", "rollout"), strict=True)
        ]
        pair = Pair(clock, ledger, serving, rollout)
        pair.lend(Mode.UNGATED)
        await asyncio.sleep(1.0)  # the first lease begins with a first share of memory
        yield pair


async def test_tokens_are_those_of_each_engine_alone(pair: Pair) -> None:
    tokens = random.Random("identity")
    serving = [[tokens.randrange(3, SERVING_VOCAB) for _ in range(80)] for _ in range(4)]
    rollout = [[tokens.randrange(3, ROLLOUT_VOCAB) for _ in range(40)] for _ in range(4)]

    async def answers(side: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        found = await asyncio.gather(*(pair.answer(side, prompt, max_tokens) for prompt in prompts))
        return [[token for token, _ in times] for times in found]

    alone = [await answers(pair.serving, serving, 60), await answers(pair.rollout, rollout, 12)]
    for mode in (Mode.SLO, Mode.UNGATED):
        pair.lend(mode)
        together = asyncio.gather(answers(pair.serving, serving, 60), answers(pair.rollout, rollout, 12))
        assert list(await together) == alone


async def test_latency(pair: Pair) -> None:
    """Alone, lent up to the SLO, and first come first served, on the same arrivals."""
    arms: dict[Mode, Latency] = {}
    words: dict[Mode, float] = {}
    start_s = pair.clock.now()
    for mode in (Mode.CLOSED, Mode.SLO, Mode.UNGATED):
        pair.lend(mode)
        async with pair.rollouts():
            before, begin_s = pair.num_words, pair.clock.now()
            arms[mode] = await pair.serve(mode.value)
            words[mode] = (pair.num_words - before) / (pair.clock.now() - begin_s)
    reports = [await side.pacing(start_s) for side in (pair.serving, pair.rollout)]
    figures = {
        mode.value: {
            "ttft_mean_s": round(statistics.mean(arm.ttft_s), 4),
            "ttft_max_s": round(max(arm.ttft_s), 4),
            "tpot_median_s": round(statistics.median(arm.tpot_s), 4),
            "tpot_max_s": round(max(arm.tpot_s), 4),
            "tokens_a_second": round(words[mode] * M),
        }
        for mode, arm in arms.items()
    }
    _logger.info("%s: %s", [type(side).__name__ for side in (pair.serving, pair.rollout)], figures)
    if not all(report["is_valid"] for report in reports):
        pytest.skip(f"the machine disturbed the pacing, so latencies prove nothing: {reports} {figures}")
    assert_slo_is_kept(arms, {mode: M * rate for mode, rate in words.items()})


async def test_gate_closes_in_time(pair: Pair) -> None:
    """After the lender closed the gate no rollout turn starts; the one that ran was short."""
    pair.lend(Mode.UNGATED)
    async with pair.rollouts():
        await asyncio.sleep(1.5)
        before = pair.num_words
        assert before > 0
        pair.lend(Mode.CLOSED)
        closed_s = pair.clock.now()
        await asyncio.sleep(1.5)
        assert pair.ledger.rollout().turn_ends_s == -math.inf
        assert pair.ledger.rollout().busy_s > 0
        held = pair.num_words
        await asyncio.sleep(1.0)
        assert pair.num_words == held
    if isinstance(pair.rollout, SglangSide):
        rows = await commands.step_log(pair.rollout.server.http, closed_s)
        assert len(rows) <= 1, "a turn started long after the gate was closed"
