"""Borrowed engines are in the pool exactly as long as their leases last."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

from rose.coserving.ledger import Ledger
from rose.coserving.lender import Lender
from rose.policies.lending import LendingConfig
from rose.pool import Borrower, EngineState, PoolConfig, RolloutPool, borrowing
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
    return Lender(ledgers, clock, LendingConfig(ttl_s=TTL_S))


def borrower(lender: Lender, pool: RolloutPool, engines: Mapping[DeviceId, FakeEngine], clock: ManualClock) -> Borrower:
    return Borrower(lender, pool, engines, job=JobId("job"), clock=clock)


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
            await clock.sleep(2 * TTL_S)
            assert leased(lender) == {D1}, "nothing is renewed or borrowed again that the lender ended"
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
            await clock.sleep(TTL_S)
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
