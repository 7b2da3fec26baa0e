"""Cancelling a turn, wherever it is, leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rose.policies.routing import RoutingRule
from rose.pool import PoolConfig, RolloutPool, RoutingConfig
from rose.testing import FakeEngine, ManualClock
from rose.types import EngineId, EngineKind, HopEnd, Sampling, Turn


class LateEngine(FakeEngine):
    """Takes ``abort_s`` over an abort, counts the calls, and may take ``start_s`` before it knows a request."""

    abort_s = 0.0
    start_s = 0.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.abort_calls = []
        self.started_ids = []

    async def generate(self, request):
        self.started_ids.append(request.request_id)
        await self.clock.sleep(self.start_s)
        async for chunk in super().generate(request):
            yield chunk

    async def abort(self, request_id):
        self.abort_calls.append(request_id)
        await self.clock.sleep(self.abort_s)
        await super().abort(request_id)


def turn(name: str, max_tokens: int = 50) -> Turn:
    return Turn(trajectory_id=name, group_id="g", prompt_ids=(1, 2), sampling=Sampling(max_tokens=max_tokens))


def late(clock: ManualClock, name: str = "a", **fields) -> LateEngine:
    return LateEngine(engine_id=EngineId(name), clock=clock, token_s=0.01, **fields)


def run(clock: ManualClock, work):
    """Run to the end; a task or future that was dropped on the way makes the test fail."""
    problems = []

    async def watched():
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context))
        result = await clock.run(work())
        await asyncio.sleep(0)
        gc.collect()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    gc.freeze()  # so that a collection looks at what this test has made alone
    try:
        result = asyncio.run(watched())
    finally:
        gc.unfreeze()
    assert problems == []
    return result


def assert_free(pool: RolloutPool, *engines: LateEngine) -> None:
    snapshot = pool.snapshot()
    assert (snapshot.num_live_turns, snapshot.num_waiting) == (0, 0)
    assert all(view.num_in_flight == 0 and view.kv_reserved_tokens == 0 for view in snapshot.engines)
    assert all(engine.num_in_flight == 0 for engine in engines)
    assert not pool._driver._pumps
    assert not pool._driver._stops


@pytest.mark.parametrize("start_s", [0.0, 0.04, 0.2], ids=["streaming", "just streaming", "starting"])
@pytest.mark.parametrize("abort_s", [0.0, 0.1])
def test_cancelling_ten_of_ten(start_s, abort_s):
    """Case E11: 4 permits, 10 rollouts, all cancelled at 50 ms."""
    clock = ManualClock()
    engine = late(clock)
    engine.start_s, engine.abort_s = start_s, abort_s

    async def work():
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=4, rule=RoutingRule.PAPER))  # all slots at once
        async with RolloutPool([engine], clock=clock, config=config) as pool:
            rollouts = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(10)]
            await clock.sleep(0.05)
            assert len(engine.started_ids) == 4
            in_acquire = asyncio.ensure_future(pool.generate(turn("t10")))
            for rollout in (*rollouts, in_acquire):
                rollout.cancel()
            outcomes = await asyncio.gather(*rollouts, in_acquire, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
            await clock.sleep(1.0)
            assert_free(pool, engine)
            assert engine.abort_calls == engine.started_ids
            before_s = clock.now()
            result = await pool.generate(turn("t11", max_tokens=3))
            assert clock.now() - before_s == pytest.approx(start_s + 0.03)
            assert len(result.token_ids) == 3
            assert engine.abort_calls == engine.started_ids[:4]

    run(clock, work)


def test_cancelling_before_the_request_was_sent_sends_nothing():
    """The turn is assigned after its caller was cancelled and before the caller runs again."""
    clock = ManualClock()
    engine = late(clock)

    async def work():
        async with RolloutPool(clock=clock) as pool:
            rollout = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(0.1)
            member = pool._state.lifecycle.join(engine, EngineKind.DEDICATED, None, clock.now())
            reading = await engine.snapshot()
            rollout.cancel()
            pool._state.lifecycle.joined(member, reading, clock.now())
            pool._driver.apply()
            assert pool.snapshot().engines[0].num_in_flight == 1
            with pytest.raises(asyncio.CancelledError):
                await rollout
            assert_free(pool, engine)
            assert engine.started_ids == engine.abort_calls == []

    run(clock, work)


def test_cancelling_while_the_engines_pause_after_busy_answers():
    clock = ManualClock()
    engine = late(clock)
    engine.set_busy(is_busy=True)

    async def work():
        async with RolloutPool([engine], clock=clock) as pool:
            rollout = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(0.02)
            rollout.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rollout
            await clock.sleep(1.0)
            assert_free(pool, engine)
            assert len(engine.started_ids) == 1
            assert engine.abort_calls == []

    run(clock, work)


def test_the_slot_is_taken_until_the_abort_is_done():
    """An engine is never given more than its cap, requests that it is still ending included."""
    clock = ManualClock()
    engine = late(clock)
    engine.abort_s = 0.3

    async def work():
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=1))
        async with RolloutPool([engine], clock=clock, config=config) as pool:
            first = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(0.1)
            first.cancel()
            second = asyncio.ensure_future(pool.generate(turn("u", max_tokens=1)))
            await clock.sleep(0.2)
            assert len(engine.started_ids) == 1
            await second
            assert clock.now() == pytest.approx(0.1 + 0.3 + 0.01)

    run(clock, work)


def test_a_late_abort_and_late_output_do_not_touch_the_second_attempt():
    """Case E06: attempt 1 of S times out, its abort is delayed by 100 ms, attempt 2 is sent at once."""
    clock = ManualClock()
    engine = late(clock)
    engine.abort_s = 0.1

    async def work():
        config = PoolConfig(circuit_s=1e-6, jitter_fraction=0.0)
        async with RolloutPool([engine], clock=clock, config=config) as pool:
            sample = asyncio.ensure_future(pool.generate(turn("S", max_tokens=20)))
            await clock.sleep(0.035)
            engine.stall()
            await clock.sleep(1.996)
            assert len(engine.started_ids) == 2
            engine.unstall()
            result = await sample
            again = await pool.generate(turn("S", max_tokens=2))
            assert_free(pool, engine)
            return result, again

    result, again = run(clock, work)
    first, second, third = engine.requests
    assert len({first.request_id, second.request_id, third.request_id}) == 3
    assert [(hop.num_tokens, hop.ended) for hop in result.hops] == [(3, HopEnd.STALLED), (17, HopEnd.FINISHED)]
    assert second.prompt_ids == (1, 2, *result.token_ids[:3])
    assert len(result.token_ids) == len(result.logprobs) == 20
    assert engine.abort_calls == engine.aborted == [first.request_id]
    assert len(again.hops) == 1


def test_cancelling_a_moved_turn_aborts_each_attempt_once():
    clock = ManualClock()
    stuck, other = late(clock, "a"), late(clock, "b")
    stuck.abort_s = other.abort_s = 0.5
    stuck.stall()

    async def work():
        async with RolloutPool([stuck, other], clock=clock) as pool:
            rollout = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(2.1)
            rollout.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rollout
            await clock.sleep(1.0)
            assert_free(pool, stuck, other)

    run(clock, work)
    assert stuck.abort_calls == stuck.started_ids
    assert other.abort_calls == other.started_ids
    assert (len(stuck.started_ids), len(other.started_ids)) == (1, 1)


def test_an_abort_that_fails_still_frees_the_slot():
    clock = ManualClock()
    engine = late(clock)

    async def broken_abort(request_id):
        message = f"no {request_id}"
        raise OSError(message)

    engine.abort = broken_abort

    async def work():
        async with RolloutPool([engine], clock=clock) as pool:
            rollout = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(0.05)
            rollout.cancel()
            await clock.sleep(0.05)
            assert_free(pool, engine)
            assert engine.aborted == engine.started_ids

    run(clock, work)


def test_an_abort_that_hangs_does_not_keep_a_recovered_engine_from_being_tried():
    clock = ManualClock()
    engine = late(clock)
    engine.stall()

    async def work():
        engine.abort_s = 1e6
        async with RolloutPool([engine], clock=clock, config=PoolConfig(close_timeout_s=0.05)) as pool:
            rollout = asyncio.ensure_future(pool.generate(turn("t", max_tokens=3)))
            await clock.sleep(2.1)
            engine.unstall()
            result = await rollout
            assert clock.now() < 10.0
            return result

    assert [hop.ended for hop in run(clock, work).hops] == [HopEnd.STALLED, HopEnd.FINISHED]


def test_an_abort_that_hangs_does_not_keep_the_pool_from_closing():
    clock = ManualClock()
    engine = late(clock)
    engine.abort_s = 1e9

    async def work():
        async with RolloutPool([engine], clock=clock, config=PoolConfig(close_timeout_s=0.05)) as pool:
            rollout = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(0.05)
            rollout.cancel()

    asyncio.run(asyncio.wait_for(drive(clock, work()), 5))
    assert engine.num_in_flight == 0


async def drive(clock: ManualClock, work) -> None:
    """Move the clock a little, then leave it standing."""
    task = asyncio.ensure_future(work)
    await clock.advance(0.1)
    await task


def test_an_abort_without_an_answer_does_not_keep_the_slot():
    clock = ManualClock()
    engine = late(clock)
    engine.abort_s = 1e6

    async def work():
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=1), reading_timeout_s=0.05)
        async with RolloutPool([engine], clock=clock, config=config) as pool:
            rollout = asyncio.ensure_future(pool.generate(turn("t")))
            await clock.sleep(0.05)
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)
            assert [view.num_in_flight for view in pool.snapshot().engines] == [1]
            while pool._driver._stops:
                await asyncio.sleep(0.01)
            assert_free(pool, engine)
            assert len((await pool.generate(turn("next", max_tokens=3))).token_ids) == 3

    run(clock, work)
