"""A pool that borrows an engine through an executor: a turn survives whatever happens to that engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from executor_parts import Parts, executor_parts

from rose.pool import PoolConfig, RolloutPool
from rose.testing import FakeEngine
from rose.testing.contracts.streams import until
from rose.types import EngineId, EngineKind, FinishReason, HopEnd, Sampling, Turn, WeightVersion

NUM_TOKENS = 60
TURN = Turn(
    trajectory_id="t", group_id="g", prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
)


async def whole_turn() -> tuple[int, ...]:
    """The tokens of an engine that is left alone; all fakes of these tests are replicas of one model."""
    own = FakeEngine(weight_version=WeightVersion("run", 3))
    async with RolloutPool([own]) as pool:
        return (await pool.generate(TURN)).token_ids


@pytest.mark.parametrize(
    ("end", "ended"),
    [("lease", HopEnd.EVICTED), ("drain", HopEnd.EVICTED), ("engine", HopEnd.LOST)],
)
async def test_a_turn_goes_on_elsewhere_with_its_tokens(tmp_path: Path, end: str, ended: HopEnd):
    expected = await whole_turn()
    async with executor_parts(tmp_path) as parts, RolloutPool(config=PoolConfig(reading_interval_s=0.05)) as pool:
        await pool.add_engine(parts.remote, EngineKind.BORROWED)
        turn = asyncio.create_task(pool.generate(TURN))
        await until(lambda: parts.service.num_tokens >= 5)
        own = FakeEngine(engine_id=EngineId("own"), weight_version=WeightVersion("run", 3))
        await pool.add_engine(own, EngineKind.DEDICATED)
        await end_by(end, parts)
        async with asyncio.timeout(5):
            result = await turn
    assert (result.token_ids, result.finish_reason) == (expected, FinishReason.LENGTH)
    assert [(hop.engine_id, hop.ended) for hop in result.hops] == [("remote", ended), ("own", HopEnd.FINISHED)]
    assert result.hops[0].num_tokens >= 5


async def end_by(end: str, parts: Parts) -> None:
    if end == "lease":
        parts.lend(8)
    elif end == "drain":
        await parts.service.drain(1.0)
    else:
        parts.fake.die()


async def test_an_engine_that_came_back_joins_anew(tmp_path: Path):
    """The pool loses it, and takes it again once it can be read."""
    async with executor_parts(tmp_path) as parts, RolloutPool(config=PoolConfig(reading_interval_s=0.02)) as pool:
        await pool.add_engine(parts.remote, EngineKind.BORROWED)
        parts.fake.die()
        await until(lambda: pool.state_of(parts.remote.engine_id) is not None and len(parts.fakes) == 2)
        await until(lambda: str(pool.state_of(parts.remote.engine_id).value) == "lost")
        await pool.add_engine(parts.remote, EngineKind.BORROWED)
        assert len((await pool.generate(TURN)).token_ids) == NUM_TOKENS
    assert len(parts.fake.requests) == 1
