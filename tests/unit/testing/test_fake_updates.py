"""Fake updates lead a pool and its engines from version to version."""

from __future__ import annotations

import rose
from rose.testing import FakeEngine, FakeUpdateSource
from rose.types import WeightVersion


async def test_nothing_to_plan_before_the_first_version_and_when_current():
    source = FakeUpdateSource(run="r")
    assert await source.plan(None) is None
    assert source.publish() == WeightVersion("r", 0)
    assert (await source.plan(None)).target == WeightVersion("r", 0)
    assert await source.plan(WeightVersion("r", 0)) is None
    assert source.publish() == WeightVersion("r", 1)
    assert (await source.plan(WeightVersion("r", 0))).target == WeightVersion("r", 1)


async def test_a_pool_syncs_from_it():
    engines = [FakeEngine(engine_id=name) for name in ("a", "b")]
    source = FakeUpdateSource()
    async with rose.RolloutPool(engines) as pool:
        for n in range(2):
            source.publish()
            report = await pool.sync_weights(source)
            assert {activation.version.n for activation in report.activations.values()} == {n}
    assert [engine.weight_version.n for engine in engines] == [1, 1]
