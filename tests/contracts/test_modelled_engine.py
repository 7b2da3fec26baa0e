"""A modelled engine keeps the engine contract, here in real time on a very fast device."""

from __future__ import annotations

import asyncio

import attrs
import pytest

from rose.interfaces import ServingEngine
from rose.simulation.batch import Batch
from rose.simulation.device import Device, Lane
from rose.simulation.engine import EngineConfig, ModelledEngine
from rose.simulation.sharing import AloneRule
from rose.testing import EngineContract, fake_update
from rose.types import EngineId, WeightUpdate, WeightVersion


@attrs.frozen
class FastTimes:
    host_gap_s: float = 0.0
    kv_bytes_per_token: int = 1

    def step_s(self, num_prefill: int, num_decodes: int, context_tokens: int, positions: float) -> float:
        return 0.001

    def growth_s(self, num_decodes: int) -> float:
        return 0.0


class TestModelledEngine(EngineContract):
    quiet_s = 0.02
    max_model_len = 4096

    async def make_engine(self) -> ServingEngine:
        lane = Lane(name="e", batch=Batch(max_seqs=64, kv_tokens=1_000_000), times=FastTimes(), chunk_tokens=8192)
        config = EngineConfig(resolution_tokens=1, flush_s=0.002, vocab_size=self.vocab_size, max_context_tokens=4096)
        device = Device(asyncio.get_running_loop(), AloneRule(lane))
        return ModelledEngine(EngineId("e"), lane, device, config, version=WeightVersion("run", 3))

    async def make_update(self, engine: ServingEngine) -> WeightUpdate:
        version = (await engine.snapshot()).weight_version
        assert version is not None
        return fake_update(WeightVersion("run", version.n + 1))


@pytest.mark.parametrize("reason", ["boom"])
async def test_a_dead_engine_says_so(reason: str) -> None:
    engine = await TestModelledEngine().make_engine()
    assert isinstance(engine, ModelledEngine)
    engine.die(reason)
    with pytest.raises(ConnectionError, match=reason):
        await engine.snapshot()
