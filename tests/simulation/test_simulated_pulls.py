"""Borrowing economics in the simulator: the live policy decides what crosses a modelled link."""

from __future__ import annotations

import asyncio

import attrs
import pytest

from rose.pool import SupportsPullCost, WeightPull
from rose.simulation.links import RelayedSync, SharedLink
from rose.simulation.loop import VirtualLoop
from rose.simulation.presets import PRESETS
from rose.simulation.run import simulate
from rose.simulation.scenario import Scenario
from rose.simulation.sync import sync_cost
from rose.simulation.sync_times import put_size
from rose.types import WeightVersion

COST = sync_cost("qwen3-8b", num_training_ranks=2, gpus_per_engine=1, changed_fraction=0.02)


def scenario(gbps: float, mode: WeightPull) -> Scenario:
    base = PRESETS["frozenlake-8b-grpo"]
    return attrs.evolve(
        base,
        cluster=attrs.evolve(base.cluster, rollout_gpus=1, training_gpus=2, borrowed_gpus=2),
        rollout=attrs.evolve(base.rollout, num_trajectories=32, group_size=8, median_tokens=200.0, sigma=0.5),
        loop=attrs.evolve(base.loop, num_steps=4, train_s=5.0),
        link=attrs.evolve(base.link, gbps=gbps, weight_pull=mode),
    )


def test_on_a_link_that_is_no_bottleneck_both_rules_do_the_same() -> None:
    always, economic = (simulate(scenario(100.0, mode), "default", 0) for mode in WeightPull)
    assert attrs.evolve(economic, num_events=always.num_events) == always
    assert always.link_bytes == 4 * put_size(COST)[0]


def test_on_a_thin_link_versions_stop_crossing_once_loans_are_seen_to_be_short() -> None:
    always, economic = (simulate(scenario(0.02, mode), "default", 0) for mode in WeightPull)
    assert economic.link_bytes < always.link_bytes == 4 * put_size(COST)[0]
    assert economic.step_s < always.step_s
    assert economic.num_trajectories == always.num_trajectories
    assert economic.steps[-1].sync_s < always.steps[-1].sync_s - 40


def test_the_relay_knows_what_has_crossed_and_what_the_link_has_left() -> None:
    relay = RelayedSync(run="r", cost=COST, link=SharedLink(gbps=8.0), local_gbps=100.0)
    num_bytes = put_size(COST)[0]

    async def work() -> None:
        await relay.publish(is_remote=False)
        update = await relay.plan(WeightVersion("r", 0))
        assert update is not None
        assert isinstance(relay, SupportsPullCost)
        key = update.manifest_keys[0]
        before = await relay.cost(update)
        assert (before.pieces, before.link_bytes_per_s) == ({key: num_bytes}, 1e9)
        assert key not in before.present
        fetching = asyncio.ensure_future(relay.fetch(update, is_local=False))
        await asyncio.sleep(0.01)
        assert (await relay.cost(update)).link_bytes_per_s == 5e8
        await fetching
        assert key in (await relay.cost(update)).present
        assert relay.next_cost().pieces == {"next": num_bytes}
        assert before.stage_s == pytest.approx(relay.next_cost().stage_s)

    VirtualLoop().run(work())
