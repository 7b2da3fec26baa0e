"""Weights reach the engines of a pool while turns run."""

from __future__ import annotations

import asyncio

import attrs
import pytest

from rose.errors import EngineLostError, TransportError, TurnFailedError, VersionConflictError
from rose.pool import EngineState, PoolConfig, RolloutPool, SyncReport, WeightsActivated
from rose.testing import FakeEngine, FakeTrainer, Fault, FaultKind, InMemoryTransport, ManualClock, fake_update
from rose.transfer.publisher import Publisher
from rose.types import (
    Activation,
    AtLeast,
    EngineId,
    Exactly,
    HopEnd,
    Sampling,
    Turn,
    VersionSpan,
    WeightUpdate,
    WeightVersion,
)

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")


def v(n: int) -> WeightVersion:
    return WeightVersion("r", n)


@attrs.define
class Source:
    """Publishes one version after the other; remembers from where engines were brought up."""

    n: int = 0
    asked: list[WeightVersion | None] = attrs.field(factory=list)

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        self.asked.append(known)
        return None if known == v(self.n) else fake_update(v(self.n))


def turn(name: str = "t", max_tokens: int = 10, **fields) -> Turn:
    return Turn(trajectory_id=name, group_id="g", prompt_ids=(1, 2), sampling=Sampling(max_tokens=max_tokens), **fields)


def engine(clock: ManualClock, name: str, *faults: Fault, **fields) -> FakeEngine:
    return FakeEngine(**{"engine_id": EngineId(name), "clock": clock, "token_s": 0.1, "faults": faults, **fields})


def run(clock: ManualClock, work):
    return asyncio.run(clock.run(work()))


def states(pool: RolloutPool) -> dict[str, EngineState]:
    return {view.engine_id: view.state for view in pool.snapshot().engines}


def test_a_sync_brings_all_engines_to_the_new_version():
    clock, events, source = ManualClock(), [], Source()
    engines = [engine(clock, "a", stage_s=1.0, activate_s=0.2), engine(clock, "b", stage_s=3.0, activate_s=0.2)]

    async def work():
        async with RolloutPool(engines, clock=clock, on_event=events.append) as pool:
            report = await pool.sync_weights(source)
            assert clock.now() == pytest.approx(3.2)
            assert pool.snapshot().version == v(0)
            assert states(pool) == {"a": EngineState.READY, "b": EngineState.READY}
            again = await pool.sync_weights(source)
            return report, again

    report, again = run(clock, work)
    assert {engine_id: done.version for engine_id, done in report.activations.items()} == {"a": v(0), "b": v(0)}
    assert (report.errors, report.unchanged) == ({}, ())
    assert again == SyncReport(activations={}, unchanged=(A, B), errors={})
    assert source.asked == [None, None, v(0), v(0)]
    assert [event.engine_id for event in events if isinstance(event, WeightsActivated)] == ["a", "b"]


def test_turns_go_on_across_an_activation_and_tell_which_token_is_of_which_version():
    clock, source = ManualClock(), Source(n=1)
    only = engine(clock, "a", weight_version=v(0), stage_s=0.35, activate_s=5.0)

    async def work():
        async with RolloutPool([only], clock=clock) as pool:
            running = asyncio.ensure_future(pool.generate(turn()))
            await clock.sleep(0)
            await pool.sync_weights(source)
            return await running

    result = run(clock, work)
    assert len(result.hops) == 1, "five seconds of pause for an update are no stall"
    assert result.versions == (VersionSpan(version=v(0), start=0, end=3), VersionSpan(version=v(1), start=3, end=10))


def test_the_time_of_an_update_is_not_counted_as_a_stall():
    clock, source = ManualClock(), Source(n=1)
    slow = engine(clock, "a", Fault(kind=FaultKind.STALL, after_tokens=3, duration_s=2.6), activate_s=1.5)

    async def work():
        async with RolloutPool([slow], clock=clock) as pool:
            running = asyncio.ensure_future(pool.generate(turn()))
            await clock.sleep(0.35)
            await pool.sync_weights(source)
            return await running

    assert len(run(clock, work).hops) == 1, "2.6 s without a token, 1.5 s of them for the update"


def test_no_new_turn_is_sent_to_an_engine_that_is_activating():
    clock, source = ManualClock(), Source(n=1)
    only = engine(clock, "a", weight_version=v(0), activate_s=1.0)

    async def work():
        async with RolloutPool([only], clock=clock) as pool:
            sync = asyncio.ensure_future(pool.sync_weights(source))
            await clock.sleep(0.5)
            assert states(pool) == {"a": EngineState.UPDATING}
            waiting = asyncio.ensure_future(pool.generate(turn(max_tokens=1)))
            await clock.sleep(0.25)
            assert only.requests == []
            await asyncio.gather(sync, waiting)
            assert clock.now() == pytest.approx(1.1)

    run(clock, work)


def test_a_turn_for_the_next_version_waits_for_it():
    clock, source = ManualClock(), Source(n=1)
    only = engine(clock, "a", weight_version=v(0))

    async def work():
        async with RolloutPool([only], clock=clock) as pool:
            waiting = asyncio.ensure_future(pool.generate(turn(versions=AtLeast(1))))
            await clock.sleep(1.0)
            assert only.requests == []
            await pool.sync_weights(source)
            return await waiting

    assert run(clock, work).versions == (VersionSpan(version=v(1), start=0, end=10),)


def test_a_turn_that_may_not_run_on_the_new_version_is_moved_before_the_activation():
    clock, source = ManualClock(), Source(n=1)
    updated = engine(clock, "a", weight_version=v(0))
    slow = engine(clock, "b", Fault(kind=FaultKind.CORRUPT_UPDATE), weight_version=v(0))

    async def work():
        async with RolloutPool([updated, slow], clock=clock) as pool:
            exact = asyncio.ensure_future(pool.generate(turn(versions=Exactly(0))))
            await clock.sleep(0.35)
            await pool.sync_weights(source)
            assert (updated.num_in_flight, len(updated.aborted)) == (0, 1)
            with pytest.raises(DeadlineReachedError):
                await finish_by(clock, exact, 1.0)
            assert states(pool) == {"a": EngineState.READY, "b": EngineState.STALE}
            exact.cancel()

    run(clock, work)


class DeadlineReachedError(Exception):
    """The work was not done in time."""


async def finish_by(clock: ManualClock, work, timeout_s: float):
    timer = asyncio.ensure_future(clock.sleep(timeout_s))
    await asyncio.wait({work, timer}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        raise DeadlineReachedError
    timer.cancel()
    return work.result()


def test_an_exact_turn_fails_once_every_engine_has_moved_on():
    clock, source = ManualClock(), Source(n=1)
    only = engine(clock, "a", weight_version=v(0))

    async def work():
        async with RolloutPool([only], clock=clock) as pool:
            exact = asyncio.ensure_future(pool.generate(turn(versions=Exactly(0))))
            await clock.sleep(0.35)
            await pool.sync_weights(source)
            with pytest.raises(TurnFailedError, match="every engine is past") as caught:
                await exact
            return caught.value.hops

    assert [(hop.num_tokens, hop.ended) for hop in run(clock, work)] == [(3, HopEnd.ABORTED)]


def test_an_engine_that_cannot_stage_is_left_out_and_its_turns_go_on():
    clock, source = ManualClock(), Source(n=1)
    engines = [engine(clock, "a", weight_version=v(0)), engine(clock, "b", weight_version=v(0))]
    engines[1].faults = tuple(Fault(kind=FaultKind.CORRUPT_UPDATE, request_index=i) for i in range(2))

    async def work():
        async with RolloutPool(engines, clock=clock) as pool:
            running = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(2)]
            await clock.sleep(0.35)
            report = await pool.sync_weights(source)
            assert states(pool) == {"a": EngineState.READY, "b": EngineState.STALE}
            assert source.asked[-1] is None
            results = await asyncio.gather(*running)
            source.n = 2
            await pool.sync_weights(source)
            assert states(pool) == {"a": EngineState.READY, "b": EngineState.READY}
            return report, results

    report, results = run(clock, work)
    assert (list(report.activations), list(report.errors)) == (["a"], ["b"])
    assert all(len(result.hops) == 1 for result in results)
    assert source.asked[-2:] == [v(1), v(0)]


def test_an_engine_whose_changes_are_damaged_gets_full_weights_at_once():
    clock, source = ManualClock(), Source(n=1)
    engines = [engine(clock, "a", weight_version=v(0))]
    engines[0].faults = (Fault(kind=FaultKind.CORRUPT_UPDATE, request_index=0),)

    async def work():
        async with RolloutPool(engines, clock=clock) as pool:
            report = await pool.sync_weights(source)
            return report, states(pool)

    report, found = run(clock, work)
    assert (list(report.activations), dict(report.errors), found) == (["a"], {}, {"a": EngineState.READY})
    assert source.asked == [v(0), None]


def test_an_outage_of_the_relay_leaves_the_engines_as_they_are():
    clock, source = ManualClock(), Source()

    class Unreachable:
        async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
            message = f"no relay for {known}"
            raise TransportError(message)

    async def work():
        async with RolloutPool([engine(clock, "a"), engine(clock, "b")], clock=clock) as pool:
            await pool.sync_weights(source)
            report = await pool.sync_weights(Unreachable())
            assert {name: type(error) for name, error in report.errors.items()} == {
                A: TransportError,
                B: TransportError,
            }
            assert states(pool) == {A: EngineState.READY, B: EngineState.READY}
            await pool.generate(turn(versions=Exactly(0)))

    run(clock, work)


def test_an_engine_that_fails_to_activate_is_fenced_until_it_gets_full_weights():
    clock, source = ManualClock(), Source(n=1)
    engines = [engine(clock, "a", weight_version=v(0)), engine(clock, "b", weight_version=v(0))]
    engines[1].faults = (Fault(kind=FaultKind.FENCE, request_index=0),)

    async def work():
        async with RolloutPool(engines, clock=clock) as pool:
            running = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(2)]
            await clock.sleep(0.35)
            report = await pool.sync_weights(source)
            assert states(pool) == {"a": EngineState.READY, "b": EngineState.FENCED}
            moved = await running[1]
            assert [hop.engine_id for hop in moved.hops] == ["b", "a"]
            await running[0]
            await pool.sync_weights(source)
            assert states(pool) == {"a": EngineState.READY, "b": EngineState.READY}
            return report

    report = run(clock, work)
    assert list(report.errors) == ["b"]
    assert source.asked[-2:] == [v(1), None]
    assert engines[1].weight_version == v(1)


def test_an_engine_lost_in_the_middle_of_a_sync_does_not_stop_the_others():
    clock, source = ManualClock(), Source(n=1)
    dies_staging = engine(clock, "a", Fault(kind=FaultKind.DIE, at_s=0.5), stage_s=1.0)
    dies_activating = engine(clock, "b", Fault(kind=FaultKind.DIE, at_s=1.5), stage_s=1.0, activate_s=1.0)
    lives = engine(clock, "c", stage_s=1.0, activate_s=1.0)

    async def work():
        async with RolloutPool([dies_staging, dies_activating, lives], clock=clock) as pool:
            report = await pool.sync_weights(source)
            assert states(pool) == {"a": EngineState.LOST, "b": EngineState.LOST, "c": EngineState.READY}
            return report

    report = run(clock, work)
    assert list(report.activations) == ["c"]
    assert all(isinstance(error, EngineLostError) for error in report.errors.values())


def test_an_engine_that_refuses_the_base_is_brought_up_from_nothing():
    clock, source = ManualClock(), Source(n=2)
    picky = Picky(engine_id=A, clock=clock, weight_version=v(1))

    async def work():
        async with RolloutPool([picky], clock=clock) as pool:
            return await pool.sync_weights(source)

    report = run(clock, work)
    assert report.errors == {}
    assert source.asked == [v(1), None]
    assert picky.num_stage_calls == 2


def test_an_acknowledgement_of_another_version_fences():
    clock, source = ManualClock(), Source(n=2)
    liar = Liar(engine_id=A, clock=clock)

    async def work():
        async with RolloutPool([liar], clock=clock) as pool:
            report = await pool.sync_weights(source)
            assert states(pool) == {"a": EngineState.FENCED}
            return report

    assert "acknowledged r:7 instead of r:2" in str(run(clock, work).errors[A])


def test_staging_and_activating_are_bounded():
    clock, source = ManualClock(), Source(n=1)
    engines = [engine(clock, "a", stage_s=100.0), engine(clock, "b", activate_s=100.0), engine(clock, "c")]

    async def work():
        config = PoolConfig(stage_timeout_s=10.0, activate_timeout_s=20.0)
        async with RolloutPool(engines, clock=clock, config=config) as pool:
            report = await pool.sync_weights(source)
            assert clock.now() == pytest.approx(30.0)
            assert states(pool) == {"a": EngineState.STALE, "b": EngineState.FENCED, "c": EngineState.READY}
            return report

    report = run(clock, work)
    assert "staging r:1 on engine 'a' was not done after 10.0 s" in str(report.errors[A])
    assert "activating r:1 on engine 'b' was not done after 20.0 s" in str(report.errors[B])


def test_a_source_that_does_not_answer_is_left_and_does_not_hold_up_the_next_sync():
    clock = ManualClock()

    class Silent(Source):
        async def plan(self, known):
            await asyncio.Event().wait()

    class Deaf(Source):
        async def acknowledge(self, acks):
            await asyncio.Event().wait()

    async def work():
        config = PoolConfig(stage_timeout_s=0.05)
        async with RolloutPool([engine(clock, "a"), engine(clock, "b")], clock=clock, config=config) as pool:
            report = await pool.sync_weights(Silent())
            assert set(states(pool).values()) == {EngineState.READY}
            again = await pool.sync_weights(Deaf())
            assert (await pool.sync_weights(Source())).unchanged == (A, B)
            return report, again

    report, again = run(clock, work)
    assert set(report.errors) == {A, B}
    assert all(isinstance(error, TransportError) for error in report.errors.values())
    assert all("planning an update was not done after 0.05 s" in str(error) for error in report.errors.values())
    assert set(again.activations) == {A, B}


def test_a_cancelled_sync_leaves_no_engine_in_updating():
    clock, source = ManualClock(), Source(n=1)
    only = engine(clock, "a", activate_s=1.0)

    async def work():
        async with RolloutPool([only], clock=clock) as pool:
            sync = asyncio.ensure_future(pool.sync_weights(source))
            await clock.sleep(0.5)
            sync.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sync
            assert states(pool) == {"a": EngineState.FENCED}
            await pool.sync_weights(source)
            assert states(pool) == {"a": EngineState.READY}

    run(clock, work)


def test_an_engine_that_joins_after_a_sync_is_stale_until_it_caught_up():
    clock, source = ManualClock(), Source(n=3)
    late = engine(clock, "b", stage_s=2.0, weight_version=v(1))
    same = engine(clock, "c", stage_s=2.0, weight_version=v(3))

    async def work():
        async with RolloutPool([engine(clock, "a")], clock=clock) as pool:
            await pool.sync_weights(source)
            assert await pool.add_engine(late) is EngineState.STALE
            await clock.sleep(1.0)
            assert (await pool.generate(turn("t", max_tokens=1))).hops[0].engine_id == "a"
            await clock.sleep(2.0)
            assert states(pool) == {"a": EngineState.READY, "b": EngineState.READY}
            assert await pool.add_engine(same) is EngineState.STALE
            await clock.sleep(3.0)
            assert states(pool)["c"] is EngineState.READY

    run(clock, work)
    assert source.asked == [None, v(1), v(3), None]
    assert (late.weight_version, len(same.updates)) == (v(3), 1)


def test_a_new_run_replaces_the_old_one():
    clock = ManualClock()
    only = engine(clock, "a", weight_version=WeightVersion("old", 9))

    async def work():
        async with RolloutPool([only], clock=clock) as pool:
            assert len((await pool.generate(turn("t", versions=AtLeast(5)))).hops) == 1
            await pool.sync_weights(Source(n=0))
            assert pool.snapshot().version == v(0)
            assert len((await pool.generate(turn("t", versions=Exactly(0)))).hops) == 1

    run(clock, work)


async def test_a_transport_is_a_source():
    """What a publisher put into a transport reaches the engines, planned from the version each one holds."""
    transport = InMemoryTransport()
    trainer = FakeTrainer()
    publisher = Publisher(trainer=trainer, transport=transport, run="r")
    only = FakeEngine(engine_id=A)
    async with RolloutPool([only]) as pool:
        assert await pool.sync_weights(transport) == SyncReport(activations={}, unchanged=(A,), errors={})
        for n in range(2):
            await publisher.publish()
            report = await pool.sync_weights(transport)
            assert report.activations[A].version == pool.snapshot().version == v(n)
    assert [len(update.manifest_keys) for update in only.updates] == [1, 1]


class Picky(FakeEngine):
    """Holds other weights than it said."""

    num_stage_calls = 0

    async def stage(self, update):
        self.num_stage_calls += 1
        if self.num_stage_calls == 1:
            message = "the update does not start from what I hold"
            raise VersionConflictError(message)
        await super().stage(update)


class Liar(FakeEngine):
    """Acknowledges what nobody sent."""

    async def activate(self):
        return Activation(version=v(7), stage_s=0.0, pause_s=0.0, fetched_bytes=0, is_verified=True)
