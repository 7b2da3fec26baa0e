"""What the pool feeds its routing policy: paces of turns that ended, progress of trajectories, engines that stalled them."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from rose.policies.pace import PaceConfig
from rose.pool import PoolConfig, RolloutPool, RoutingConfig, TurnAssigned
from rose.testing import FakeEngine, ManualClock
from rose.types import EngineId, EngineKind, RouteReason, Sampling, Turn

NAMES = (f"t{i}" for i in itertools.count())


def engine(clock: ManualClock, name: str, token_s: float) -> FakeEngine:
    return FakeEngine(engine_id=EngineId(name), clock=clock, token_s=token_s)


async def take_turns(
    pool: RolloutPool, name: str, num_turns: int, *, max_tokens: int = 20, pause_s: float = 0.0
) -> list[str]:
    """Run a trajectory; returns the engine of each turn."""
    prompt, engines = (1, 2, 3), []
    for _ in range(num_turns):
        turn = Turn(trajectory_id=name, group_id="g", prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens))
        result = await pool.generate(turn)
        prompt = (*prompt, *result.token_ids, 7)
        engines.append(result.hops[-1].engine_id)
        if pause_s:
            await pool._driver._clock.sleep(pause_s)
    return engines


def run(work):
    clock = ManualClock()
    return asyncio.run(clock.run(work(clock)))


def test_a_trajectory_moves_from_a_slow_borrowed_engine_once_a_dedicated_slot_is_free():
    events = []

    async def work(clock):
        own, lent = engine(clock, "own", 0.01), engine(clock, "lent", 0.05)
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=1), stall_s=60.0)
        async with RolloutPool([own], borrowed=[lent], clock=clock, config=config, on_event=events.append) as pool:
            first = asyncio.ensure_future(take_turns(pool, "first", 8))
            second = asyncio.ensure_future(take_turns(pool, "second", 8))
            visited = await asyncio.gather(first, second)
            return visited, pool.accounts()[own.engine_id]

    (first, second), account = run(work)
    assert set(first) == {"own"}
    assert second[0] == "lent"
    assert second[-1] == "own"
    assert second == sorted(second)  # it moves once and stays
    moves = [event for event in events if isinstance(event, TurnAssigned) and event.reason is RouteReason.MIGRATED]
    assert len(moves) == account.num_moved_in == 1
    assert account.num_moved_prompt_tokens > 20


def test_equal_engines_keep_their_trajectories():
    async def work(clock):
        engines = [engine(clock, name, 0.01) for name in "abc"]
        async with RolloutPool(engines, clock=clock) as pool:
            visited = await asyncio.gather(*(take_turns(pool, f"t{i}", 6) for i in range(9)))
            return visited, pool.accounts().values()

    visited, accounts = run(work)
    assert all(len(set(engines)) == 1 for engines in visited)
    assert sum(account.num_moved_in for account in accounts) == 0


def test_later_turns_stay_off_an_engine_that_stalled_the_trajectory_until_it_makes_tokens_again():
    async def work(clock):
        ill, well = engine(clock, "a", 0.01), engine(clock, "b", 0.01)
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=1), stall_s=2.0, circuit_s=0.1, jitter_fraction=0.0)
        async with RolloutPool([ill, well], clock=clock, config=config) as pool:
            ill.stall()
            seen = [*await take_turns(pool, "x", 1)]
            await clock.sleep(5.0)  # its circuit lets a request through again
            busy = asyncio.ensure_future(take_turns(pool, "other", 1, max_tokens=300))
            await clock.sleep(0.1)
            x = asyncio.ensure_future(take_turns(pool, "x", 1))
            await clock.sleep(6.0)
            ill.unstall()
            return seen, await busy, await x

    seen, busy, x = run(work)
    assert seen == ["b"]
    assert {*busy, *x} <= {"a", "b"}


def test_what_waits_to_be_computed_and_the_load_return_to_nothing():
    async def work(clock):
        engines = [engine(clock, name, 0.01) for name in "ab"]
        async with RolloutPool(engines, clock=clock) as pool:
            tasks = [asyncio.ensure_future(take_turns(pool, next(NAMES), 3)) for _ in range(6)]
            await clock.sleep(0.05)
            members = list(pool._state.engines.members.values())
            assert sum(member.load_tokens for member in members) > 0
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await clock.sleep(1.0)
            return members

    for member in run(work):
        assert (member.load_tokens, member.num_waiting_prompt_tokens, member.held) == (0, 0, {})


def test_a_move_leaves_the_slot_of_a_trajectory_whose_environment_is_at_work():
    """Its engine keeps its prefix; a slot that looks free is its own for a few times the usual pause."""

    async def work(clock):
        own, lent = engine(clock, "own", 0.01), engine(clock, "lent", 0.05)
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=1), stall_s=60.0)
        async with RolloutPool([own], borrowed=[lent], clock=clock, config=config) as pool:
            first = asyncio.ensure_future(take_turns(pool, "first", 10, pause_s=0.2))
            await clock.sleep(0.01)
            second = asyncio.ensure_future(take_turns(pool, "second", 4, pause_s=0.01))
            return await asyncio.gather(first, second)

    first, second = run(work)
    assert set(first) == {"own"}
    assert set(second) == {"lent"}


def test_a_trajectory_that_does_not_come_back_keeps_no_seat():
    async def work(clock):
        own = engine(clock, "own", 0.01)
        async with RolloutPool([own], clock=clock) as pool:
            await take_turns(pool, "only", 1)
            seated = pool.snapshot().engines[0].num_seats
            await clock.sleep(30.0)
            return seated, pool.snapshot().engines[0].num_seats

    assert run(work) == (1, 0)


def test_a_trajectory_whose_environment_is_at_work_counts_at_its_engine_as_if_it_ran():
    """Otherwise an engine between two turns of its only trajectory looks idle, and draws the trajectories of all others."""

    async def work(clock):
        own = engine(clock, "own", 0.01)
        async with RolloutPool([own], clock=clock) as pool:
            (member,) = pool._state.engines.members.values()
            await take_turns(pool, "only", 2)
            (view,) = pool._state.engines.index
            seated = member.seat_tokens, view.most_left_tokens, view.pace_s
            task = asyncio.ensure_future(take_turns(pool, "only", 1))
            await asyncio.sleep(0)
            back = member.seat_tokens, len(member.left_tokens)
            await task
            await clock.sleep(30.0)
            (view,) = pool._state.engines.index
            return seated, back, (member.seat_tokens, view.most_left_tokens, list(member.left_tokens))

    (seat_tokens, most_left_tokens, pace_s), back, gone = run(work)
    assert seat_tokens == 3 + 20 + 1 + 20
    assert most_left_tokens == RoutingConfig().progress_factor * 40
    assert pace_s is not None
    assert back == (0, 1)
    assert gone == (0, 0.0, [])


@pytest.mark.parametrize("kind", EngineKind)
def test_an_engine_that_left_is_forgotten(kind):
    async def work(clock):
        keeper, leaver = engine(clock, "keeper", 0.01), engine(clock, "leaver", 0.02)
        async with RolloutPool(
            [keeper], clock=clock, config=PoolConfig(routing=RoutingConfig(cap_per_engine=1))
        ) as pool:
            await pool.add_engine(leaver, kind)
            await asyncio.gather(take_turns(pool, "p", 3), take_turns(pool, "q", 3))
            pace = pool._state.engines.pace
            before = pace.estimate(leaver.engine_id, kind, 0.0)
            await pool.remove_engine(leaver.engine_id, "lease ended")
            return before, pace.estimate(leaver.engine_id, kind, 0.0), pace.estimate(EngineId("new"), kind, 0.0)

    before, after, unknown = run(work)
    assert after == unknown
    assert before is not None


def tight(**options) -> PoolConfig:
    """Return the settings of a pool with two slots an engine, in which prompts cost much to compute."""
    return PoolConfig(
        routing=RoutingConfig(cap_per_engine=2, pace=PaceConfig(prefill_share=0.5)), stall_s=60.0, **options
    )


@pytest.mark.parametrize(("pause_s", "is_kept"), [(0.01, True), (3.0, False)])
def test_who_begins_waits_rather_than_displace_a_trajectory_whose_environment_is_at_work_for_a_moment(pause_s, is_kept):
    async def work(clock):
        engines = [engine(clock, name, 0.02) for name in "ab"]
        async with RolloutPool(engines, clock=clock, config=tight()) as pool:
            old = [asyncio.ensure_future(take_turns(pool, f"t{i}", 12, pause_s=pause_s)) for i in range(4)]
            await clock.sleep(2.0 + 3 * pause_s)
            new = asyncio.ensure_future(take_turns(pool, "new", 12, pause_s=pause_s))
            await clock.sleep(0.2)
            has_begun = any(attempt.record.turn.trajectory_id == "new" for attempt in pool._state._open.values())
            return await asyncio.gather(*old), await new, has_begun

    old, new, has_begun = run(work)
    assert has_begun is not is_kept
    assert all(len(visited) == 12 for visited in (*old, new))
    if is_kept:
        assert all(len(set(visited)) == 1 for visited in (*old, new))


def test_who_waits_for_a_seat_goes_once_its_trajectory_did_not_come_back_although_nothing_else_happens():
    async def work(clock):
        own = engine(clock, "own", 0.02)
        async with RolloutPool([own], clock=clock, config=tight()) as pool:
            await asyncio.gather(*(take_turns(pool, name, 6, pause_s=0.01) for name in ("x", "y")))
            began_s = clock.now()
            await take_turns(pool, "new", 1)
            return clock.now() - began_s

    assert 0.4 < run(work) < 0.4 + 1.5 + 0.5 + 0.1, "at the first reading after the seat"


def test_kv_memory_of_a_trajectory_that_will_be_back_is_its_own():
    """Two fit, with all that they make; the third would fit beside one of them."""

    async def work(clock):
        own = FakeEngine(engine_id=EngineId("own"), clock=clock, token_s=0.02, kv_total_tokens=560)
        async with RolloutPool([own], clock=clock, config=tight()) as pool:
            old = [asyncio.ensure_future(take_turns(pool, name, 12, pause_s=0.01)) for name in ("x", "y")]
            await clock.sleep(2.05)
            new = asyncio.ensure_future(take_turns(pool, "new", 3, pause_s=0.01))
            waited = []
            for _ in range(10):
                await clock.sleep(0.1)
                waited.append(pool.snapshot().num_waiting)
            return await asyncio.gather(*old, new), waited, pool.statistics()

    visited, waited, statistics = run(work)
    assert all(set(engines) == {"own"} for engines in visited)
    assert set(waited) == {1}
    assert statistics.reprefilled_tokens == {}
