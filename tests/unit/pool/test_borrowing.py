"""Borrowed engines are in the pool exactly as long as their leases last."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

from rose.coserving.ledger import Ledger
from rose.coserving.lender import LeaseChange, Lender
from rose.errors import TransportError
from rose.policies.lending import LendingConfig
from rose.pool import Borrower, EngineState, PoolConfig, RolloutPool, borrowing
from rose.pool.lease_source import LocalLender
from rose.testing import FakeEngine, ManualClock
from rose.types import DeviceId, EngineId, EngineKind, HopEnd, JobId, RequestId, Sampling, Turn

TTL_S = 30.0
D0, D1 = DeviceId("d0"), DeviceId("d1")


def turn(name: str) -> Turn:
    return Turn(trajectory_id=name, group_id="g", prompt_ids=(1, 2), sampling=Sampling(max_tokens=10))


def engine(clock: ManualClock, name: str) -> FakeEngine:
    return FakeEngine(engine_id=EngineId(name), clock=clock, token_s=0.1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def engines(clock: ManualClock) -> dict[DeviceId, FakeEngine]:
    return {D0: engine(clock, "b0"), D1: engine(clock, "b1")}


@pytest.fixture
def lender(tmp_path: Path, clock: ManualClock, engines: Mapping[DeviceId, FakeEngine]) -> Lender:
    ledgers = {device: Ledger.create(tmp_path / device) for device in engines}
    for ledger in ledgers.values():
        ledger.beat(0.0)
    return Lender(ledgers, clock, LendingConfig(ttl_s=TTL_S, stale_after_s=1e9))


def borrower(lender: Lender, pool: RolloutPool, engines: Mapping[DeviceId, FakeEngine], clock: ManualClock) -> Borrower:
    return Borrower(lender, pool, engines, job=JobId("job"), clock=clock, demand=None)


def borrowed(pool: RolloutPool) -> dict[str, EngineState]:
    return {view.engine_id: view.state for view in pool.snapshot().engines if view.kind is EngineKind.BORROWED}


def leased(lender: Lender) -> set[DeviceId]:
    return {lease.device_id for lease in lender.leases}


def test_devices_are_borrowed_renewed_and_given_back(clock, engines, lender):
    async def work():
        async with RolloutPool([engine(clock, "own")], clock=clock) as pool:
            async with borrower(lender, pool, engines, clock):
                assert borrowed(pool) == {"b0": EngineState.READY, "b1": EngineState.READY}
                await clock.sleep(10 * TTL_S)
                assert leased(lender) == {D0, D1}
                assert all(lease.expires_s > clock.now() for lease in lender.leases)
            assert borrowed(pool) == {}
            assert lender.leases == ()

    asyncio.run(clock.run(work()))


def test_a_revoked_device_leaves_and_its_turns_go_on_elsewhere(clock, engines, lender):
    async def work():
        async with RolloutPool([engine(clock, "own")], clock=clock) as pool, borrower(lender, pool, engines, clock):
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(40)]
            await clock.sleep(0.35)
            assert engines[D0].num_in_flight
            lender.revoke(D0)
            results = await asyncio.gather(*turns)
            assert borrowed(pool) == {"b1": EngineState.READY}
            assert leased(lender) == {D1}
            await clock.sleep(0.9 * TTL_S)
            assert leased(lender) == {D1}, "nothing is renewed that the lender ended, and the device rests"
            return results

    results = asyncio.run(clock.run(work()))
    moved = [result for result in results if len(result.hops) > 1]
    assert moved
    for result in moved:
        assert (result.hops[0].engine_id, result.hops[0].ended) == ("b0", HopEnd.ABORTED)
    assert all(len(result.token_ids) == 10 for result in results)


@attrs.define(eq=False, kw_only=True, slots=False)
class DeafEngine(FakeEngine):
    """Never acknowledges an abort."""

    async def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        await asyncio.Event().wait()


def test_revoking_all_takes_every_engine_out_at_once(clock, engines, lender):
    """One engine that does not acknowledge its aborts must not keep turns coming to the others."""
    engines[D0] = DeafEngine(engine_id=EngineId("b0"), clock=clock, token_s=0.1)

    async def work():
        config = PoolConfig(close_timeout_s=0.01)
        async with RolloutPool(clock=clock, config=config) as pool, borrower(lender, pool, engines, clock):
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(2)]
            await clock.sleep(0.15)
            lender.stop()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert borrowed(pool) == {}
            for task in turns:
                task.cancel()

    asyncio.run(clock.run(work()))


def test_a_device_whose_engine_does_not_answer_is_given_back_at_once(clock, engines, lender):
    engines[D0].die()

    async def work():
        async with RolloutPool(clock=clock) as pool, borrower(lender, pool, engines, clock):
            assert leased(lender) == {D1}

    asyncio.run(clock.run(work()))


def test_the_device_of_an_engine_that_is_lost_later_is_given_back(clock, engines, lender):
    async def work():
        async with RolloutPool([engine(clock, "own")], clock=clock) as pool, borrower(lender, pool, engines, clock):
            engines[D0].die()
            await clock.sleep(TTL_S + 1.0)
            assert leased(lender) == {D1}
            assert borrowed(pool) == {"b1": EngineState.READY}

    asyncio.run(clock.run(work()))


def test_leaving_ends_although_the_clock_stands_still(clock, engines, lender, monkeypatch):
    """A job that is interrupted leaves with a frozen clock; an engine that acknowledges nothing does not hold it up."""
    monkeypatch.setattr(borrowing, "_REMOVE_TIMEOUT_S", 0.05)
    engines[D0] = DeafEngine(engine_id=EngineId("b0"), clock=clock, token_s=0.1)

    async def work():
        async with RolloutPool(clock=clock, config=PoolConfig(close_timeout_s=0.05)) as pool:
            async with borrower(lender, pool, engines, clock):
                turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(2)]
                await asyncio.sleep(0.02)
                assert engines[D0].num_in_flight
            assert lender.leases == ()
            for task in turns:
                task.cancel()

    async def bounded():
        async with asyncio.timeout(5):
            await work()

    asyncio.run(bounded())


def test_what_was_not_granted_is_asked_for_again(clock, engines, lender):
    async def work():
        async with RolloutPool(clock=clock) as pool:
            (other,) = lender.grant(JobId("other"), 1)
            async with borrower(lender, pool, engines, clock):
                pass
            assert lender.grant(JobId("third"), 9), "nothing is kept for a job that left"
            lender.release([lease.lease_id for lease in lender.leases if lease.job == "third"])
            lender.grant(JobId("third"), 0)
            async with borrower(lender, pool, engines, clock):
                assert leased(lender) == {D0, D1}
                assert borrowed(pool) == {"b1": EngineState.READY}
                lender.release([other.lease_id])
                await clock.sleep(10.5)
                assert borrowed(pool) == {"b0": EngineState.READY, "b1": EngineState.READY}
                lender.revoke(D1)
                await clock.sleep(1.0)
                assert borrowed(pool) == {"b0": EngineState.READY}
                await clock.sleep(40.0)
                assert borrowed(pool) == {"b0": EngineState.READY, "b1": EngineState.READY}, "after its rest"

    asyncio.run(clock.run(work()))


def test_a_device_that_is_asked_back_finishes_its_turns_and_is_given_back_early(clock, engines, lender):
    async def work():
        async with RolloutPool([engine(clock, "own")], clock=clock) as pool, borrower(lender, pool, engines, clock):
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(40)]
            await clock.sleep(0.35)
            assert engines[D0].num_in_flight
            lender.revoke(D0, grace_s=8.0)
            results = await asyncio.gather(*turns)
            assert all(len(result.hops) == 1 for result in results), "nothing was cut short"
            await clock.sleep(0.1)
            assert leased(lender) == {D1}, "before the grace was over"
            assert borrowed(pool) == {"b1": EngineState.READY}

    asyncio.run(clock.run(work()))


def test_turns_that_outlast_the_grace_go_on_elsewhere(clock, engines, lender):
    async def work():
        async with RolloutPool([engine(clock, "own")], clock=clock) as pool, borrower(lender, pool, engines, clock):
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(40)]
            await clock.sleep(0.35)
            lender.revoke(D0, grace_s=0.3)
            results = await asyncio.gather(*turns)
            moved = [result.hops[0] for result in results if len(result.hops) > 1]
            assert {(hop.engine_id, hop.ended) for hop in moved} == {("b0", HopEnd.ABORTED)}
            assert leased(lender) == {D1}

    asyncio.run(clock.run(work()))


@attrs.define(eq=False, kw_only=True, slots=False)
class FencedEngine(FakeEngine):
    """Shows a fencing token."""

    tokens: list[tuple[int, ...]] = attrs.field(factory=list)

    def set_lease(self, *fencing_tokens: int) -> None:
        self.tokens.append(fencing_tokens)


def test_an_engine_is_given_its_token_and_loses_it_with_the_lease(clock, engines, lender):
    fenced = engines[D0] = FencedEngine(engine_id=EngineId("b0"), clock=clock)

    async def work():
        async with RolloutPool(clock=clock) as pool, borrower(lender, pool, engines, clock):
            (lease,) = [lease for lease in lender.leases if lease.device_id == D0]
            assert fenced.tokens == [(lease.fencing_token,)]
            lender.revoke(D0)
            await clock.sleep(0.1)
            assert fenced.tokens[1:] == [()]
            await clock.sleep(40.0)
            assert fenced.tokens[2][0] > lease.fencing_token

    asyncio.run(clock.run(work()))


class AwayLender(LocalLender):
    """A lender that cannot be reached now and then."""

    is_away = False

    async def ask(self, *args, **options):
        return await self.answer(super().ask(*args, **options))

    async def renew(self, *args):
        return await self.answer(super().renew(*args))

    async def changed(self, *args):
        return await self.answer(super().changed(*args))

    async def answer(self, work):
        if self.is_away:
            work.close()
            message = "connection refused"
            raise TransportError(message)
        return await work


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_an_engine_that_does_not_answer_for_long_is_warned_of_once(clock, engines, lender, caplog):
    engines[D0].die()

    async def work():
        async with RolloutPool(clock=clock) as pool, borrower(lender, pool, engines, clock):
            await clock.sleep(20 * TTL_S)

    with caplog.at_level(logging.INFO, logger="rose.pool.borrowing"):
        asyncio.run(clock.run(work()))
    assert len([entry for entry in caplog.records if "d0 is given back" in entry.getMessage()]) > 3
    assert len(warnings_of(caplog)) == 1


def test_a_lender_that_is_away_for_long_is_warned_of_once_each_time(clock, engines, lender, caplog):
    away = AwayLender(lender)

    async def work():
        async with RolloutPool(clock=clock) as pool, borrower(away, pool, engines, clock):
            for _ in range(2):
                away.is_away = True
                await clock.sleep(0.9 * TTL_S)
                away.is_away = False
                await clock.sleep(TTL_S)

    with caplog.at_level(logging.INFO, logger="rose.pool.borrowing"):
        asyncio.run(clock.run(work()))
    renewals = [said for said in warnings_of(caplog) if "cannot renew leases now: connection refused" in said]
    assert len(renewals) == 2


def test_leases_last_as_long_as_they_last_while_the_lender_is_away(clock, engines, lender):
    away = AwayLender(lender)

    async def work():
        async with RolloutPool(clock=clock) as pool, borrower(away, pool, engines, clock):
            away.is_away = True
            await clock.sleep(0.9 * TTL_S)
            assert set(borrowed(pool)) == {"b0", "b1"}
            await clock.sleep(0.2 * TTL_S)
            assert borrowed(pool) == {}, "by the borrower's own clock: nobody said so"
            away.is_away = False
            for device in (D0, D1):
                lender._devices[device].ledger.beat(clock.now())
            await clock.sleep(11.0)
            assert set(borrowed(pool)) == {"b0", "b1"}

    asyncio.run(clock.run(work()))


def test_a_dead_engines_device_is_asked_for_later_and_later(clock, engines, lender):
    granted = []
    lender.subscribe(lambda event: granted.append(clock.now()) if event.change is LeaseChange.GRANTED else None)
    engines[D0].die()

    async def work():
        async with RolloutPool(clock=clock) as pool, borrower(lender, pool, engines, clock):
            await clock.sleep(200.0)
            assert len(granted) <= 7
            await clock.sleep(3600.0)

    asyncio.run(clock.run(work()))
    waits = [after - before for before, after in itertools.pairwise(granted[1:])]
    assert waits == sorted(waits)
    assert waits[-1] <= 90.0, "an engine that comes back is borrowed soon, however long it was away"


def test_an_engine_over_two_devices_is_borrowed_whole_and_leaves_with_either(clock, engines, lender):
    both = FencedEngine(engine_id=EngineId("tp2"), clock=clock)

    async def work():
        (other,) = lender.grant(JobId("other"), 1)
        assert other.device_id == D0
        async with RolloutPool(clock=clock) as pool, borrower(lender, pool, {(D1, D0): both}, clock):
            assert leased(lender) == {D0}, "half of it is of no use"
            lender.release([other.lease_id])
            await clock.sleep(10.5)
            tokens = {lease.device_id: lease.fencing_token for lease in lender.leases}
            assert borrowed(pool) == {"tp2": EngineState.READY}
            assert both.tokens == [(tokens[D1], tokens[D0])]
            await clock.sleep(2 * TTL_S)
            assert leased(lender) == {D0, D1}, "both are renewed"
            lender.revoke(D0)
            await clock.sleep(0.1)
            assert (borrowed(pool), leased(lender)) == ({}, set())
        assert both.tokens[-1] == ()

    asyncio.run(clock.run(work()))
