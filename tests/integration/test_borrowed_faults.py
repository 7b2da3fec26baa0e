"""Faults of borrowed engines in the middle of a step, on real engines: the step ends, nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import attrs
import pytest

from rose.pool import EngineState, PoolConfig, RolloutPool, RoutingConfig
from rose.reference.demo_config import DemoConfig
from rose.reference.demo_models import make_serving_model, policy_models
from rose.reference.env_workers import EnvironmentPool
from rose.reference.fleet import SERVING_VOCAB, Fleet
from rose.reference.lake import FrozenLake, training_seed
from rose.reference.load import plan_load
from rose.reference.rollout import RolloutContext, rollout_step
from rose.reference.serving_site import ServingSite
from rose.reference.trajectory import Trajectory, TrajectoryPlan, account, plan_groups
from rose.testing.models import make_qwen3
from rose.types import EngineKind, HopEnd

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

CONFIG = DemoConfig(num_dedicated=1, num_borrowed=2, k=2.0, num_groups=6, group_size=8, cap_per_engine=16)


@attrs.define
class Site:
    fleet: Fleet
    episodes: EnvironmentPool
    serving: ServingSite

    @contextlib.asynccontextmanager
    async def open_pool(self):
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=CONFIG.cap_per_engine))
        async with (
            RolloutPool(self.fleet.dedicated, config=config, clock=self.fleet.clock) as pool,
            self.fleet.lend_to(pool),
        ):
            yield pool

    async def roll_out(self, pool: RolloutPool, label: str) -> tuple[list[TrajectoryPlan], list[Trajectory]]:
        seeds = [training_seed(i) for i in range(CONFIG.num_groups)]
        plans = plan_groups(label, seeds, group_size=CONFIG.group_size, run_seed=0)
        context = RolloutContext.of(FrozenLake, generate=pool.generate, episodes=self.episodes, clock=self.fleet.clock)
        await self.serving.begin(label)
        self.fleet.clock.unfreeze()
        try:
            async with asyncio.timeout(120):
                return plans, await rollout_step(context, plans)
        finally:
            self.fleet.clock.freeze()


@contextlib.asynccontextmanager
async def running_site(tmp_path: Path):
    policy = make_qwen3(tmp_path / "policy", layers=2, hidden=128, heads=4, kv_heads=2, vocab=32, is_tied=False)
    models = policy_models(policy, make_serving_model(tmp_path / "serving", seed=0), FrozenLake)
    load = plan_load(
        None, rate_rps=4.0, offset_s=0, num_devices=2, seed=0, max_prompt_tokens=8000, max_output_tokens=500
    )
    async with contextlib.AsyncExitStack() as stack:
        fleet = Fleet.prepare(CONFIG)
        stack.push_async_callback(fleet.close)
        serving = await ServingSite.start(
            fleet.serving_specs(CONFIG, models), load, clock_path=Path(fleet.clock.path), vocab_size=SERVING_VOCAB
        )
        stack.push_async_callback(serving.close)
        episodes = await stack.enter_async_context(EnvironmentPool(CONFIG.env, num_processes=1))
        await fleet.start(CONFIG, models)
        yield Site(fleet, episodes, serving)


async def until_borrowed_work(pool: RolloutPool) -> None:
    """Wait until every borrowed engine that is ready has turns in flight and has finished some."""
    while True:
        views = [
            view
            for view in pool.snapshot().engines
            if view.kind is EngineKind.BORROWED and view.state is EngineState.READY
        ]
        accounts = pool.accounts()
        if views and all(view.num_in_flight > 4 and accounts[view.engine_id].num_tokens > 4 for view in views):
            return
        await asyncio.sleep(0.002)


def check_whole(plans: list[TrajectoryPlan], trajectories: list[Trajectory]) -> None:
    accounted = account(plans, trajectories)
    assert accounted.is_whole, accounted
    assert accounted.num_failed == 0
    assert accounted.num_finished == len(plans) == CONFIG.num_groups * CONFIG.group_size
    for trajectory in trajectories:
        for turn in trajectory.turns:
            assert turn.num_tokens <= FrozenLake.max_tokens_per_turn
            assert sum(hop.num_tokens for hop in turn.hops) == turn.num_tokens


async def test_borrowed_engines_that_die_or_are_revoked_in_mid_step_lose_nothing(tmp_path: Path):
    async with running_site(tmp_path) as site:
        async with site.open_pool() as pool:
            step = asyncio.create_task(site.roll_out(pool, "kill"))
            await asyncio.wait_for(until_borrowed_work(pool), 60)
            os.kill(site.fleet.borrowed[0].pid, signal.SIGKILL)
            plans, trajectories = await step
            check_whole(plans, trajectories)
            ends = [hop.ended for trajectory in trajectories for hop in trajectory.hops]
            assert ends.count(HopEnd.LOST) >= 4

        async with site.open_pool() as pool:
            step = asyncio.create_task(site.roll_out(pool, "revoke"))
            await asyncio.wait_for(until_borrowed_work(pool), 60)
            site.fleet.lender.revoke()
            plans, trajectories = await step
            check_whole(plans, trajectories)
            moved = [hop for trajectory in trajectories for hop in trajectory.hops if hop.ended is not HopEnd.FINISHED]
            assert moved, "the revocation must have caught turns in flight"
            assert {hop.engine_id for hop in moved} == {site.fleet.borrowed[1].engine_id}
