"""Engines join, drain and leave while turns run."""

from __future__ import annotations

import asyncio

import pytest

from rose.errors import EngineError, EngineLostError
from rose.pool import EngineState, EngineStateChanged, PoolConfig, RolloutPool, RoutingConfig
from rose.testing import FakeEngine, ManualClock
from rose.types import EngineId, EngineKind, HopEnd, LeaseId, RouteReason, Sampling, Turn, WeightVersion

A, B = EngineId("a"), EngineId("b")


def turn(name: str, max_tokens: int = 10) -> Turn:
    return Turn(trajectory_id=name, group_id="g", prompt_ids=(1, 2), sampling=Sampling(max_tokens=max_tokens))


def engine(clock: ManualClock, name: str, **fields) -> FakeEngine:
    return FakeEngine(**{"engine_id": EngineId(name), "clock": clock, "token_s": 0.1, **fields})


def run(clock: ManualClock, work):
    return asyncio.run(clock.run(work()))


def states(pool: RolloutPool) -> dict[str, EngineState]:
    return {view.engine_id: view.state for view in pool.snapshot().engines}


def test_a_waiting_turn_goes_to_an_engine_that_joins():
    clock = ManualClock()

    async def work():
        async with RolloutPool(clock=clock) as pool:
            waiting = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(1.0)
            state = await pool.add_engine(engine(clock, "a"), EngineKind.BORROWED, lease_id=LeaseId("l1"))
            return state, await waiting

    state, result = run(clock, work)
    assert state is EngineState.READY
    assert result.hops[0].reason is RouteReason.BORROWED


def test_removing_an_engine_moves_its_turns_and_waits_for_the_aborts():
    clock, events = ManualClock(), []
    leaving, other = engine(clock, "a"), engine(clock, "b")

    async def work():
        async with RolloutPool([leaving], clock=clock, on_event=events.append) as pool:
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(2)]
            await clock.sleep(0.25)
            await pool.add_engine(other)
            assert await pool.remove_engine(A, "lease ended")
            assert (leaving.num_in_flight, len(leaving.aborted)) == (0, 2)
            results = await asyncio.gather(*turns)
            assert states(pool) == {"b": EngineState.READY}
            return results, pool.accounts()

    results, accounts = run(clock, work)
    for result in results:
        assert [(hop.num_tokens, hop.ended) for hop in result.hops] == [(2, HopEnd.ABORTED), (8, HopEnd.FINISHED)]
    assert accounts[A].num_tokens == 4
    left = [event for event in events if isinstance(event, EngineStateChanged) and event.new is None]
    assert [(event.engine_id, event.why) for event in left] == [("a", "lease ended")]


def test_nothing_is_told_of_an_engine_after_it_left():
    clock, events = ManualClock(), []
    leaving = engine(clock, "a")

    async def work():
        async with RolloutPool([leaving, engine(clock, "b")], clock=clock, on_event=events.append) as pool:
            running = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(0.25)
            leaving.die()
            await pool.remove_engine(A, "its device is gone")
            await running
            await clock.sleep(2.0)

    run(clock, work)
    last = [event for event in events if isinstance(event, EngineStateChanged) and event.engine_id == "a"][-1]
    assert (last.new, last.why) == (None, "its device is gone")


def test_draining_lets_turns_finish_and_sends_no_more():
    clock = ManualClock()
    draining = engine(clock, "a")

    async def work():
        async with RolloutPool([draining], clock=clock) as pool:
            running = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(0.25)
            drain = asyncio.ensure_future(pool.drain_engine(A, "going away"))
            waiting = asyncio.ensure_future(pool.generate(turn("u")))
            assert await drain
            assert clock.now() == pytest.approx(1.0)
            assert len((await running).hops) == 1
            assert not waiting.done()
            assert states(pool) == {"a": EngineState.DRAINING}
            await pool.remove_engine(A, "gone")
            await pool.add_engine(engine(clock, "b"))
            assert (await waiting).hops[0].engine_id == "b"

    run(clock, work)


def test_a_drain_that_takes_too_long_says_so():
    clock = ManualClock()

    async def work():
        async with RolloutPool([engine(clock, "a")], clock=clock) as pool:
            running = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(0.0)
            assert not await pool.drain_engine(A, "going away", timeout_s=0.5)
            assert clock.now() == pytest.approx(0.5)
            await running
            assert await pool.drain_engine(A, "going away", timeout_s=0.5)

    run(clock, work)


def test_the_health_check_finds_an_engine_that_died_idle_and_its_id_may_join_again():
    clock, events = ManualClock(), []
    dying = engine(clock, "a")

    async def work():
        async with RolloutPool([dying], clock=clock, on_event=events.append) as pool:
            await pool.generate(turn("t"))
            dying.die()
            await clock.sleep(1.0)
            assert states(pool) == {"a": EngineState.LOST}
            await pool.add_engine(engine(clock, "a"))
            await pool.generate(turn("t"))
            return pool.accounts()

    assert run(clock, work)[A].num_attempts == 2
    ways = [(event.old, event.new) for event in events if isinstance(event, EngineStateChanged)]
    assert ways == [
        (None, EngineState.JOINING),
        (EngineState.JOINING, EngineState.READY),
        (EngineState.READY, EngineState.LOST),
        (None, EngineState.JOINING),
        (EngineState.JOINING, EngineState.READY),
    ]


def test_an_engine_is_seen_joining_and_gets_no_turn_until_it_answered():
    clock = ManualClock()
    slow = SlowToAnswer(engine_id=A, clock=clock)

    async def work():
        async with RolloutPool(clock=clock) as pool:
            joining = asyncio.ensure_future(pool.add_engine(slow))
            waiting = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(0.5)
            assert states(pool) == {"a": EngineState.JOINING}
            assert slow.requests == []
            assert await joining is EngineState.READY
            await waiting

    run(clock, work)


class SlowToAnswer(FakeEngine):
    """Takes a second over every reading."""

    async def snapshot(self):
        await self.clock.sleep(1.0)
        return await super().snapshot()


def test_an_id_that_is_in_use_is_refused():
    clock = ManualClock()

    async def work():
        async with RolloutPool([engine(clock, "a")], clock=clock) as pool:
            with pytest.raises(ValueError, match="'a' is in the pool already, ready"):
                await pool.add_engine(engine(clock, "a"))

    run(clock, work)


def test_removing_an_unknown_engine_names_the_known_ones():
    clock = ManualClock()

    async def work():
        async with RolloutPool([engine(clock, "a")], clock=clock) as pool:
            with pytest.raises(EngineLostError, match=r"'x' is not in the pool; its engines are \['a'\]"):
                await pool.remove_engine(EngineId("x"), "typo")

    run(clock, work)


def test_an_engine_that_does_not_answer_when_it_joins_is_lost():
    clock = ManualClock()
    dead = engine(clock, "b")
    dead.die()

    async def work():
        async with RolloutPool([engine(clock, "a")], clock=clock) as pool:
            with pytest.raises(EngineLostError, match="engine b is gone"):
                await pool.add_engine(dead)
            assert states(pool) == {"a": EngineState.READY, "b": EngineState.LOST}

    run(clock, work)


def test_a_dead_first_engine_does_not_keep_the_pool_from_opening():
    clock = ManualClock()
    dead = engine(clock, "a")
    dead.die()

    async def work():
        async with RolloutPool([dead, engine(clock, "b")], clock=clock) as pool:
            assert states(pool) == {"a": EngineState.LOST, "b": EngineState.READY}
            assert (await pool.generate(turn("t"))).hops[0].engine_id == "b"

    run(clock, work)


def test_an_engine_with_other_weights_than_the_first_ones_is_stale():
    clock = ManualClock()
    first = engine(clock, "a", weight_version=WeightVersion("r", 1))
    same = engine(clock, "b", weight_version=WeightVersion("r", 1))
    other = engine(clock, "c", weight_version=WeightVersion("r", 0))

    async def work():
        async with RolloutPool([first, same, other], clock=clock) as pool:
            assert states(pool) == {"a": EngineState.READY, "b": EngineState.READY, "c": EngineState.STALE}
            assert pool.snapshot().version == WeightVersion("r", 1)

    run(clock, work)


def test_a_fenced_engine_gets_no_more_turns():
    clock = ManualClock()
    fenced, other = engine(clock, "a"), engine(clock, "b")
    fenced.fence()

    async def work():
        async with RolloutPool([fenced, other], clock=clock) as pool:
            result = await pool.generate(turn("t"))
            assert [hop.ended for hop in result.hops] == [HopEnd.LOST, HopEnd.FINISHED]
            assert states(pool) == {"a": EngineState.FENCED, "b": EngineState.READY}
            assert len((await pool.generate(turn("u"))).hops) == 1

    run(clock, work)


def test_a_cut_kv_budget_is_seen_by_the_next_reading():
    """A borrowed engine whose budget was revoked is not tried; its turns wait until it has room again."""
    clock = ManualClock()
    lent = engine(clock, "b")

    async def work():
        async with RolloutPool(borrowed=[lent], clock=clock) as pool:
            await lent.set_kv_budget(0)
            await clock.sleep(1.0)
            waiting = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(3.0)
            assert lent.requests == []
            await lent.set_kv_budget(1000)
            return await waiting

    assert len(run(clock, work).hops) == 1


def test_two_pools_never_use_one_request_id():
    clock = ManualClock()
    shared = engine(clock, "a")

    async def work():
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=4))
        async with RolloutPool([shared], clock=clock, config=config) as one, RolloutPool([shared], clock=clock) as two:
            await asyncio.gather(*(pool.generate(turn("t")) for pool in (one, two) for _ in range(4)))

    run(clock, work)
    assert len({request.request_id for request in shared.requests}) == 8
    assert not any("t" == request.request_id for request in shared.requests)


class HangsEngine(FakeEngine):
    """An engine whose process is stopped: it neither answers nor goes away."""

    async def snapshot(self):
        if self._is_stalled:
            await asyncio.Event().wait()
        return await super().snapshot()


def hanging(clock: ManualClock, name: str) -> HangsEngine:
    return HangsEngine(engine_id=EngineId(name), clock=clock, token_s=0.1)


def test_an_engine_that_does_not_answer_a_reading_is_lost():
    clock = ManualClock()
    stopped = hanging(clock, "a")

    async def work():
        async with RolloutPool([stopped], clock=clock, config=PoolConfig(reading_timeout_s=5.0)) as pool:
            stopped.stall()
            await clock.sleep(5.4)
            assert states(pool) == {"a": EngineState.READY}
            await clock.sleep(0.2)
            assert states(pool) == {"a": EngineState.LOST}

    run(clock, work)


def test_an_engine_that_does_not_answer_does_not_keep_the_pool_from_opening():
    clock = ManualClock()
    stopped, other = hanging(clock, "a"), engine(clock, "b")
    stopped.stall()

    async def work():
        async with RolloutPool([stopped, other], clock=clock) as pool:
            return states(pool)

    assert run(clock, work) == {"a": EngineState.LOST, "b": EngineState.READY}


def test_the_turns_of_a_draining_engine_move_when_it_is_fenced():
    clock = ManualClock()
    leaving, other = engine(clock, "a"), engine(clock, "b")

    async def work():
        async with RolloutPool([leaving], clock=clock) as pool:
            running = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(2)]
            await clock.sleep(0.25)
            await pool.add_engine(other)
            drained = asyncio.ensure_future(pool.drain_engine(A, "leaving"))
            await clock.sleep(0)
            pool._state.lifecycle.fall_out(pool._state.engines.get(A), EngineState.FENCED, "half written", clock.now())
            pool._driver.apply()
            assert await drained
            assert states(pool)["a"] is EngineState.DRAINING
            return await asyncio.gather(*running)

    for result in run(clock, work):
        assert [(hop.engine_id, hop.ended) for hop in result.hops] == [("a", HopEnd.LOST), ("b", HopEnd.FINISHED)]


def test_an_engine_of_the_first_ones_that_did_not_answer_is_asked_again():
    clock = ManualClock()
    other = engine(clock, "b")

    class Late(FakeEngine):
        async def snapshot(self):
            if self.clock.now() < 7.0:
                message = "not up yet"
                raise EngineLostError(message)
            return await super().snapshot()

    late = Late(engine_id=A, clock=clock, token_s=0.1)

    async def work():
        async with RolloutPool([late, other], clock=clock, config=PoolConfig(rejoin_s=5.0)) as pool:
            before = states(pool)
            await clock.sleep(20.0)
            return before, states(pool)

    before, after = run(clock, work)
    assert before == {"a": EngineState.LOST, "b": EngineState.READY}
    assert after == {"a": EngineState.READY, "b": EngineState.READY}


async def put_to_work(pool: RolloutPool, clock: ManualClock) -> None:
    """Let another engine make the pool's first tokens, and go."""
    await pool.add_engine(engine(clock, "z"))
    await pool.generate(turn("first"))
    await pool.remove_engine(EngineId("z"), "test")


def test_an_engine_that_joins_is_given_more_turns_as_it_shows_tokens():
    clock = ManualClock()

    async def work():
        async with RolloutPool(clock=clock, config=PoolConfig(routing=RoutingConfig(cap_per_engine=6))) as pool:
            await put_to_work(pool, clock)
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}", 50))) for i in range(8)]
            await pool.add_engine(engine(clock, "a"))
            seen = []
            for _ in range(4):
                seen.append(pool.snapshot().engines[0].num_in_flight)
                await clock.sleep(0.11)
            await asyncio.gather(*turns)
            return seen

    assert run(clock, work) == [2, 4, 6, 6]


def test_the_first_of_several_engines_that_join_takes_no_more_than_its_share():
    clock = ManualClock()

    async def work():
        async with RolloutPool(clock=clock) as pool:
            await put_to_work(pool, clock)
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}", 50))) for i in range(16)]
            for name in "abcd":
                await pool.add_engine(engine(clock, name), EngineKind.BORROWED)
            await clock.sleep(0.5)
            shares = {view.engine_id: view.num_in_flight for view in pool.snapshot().engines}
            await asyncio.gather(*turns)
            return shares

    assert run(clock, work) == {"a": 4, "b": 4, "c": 4, "d": 4}


def test_a_dead_engine_is_sent_no_burst():
    """The lost engine always looks the least loaded; it fails what it is sent at once."""
    clock = ManualClock()

    class Dead(FakeEngine):
        num_sent = 0

        async def generate(self, request):
            self.num_sent += 1
            message = "no such model"
            raise EngineError(message)
            yield

    dead = Dead(engine_id=A, clock=clock)

    async def work():
        async with RolloutPool([engine(clock, "b"), engine(clock, "c")], clock=clock) as pool:
            await pool.generate(turn("first"))
            await pool.add_engine(dead)
            return await asyncio.gather(*(pool.generate(turn(f"t{i}")) for i in range(100)))

    results = run(clock, work)
    assert all(len(result.token_ids) == 10 for result in results)
    assert dead.num_sent == 2


def test_the_first_burst_goes_to_dedicated_engines_first():
    """Before any engine showed a token, holding one back would only send the first trajectories elsewhere."""
    clock = ManualClock()

    async def work():
        async with RolloutPool([engine(clock, "a")], borrowed=[engine(clock, "b")], clock=clock) as pool:
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}", 50))) for i in range(18)]
            await clock.sleep(0.05)
            shares = {view.engine_id: view.num_in_flight for view in pool.snapshot().engines}
            await asyncio.gather(*turns)
            return shares

    assert run(clock, work) == {"a": 16, "b": 2}
