"""The rig with real engines: one short run, the kill switch, and a rollout engine that is stopped while it holds the device."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from rose.bench.coserve import probes
from rose.bench.coserve.live import ROLLOUT, SERVING, LiveRig, RunPlan
from rose.bench.coserve.settings import LiveSettings
from rose.bench.coserve.world import DeviceSetup

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

SETTINGS = LiveSettings(k=1.0, setup=DeviceSetup(num_slots=4))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[LiveRig]:
    async with LiveRig.start(SETTINGS) as rig:
        yield rig


async def test_runs_of_all_kinds_answer_the_same_requests_and_only_lent_devices_make_rollout_tokens(rig):
    arrivals = probes.sparse_arrivals(4, seed=0)
    runs = {
        policy: await rig.run(RunPlan(policy=policy, label=f"test-{policy}", arrivals=arrivals, duration_s=5.0))
        for policy in ("alone", "slo")
    }
    assert (
        [record.index for record in runs["slo"].requests]
        == [record.index for record in runs["alone"].requests]
        == [0, 1, 2, 3]
    )
    assert runs["alone"].net_tokens == 0
    assert not runs["alone"].turns[ROLLOUT]
    assert runs["slo"].net_tokens >= runs["slo"].decoded_tokens > 50
    assert len(probes.prefill_waits_s(runs["slo"])) == 4
    assert 0.5 < probes.idle_used_fraction(runs["slo"]) < 1.2
    assert runs["slo"].pacing[SERVING].num_steps > 0


async def test_the_kill_switch_drains_the_device(rig):
    found = await probes.measure_drain(rig, probes.sparse_arrivals(20, seed=1), num_drains=1)
    assert found["drains"][0]["num_running"] > 0
    assert 0 < found["drain_s"] < 5.0


async def test_a_rollout_engine_that_is_stopped_in_its_turn_is_ended_and_replaced(rig):
    before = rig.rollout.pid
    found = await probes.measure_watchdog(rig)
    assert found["was_ended"]
    assert found["unanswered"] == 0
    assert 0 < found["delay_ms"] < 3000
    assert rig.rollout.pid != before
