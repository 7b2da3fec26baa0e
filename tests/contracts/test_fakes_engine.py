"""The fake engine and the clocks keep their contracts."""

from __future__ import annotations

from rose.clocks import MonotonicClock
from rose.interfaces import Clock, ServingEngine
from rose.testing import ClockContract, EngineContract, FakeEngine, ManualClock, fake_update
from rose.types import WeightUpdate, WeightVersion


class TestFakeEngine(EngineContract):
    quiet_s = 0.02

    async def make_engine(self) -> ServingEngine:
        return FakeEngine(token_s=0.001, weight_version=WeightVersion("run", 3))

    async def make_update(self, engine: ServingEngine) -> WeightUpdate:
        return fake_update(WeightVersion("run", (await engine.snapshot()).weight_version.n + 1))


class TestFakeEngineWithoutLatency(EngineContract):
    quiet_s = 0.02
    long_tokens = 2000

    async def make_engine(self) -> ServingEngine:
        return FakeEngine()


class TestMonotonicClock(ClockContract):
    def make_clock(self) -> Clock:
        return MonotonicClock()


class TestManualClock(ClockContract):
    def make_clock(self) -> Clock:
        return ManualClock()

    async def let_pass(self, clock: Clock, duration_s: float) -> None:
        await clock.advance(duration_s)
