"""What turns may ask of weight versions, barriers, and the statistics of versions and moves."""

from __future__ import annotations

import asyncio

import attrs
import pytest

from rose.errors import DeadlineExceededError, StaleTrajectoryError, TurnFailedError, VersionUnavailableError
from rose.pool import EngineState, EngineStateChanged, PoolConfig, ResumePolicy, RolloutPool, RoutingConfig
from rose.testing import FakeEngine, Fault, FaultKind, ManualClock, fake_update
from rose.types import (
    AtLeast,
    EngineId,
    Exactly,
    FinishReason,
    HopEnd,
    RouteReason,
    Sampling,
    Turn,
    WeightUpdate,
    WeightVersion,
)


def v(n: int) -> WeightVersion:
    return WeightVersion("r", n)


@attrs.define
class Source:
    n: int

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        return None if known == v(self.n) else fake_update(v(self.n))


def turn(name: str = "t", *, max_tokens: int = 4, num_prompt: int = 3, **fields) -> Turn:
    sampling = Sampling(max_tokens=max_tokens)
    return Turn(trajectory_id=name, group_id="g", prompt_ids=(1,) * num_prompt, sampling=sampling, **fields)


def engine(clock: ManualClock, name: str = "a", *faults: Fault, **fields) -> FakeEngine:
    options = {"token_s": 0.01, "weight_version": v(1), **fields}
    return FakeEngine(engine_id=EngineId(name), clock=clock, faults=faults, **options)


def run(clock: ManualClock, work):
    return asyncio.run(clock.run(work()))


class TestWaitOrRefuse:
    def test_a_turn_that_does_not_wait_is_refused_at_once_and_served_after_the_sync(self):
        clock = ManualClock()
        full = engine(clock)

        async def work():
            config = PoolConfig(routing=RoutingConfig(cap_per_engine=1))
            async with RolloutPool([full], clock=clock, config=config) as pool:
                running = asyncio.ensure_future(pool.generate(turn("running")))
                await clock.sleep(0.005)
                for versions in (AtLeast(2), Exactly(2)):
                    with pytest.raises(VersionUnavailableError, match="pool is at r:1; ask again") as caught:
                        await pool.generate(turn(versions=versions, waits_for_version=False))
                    assert caught.value.is_retryable
                assert clock.now() == 0.005, "although the engine has no slot"
                await pool.sync_weights(Source(2))
                again = await pool.generate(turn(versions=Exactly(2), waits_for_version=False))
                await running
                return again

        assert [span.version for span in run(clock, work).versions] == [v(2)]
        assert len(full.requests) == 2

    def test_a_turn_that_waits_gets_the_version_when_it_comes(self):
        clock = ManualClock()

        async def work():
            async with RolloutPool([engine(clock)], clock=clock) as pool:
                waiting = asyncio.ensure_future(pool.generate(turn(versions=AtLeast(2))))
                await clock.sleep(5.0)
                assert not waiting.done()
                await pool.sync_weights(Source(2))
                return await waiting

        assert [span.version for span in run(clock, work).versions] == [v(2)]

    def test_a_version_that_is_gone_is_not_worth_asking_again(self):
        clock = ManualClock()

        async def work():
            async with RolloutPool([engine(clock)], clock=clock) as pool:
                for _ in range(2):
                    with pytest.raises(VersionUnavailableError, match="every engine is past") as caught:
                        await pool.generate(turn(versions=Exactly(0)))
                    assert not caught.value.is_retryable

        run(clock, work)

    def test_a_turn_that_lost_its_version_on_the_way_is_refused_with_its_tokens(self):
        clock = ManualClock()
        abrupt = engine(clock)

        async def work():
            async with RolloutPool([abrupt], clock=clock) as pool:
                a_turn = turn(max_tokens=50, versions=Exactly(1), waits_for_version=False)
                running = asyncio.ensure_future(pool.generate(a_turn))
                await clock.sleep(0.055)
                await pool.sync_weights(Source(2))
                with pytest.raises(VersionUnavailableError) as caught:
                    await running
                return caught.value.partial

        partial = run(clock, work)
        assert len(partial.token_ids) == 5
        assert [hop.ended for hop in partial.hops] == [HopEnd.ABORTED]

    def test_a_pinned_turn_does_not_wait_for_a_fenced_engine(self):
        """It would be of the right version, but comes back only with a newer one, which may wait for this turn."""
        clock = ManualClock()
        abrupt, fenced = engine(clock, "a", token_s=1.0), engine(clock, "b")

        async def work():
            config = PoolConfig(resume_after_abort=ResumePolicy.SAME_VERSION)
            async with RolloutPool([abrupt, fenced], clock=clock, config=config) as pool:
                running = asyncio.ensure_future(pool.generate(turn(max_tokens=50)))
                await clock.sleep(1.5)
                fenced.faults = (Fault(kind=FaultKind.FENCE, request_index=0),)
                await pool.sync_weights(Source(2))
                for request in abrupt.requests:
                    await abrupt.abort(request.request_id)
                return await running

        assert run(clock, work).finish_reason is FinishReason.ABORTED


class TestStaleness:
    def test_a_trajectory_may_not_go_on_when_its_oldest_token_is_too_old(self):
        clock = ManualClock()
        only = engine(clock)

        async def work():
            async with RolloutPool([only], clock=clock) as pool:
                await pool.sync_weights(Source(1))
                await pool.generate(turn("old"))
                await pool.sync_weights(Source(2))
                await pool.generate(turn("new", max_staleness=1))
                await pool.generate(turn("old", max_staleness=1))
                await pool.sync_weights(Source(3))
                num_before = len(only.requests)
                with pytest.raises(StaleTrajectoryError, match="the pool is at r:3, 2 ahead of it; drop"):
                    await pool.generate(turn("old", max_staleness=1))
                assert len(only.requests) == num_before, "no engine heard of it"
                await pool.generate(turn("new", max_staleness=1))
                await pool.generate(turn("old"))
                await pool.sync_weights(Source(4))
                with pytest.raises(StaleTrajectoryError):
                    await pool.generate(turn("new", max_staleness=1))

        run(clock, work)

    def test_a_turn_that_grew_stale_in_the_queue_is_not_begun(self):
        clock = ManualClock()
        only = engine(clock)

        async def work():
            config = PoolConfig(routing=RoutingConfig(cap_per_engine=1))
            async with RolloutPool([only], clock=clock, config=config) as pool:
                await pool.sync_weights(Source(1))
                await pool.generate(turn("old"))
                running = asyncio.ensure_future(pool.generate(turn("running", max_tokens=20)))
                await asyncio.sleep(0)
                waiting = asyncio.ensure_future(pool.generate(turn("old", max_staleness=0)))
                await clock.sleep(0.05)
                await pool.sync_weights(Source(2))
                assert not waiting.done()
                await running
                with pytest.raises(StaleTrajectoryError):
                    await waiting
                assert len(only.requests) == 2

        run(clock, work)

    def test_tokens_of_another_run_are_never_fresh(self):
        clock = ManualClock()
        only = engine(clock)

        async def work():
            async with RolloutPool([only], clock=clock) as pool:
                await pool.generate(turn("old"))
                pool._state.engines.acknowledge(pool._state.engines.get(EngineId("a")), WeightVersion("other", 1))
                with pytest.raises(StaleTrajectoryError, match="inf ahead"):
                    await pool.generate(turn("old", max_staleness=100))
                await pool.generate(turn("old"))

        run(clock, work)


class TestBarrier:
    def test_it_waits_for_engines_and_for_turns_with_older_tokens(self):
        clock = ManualClock()
        engines = [engine(clock, "a"), engine(clock, "b", stage_s=1.0)]

        async def work():
            async with RolloutPool(engines, clock=clock) as pool:
                await pool.sync_weights(Source(1))
                await pool.barrier(v(1))
                before = asyncio.ensure_future(pool.generate(turn("before", max_tokens=300)))
                await clock.sleep(0.1)
                passed = asyncio.ensure_future(pool.barrier(v(2)))
                sync = asyncio.ensure_future(pool.sync_weights(Source(2)))
                await clock.sleep(0.5)
                assert not passed.done()
                await sync
                after = asyncio.ensure_future(pool.generate(turn("after", max_tokens=900)))
                await clock.sleep(0.1)
                assert not passed.done(), "a live turn has tokens of the older version"
                await before
                await passed
                assert not after.done(), "turns of the new version do not hold it up"
                assert clock.now() == pytest.approx(3.1, abs=1.1)
                await after
                assert not pool._driver._barriers

        run(clock, work)

    def test_a_turn_on_an_engine_that_fell_behind_holds_it_up_until_it_is_cancelled(self):
        clock = ManualClock()
        faults = [Fault(kind=FaultKind.CORRUPT_UPDATE, request_index=n) for n in range(2)]
        engines = [engine(clock, "a"), engine(clock, "b", *faults, token_s=1.0)]

        async def work():
            async with RolloutPool(engines, clock=clock) as pool:
                turns = [asyncio.ensure_future(pool.generate(turn(name, max_tokens=99))) for name in "xy"]
                await clock.sleep(0.1)
                report = await pool.sync_weights(Source(2))
                assert list(report.errors) == ["b"]
                passed = asyncio.ensure_future(pool.barrier(v(2)))
                await turns[0]
                assert not passed.done(), "y has no token yet, but runs on weights of the older version"
                turns[1].cancel()
                await passed

        run(clock, work)

    def test_it_ends_with_the_pool(self):
        clock = ManualClock()

        async def work():
            async with RolloutPool([engine(clock)], clock=clock) as pool:
                bounds = (None, 100.0)
                waiting = [asyncio.ensure_future(pool.barrier(v(2), timeout_s=bound)) for bound in bounds]
                await clock.sleep(0.1)
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert [str(outcome) for outcome in outcomes] == ["the pool was closed"] * 2
            assert all(isinstance(outcome, TurnFailedError) for outcome in outcomes)
            assert clock.now() == pytest.approx(0.1)

        run(clock, work)

    def test_it_is_bounded_and_names_what_holds_it_up(self):
        clock = ManualClock()

        async def work():
            async with RolloutPool([engine(clock)], clock=clock) as pool:
                with pytest.raises(DeadlineExceededError, match=r"after 3\.0 s: engine a is at r:1"):
                    await pool.barrier(v(2), timeout_s=3.0)
                running = asyncio.ensure_future(pool.generate(turn("slow", max_tokens=900)))
                await clock.sleep(0.1)
                await pool.sync_weights(Source(2))
                with pytest.raises(DeadlineExceededError, match="turn of trajectory 'slow' is not done"):
                    await pool.barrier(v(2), timeout_s=1.0)
                running.cancel()
                with pytest.raises(TypeError, match="version must be of type WeightVersion"):
                    await pool.barrier(2)
                assert not pool._driver._barriers

        run(clock, work)


class TestStatistics:
    def test_tokens_are_counted_by_version_and_by_staleness(self):
        clock = ManualClock()

        async def work():
            async with RolloutPool([engine(clock)], clock=clock) as pool:
                await pool.sync_weights(Source(1))
                await pool.generate(turn("a"))
                mixed = asyncio.ensure_future(pool.generate(turn("b", max_tokens=10)))
                await clock.sleep(0.035)
                await pool.sync_weights(Source(2))
                await mixed
                return pool.statistics()

        statistics = run(clock, work)
        assert statistics.tokens_by_version == {v(1): 7, v(2): 7}
        assert statistics.tokens_by_staleness == {0: 4 + 7, 1: 3}
        assert statistics.oldest_by_staleness == {0: 1, 1: 1}
        assert statistics.finished == {FinishReason.LENGTH: 2}
        assert statistics.num_prompt_tokens == 6

    def test_moves_and_what_they_prefill_again_are_counted_with_their_reason(self):
        clock = ManualClock()
        evicting = engine(clock, "a", Fault(kind=FaultKind.EVICT, after_tokens=2, request_index=1))

        async def work():
            async with RolloutPool([evicting], clock=clock) as pool:
                await pool.generate(turn("t"))
                await pool.add_engine(engine(clock, "b"))
                await pool.generate(turn("t", num_prompt=9))
                with pytest.raises(TurnFailedError, match="closed"):
                    await asyncio.gather(pool.generate(turn("u")), close(pool))
                return pool.statistics()

        async def close(pool):
            pool._state.close(clock.now())
            pool._driver.apply()

        statistics = run(clock, work)
        expected = {RouteReason.DEDICATED: 2, RouteReason.AFFINITY: 1, RouteReason.REROUTED_EVICTED: 1}
        assert statistics.attempts == expected
        assert statistics.moves == {HopEnd.EVICTED: 1}
        assert statistics.reprefilled_tokens == {RouteReason.REROUTED_EVICTED: 9 + 2}
        assert statistics.failed == {"TurnFailedError": 1}

    def test_a_later_turn_elsewhere_prefills_again_what_its_engine_had(self):
        clock = ManualClock()
        first = engine(clock, "a")

        async def work():
            async with RolloutPool([first], clock=clock) as pool:
                await pool.generate(turn("t"))
                await pool.add_engine(engine(clock, "b"))
                await pool.remove_engine(EngineId("a"), "test")
                await pool.generate(turn("t", num_prompt=50))
                return pool.statistics()

        assert run(clock, work).reprefilled_tokens == {RouteReason.DEDICATED: 3 + 4}


class TestRejoin:
    """A lost engine of the job's own that answers again is stale until it has the weights."""

    @staticmethod
    def revive(fake: FakeEngine) -> None:
        fake._lost_because, fake.weight_version = None, None

    def test_an_engine_that_is_back_gets_the_weights_before_any_turn(self):
        clock, events = ManualClock(), []
        engines = [engine(clock, "a"), engine(clock, "b")]

        async def work():
            async with RolloutPool(engines, clock=clock, on_event=events.append) as pool:
                await pool.sync_weights(Source(2))
                engines[1].die()
                await clock.sleep(8.0)
                assert pool.state_of(EngineId("b")) is EngineState.LOST
                self.revive(engines[1])
                await clock.sleep(30.0)
                assert pool.state_of(EngineId("b")) is EngineState.READY
                assert engines[1].weight_version == v(2)
                engines[1].die()
                await clock.sleep(1.0)
                self.revive(engines[1])
                await clock.sleep(6.0)
                assert pool.state_of(EngineId("b")) is EngineState.READY, "as often as it takes"

        run(clock, work)
        ways = [event.new for event in events if isinstance(event, EngineStateChanged) and event.engine_id == "b"]
        back = [EngineState.JOINING, EngineState.STALE, EngineState.UPDATING, EngineState.READY]
        assert ways[-10:] == [EngineState.LOST, *back, EngineState.LOST, *back]

    def test_nobody_is_asked_who_left_was_replaced_or_is_borrowed(self):
        clock = ManualClock()
        engines = {name: engine(clock, name) for name in "abcd"}

        async def work():
            own = [engines[name] for name in ("a", "b", "d")]
            async with RolloutPool(own, borrowed=[engines["c"]], clock=clock) as pool:
                for name in "abc":
                    engines[name].die()
                await clock.sleep(1.0)
                await pool.remove_engine(EngineId("a"), "test")
                replacement = engine(clock, "b", seed=5)
                await pool.add_engine(replacement)
                for name in "abc":
                    self.revive(engines[name])
                await clock.sleep(200.0)
                assert pool.state_of(EngineId("a")) is None
                assert pool._state.engines.get(EngineId("b")).engine is replacement
                assert pool.state_of(EngineId("c")) is EngineState.LOST

        run(clock, work)

    def test_it_can_be_turned_off_and_asks_less_and_less_often(self):
        clock = ManualClock()

        class Counted(FakeEngine):
            num_asked = 0

            async def snapshot(self):
                self.num_asked += 1
                return await super().snapshot()

        lost = [Counted(engine_id=EngineId(name), clock=clock) for name in "ab"]

        async def work(config, fake):
            async with RolloutPool([engine(clock, "x"), fake], clock=clock, config=config) as pool:
                fake.die()
                await clock.sleep(1.0)
                before = fake.num_asked
                await clock.sleep(600.0)
                assert pool.state_of(fake.engine_id) is EngineState.LOST
                return fake.num_asked - before

        asked = run(clock, lambda: work(PoolConfig(rejoin_s=5.0, rejoin_max_s=100.0), lost[0]))
        assert asked == 9  # after 5, 10, 20, 40, 80 and then every 100 s
        assert run(clock, lambda: work(PoolConfig(rejoin_s=None), lost[1])) == 0
