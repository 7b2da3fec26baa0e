"""The direct path to a borrowed engine behind an executor: the client acts under the pool's lease. Weights reach the engines of a remote pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from executor_parts import executor_parts

from pool_parts import fakes, pool_of, until
from rose import RolloutPool
from rose.errors import TransportError
from rose.pool import PoolConfig
from rose.testing import FakeEngine, FakeTrainer, InMemoryTransport
from rose.transfer.publisher import Publisher
from rose.types import AtLeast, EngineId, EngineKind, FinishReason, HopEnd, Sampling, Turn, WeightVersion

NUM_TOKENS = 60
V3 = WeightVersion("run", 3)
TURN = Turn(
    trajectory_id="t", group_id="g", prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
)


@pytest.mark.parametrize(("end", "ended"), [("lease", HopEnd.EVICTED), ("engine", HopEnd.LOST)])
async def test_a_turn_on_a_borrowed_engine_survives_its_end(tmp_path: Path, end: str, ended: HopEnd) -> None:
    config = PoolConfig(reading_interval_s=0.05)
    async with executor_parts(tmp_path) as parts, pool_of([], config=config) as (pool, url):
        await pool.add_engine(parts.remote, EngineKind.BORROWED)
        async with RolloutPool.connect(url) as remote:
            task = asyncio.create_task(remote.generate(TURN))
            await until(lambda: parts.service.num_tokens >= 5)
            own = FakeEngine(engine_id=EngineId("own"), weight_version=V3)
            await pool.add_engine(own, EngineKind.DEDICATED)
            if end == "lease":
                parts.lend(8)
            else:
                parts.fake.die()
            async with asyncio.timeout(10):
                result = await task
        expected = await pool.generate(TURN)
    assert (result.token_ids, result.finish_reason) == (expected.token_ids, FinishReason.LENGTH)
    assert [(hop.engine_id, hop.ended) for hop in result.hops] == [("remote", ended), ("own", HopEnd.FINISHED)]
    # Where the pool sees the engine go before the client has told its tokens, these are computed again.
    assert result.hops[0].num_tokens >= 5 or end == "engine"
    assert parts.service.num_fenced == 0


async def test_the_lease_of_the_moment_is_the_client_s(tmp_path: Path) -> None:
    async with executor_parts(tmp_path) as parts, pool_of([]) as (pool, url), RolloutPool.connect(url) as remote:
        await pool.add_engine(parts.remote, EngineKind.BORROWED)
        assert len((await remote.generate(TURN)).token_ids) == NUM_TOKENS
        parts.lend(9)
        parts.remote.set_lease(9)
        assert len((await remote.generate(TURN)).token_ids) == NUM_TOKENS
        assert parts.service.num_fenced <= 1  # the second turn's head start, which has the lease of before
        assert len(parts.fake.requests) == 2


async def test_weights_are_synced_through_the_pool() -> None:
    transport = InMemoryTransport()
    publisher = Publisher(FakeTrainer(), transport, run="r")
    await publisher.publish()
    engines = fakes(2)
    async with pool_of(engines) as (pool, url), RolloutPool.connect(url) as remote:
        report = await remote.sync_weights(transport)
        assert set(report.activations) == {"e0", "e1"}
        assert not report.errors
        assert pool.version == WeightVersion("r", 0)
        result = await remote.generate(attrs.evolve(TURN, versions=AtLeast(0)))
        assert result.versions[0].version == WeightVersion("r", 0)
        assert (await remote.sync_weights(transport)).unchanged == ("e0", "e1")
        late = FakeEngine(engine_id=EngineId("late"))
        await pool.add_engine(late)  # catches up from the same store
        await until(lambda: late.weight_version == WeightVersion("r", 0))


async def test_a_transport_that_only_this_process_has_is_refused() -> None:
    async with pool_of(fakes(1)) as (_, url), RolloutPool.connect(url) as remote:
        transport = InMemoryTransport()
        name = dict(transport.address().options)["local"]
        del transport
        with pytest.raises(TransportError, match="its owner must serve it"):
            await remote._client.call("POST", "/v1/sync", {"address": {"name": "memory", "local": name}})
