"""Whole histories in virtual time: trajectories of several turns, engines that come, go, stall, evict and are updated.

One engine stays well, so that everything can end. Fake engines of one seed are replicas: whatever happens to a turn, its
tokens must be those of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import attrs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.pool import PoolConfig, RolloutPool, RoutingConfig, TurnFailed, TurnFinished
from rose.testing import FakeEngine, ManualClock, fake_update
from rose.types import EngineId, EngineKind, FinishReason, HopEnd, Sampling, Turn, WeightVersion

NUM_TURNS, MAX_TOKENS, TOKEN_S = 3, 12, 0.05
KEEPER = EngineId("keeper")
DISTURBANCES = [
    "die",
    "stall",
    "unstall",
    "evict",
    "busy",
    "calm",
    "remove",
    "join",
    "update",
    "squeeze",
    "cancel",
    "abort",
]
HISTORIES = st.lists(
    st.tuples(st.floats(0.0, 0.6), st.sampled_from(DISTURBANCES), st.integers(0, 99)), min_size=1, max_size=25
)


@attrs.define(eq=False)
class World:
    """A pool, its engines, and what was done to them."""

    clock: ManualClock = attrs.field(factory=ManualClock)
    engines: dict[str, FakeEngine] = attrs.field(factory=dict)
    events: list = attrs.field(factory=list)
    rollouts: list = attrs.field(factory=list)
    everyone: list[FakeEngine] = attrs.field(factory=list)
    aborts: Counter = attrs.field(factory=Counter)
    version: int = 0

    def engine(self, name: str) -> FakeEngine:
        engine = FakeEngine(engine_id=EngineId(name), clock=self.clock, token_s=TOKEN_S, activate_s=0.2)
        abort = engine.abort

        async def counted(request_id):
            self.aborts[request_id] += 1
            await self.clock.sleep(0.1)
            await abort(request_id)

        engine.abort = counted
        self.engines[name] = engine
        self.everyone.append(engine)
        return engine

    async def plan(self, known):
        target = WeightVersion("r", self.version)
        return None if known == target else fake_update(target)


async def trajectory(pool: RolloutPool, name: str) -> list:
    prompt, results = (len(name), int(name[1:])), []
    for _ in range(NUM_TURNS):
        turn = Turn(trajectory_id=name, group_id=name[:2], prompt_ids=prompt, sampling=Sampling(max_tokens=MAX_TOKENS))
        results.append(await pool.generate(turn))
        prompt = (*prompt, *results[-1].token_ids, 5)
    return results


async def disturb(world: World, pool: RolloutPool, what: str, pick: int) -> None:
    if what == "join":
        await pool.add_engine(world.engine(f"e{len(world.everyone)}"), list(EngineKind)[pick % 2])
    elif what == "update":
        world.version += 1
        await pool.sync_weights(world)
    elif what == "cancel":
        world.rollouts[pick % len(world.rollouts)].cancel()
    elif others := [engine for name, engine in world.engines.items() if name != KEEPER]:
        await disturb_engine(world, pool, others[pick % len(others)], what, pick)


async def disturb_engine(world: World, pool: RolloutPool, engine: FakeEngine, what: str, pick: int) -> None:
    if what == "die":
        del world.engines[engine.engine_id]
        engine.die()
    elif what == "remove":
        del world.engines[engine.engine_id]
        await pool.remove_engine(engine.engine_id, "lease ended", timeout_s=1.0)
    elif what in ("busy", "calm"):
        engine.set_busy(is_busy=what == "busy")
    elif what == "squeeze":
        await engine.set_kv_budget([0, 30, 10_000][pick % 3])
    elif what in ("stall", "unstall"):
        getattr(engine, what)()
    elif engine.requests:
        request_id = engine.requests[-1 - pick % len(engine.requests)].request_id
        await FakeEngine.abort(engine, request_id) if what == "abort" else engine.evict(request_id)


async def live(world: World, history, num_trajectories: int) -> list:
    config = PoolConfig(routing=RoutingConfig(cap_per_engine=4), max_hops=64, max_busy=1000, circuit_s=1.0)
    first = [world.engine(KEEPER), world.engine("e1")]
    lent = [world.engine("e2")]
    async with RolloutPool(
        first, borrowed=lent, clock=world.clock, config=config, on_event=world.events.append
    ) as pool:
        world.rollouts += [asyncio.ensure_future(trajectory(pool, f"t{i}")) for i in range(num_trajectories)]
        for pause_s, what, pick in history:
            await world.clock.sleep(pause_s)
            await disturb(world, pool, what, pick)
        outcomes = await asyncio.gather(*world.rollouts, return_exceptions=True)
        await world.clock.sleep(5.0)
        assert_nothing_left(world, pool)
    return outcomes


def assert_nothing_left(world: World, pool: RolloutPool) -> None:
    snapshot = pool.snapshot()
    assert (snapshot.num_live_turns, snapshot.num_waiting) == (0, 0)
    assert all(view.num_in_flight == 0 and view.kv_reserved_tokens == 0 for view in snapshot.engines)
    assert all(engine.num_in_flight == 0 for engine in world.engines.values())
    assert not pool._driver._pumps
    assert not pool._driver._stops
    assert max(world.aborts.values(), default=0) <= 1
    ids = [request.request_id for engine in world.everyone for request in engine.requests]
    assert len(ids) == len(set(ids))


def play(history, num_trajectories: int) -> tuple[World, list]:
    world, problems = World(), []

    async def watched():
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context))
        outcomes = await world.clock.run(live(world, history, num_trajectories))
        gc.collect()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return outcomes

    outcomes = asyncio.run(watched())
    assert problems == []
    return world, outcomes


UNDISTURBED = play([], 8)[1]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=HISTORIES, num_trajectories=st.integers(1, 8))
def test_no_history_loses_repeats_or_changes_a_token(history, num_trajectories):
    world, outcomes = play(history, num_trajectories)
    for outcome, undisturbed in zip(outcomes, UNDISTURBED, strict=False):
        if isinstance(outcome, asyncio.CancelledError):
            continue
        assert not isinstance(outcome, BaseException), outcome
        for result, expected in zip(outcome, undisturbed, strict=True):
            assert result.token_ids == expected.token_ids
            assert result.logprobs == expected.logprobs
            assert result.finish_reason is FinishReason.LENGTH
            assert sum(hop.num_tokens for hop in result.hops) == MAX_TOKENS
            assert [hop.ended for hop in result.hops].count(HopEnd.FINISHED) <= 1
            assert sum(span.end - span.start for span in result.versions) <= MAX_TOKENS
            assert [span.version for span in result.versions] == sorted(span.version for span in result.versions)
    finished = Counter(event.trajectory_id for event in world.events if isinstance(event, TurnFinished))
    failed = [event for event in world.events if isinstance(event, TurnFailed)]
    assert all(event.error == "cancelled" for event in failed)
    assert all(count <= NUM_TURNS for count in finished.values())


def test_an_undisturbed_history_moves_nothing():
    world, outcomes = play([], 8)
    assert all(len(result.hops) == 1 for results in outcomes for result in results)
    assert world.aborts == Counter()
    assert sum(isinstance(event, TurnFinished) for event in world.events) == 8 * NUM_TURNS
