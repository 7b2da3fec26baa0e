"""Rented and whole engines come and go as their way of supply says."""

from __future__ import annotations

import asyncio

import attrs
import pytest

from rose.pool import EngineState, PoolConfig, RolloutPool
from rose.simulation.loop import VirtualLoop
from rose.simulation.micro_profile import serving_p99_s
from rose.simulation.presets import PRESETS
from rose.simulation.shared_supply import (
    CoservingSupply,
    PartitionSupply,
    SwitchSupply,
    WholeSupply,
    profiled_share,
    wake_s,
)
from rose.simulation.supply import RentedSupply, Supply
from rose.simulation.world import World
from rose.types import EngineKind


def scenario(load_fraction: float = 0.19, borrowed_gpus: int = 3):
    base = PRESETS["frozenlake-8b-grpo"]
    return attrs.evolve(
        base,
        cluster=attrs.evolve(base.cluster, rollout_gpus=1, training_gpus=1, borrowed_gpus=borrowed_gpus),
        serving=attrs.evolve(base.serving, load_fraction=load_fraction),
    )


def watch(supply: Supply, duration_s: float, **options: float) -> tuple[World, list[int]]:
    """Lend for a while; returns how many borrowed engines there were, second by second."""
    loop = VirtualLoop()
    counts: list[int] = []

    async def main() -> World:
        world = World(scenario(**options), 0, loop)  # type: ignore[arg-type]
        supply.build(world)
        world.dedicated = [world.whole_engine("own")]
        world.start_serving()
        async with (
            RolloutPool(world.dedicated, config=PoolConfig(), clock=world.clock) as pool,
            supply.lend(world, pool),
        ):
            for _ in range(int(duration_s)):
                await asyncio.sleep(1)
                counts.append(sum(view.kind is EngineKind.BORROWED for view in pool.snapshot().engines))
        return world

    return loop.run(main()), counts


def test_functions_boot_live_and_are_replaced() -> None:
    world, counts = watch(RentedSupply(name="function", boot_s=10.0, limit_s=60.0), 150)
    assert counts[5] == 0
    assert counts[20] == 3
    assert counts[65] == 0  # their lives are over, the next ones boot
    assert counts[80] == 3
    assert len(world.held) == 9
    assert all(held.until_s is not None for held in world.held)


def test_spot_instances_are_had_for_about_their_share_of_the_time() -> None:
    supply = RentedSupply(name="spot", boot_s=1.0, mean_up_s=100.0, mean_down_s=100.0)
    _, counts = watch(supply, 3000)
    assert sum(counts) / len(counts) / 3 == pytest.approx(supply.availability, abs=0.12)
    assert min(counts) < max(counts)


def test_leased_engines_are_there_after_their_models_woke_up_all_together() -> None:
    world, counts = watch(CoservingSupply(), 5)
    assert 0.9 < wake_s(world) < 2.0
    assert counts[0] == 3  # they woke before the first second was counted from
    assert all(held.overhead_s == wake_s(world) for held in world.held)


def test_idle_serving_engines_are_lent_whole_and_busy_ones_are_not() -> None:
    assert watch(WholeSupply(), 100)[1][-1] == 2
    assert watch(WholeSupply(), 100, load_fraction=0.8)[1][-1] == 0


def test_a_micro_profile_gives_serving_what_its_slo_needs() -> None:
    loop = VirtualLoop()
    fast = serving_p99_s(scenario(), 0, speed=1.0, duration_s=30.0)
    slow = serving_p99_s(scenario(), 0, speed=0.3, duration_s=30.0)
    assert fast[0] < slow[0]
    assert fast[1] < slow[1]

    async def main() -> tuple[float, float]:
        tight = attrs.evolve(scenario(), serving=attrs.evolve(scenario().serving, tpot_slo_s=0.02, ttft_slo_s=0.3))
        return profiled_share(World(scenario(), 0, loop)), profiled_share(World(tight, 0, loop))

    roomy, tight = loop.run(main())
    assert tight < roomy


def test_a_partition_has_its_engines_for_the_whole_phase() -> None:
    _, counts = watch(PartitionSupply(), 10)
    assert counts[0] in (0, 3)
    assert counts[-1] == 3


class GaveUpError(Exception):
    """Ends a phase."""


def break_off(supply: Supply, at_s: float) -> World:
    """End a phase by an error, begin another one, end that; nothing of either may stay behind."""
    loop = VirtualLoop()

    async def main() -> World:
        world = World(scenario(), 0, loop)
        supply.build(world)
        world.dedicated = [world.whole_engine("own")]
        world.start_serving()
        async with RolloutPool(world.dedicated, config=PoolConfig(), clock=world.clock) as pool:
            for _ in range(2):
                try:
                    async with supply.lend(world, pool):
                        await asyncio.sleep(at_s)
                        raise GaveUpError  # noqa: TRY301 - as a job that fails
                except* GaveUpError:
                    pass
                left = [view for view in pool.snapshot().engines if view.kind is EngineKind.BORROWED]
                assert all(view.state is EngineState.LOST for view in left)
                assert all(held.until_s is not None for held in world.held)
                world.close_window(0.0)
            await asyncio.sleep(60)
            assert all(feed.redirect is None for feed in world.feeds)
        return world

    return loop.run(main())


SUPPLIES = {
    "spot": lambda: RentedSupply(name="spot", boot_s=5.0, mean_up_s=30.0, mean_down_s=5.0, warning_s=3.0),
    "function": lambda: RentedSupply(name="function", boot_s=5.0, limit_s=20.0),
    "leases": CoservingSupply,
    "static": PartitionSupply,
    "switch": SwitchSupply,
    "whole": WholeSupply,
}


@pytest.mark.parametrize("name", SUPPLIES)
@pytest.mark.parametrize("at_s", [0.0, 0.1, 1.5, 5.0, 20.0, 22.0, 70.0])
def test_no_engine_stays_when_a_phase_is_broken_off(name: str, at_s: float) -> None:
    break_off(SUPPLIES[name](), at_s)


def test_serving_that_takes_its_gpus_back_waits_for_its_model() -> None:
    loop = VirtualLoop()
    supply = WholeSupply(boot_s=20.0)

    async def main() -> None:
        world = World(scenario(), 0, loop)
        supply.build(world)
        world.dedicated = [world.whole_engine("own")]
        world.start_serving()
        async with RolloutPool(world.dedicated, config=PoolConfig(), clock=world.clock) as pool:
            async with supply.lend(world, pool):
                await asyncio.sleep(50)
                assert [feed.redirect for feed in world.feeds] == [None, world.feeds[0], world.feeds[0]]
            for wait_s, is_back in ((0.0, False), (19.0, False), (2.0, True)):
                await asyncio.sleep(wait_s)
                assert [feed.redirect is None for feed in world.feeds] == [True, is_back, is_back]

    loop.run(main())
