"""Every test of the engine contract fails on an engine that is broken in the way the test is about."""

from __future__ import annotations

import pytest
from broken_engines import BITES

from rose.testing import EngineContract, FakeEngine, fake_update
from rose.types import WeightVersion


class Suite(EngineContract):
    quiet_s = 0.01
    timeout_s = 10.0
    engine_class = FakeEngine

    async def make_engine(self):
        return self.engine_class(token_s=0.001, weight_version=WeightVersion("run", 3))

    async def make_update(self, engine):
        return fake_update(WeightVersion("run", engine.weight_version.n + 1))


@pytest.mark.parametrize(("broken", "test"), BITES, ids=lambda value: getattr(value, "__name__", value))
async def test_it_bites(broken, test, monkeypatch):
    monkeypatch.setattr(Suite, "engine_class", broken)
    monkeypatch.setattr(Suite, "timeout_s", 0.5)
    with pytest.raises((AssertionError, TimeoutError, RuntimeError, KeyError)):
        await getattr(Suite(), f"test_{test}")()


@pytest.mark.parametrize("test", sorted({test for _, test in BITES}))
async def test_it_passes_a_sound_engine(test):
    await getattr(Suite(), f"test_{test}")()


def test_no_test_of_the_contract_is_left_out():
    assert {f"test_{test}" for _, test in BITES} == {name for name in dir(EngineContract) if name.startswith("test_")}
