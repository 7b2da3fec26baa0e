"""Modelled engines under the live pool: scripted lengths, prefixes, progress, evictions, losses, weights."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import attrs
import pytest

from rose.errors import EngineLostError, RequestRefusedError
from rose.pool import PoolConfig, RolloutPool
from rose.simulation.batch import Batch
from rose.simulation.device import Device, Lane
from rose.simulation.engine import HEADER_IDS, TOKEN, EngineConfig, ModelledEngine, PromptHeader
from rose.simulation.loop import LoopClock, VirtualLoop
from rose.simulation.sharing import AloneRule
from rose.testing import fake_update
from rose.types import (
    EngineId,
    EngineRequest,
    FinishReason,
    RequestId,
    Sampling,
    TokenChunk,
    Turn,
    WeightUpdate,
    WeightVersion,
)

SCALE = 10


@attrs.frozen
class Times:
    """10 ms a step and 1 ms a prompt token."""

    host_gap_s: float = 0.0
    kv_bytes_per_token: int = 1

    def step_s(self, num_prefill: int, num_decodes: int, context_tokens: int, positions: float) -> float:
        return 0.010 + 0.001 * num_prefill

    def growth_s(self, num_decodes: int) -> float:
        return 0.0


def make_engine(name: str = "e", *, kv_tokens: int = 100_000, **config: object) -> ModelledEngine:
    lane = Lane(name=name, batch=Batch(max_seqs=16, kv_tokens=kv_tokens), times=Times(), chunk_tokens=1000)
    device = Device(asyncio.get_running_loop(), AloneRule(lane))
    return ModelledEngine(
        EngineId(name),
        lane,
        device,
        EngineConfig(resolution_tokens=SCALE, **config),  # type: ignore[arg-type]
    )


def prompt(length: int, stop_at: int, trajectory: int = 1) -> tuple[int, ...]:
    return PromptHeader(trajectory, 1, HEADER_IDS, stop_at).ids() + (TOKEN,) * (length - HEADER_IDS)


def request(name: str, length: int, stop_at: int, *, most: int = 1000, trajectory: int = 1) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        prompt_ids=prompt(length, stop_at, trajectory),
        sampling=Sampling(max_tokens=most, logprobs=False),
    )


async def collect(engine: ModelledEngine, asked: EngineRequest) -> list[tuple[float, TokenChunk]]:
    loop = asyncio.get_running_loop()
    return [(loop.time(), chunk) async for chunk in engine.generate(asked)]


def run(main: Callable[[], Awaitable[object]]) -> object:
    return VirtualLoop().run(main())  # type: ignore[arg-type]


def test_the_header_says_where_the_model_stops() -> None:
    async def main() -> None:
        chunks = await collect(make_engine(), request("a", 10, 15))
        assert sum(len(chunk.token_ids) for _, chunk in chunks) == 5
        assert chunks[-1][1].finish_reason is FinishReason.STOP
        assert chunks[-1][0] == pytest.approx(0.010 + 0.1 + 49 * 0.010)
        cut = await collect(make_engine(), request("b", 10, 15, most=3))
        assert sum(len(chunk.token_ids) for _, chunk in cut) == 3
        assert cut[-1][1].finish_reason is FinishReason.LENGTH

    run(main)


def test_a_long_answer_shows_progress_and_a_held_one_does_not() -> None:
    async def main() -> None:
        engine = make_engine(flush_s=1.0)
        chunks = await collect(engine, request("a", 10, 110))
        gaps = [b[0] - a[0] for a, b in itertools.pairwise(chunks)]
        assert max(gaps) <= 1.0 + 1e-9
        assert len(chunks) == 12

    run(main)


def test_the_first_token_is_shown_when_it_is_made() -> None:
    """A pool takes a late one for a prompt that is still being computed."""

    async def main() -> None:
        (first_s, first), *_ = await collect(make_engine(flush_s=50.0), request("a", 10, 110))
        assert first_s == pytest.approx(0.010 + 0.1)
        assert len(first.token_ids) == 1

    run(main)


def test_a_later_turn_finds_its_prefix_and_another_trajectory_does_not() -> None:
    async def main() -> None:
        engine = make_engine()
        await collect(engine, request("a", 10, 12))
        before = engine.lane.batch.num_prefilled_tokens
        await collect(engine, request("b", 20, 22))
        assert engine.lane.batch.num_prefilled_tokens - before == 200 - 119
        before = engine.lane.batch.num_prefilled_tokens
        await collect(engine, request("c", 20, 22, trajectory=2))
        assert engine.lane.batch.num_prefilled_tokens - before == 200 - HEADER_IDS * SCALE  # the group's prompt

    run(main)


def test_an_abort_keeps_what_was_made_and_frees_the_engine() -> None:
    async def main() -> None:
        engine = make_engine()
        task = asyncio.ensure_future(collect(engine, request("a", 10, 1000)))
        await asyncio.sleep(1.11)
        await engine.abort(RequestId("a"))
        chunks = await task
        assert chunks[-1][1].finish_reason is FinishReason.ABORTED
        assert sum(len(chunk.token_ids) for _, chunk in chunks) == 11
        snapshot = await engine.snapshot()
        assert (snapshot.num_running, snapshot.num_waiting, snapshot.kv_used_tokens) == (0, 0, 0)

    run(main)


def test_what_can_never_fit_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(RequestRefusedError, match="may need 1010 KV tokens"):
            await collect(make_engine(kv_tokens=1000), request("a", 100, 101))

    run(main)


def test_a_lost_engine_takes_its_streams_along() -> None:
    async def main() -> None:
        engine = make_engine()
        task = asyncio.ensure_future(collect(engine, request("a", 10, 1000)))
        await asyncio.sleep(0.5)
        engine.die("the power went")
        with pytest.raises(EngineLostError, match="the power went"):
            await task

    run(main)


def test_the_live_pool_moves_a_turn_from_a_lost_engine_with_the_tokens_it_has() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        engines = [make_engine("a", flush_s=0.5), make_engine("b", flush_s=0.5)]
        async with RolloutPool(engines, config=PoolConfig(), clock=LoopClock(loop)) as pool:
            turn = Turn(
                trajectory_id="t",
                group_id="g",
                prompt_ids=prompt(10, 60),
                sampling=Sampling(max_tokens=500, logprobs=False),
            )
            task = asyncio.ensure_future(pool.generate(turn))
            await asyncio.sleep(2.0)
            engines[0].die("it was taken away")
            result = await task
        assert len(result.token_ids) == 50
        assert [hop.engine_id for hop in result.hops] == ["a", "b"]
        assert result.hops[0].num_tokens > 10
        assert result.finish_reason is FinishReason.STOP

    run(main)


def test_a_sleeping_model_answers_when_it_is_awake() -> None:
    async def main() -> None:
        engine = make_engine()
        engine.asleep_s = 3.0
        await engine.snapshot()
        assert asyncio.get_running_loop().time() == 3.0
        await engine.snapshot()
        assert asyncio.get_running_loop().time() == 3.0

    run(main)


class SlowRelay:
    """Updates arrive at once and take a second to write."""

    async def fetch(self, update: WeightUpdate, *, is_local: bool) -> int:
        return 0

    def activation_s(self, update: WeightUpdate) -> float:
        return 1.0


def test_tokens_carry_the_version_that_made_them() -> None:
    async def main() -> None:
        engine = make_engine(flush_s=5.0)
        engine._version, update = WeightVersion("run", 1), fake_update(WeightVersion("run", 2))
        task = asyncio.ensure_future(collect(engine, request("a", 10, 40)))
        await asyncio.sleep(0.110 + 1.495)
        await engine.stage(update)
        await engine.activate()
        chunks = [chunk for _, chunk in await task]
        assert [(chunk.version.n, len(chunk.token_ids)) for chunk in chunks if chunk.version] == [
            (1, 1),
            (1, 15),
            (2, 14),
        ]
        assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason.STOP]

    run(main)


def test_an_activation_that_is_given_up_leaves_the_engine_at_its_version_and_at_work() -> None:
    async def main() -> None:
        engine = make_engine()
        engine._version, engine._relay = WeightVersion("run", 1), SlowRelay()
        await engine.stage(fake_update(WeightVersion("run", 2)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await engine.activate()
        snapshot = await engine.snapshot()
        assert (snapshot.is_paused, snapshot.weight_version) == (False, WeightVersion("run", 1))
        assert (await collect(engine, request("a", 10, 12)))[-1][1].finish_reason is FinishReason.STOP

    run(main)


def test_what_a_lost_engine_had_made_is_counted() -> None:
    async def main() -> None:
        engine = make_engine(flush_s=50.0)
        task = asyncio.ensure_future(collect(engine, request("a", 10, 1000)))
        await asyncio.sleep(0.115 + 0.40)
        engine.die("the power went")
        with pytest.raises(EngineLostError):
            await task
        assert engine.num_tokens == 50  # 41 steps, counted in ids of ten
        assert engine.lane.busy_s == pytest.approx(0.110 + 40 * 0.010 + 0.005, abs=0.0051)

    run(main)
