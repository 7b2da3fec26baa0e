"""However a job asks and whatever is lost on the way, it never holds more leases than it may: by the lender's own audit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.coserving.lease_sqlite import AuditReader, SqliteStore
from rose.coserving.ledger import Ledger
from rose.coserving.lender import Lender
from rose.coserving.lender_audit import check_audit
from rose.errors import TransportError
from rose.hosts.job.capped import CappedLender
from rose.policies.lending import Ask, Lease, LendingConfig
from rose.pool import Borrower, RolloutPool
from rose.pool.borrowing import LocalLender
from rose.testing import FakeEngine, ManualClock
from rose.types import DeviceId, EngineId, JobId

JOB = JobId("job")
NAMES = [DeviceId(f"d{i}") for i in range(6)]
TTL_S = 30.0


class Site:
    """Six devices, a lender with an audit, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.path = folder / "state"
        ledgers = {name: Ledger.create(folder / name) for name in NAMES}
        for ledger in ledgers.values():
            ledger.beat(0.0)
        self.store = SqliteStore(self.path, boot_id="b")
        config = LendingConfig(ttl_s=TTL_S, stale_after_s=1e9, rest_s=0.0, min_hold_s=0.0)
        self.lender = Lender(ledgers, self.clock, config, store=self.store)

    def most_held(self) -> int:
        """Return the most leases at a time, as the audit has them."""
        self.store.close()
        with AuditReader(self.path) as reader:
            entries = list(reader.entries())
        assert check_audit(entries) == []
        held: set[str] = set()
        most = 0
        for entry in entries:
            if entry.change == "granted":
                held.add(entry.device_id)
            elif entry.change in {"released", "revoked", "expired"}:
                held.discard(entry.device_id)
            most = max(most, len(held))
        return most


class Lossy(LocalLender):
    """Answers get lost on the way back, after the lender did what was asked."""

    def __init__(self, lender: Lender, rng: random.Random, *, loss: float) -> None:
        super().__init__(lender)
        self.rng, self.loss = rng, loss

    async def ask(self, *args, **options) -> Sequence[Lease]:
        return self._maybe(await super().ask(*args, **options))

    async def renew(self, *args, **options) -> Sequence[Lease]:
        return self._maybe(await super().renew(*args, **options))

    async def release(self, *args, **options) -> None:
        self._maybe(await super().release(*args, **options))

    def _maybe(self, answer):
        if self.rng.random() < self.loss:
            message = "the answer was lost"
            raise TransportError(message)
        return answer


def ask(num_devices: int, **options) -> Ask:
    return Ask(job=JOB, num_devices=num_devices, devices=frozenset(NAMES), **options)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def test_asks_are_cut_to_what_may_still_be_held(site: Site):
    capped = CappedLender(LocalLender(site.lender), 3)
    first = await capped.ask(ask(2))
    second = await capped.ask(ask(4))
    assert (len(first), len(second)) == (2, 1)
    assert await capped.ask(ask(1)) == ()
    await capped.release(JOB, [first[0].lease_id])
    assert await capped.ask(ask(2, is_whole=True)) == (), "half a gang is of no use"
    assert len(await capped.ask(ask(2))) == 1
    assert (capped.most_held, site.most_held()) == (3, 3)


async def test_what_a_former_process_of_the_job_holds_counts(site: Site):
    site.lender.grant(JOB, 2)
    site.lender.grant(JobId("other"), 1)
    capped = CappedLender(LocalLender(site.lender), 3)
    assert len(await capped.ask(ask(3))) == 1
    assert sum(lease.job == JOB for lease in site.lender.leases) == 3


async def test_a_grant_whose_answer_was_lost_counts(site: Site):
    lossy = Lossy(site.lender, random.Random(0), loss=1.0)
    capped = CappedLender(lossy, 2)
    with pytest.raises(TransportError):
        await capped.ask(ask(2))
    lossy.loss = 0.0
    assert await capped.ask(ask(2)) == ()
    await site.clock.sleep(0)
    assert len(site.lender.leases) == 2


async def test_a_release_that_is_cancelled_does_not_take_room_for_good(site: Site):
    class Slow(LocalLender):
        async def release(self, *args, **options) -> None:
            await super().release(*args, **options)
            await asyncio.Event().wait()

    capped = CappedLender(Slow(site.lender), 2)
    leases = await capped.ask(ask(2))
    giving_back = asyncio.ensure_future(capped.release(JOB, [lease.lease_id for lease in leases]))
    await asyncio.sleep(0)
    giving_back.cancel()
    await asyncio.gather(giving_back, return_exceptions=True)
    assert len(await capped.ask(ask(2))) == 2


async def test_an_end_that_the_job_did_not_cause_makes_room(site: Site):
    capped = CappedLender(LocalLender(site.lender), 2)
    leases = await capped.ask(ask(2))
    site.lender.revoke(leases[0].device_id)
    known = {lease.lease_id: False for lease in leases}
    assert [lease.lease_id for lease in await capped.changed(JOB, known)] == [leases[1].lease_id]
    assert len(await capped.ask(ask(2))) == 1


@pytest.mark.parametrize("seed", range(25))
def test_no_history_holds_more_than_it_may(site: Site, seed: int):
    """Asks, renewals, releases, revocations, expiry, lost answers and restarts, in any order."""
    rng = random.Random(seed)
    num_most = rng.randint(1, 5)

    async def history() -> None:
        lossy = Lossy(site.lender, rng, loss=0.25)
        capped = CappedLender(lossy, num_most)
        known: list = []
        for _ in range(60):
            try:
                match rng.randrange(7):
                    case 0 | 1 | 2:
                        count = rng.randint(0, 6)
                        leases = await capped.ask(ask(count, is_whole=rng.random() < 0.2))
                        known += [lease.lease_id for lease in leases]
                    case 3:
                        known = [lease.lease_id for lease in await capped.renew(JOB, known)]
                    case 4 if known:
                        await capped.release(JOB, [known.pop(rng.randrange(len(known)))])
                    case 5:
                        site.lender.revoke(rng.choice(NAMES))
                        await site.clock.sleep(rng.choice((0.0, 5.0, TTL_S)))
                        site.lender.expire()
                    case 6 if rng.random() < 0.2:
                        capped, known = CappedLender(lossy, num_most), []
            except TransportError:
                pass

    asyncio.run(site.clock.run(history()))
    assert site.most_held() <= num_most


def test_a_pool_with_more_engines_than_it_may_borrow_takes_so_many(site: Site):
    async def work() -> None:
        engines = {name: FakeEngine(engine_id=EngineId(name), clock=site.clock) for name in NAMES}
        own = FakeEngine(engine_id=EngineId("own"), clock=site.clock)
        capped = CappedLender(LocalLender(site.lender), 2)
        async with RolloutPool([own], clock=site.clock) as pool:
            async with Borrower(capped, pool, engines, job=JOB, clock=site.clock, ask_again_s=1.0, demand=None):
                for _ in range(20):
                    await site.clock.sleep(5.0)
                    assert len(site.lender.leases) == 2
                    site.lender.revoke(rng.choice(site.lender.leases).device_id)
            assert site.lender.leases == ()

    rng = random.Random(0)
    asyncio.run(site.clock.run(work()))
    assert site.most_held() == 2
