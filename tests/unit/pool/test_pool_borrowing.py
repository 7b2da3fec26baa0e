"""Devices that are not the borrower's: others' leases, missing engines, a beginning that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import pytest

from rose.coserving.ledger import IDLE_SERVING, Ledger
from rose.coserving.lender import Lender
from rose.policies.lending import LendingConfig
from rose.pool import Borrower, EngineState, RolloutPool
from rose.testing import FakeEngine, ManualClock
from rose.types import DeviceId, EngineId, JobId

JOB = JobId("job")
TTL_S = 10.0


@attrs.define
class Site:
    """Three lent devices, idlest first, and the job's engines on them."""

    clock: ManualClock
    lender: Lender
    engines: dict[DeviceId, FakeEngine]

    def borrower(self, pool: RolloutPool, *devices: str) -> Borrower:
        chosen = {device: engine for device, engine in self.engines.items() if not devices or device in devices}
        return Borrower(self.lender, pool, chosen, job=JOB, clock=self.clock, demand=None)

    def lent(self) -> set[str]:
        return {lease.device_id for lease in self.lender.leases}

    def run(self, work):
        return asyncio.run(self.clock.run(work))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    clock = ManualClock()
    ledgers = {}
    for name, used in (("d0", 0.1), ("d1", 0.2), ("d2", 0.3)):
        ledger = ledgers[DeviceId(name)] = Ledger.create(tmp_path / name)
        ledger.publish_serving(attrs.evolve(IDLE_SERVING, kv_used_bytes=used, kv_pool_bytes=1.0))
        ledger.beat(0.0)
    engines = {name: FakeEngine(engine_id=EngineId(f"on-{name}"), clock=clock, token_s=0.1) for name in ledgers}
    return Site(clock, Lender(ledgers, clock, LendingConfig(ttl_s=TTL_S, rest_s=0.0)), engines)


def states(pool: RolloutPool) -> dict[str, EngineState]:
    return {view.engine_id: view.state for view in pool.snapshot().engines}


def test_only_devices_where_the_job_has_an_engine_are_borrowed(site):
    async def work():
        async with RolloutPool(clock=site.clock) as pool, site.borrower(pool, "d0", "d2"):
            assert site.lent() == {"d0", "d2"}
            assert set(states(pool)) == {"on-d0", "on-d2"}

    site.run(work())


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_beginning_that_fails_leaves_no_lease_and_no_engine(site, is_cancelled):
    """The second engine never answers and the caller gives up, or its id is taken."""

    async def never():
        await asyncio.Event().wait()

    async def begin(pool):
        async with site.borrower(pool):
            pytest.fail("it has not begun")

    async def work():
        async with RolloutPool(clock=site.clock) as pool:
            if is_cancelled:
                site.engines[DeviceId("d1")].snapshot = never
            else:
                site.engines[DeviceId("d1")].engine_id = EngineId("own")
                await pool.add_engine(FakeEngine(engine_id=EngineId("own"), clock=site.clock))
            beginning = asyncio.ensure_future(begin(pool))
            await site.clock.sleep(1.0)
            if is_cancelled:
                assert site.lent() == {"d0", "d1", "d2"}
                beginning.cancel()
            with pytest.raises(asyncio.CancelledError if is_cancelled else ValueError):
                await beginning
            assert site.lent() == set()
            ready = {name for name, state in states(pool).items() if state is EngineState.READY}
            assert ready == (set() if is_cancelled else {"own"})
            assert site.lender._listeners == []

    site.run(work())


def test_a_device_that_went_to_another_job_is_left_alone(site):
    """The lease was revoked and granted again before the borrower heard of it."""

    async def work():
        async with RolloutPool(clock=site.clock) as pool:
            async with site.borrower(pool, "d0"):
                site.lender.revoke(DeviceId("d0"))
                site.lender.grant(JobId("other"), 1)
            assert [(lease.job, lease.device_id) for lease in site.lender.leases] == [("other", "d0")]

    site.run(work())
