"""An engine behind the host of another actor keeps the serving-engine contract; no Ray is needed to see that."""

from __future__ import annotations

from typing import Any

import attrs

from rose.hosts.ray.engine import RayEngine
from rose.hosts.ray.engine_host import EngineHost
from rose.hosts.ray.peers import LocalPeer
from rose.hosts.ray.specs import EngineSpec
from rose.interfaces import ServingEngine
from rose.testing import EngineContract, FakeEngine, fake_update
from rose.types import EngineId, WeightUpdate, WeightVersion


class OwnSpec(EngineSpec):
    """A spec that makes a fake engine without an entry point."""

    def make(self) -> ServingEngine:
        return FakeEngine(engine_id=EngineId(self.engine_id), **self.options)


class TestRayFake(EngineContract):
    quiet_s = 0.02

    async def make_engine(self) -> ServingEngine:
        options: dict[str, Any] = {"token_s": 0.001, "weight_version": WeightVersion("run", 3)}
        self.host = EngineHost(OwnSpec(engine_id="e", backend="fake", options=options))
        engine = RayEngine(EngineId("e"), LocalPeer(self.host))
        await engine.open()
        return engine

    async def release_engine(self, engine: ServingEngine) -> None:
        await engine.close()
        await self.host.close()

    async def make_update(self, engine: ServingEngine) -> WeightUpdate:
        version = (await engine.snapshot()).weight_version
        assert version is not None
        return fake_update(attrs.evolve(version, n=version.n + 1))
