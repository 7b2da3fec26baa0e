"""The lender's state over crashes, restarts and clocks, with real SQLite files and ledgers."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from rose.coserving.lease_sqlite import AuditReader, SqliteStore
from rose.coserving.ledger import IDLE_SERVING, Ledger, RolloutState, UsageState
from rose.coserving.lender import Lender, Switch, SwitchKind
from rose.coserving.lender_audit import Entry, check_audit
from rose.errors import ConfigError, LeaseError, LedgerError
from rose.policies.admission import Mode, check_lease
from rose.policies.lending import Ask, JobTerms, LendingConfig, job_key
from rose.testing import ManualClock
from rose.types import DeviceId, JobId

A, B = JobId("a"), JobId("b")
TTL_S = 10.0


@attrs.define(eq=False)
class Site:
    """Six devices, and a lender that can be killed and started again."""

    root: Path
    config: LendingConfig = attrs.field(factory=lambda: LendingConfig(ttl_s=TTL_S, stale_after_s=9e9, rest_s=0.0))
    num_devices: int = 6
    clock: ManualClock = attrs.field(factory=lambda: ManualClock(100.0))
    wall_s: float = 1.7e9
    boot_id: str = "boot"
    ledgers: dict[DeviceId, Ledger] = attrs.field(init=False)
    lender: Lender = attrs.field(init=False)
    store: SqliteStore | None = None

    def __attrs_post_init__(self) -> None:
        names = [DeviceId(f"d{i}") for i in range(self.num_devices)]
        self.ledgers = {name: Ledger.create(self.root / name) for name in names}
        for i, ledger in enumerate(self.ledgers.values()):
            ledger.publish_serving(attrs.evolve(IDLE_SERVING, kv_used_bytes=i / 10, kv_pool_bytes=1.0))
            ledger.beat(0.0)
        self.start()

    def start(self) -> None:
        self.store = SqliteStore(self.root / "state", boot_id=self.boot_id)
        self.lender = Lender(self.ledgers, self.clock, self.config, store=self.store, wall=lambda: self.wall_s)

    def kill(self) -> None:
        """What is left after a kill -9: files. The lock goes with the process."""
        if self.store is not None:
            self.store.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    def works(self, device: str, token: int) -> bool:
        """Whether an engine on the device would work under this token."""
        budget = self.ledgers[DeviceId(device)].budget()
        return budget.fencing_token == token and check_lease(budget, token, self.clock.now()) is None

    def problems(self) -> list[str]:
        with AuditReader(self.root / "state") as reader:
            return check_audit(reader.entries())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.kill()


async def test_a_restart_takes_leases_over_and_grants_nothing_twice(site: Site) -> None:
    kept, revoked, over = site.lender.grant(A, 3)
    site.lender.revoke(revoked.device_id)
    await site.clock.advance(6.0)
    site.lender.renew(kept.lease_id)
    site.lender.set_mode(Mode.QUIET)
    await site.clock.advance(5.0)
    site.restart()
    assert [lease.lease_id for lease in site.lender.leases] == [kept.lease_id]
    assert site.works(kept.device_id, kept.fencing_token)
    assert not site.works(over.device_id, over.fencing_token)
    assert site.lender.mode is Mode.QUIET
    others = site.lender.grant(B, 6)
    assert len(others) == 5
    assert all(lease.fencing_token > 1 for lease in others)
    assert site.lender.renew(kept.lease_id).expires_s == site.clock.now() + TTL_S
    assert site.problems() == []


def test_another_boot_ends_all_leases_and_keeps_tokens_and_switches(site: Site) -> None:
    leases = site.lender.grant(A, 6)
    site.lender.stop(Switch(SwitchKind.DEVICE, "d0"))
    site.boot_id = "another"
    site.ledgers = {name: Ledger.create(site.root / name) for name in site.ledgers}
    for ledger in site.ledgers.values():
        ledger.beat(0.0)
    site.restart()
    assert site.lender.leases == ()
    again = {lease.device_id: lease.fencing_token for lease in site.lender.grant(A, 6)}
    assert set(again) == {"d1", "d2", "d3", "d4", "d5"}
    assert all(again[lease.device_id] > lease.fencing_token for lease in leases[1:])
    assert site.problems() == []


class FailingStore(SqliteStore):
    """Loses power before or after the next commits reach the disk."""

    fails_before = fails_after = False

    def commit(self, *args, **options):
        if self.fails_before:
            message = "disk full"
            raise LedgerError(message)
        super().commit(*args, **options)
        if self.fails_after:
            message = "killed"
            raise LedgerError(message)


@pytest.fixture
def failing(site: Site) -> Site:
    site.kill()
    site.store = store = FailingStore(site.root / "state", boot_id="boot")
    site.lender = Lender(site.ledgers, site.clock, site.config, store=store, wall=lambda: site.wall_s)
    return site


def test_a_grant_that_is_not_kept_is_none(failing: Site) -> None:
    failing.store.fails_before = True
    with pytest.raises(LedgerError, match="disk full"):
        failing.lender.grant(A, 2)
    assert failing.lender.leases == ()
    assert not any(ledger.budget().is_granted for ledger in failing.ledgers.values())


def test_the_ledger_says_whose_the_lease_is(site: Site) -> None:
    of_a, of_b = site.lender.grant_all([Ask(job=A, num_devices=1), Ask(job=B, num_devices=1)])
    holders = {lease.device_id: site.ledgers[lease.device_id].budget().holder for lease in (of_a, of_b)}
    assert holders == {of_a.device_id: job_key(A), of_b.device_id: job_key(B)}
    assert len({0, *holders.values()}) == 3
    site.restart()
    assert site.ledgers[of_a.device_id].budget().holder == job_key(A)
    site.lender.release([of_a.lease_id])
    assert site.ledgers[of_a.device_id].budget().holder == 0


def test_text_that_is_no_unicode_stops_nobody(site: Site) -> None:
    (lease,) = site.lender.grant(JobId("\udcff"), 1, model="\ud800")
    site.lender.stop(Switch(SwitchKind.MODEL, "\ud800"), who="serving \udcff", reason="\udcff")
    site.lender.grant(A, 6)
    with AuditReader(site.root / "state") as reader:
        (ended,) = (entry for entry in reader.entries() if entry.change == "revoked")
    assert (ended.job, ended.lease_id) == (r"\udcff", lease.lease_id)
    assert site.problems() == []


def test_a_change_that_fails_for_any_reason_leaves_the_next_one_alone(site: Site) -> None:
    unfit = Entry(change="mode", who="", at_s=0.0, wall_s=0.0, fencing_token=1 << 70)
    with pytest.raises(OverflowError):
        site.store.commit([], [unfit])
    assert len(site.lender.grant(A, 1)) == 1
    assert site.problems() == []


def test_a_crash_between_keeping_and_writing_is_repaired_at_the_next_start(failing: Site) -> None:
    failing.store.fails_after = True
    with pytest.raises(LedgerError, match="killed"):
        failing.lender.grant(A, 1)
    assert not failing.ledgers[DeviceId("d0")].budget().is_granted, "the ledger was not written yet"
    failing.restart()
    (lease,) = failing.lender.leases
    assert failing.works("d0", lease.fencing_token)
    assert [each.device_id for each in failing.lender.grant(B, 1)] == ["d1"]
    assert failing.problems() == []


def test_serving_stops_devices_although_nothing_can_be_kept_and_a_restart_sees_it(failing: Site) -> None:
    (first, second) = failing.lender.grant(A, 2)
    failing.store.fails_before = True
    with pytest.raises(LedgerError):
        failing.lender.stop()
    assert not failing.works(first.device_id, first.fencing_token)
    failing.restart()
    assert failing.lender.leases == (), "the ledgers say that they are over"
    assert {lease.device_id for lease in failing.lender.grant(B, 2)} == {first.device_id, second.device_id}
    assert failing.problems() == []


def test_what_could_not_be_kept_is_kept_with_the_next_change(failing: Site) -> None:
    failing.lender.grant(A, 1)
    failing.store.fails_before = True
    with pytest.raises(LedgerError):
        failing.lender.stop(Switch(SwitchKind.DEVICE, "d0"))
    failing.store.fails_before = False
    failing.lender.grant(B, 1)
    assert failing.problems() == []
    failing.restart()
    assert failing.lender.switches == {Switch(SwitchKind.DEVICE, "d0")}


def test_a_mode_that_cannot_be_kept_lends_no_more_than_before(failing: Site) -> None:
    for mode, in_force in ((Mode.UNGATED, Mode.SLO), (Mode.QUIET, Mode.QUIET), (Mode.SLO, Mode.QUIET)):
        failing.store.fails_before = True
        with pytest.raises(LedgerError, match="disk full"):
            failing.lender.set_mode(mode)
        assert {failing.lender.mode, *(ledger.budget().mode for ledger in failing.ledgers.values())} == {in_force}
    failing.store.fails_before = False
    failing.lender.set_mode(Mode.PAPER)
    failing.restart()
    assert failing.lender.mode is Mode.PAPER


def test_switches_stay_thrown_over_restarts_until_they_are_lifted(site: Site) -> None:
    site.lender.grant(A, 2)
    site.lender.stop(Switch(SwitchKind.DEVICE, "d1"), who="serving ann", reason="hot")
    site.lender.stop(who="serving bob")
    site.restart()
    assert site.lender.grant(A, 6) == ()
    site.lender.allow(Switch())
    assert "d1" not in {lease.device_id for lease in site.lender.grant(A, 6)}
    site.lender.allow()
    site.restart()
    assert [lease.device_id for lease in site.lender.grant(A, 1)] == ["d1"]
    with AuditReader(site.root / "state") as reader:
        thrown = [(entry.who, entry.reason) for entry in reader.entries() if entry.change == "switch_thrown"]
    assert thrown == [("serving ann", "device d1: hot"), ("serving bob", "all")]


def test_the_audit_says_what_leases_came_to(site: Site) -> None:
    ledger = site.ledgers[DeviceId("d0")]

    def publish(broken: int, busy_s: float, pid: int = 7) -> None:
        counts = UsageState(
            num_requests=10 * broken, num_broken=broken, debt_s=broken / 2, delay_s=busy_s / 10, pid=pid
        )
        ledger.publish_usage(attrs.evolve(counts, updated_s=100.0))
        ledger.publish_rollout(RolloutState(busy_s=busy_s, pid=8))

    publish(5, 100.0)
    (lease,) = site.lender.grant(A, 1)
    publish(7, 104.0)
    site.restart()
    site.clock._now_s += 8.0
    site.lender.release([lease.lease_id])
    publish(9, 108.0)
    (lease,) = site.lender.grant(A, 1)
    publish(3, 1.0, pid=9)  # serving was started anew
    site.lender.revoke(lease.device_id)
    with AuditReader(site.root / "state") as reader:
        (row,) = reader.totals()
        ends = [entry for entry in reader.entries() if entry.held_s is not None]
    assert [(entry.held_s, entry.used.num_broken, entry.used.rollout_s) for entry in ends] == [
        (8.0, 2, 4.0),
        (0.0, 3, 0.0),
    ]
    assert (row["tenant"], row["job"], row["num_leases"], row["lent_s"], row["num_broken"]) == ("a", "a", 2, 8.0, 5)
    assert row["debt_s"] == pytest.approx(2.5)


def test_the_audit_is_append_only_and_its_proof_can_fail(site: Site) -> None:
    site.lender.grant(A, 1)
    database = sqlite3.connect(site.root / "state")
    for order in ("UPDATE audit SET job = 'b'", "DELETE FROM audit"):
        with pytest.raises(sqlite3.DatabaseError, match="append-only"):
            database.execute(order)
    database.close()
    with AuditReader(site.root / "state") as reader:
        started, granted = reader.entries()
    twice = attrs.evolve(granted, seq=3, job="b", lease_id="d0#9", fencing_token=9)
    stale = attrs.evolve(granted, seq=3, change="released")
    assert "two holders" in check_audit([started, granted, twice])[0]
    assert "not above" in check_audit([granted, stale, attrs.evolve(granted, seq=4)])[0]
    assert "not the lease in force" in check_audit([attrs.evolve(granted, change="renewed")])[0]
    assert "went back" in check_audit([granted, attrs.evolve(stale, at_s=1.0)])[0]
    assert "does not grow" in check_audit([granted, attrs.evolve(stale, seq=2)])[0]
    assert check_audit([granted, stale]) == []


def test_grants_and_ends_wait_for_the_disk_and_renewals_do_not(site: Site) -> None:
    def waits() -> bool:
        (level,) = site.store._database.execute("PRAGMA synchronous").fetchone()
        return level == 2

    (lease,) = site.lender.grant(A, 1)
    assert waits()
    site.lender.renew(lease.lease_id)
    assert not waits()
    site.lender.revoke(lease.device_id, grace_s=1.0)
    assert waits()


def test_one_lender_a_state_and_only_a_lenders_state(site: Site, tmp_path: Path) -> None:
    (site.root / "link").symlink_to(site.root / "state")
    for name in ("state", "link"):
        with pytest.raises(ConfigError, match="another lender uses the lender state"):
            SqliteStore(site.root / name)
    assert {path.stat().st_mode & 0o777 for path in site.root.glob("state*")} == {0o600}
    (tmp_path / "text").write_text("this is no database, and long enough to be told from one" * 20)
    with pytest.raises(ConfigError, match=r"cannot use .*text"):
        SqliteStore(tmp_path / "text")
    sqlite3.connect(tmp_path / "other").execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(ConfigError, match="no lender's state"):
        SqliteStore(tmp_path / "other")
    with pytest.raises(ConfigError, match="choose a folder"):
        SqliteStore(tmp_path / "missing" / "state")
    with pytest.raises(ConfigError, match="cannot use"):
        AuditReader(tmp_path / "nothing")


@pytest.mark.parametrize("seed", range(4))
def test_case_o03_two_jobs_ask_at_once_for_four_of_six(site: Site, seed: int) -> None:
    """Case O03: no device is ever held by two; one gets four, the other two; the dead one's are free after
    the TTL, and fenced. 100 rounds over the seeds."""
    rng = random.Random(seed)
    for _ in range(25):
        granted: dict[JobId, tuple] = {}
        barrier = threading.Barrier(2)

        def ask(job: JobId, granted: dict = granted, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            granted[job] = site.lender.grant(job, 4)

        threads = [threading.Thread(target=ask, args=(job,)) for job in rng.sample((A, B), 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = [lease.device_id for leases in granted.values() for lease in leases]
        assert len(held) == len(set(held)) == 6
        assert sorted(map(len, granted.values())) == [2, 4]
        dead = next(job for job, leases in granted.items() if len(leases) == 4)
        alive = A if dead == B else B
        for _ in range(3):
            site.clock._now_s += TTL_S / 2.5
            site.lender.renew_all([lease.lease_id for lease in granted[alive]])
        for lease in granted[dead]:
            assert not site.works(lease.device_id, lease.fencing_token)
            with pytest.raises(LeaseError, match="fenced"):
                site.lender.renew(lease.lease_id)
        freed = site.lender.grant(alive, 4)
        assert {lease.device_id for lease in freed} == {lease.device_id for lease in granted[dead]}
        site.lender.release([lease.lease_id for lease in site.lender.leases])
    assert site.problems() == []


def drive(site: Site, rounds: int, seed: int, weights: dict[JobId, float]) -> dict[JobId, float]:
    """Let jobs that want all there is ask and renew, while lenders and jobs crash and the wall clock jumps; device seconds a job."""
    rng = random.Random(seed)
    down = dict.fromkeys(weights, 0)
    lent_s: Counter[JobId] = Counter()
    for _ in range(rounds):
        for _ in range(10):
            site.clock._now_s += 1.0
            site.lender.tick()
            for job in rng.sample(sorted(weights), len(weights)):
                if down[job]:
                    continue
                mine = [lease.lease_id for lease in site.lender.leases if lease.job == job]
                site.lender.renew_all(mine)
                site.lender.grant(job, site.num_devices - len(mine))
            holders = Counter(lease.device_id for lease in site.lender.leases)
            assert max(holders.values(), default=0) <= 1
            for lease in site.lender.leases:
                assert site.works(lease.device_id, lease.fencing_token)
                lent_s[lease.job] += 0.0 if any(down.values()) else 1.0
        down = {job: max(0, left - 1) for job, left in down.items()}
        site.wall_s += rng.choice([0.0, -86_400.0, 3.0e7])
        if rng.random() < 0.1:
            site.restart()
        elif rng.random() < 0.1:
            down[rng.choice(sorted(down))] = 3  # silent for three rounds: its leases run out
    return lent_s


@pytest.mark.parametrize(("num_devices", "weight"), [(6, 1.0), (5, 1.0), (6, 2.0), (5, 3.0)])
def test_a_hundred_rounds_of_crashes_and_clock_jumps_keep_holders_single_and_shares_fair(
    tmp_path: Path, num_devices: int, weight: float
) -> None:
    config = LendingConfig(
        ttl_s=TTL_S, stale_after_s=9e9, grace_s=1.0, min_hold_s=5.0, jobs={"a": JobTerms(weight=weight)}
    )
    site = Site(tmp_path, config, num_devices)
    lent_s = drive(site, 100, 7, {A: weight, B: 1.0})
    site.kill()
    total_s = sum(lent_s.values())
    assert total_s > 100 * num_devices
    assert lent_s[A] / total_s == pytest.approx(weight / (weight + 1), rel=0.05)
    assert lent_s[B] / total_s == pytest.approx(1 / (weight + 1), rel=0.05)
    assert site.problems() == []


def test_entries_name_clocks_and_who(site: Site) -> None:
    site.lender.grant(A, 1)
    site.lender.revoke(grace_s=1.0, who="serving ann", reason="deploy")
    with AuditReader(site.root / "state") as reader:
        entries: list[Entry] = list(reader.entries(after=1))
    assert [(entry.change, entry.who, entry.reason) for entry in entries] == [
        ("granted", "job a", ""),
        ("revoking", "serving ann", "deploy"),
    ]
    assert {(entry.at_s, entry.wall_s, entry.boot_id) for entry in entries} == {(100.0, 1.7e9, "boot")}
