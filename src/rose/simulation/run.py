"""One simulation: a scenario, a strategy, a seed in; an ``Outcome`` out. The same bytes for the same arguments."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
from collections.abc import Callable, Iterator

import attrs

from rose.backends.paced.profiles import Profile, kv_pool_bytes, profile_named
from rose.policies.routing import RoutingRule
from rose.pool import ConcurrencyConfig, PoolConfig, RolloutPool, RoutingConfig
from rose.simulation.loop import VirtualLoop, new_loop
from rose.simulation.outcome import Outcome, ServingOutcome
from rose.simulation.rl_loops import Job, run_async, run_dapo, run_grpo
from rose.simulation.rollouts import TrajectoryRunner, TrajectorySlots, floor_s
from rose.simulation.scenario import Algorithm, Scenario
from rose.simulation.strategies import FIXED, Strategy, strategy_named
from rose.simulation.trajectories import TrajectoryPlan, TrajectorySource
from rose.simulation.world import WARM_UP_S, World, alone, poker
from rose.types import HopEnd

ALONE_S = 600.0
_UNCAPPED = 1_000_000
_STALL_S, _PATIENT_S = 2.0, 1e5  # a baseline that sends everything at once waits for what its engines preempt
_SLOW_TOKEN_S = 0.1  # of a decode beside full prefill chunks; a pool that sees one id for many tokens must not take that for a stall
_READING_S = 2.0
_LOOPS = {Algorithm.GRPO: run_grpo, Algorithm.DAPO: run_dapo, Algorithm.ASYNC: run_async}


def simulate(scenario: Scenario, strategy: str, seed: int) -> Outcome:
    """Run the job of ``scenario`` under a named strategy.

    Raises:
        ConfigError: The strategy is not known, or the scenario cannot be built.
        SimulationError: The system got stuck.
    """
    chosen = strategy_named(strategy)
    loop = new_loop()
    with _few_collections():
        return loop.run(_run(scenario, chosen, seed, loop, train_s(scenario, seed)))


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage rarely: hundreds of thousands of live objects make each collection slow, and few of them are garbage."""
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def simulate_serving(scenario: Scenario, seed: int) -> ServingOutcome:
    """Run the serving side alone for ten minutes, on the arrivals that it has in every run of that seed."""
    return _serving_alone(scenario, seed, ((WARM_UP_S, WARM_UP_S + ALONE_S),))


def _serving_alone(scenario: Scenario, seed: int, windows: tuple[tuple[float, float], ...]) -> ServingOutcome:
    """Run the serving side alone and return what users saw whose requests arrived within ``windows``."""
    loop = new_loop()

    async def run() -> ServingOutcome:
        world = World(scenario, seed, loop)
        pool_bytes = kv_pool_bytes(scenario.cluster.kv_memory_fraction, world.serving)
        for index in range(max(1, world.num_lent)):
            lane = world.serving_lane(f"serving{index}", pool_bytes)
            world.feed(index, lane, poker(alone(loop, lane)))
        world.start_serving()
        for begin_s, end_s in windows:
            await asyncio.sleep(begin_s - loop.time())
            world.open_window()
            await asyncio.sleep(end_s - loop.time())
            world.close_window(begin_s)
        outcome = world.summarise()
        assert outcome is not None  # noqa: S101 - there is at least one feed
        return outcome

    return loop.run(run())


def train_s(scenario: Scenario, seed: int) -> float:
    """Return what training takes: as given, or so that the fixed baseline of that seed has the scenario's rollout share."""
    given = scenario.loop.train_s
    if given is not None:
        return given
    synchronous = attrs.evolve(scenario, loop=attrs.evolve(scenario.loop, algorithm=Algorithm.GRPO, num_steps=1))
    return _fitted_train_s(synchronous, seed)


@functools.lru_cache(maxsize=256)
def _fitted_train_s(scenario: Scenario, seed: int) -> float:
    loop = new_loop()
    step = loop.run(_run(scenario, strategy_named(FIXED), seed, loop, 0.0)).steps[0]
    share = scenario.loop.rollout_share
    return max(0.0, step.rollout_s * (1 - share) / share - step.sync_s)


async def _run(scenario: Scenario, strategy: Strategy, seed: int, loop: VirtualLoop, train_time_s: float) -> Outcome:
    config = pool_config(scenario, strategy)
    world = World(scenario, seed, loop, stall_s=config.stall_s)
    algorithm = strategy.algorithm or scenario.loop.algorithm
    supply = strategy.supply()
    supply.build(world)
    world.dedicated = [
        world.whole_engine(f"dedicated{i}", hides_kv=not strategy.looks_at_kv) for i in range(world.num_dedicated)
    ]
    world.start_serving()
    await asyncio.sleep(WARM_UP_S)
    max_demand = scenario.loop.max_demand if algorithm is Algorithm.DAPO else 1.0
    slots = TrajectorySlots(config.routing.cap_per_engine if strategy.is_capped else None, supply.slot_share)
    pool = RolloutPool(world.dedicated, config=config, clock=world.clock, on_event=slots.hear, seed=seed)
    async with pool:
        job = Job(
            world=world,
            strategy=strategy,
            supply=supply,
            pool=pool,
            source=TrajectorySource(scenario.rollout, seed=seed, max_demand=max_demand),
            runner=TrajectoryRunner(
                generate=pool.generate,
                started=world.started,
                resolution_tokens=scenario.rollout.resolution_tokens,
                max_turn_tokens=scenario.rollout.max_turn_tokens,
                slots=slots,
            ),
            train_s=train_time_s,
            alone_s=_alone_s(world.rollout),
        )
        await _LOOPS[algorithm](job, scenario.loop.num_steps)
        return _outcome(job, seed)


def pool_config(scenario: Scenario, strategy: Strategy) -> PoolConfig:
    """Return the pool's settings for a strategy: a baseline and the published rules have their cap alone, whatever KV memory says."""
    cap = scenario.rollout.cap_per_gpu * profile_named(scenario.rollout.profile).num_gpus
    routing = RoutingConfig(
        cap_per_engine=cap if strategy.is_capped else _UNCAPPED,
        rule=strategy.routing,
        max_context_tokens=scenario.rollout.max_context_tokens // scenario.rollout.resolution_tokens,
    )
    return PoolConfig(
        routing=routing,
        concurrency=ConcurrencyConfig(is_adaptive=strategy.routing is RoutingRule.VALUE),
        stall_s=_STALL_S + scenario.rollout.resolution_tokens * _SLOW_TOKEN_S if strategy.is_capped else _PATIENT_S,
        reading_interval_s=_READING_S,
        weight_pull=scenario.link.weight_pull,
        reading_timeout_s=30.0,
        max_trajectories=max(100_000, 10 * scenario.rollout.num_trajectories),
    )


def _alone_s(profile: Profile) -> Callable[[TrajectoryPlan], float]:
    step_s = profile.fast_step()

    def decode_s(context_tokens: int) -> float:
        return step_s(0, 1, context_tokens, 0.0) + profile.host_gap_s

    def prefill_s(num_new: int, num_context: int) -> float:
        return step_s(num_new, 0, 0, num_new * (num_context - num_new / 2)) + profile.host_gap_s

    return lambda plan: floor_s(plan, step_s=decode_s, prefill_s=prefill_s)


def _outcome(job: Job, seed: int) -> Outcome:
    world, steps = job.world, job.steps
    accounts = job.pool.accounts().values()
    ends = {end: sum(account.num_ended[end] for account in accounts) for end in HopEnd}
    now_s = world.loop.time()
    held_s = [((held.until_s if held.until_s is not None else now_s) - held.since_s, held) for held in world.held]
    held_gpu_s = sum(duration_s * held.num_gpus for duration_s, held in held_s)
    overhead_gpu_s = sum(min(duration_s, held.overhead_s) * held.num_gpus for duration_s, held in held_s)
    serving = world.summarise()
    beside = None if serving is None else _serving_alone(world.scenario, seed, tuple(world.windows))
    prefilled = sum(engine.lane.batch.num_prefilled_tokens for engine in [*world.dedicated, *world.guests])
    step_s = _mean([step.step_s for step in steps])
    return Outcome(
        strategy=job.strategy.name,
        seed=seed,
        steps=tuple(steps),
        step_s=step_s,
        rollout_s=_mean([step.rollout_s for step in steps]),
        floor_s=_mean(job.floors_s),
        completion=job.completion,
        num_turns=sum(record.num_turns for record in job.records),
        num_tokens=sum(record.num_tokens for record in job.records),
        num_trajectories=len(job.records),
        num_hops=sum(record.num_hops for record in job.records),
        num_evicted=ends[HopEnd.EVICTED],
        num_stalled=ends[HopEnd.STALLED],
        num_lost=ends[HopEnd.LOST],
        reprefill_tokens=max(0, prefilled - sum(record.needed_tokens for record in job.records)),
        borrowed_tokens=sum(engine.num_tokens for engine in world.guests),
        borrowed_gpu_s=held_gpu_s,
        overhead_fraction=overhead_gpu_s / held_gpu_s if held_gpu_s else 0.0,
        cost_dollars=_cost(job, step_s, held_gpu_s),
        made_tokens=sum(engine.num_tokens for engine in [*world.dedicated, *world.guests]),
        alone_ttft_p50_ms=None if beside is None else beside.ttft_p50_ms,
        alone_ttft_p99_ms=None if beside is None else beside.ttft_p99_ms,
        alone_tpot_p50_ms=None if beside is None else beside.tpot_p50_ms,
        alone_tpot_p99_ms=None if beside is None else beside.tpot_p99_ms,
        serving=serving,
        link_bytes=world.relay.link.delivered_bytes,
        num_events=world.loop.num_callbacks,
    )


def _cost(job: Job, step_s: float, held_gpu_s: float) -> float:
    cluster, prices = job.world.scenario.cluster, job.world.scenario.prices
    own = (cluster.rollout_gpus + cluster.training_gpus) * step_s * prices.dedicated
    more: float = getattr(prices, job.strategy.price) * held_gpu_s / max(1, len(job.steps))
    return (own + more) / 3600


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
