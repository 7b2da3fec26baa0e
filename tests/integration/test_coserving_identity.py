"""Sharing a device changes no token: serving's stay what they are alone, an evicted rollout goes on elsewhere as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from rose.backends.vllm import InProcessVllmEngine, VllmEngine, VllmOptions
from rose.coserving.ledger import Ledger
from rose.policies.admission import Budget, Mode
from rose.testing.contracts.streams import Reading, Stream, collect, reading
from rose.testing.models import make_qwen3
from rose.types import EngineId, EngineRequest, FinishReason, RequestId, Sampling

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200), pytest.mark.asyncio(loop_scope="module")]

POOL_TOKENS = 8192
PREFIX = tuple(range(40, 180))  # at least one block that every serving prompt starts with


@attrs.define
class Pair:
    """A serving and a rollout engine of two models on one device, and a dedicated engine of the rollout model."""

    ledger: Ledger
    serving: Any
    rollout: Any
    elsewhere: Any
    rollout_token_bytes: int
    _token: int = 0
    _ids: Any = attrs.field(factory=itertools.count)

    def lend(self, mode: Mode | None, kv_cap_tokens: float = math.inf) -> None:
        self._token += 1
        budget = Budget(fencing_token=self._token)
        if mode is not None:
            cap_bytes = kv_cap_tokens * self.rollout_token_bytes
            budget = attrs.evolve(budget, mode=mode, kv_cap_bytes=cap_bytes, expires_s=math.inf, is_granted=True)
        self.ledger.publish_budget(budget)

    def request(self, prompt: Sequence[int], max_tokens: int) -> EngineRequest:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=True)
        return EngineRequest(request_id=RequestId(f"r{next(self._ids)}"), prompt_ids=prompt, sampling=sampling)

    async def serve(self, num_tokens: int = 12) -> list[Stream]:
        """Answer seven prompts of one prefix, the first alone, then two at a time; the cache starts empty."""
        await self.serving.reset_prefix_cache()
        done = [await collect(self.serving, self.request(PREFIX, num_tokens))]
        for i in range(0, 6, 2):
            prompts = [(*PREFIX, *range(180 + j, 185 + 9 * j)) for j in (i, i + 1)]
            done += await asyncio.gather(*(collect(self.serving, self.request(p, num_tokens)) for p in prompts))
        return done

    async def cut(self, kv_cap_tokens: int) -> None:
        """Lend less memory for as long as it takes to evict somebody."""
        before = (await self.rollout._ask("rose_snapshot"))["num_evicted"]
        self.lend(Mode.UNGATED, kv_cap_tokens)
        async with asyncio.timeout(20):
            while (await self.rollout._ask("rose_snapshot"))["num_evicted"] == before:
                await asyncio.sleep(0.002)

    async def cached_fraction(self) -> tuple[int, int]:
        load = await self.serving._ask("rose_snapshot")
        return load["num_cached_tokens"], load["num_prompt_tokens"]

    async def roll_out(self, prompt: Sequence[int], num_tokens: int) -> tuple[Stream, bool]:
        """Run a rollout on the borrowed engine and, when it is evicted, to its end elsewhere; returns whether it was."""
        stream = await collect(self.rollout, self.request(prompt, num_tokens))
        if stream.finish_reason is not FinishReason.EVICTED:
            return stream, False
        rest = self.request((*prompt, *stream.token_ids), num_tokens - len(stream.token_ids))
        stream.chunks += (await collect(self.elsewhere, rest)).chunks
        return stream, True


@attrs.frozen
class Shape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int

    def token_bytes(self, dtype: str = "float32") -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * (4 if dtype == "float32" else 2)

    def options(self, folder: Path, name: str, dtype: str, rose: dict[str, Any]) -> VllmOptions:
        model = folder / f"{self.layers}-{self.heads}-{self.kv_heads}-{self.head_dim}"
        if not model.exists():
            make_qwen3(
                model,
                layers=self.layers,
                hidden=self.heads * 32,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                vocab=256,
                max_positions=2048,
            )
        block_bytes = self.token_bytes(dtype) * self.block
        return VllmOptions(
            engine_id=EngineId(name),
            model=str(model),
            dtype=dtype,
            block_size=self.block,
            kv_cache_bytes=(POOL_TOKENS // self.block + 1) * block_bytes,
            max_num_seqs=4,
            rose=rose,
        )


@contextlib.asynccontextmanager
async def open_pair(
    folder: Path, serving: Shape, rollout: Shape, dtype: str = "float32", kind: type = InProcessVllmEngine
) -> AsyncIterator[Pair]:
    """Two engines that share one pool of KV memory, and a third one elsewhere."""
    shared = {
        "device": {"kind": "host", "path": str(folder / "device")},
        "ledger": str(folder / "ledger"),
        "admission": {"slo": {"ttft_s": 5.0, "tpot_s": 1.0}},
        "timing": {"watchdog_s": 60.0},
        "memory": {
            "pool_bytes": POOL_TOKENS * max(serving.token_bytes(dtype), rollout.token_bytes(dtype)),
            "headroom_bytes": 0,
            "granule_bytes": rollout.block * rollout.token_bytes(dtype),
            "growth_fraction": 1.0,
            "growth_interval_s": 0.0,
        },
    }
    ledger = Ledger.create(folder / "ledger")
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for shape, name, rose, cls in (
            (serving, "serving", {"role": "serving", **shared}, kind),
            (rollout, "rollout", {"role": "rollout", **shared}, kind),
            (rollout, "elsewhere", {}, InProcessVllmEngine),
        ):
            engines.append(await cls.create(shape.options(folder, name, dtype, rose)))
            stack.push_async_callback(engines[-1].close)
        yield Pair(ledger, *engines, rollout_token_bytes=rollout.token_bytes(dtype))


def tokens(streams: Sequence[Stream]) -> list[tuple[int, ...]]:
    return [stream.token_ids for stream in streams]


async def all_run(pair: Pair) -> None:
    async with asyncio.timeout(30):
        while (await pair.rollout.snapshot()).num_running < len(PROMPTS):
            await asyncio.sleep(0.005)


PROMPTS = [tuple(range(5 + i, 60 + 9 * i)) for i in range(4)]


async def check_identity(pair: Pair, num_tokens: int) -> None:
    """Serving alone and beside rollouts that are cut down in the middle, and the rollouts to their end."""
    pair.lend(None)
    alone, cached_alone = await pair.serve(), await pair.cached_fraction()
    whole = await asyncio.gather(*(collect(pair.elsewhere, pair.request(p, num_tokens)) for p in PROMPTS))
    pair.lend(Mode.UNGATED)
    tasks = [asyncio.create_task(pair.roll_out(p, num_tokens)) for p in PROMPTS]
    await all_run(pair)
    shared = asyncio.create_task(pair.serve())
    await pair.cut(256)
    pair.lend(Mode.UNGATED)
    assert tokens(await shared) == tokens(alone)
    cached = await pair.cached_fraction()
    assert (cached[0] - cached_alone[0], cached[1] - cached_alone[1]) == cached_alone
    assert cached_alone[0] > 0, "the prompts share a prefix"
    done = await asyncio.gather(*tasks)
    assert any(was_evicted for _, was_evicted in done)
    assert tokens([stream for stream, _ in done]) == tokens(whole)


PAIRINGS = [
    (Shape(4, 2, 1, 32, 32), Shape(1, 4, 2, 64, 64)),  # a token holds as many bytes in both
    (Shape(3, 3, 1, 64, 64), Shape(2, 2, 2, 32, 32)),
    (Shape(2, 4, 4, 32, 32), Shape(1, 2, 1, 128, 128)),
    (Shape(1, 1, 1, 128, 128), Shape(4, 2, 1, 64, 32)),
]


@pytest.mark.parametrize(("serving", "rollout"), PAIRINGS)
async def test_pairings_of_models_change_no_token(tmp_path: Path, serving: Shape, rollout: Shape) -> None:
    """Layer count, heads, head size and block size differ; one process, fp32."""
    async with open_pair(tmp_path, serving, rollout) as pair:
        await check_identity(pair, 120)


async def test_bf16_log_probs_hardly_move(tmp_path: Path) -> None:
    """In bf16 a moved rollout is computed in other batches and chunks: its log-probs stay within the noise of that."""
    async with open_pair(tmp_path, *PAIRINGS[0], dtype="bfloat16") as pair:
        pair.lend(None)
        whole = [await collect(pair.elsewhere, pair.request(p, 120)) for p in PROMPTS]
        alone = await pair.serve()
        pair.lend(Mode.UNGATED)
        tasks = [asyncio.create_task(pair.roll_out(p, 120)) for p in PROMPTS]
        await all_run(pair)
        serving = asyncio.create_task(pair.serve())
        await pair.cut(256)
        pair.lend(Mode.UNGATED)
        beside = await serving
        done = [stream for stream, _ in await asyncio.gather(*tasks)]
    difference = np.concatenate(
        [differences(one, other) for one, other in zip([*alone, *whole], [*beside, *done], strict=True)]
    )
    assert len(difference) > 200
    assert difference.mean() <= 5e-3
    assert np.quantile(difference, 0.99) <= 3e-2


def differences(one: Stream, other: Stream) -> Any:
    """Return how far the log-probs are apart, up to the first token that differs."""
    same = [a == b for a, b in zip(one.token_ids, other.token_ids, strict=True)]
    end = same.index(False) if False in same else len(same)
    return np.abs(np.array(one.logprobs[:end]) - np.array(other.logprobs[:end]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Two engine processes."""
    async with open_pair(tmp_path_factory.mktemp("pair"), *PAIRINGS[0], kind=VllmEngine) as pair:
        yield pair


async def test_two_processes_change_no_token(pair: Pair) -> None:
    await check_identity(pair, 120)


async def test_serving_starts_within_one_step_of_full_slots(pair: Pair) -> None:
    """Case C01: four slots full of rollouts of 1000 tokens when a serving request comes, and a newer rollout waits."""
    pair.lend(Mode.SLO)
    prompts = [tuple(range(10 + i, 50 + i)) for i in range(5)]
    whole = await asyncio.gather(*(collect(pair.elsewhere, pair.request(p, 1000)) for p in prompts))
    started: list[int] = []
    streams: dict[int, Reading] = {}

    async def roll_out(number: int) -> tuple[int, ...]:
        """Go on where it was until all tokens are there, as a pool does."""
        have: tuple[int, ...] = ()
        while len(have) < 1000:
            async with reading(pair.rollout, pair.request((*prompts[number], *have), 1000 - len(have))) as stream:
                streams[number] = stream
                await stream.has_tokens(1)
                started.append(number)
                await stream.finish()
                have += stream.token_ids
        return have

    tasks = []
    for number in range(4):
        tasks.append(asyncio.create_task(roll_out(number)))
        async with asyncio.timeout(20):
            while len(started) == number:
                await asyncio.sleep(0.002)
    await streams[3].has_tokens(130)  # three blocks
    num_blocks = sum(-(-(40 + len(stream.token_ids)) // 64) for stream in streams.values())
    num_prompt = (POOL_TOKENS - (num_blocks - 3) * 64) // 4 // 32 * 32 - 8  # one to three blocks too many
    sent_s, victim = asyncio.get_running_loop().time(), streams[3]
    serving = [
        asyncio.create_task(collect(pair.serving, pair.request([3 + (i + k) % 200 for k in range(num_prompt)], 8)))
        for i in range(4)
    ]
    await victim.finish()
    assert victim.finish_reason is FinishReason.EVICTED
    async with asyncio.timeout(20):
        while streams[3] is victim:
            await asyncio.sleep(0.002)
    tasks.append(asyncio.create_task(roll_out(4)))
    assert {(await task).finish_reason for task in serving} == {FinishReason.LENGTH}
    rows = await pair.serving.step_log(sent_s)
    first_s, asked_s = rows[0][0], rows[0][0] - rows[0][4]
    between = [row for row in await pair.rollout.step_log(sent_s) if asked_s < row[0] < first_s]
    assert len(between) <= 1, "rollouts went on before serving"
    assert [await task for task in tasks] == tokens(whole)
    back = started[4:-1]  # more than one where rollouts went on for long before serving's request came
    assert started[:4] == [0, 1, 2, 3]
    assert back == list(range(4 - len(back), 4)), "the youngest were evicted, and came back oldest first"
    assert started[-1] == 4, "they came back before the newer one"
