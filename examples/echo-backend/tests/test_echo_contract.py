"""The whole test of a third-party backend: get it by name, and let the contract suite do the rest."""

from __future__ import annotations

import rose
from rose.interfaces import ServingEngine
from rose.testing import EngineContract, fake_update
from rose.types import WeightUpdate, WeightVersion


class TestEchoEngine(EngineContract):
    vocab_size = 256
    max_model_len = 512
    is_continuable = False  # an echo of a longer prompt begins anew

    async def make_engine(self) -> ServingEngine:
        return rose.serving_engine("echo", vocab_size=self.vocab_size, max_model_len=self.max_model_len)

    async def make_update(self, engine: ServingEngine) -> WeightUpdate:
        version = (await engine.snapshot()).weight_version
        return fake_update(WeightVersion("run", 0 if version is None else version.n + 1))


async def test_it_echoes() -> None:
    suite = TestEchoEngine()
    async with suite.engine() as engine:
        chunks = [chunk async for chunk in engine.generate(suite.request(max_tokens=7))]
    assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3, 4, 5, 1, 2]
