"""The lender over real ledger files, on a manual clock."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest

from rose.coserving.ledger import IDLE_SERVING, Ledger, UsageState
from rose.coserving.lender import DeviceTerms, LeaseChange, LeaseEvent, Lender, Switch, SwitchKind
from rose.errors import LeaseError
from rose.policies.admission import Budget, Mode, check_lease
from rose.policies.lending import LendingConfig
from rose.testing import ManualClock
from rose.types import DeviceId, JobId, LeaseId

JOB = JobId("job")


@attrs.define
class Cluster:
    clock: ManualClock
    ledgers: dict[DeviceId, Ledger]
    lender: Lender
    events: list[LeaseEvent]

    def problem(self, device: str) -> Any:
        return check_lease(self.ledgers[DeviceId(device)].budget(), 0, self.clock.now())


def speak(ledger: Ledger, use: float) -> None:
    ledger.publish_serving(attrs.evolve(IDLE_SERVING, kv_used_bytes=use, kv_pool_bytes=1.0))
    ledger.beat(0.0)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    ledgers = {DeviceId(name): Ledger.create(tmp_path / name) for name in ("a", "b", "c", "silent")}
    for name, use in (("a", 0.5), ("b", 0.1), ("c", 0.3)):
        speak(ledgers[DeviceId(name)], use)
    clock = ManualClock()
    lender = Lender(ledgers, clock, LendingConfig(ttl_s=10.0, rest_s=0.0))
    events: list[LeaseEvent] = []
    lender.subscribe(events.append)
    return Cluster(clock, ledgers, lender, events)


def test_the_idlest_devices_are_lent_first_and_the_ledger_says_so(cluster: Cluster) -> None:
    leases = cluster.lender.grant(JOB, 2)
    assert [lease.device_id for lease in leases] == ["b", "c"]
    assert cluster.problem("b") is None
    assert cluster.problem("a") is not None
    assert [event.change for event in cluster.events] == [LeaseChange.GRANTED] * 2
    assert [lease.device_id for lease in cluster.lender.grant(JOB, 9)] == ["a"], "a silent device is not lent"


async def test_a_lease_ends_unless_renewed(cluster: Cluster) -> None:
    kept, left = cluster.lender.grant(JOB, 2)
    await cluster.clock.advance(8.0)
    assert cluster.lender.renew(kept.lease_id).expires_s == 18.0
    await cluster.clock.advance(4.0)
    assert cluster.problem("c") is not None, "the engine itself sees the end"
    assert cluster.lender.expire() == (left,)
    assert cluster.lender.leases == (attrs.evolve(kept, expires_s=18.0),)
    with pytest.raises(LeaseError, match="not in force"):
        cluster.lender.renew(left.lease_id)


def test_revoked_leases_are_fenced_for_ever(cluster: Cluster) -> None:
    (lease,) = cluster.lender.grant(JOB, 1)
    assert cluster.lender.revoke(lease.device_id) == (lease,)
    token = cluster.ledgers[lease.device_id].budget().fencing_token
    assert token > lease.fencing_token
    (again,) = cluster.lender.grant(JOB, 1)
    assert again.device_id == lease.device_id
    assert again.fencing_token > token
    with pytest.raises(LeaseError, match=lease.lease_id):
        cluster.lender.renew(lease.lease_id)


def test_the_kill_switch_takes_everything_and_keeps_it(cluster: Cluster) -> None:
    cluster.lender.grant(JOB, 3)
    assert len(cluster.lender.stop()) == 3
    assert all(cluster.problem(name) is not None for name in ("a", "b", "c"))
    assert cluster.lender.grant(JOB, 3) == ()
    cluster.lender.allow()
    assert len(cluster.lender.grant(JOB, 3)) == 3


def test_the_mode_changes_under_running_leases(cluster: Cluster) -> None:
    cluster.lender.grant(JOB, 1)
    cluster.lender.set_mode(Mode.UNGATED)
    assert cluster.ledgers[DeviceId("b")].budget().mode is Mode.UNGATED
    assert cluster.problem("b") is None


def test_a_restarted_lender_goes_on_counting(cluster: Cluster) -> None:
    """A lender that lost its memory must not reuse a token that an old borrower may still hold."""
    (lease,) = cluster.lender.grant(JOB, 1)
    restarted = Lender(cluster.ledgers, cluster.clock)
    assert cluster.problem("b") is not None
    (again,) = restarted.grant(JOB, 1)
    assert again.fencing_token > lease.fencing_token


def test_unknown_devices_and_leases_are_errors(cluster: Cluster) -> None:
    with pytest.raises(LeaseError, match="no device 'x'"):
        cluster.lender.revoke(DeviceId("x"))
    with pytest.raises(LeaseError, match="ask for a new one"):
        cluster.lender.renew(LeaseId("x"))
    assert cluster.lender.revoke() == ()
    assert math.isfinite(cluster.lender.grant(JOB, 1)[0].expires_s)


async def test_a_device_that_is_asked_back_is_not_renewed_and_ends_at_its_deadline(cluster: Cluster) -> None:
    (lease,) = cluster.lender.grant(JOB, 1)
    await cluster.clock.advance(2.0)
    (asked,) = cluster.lender.revoke(lease.device_id, grace_s=5.0)
    assert (asked.is_revoking, asked.expires_s) == (True, 7.0)
    assert cluster.events[-1] == LeaseEvent(LeaseChange.REVOKING, asked)
    assert cluster.problem("b") is None, "the job has until then"
    with pytest.raises(LeaseError, match=r"asked back and ends in 5\.000 s"):
        cluster.lender.renew(lease.lease_id)
    assert cluster.lender.renew_all([lease.lease_id]) == (asked,)
    assert cluster.lender.revoke(lease.device_id, grace_s=60.0) == (), "asking twice gives no more time"
    await cluster.clock.advance(5.0)
    assert cluster.problem("b") is not None, "the engine itself sees the end"
    assert cluster.lender.expire() == (asked,)
    assert cluster.lender.leases == ()


async def test_what_serving_took_back_rests(cluster: Cluster) -> None:
    cluster.lender = Lender(cluster.ledgers, cluster.clock, LendingConfig(ttl_s=99.0, rest_s=30.0, stale_after_s=99.0))
    cluster.lender.grant(JOB, 3)
    cluster.lender.revoke(DeviceId("b"))
    assert cluster.lender.grant(JOB, 3) == ()
    await cluster.clock.advance(30.0)
    assert [lease.device_id for lease in cluster.lender.grant(JOB, 3)] == ["b"]


async def test_silent_devices_are_not_lent_and_mean_use_counts_before_the_present_one(cluster: Cluster) -> None:
    cluster.ledgers[DeviceId("a")].publish_usage(UsageState(kv_mean_fraction=0.01, updated_s=0.0))
    assert cluster.lender.grant(JOB, 1)[0].device_id == "a", "busy now, idle on the whole"
    await cluster.clock.advance(10.5)
    cluster.ledgers[DeviceId("c")].beat(10.0)
    assert [lease.device_id for lease in cluster.lender.grant(JOB, 9)] == ["c"]


def test_switches_stop_one_device_one_model_or_all(cluster: Cluster) -> None:
    terms = {
        DeviceId("a"): DeviceTerms(models=frozenset({"m", "n"}), serving_model="s"),
        DeviceId("b"): DeviceTerms(models=frozenset({"m"}), serving_model="t"),
    }
    lender = cluster.lender = Lender(cluster.ledgers, cluster.clock, LendingConfig(rest_s=0.0), terms=terms)

    def lent(model: str | None = None) -> str:
        lender.grant(JOB, 9, model=model)
        return "".join(sorted(lease.device_id for lease in lender.leases))

    assert lent("m") == "abc"
    ended = lender.stop(Switch(SwitchKind.MODEL, "m"))
    assert len(ended) == 3
    assert lent("m") == "", "no more of that model"
    assert lent("n") == "c", "nor any other where it could be loaded"
    lender.stop(Switch(SwitchKind.DEVICE, "c"))
    lender.allow(Switch(SwitchKind.MODEL, "m"))
    assert lent() == "ab"
    assert [lease.device_id for lease in lender.stop(Switch(SwitchKind.MODEL, "t"))] == ["b"], "serving's own model"
    lender.stop()
    assert lent() == ""
    lender.allow(Switch())
    assert lent() == "a"
    lender.allow()
    assert lent() == "abc"
    with pytest.raises(LeaseError, match="no device 'x'"):
        lender.stop(Switch(SwitchKind.DEVICE, "x"))


async def test_a_waiting_job_is_given_its_share(cluster: Cluster) -> None:
    config = LendingConfig(ttl_s=10.0, grace_s=2.0, min_hold_s=5.0, stale_after_s=1e9)
    lender = cluster.lender = Lender(cluster.ledgers, cluster.clock, config)
    speak(cluster.ledgers[DeviceId("silent")], 0.0)
    first = lender.grant(JOB, 4)
    assert (len(first), lender.grant(JobId("other"), 4)) == (4, ())
    lender.tick()
    assert not any(lease.is_revoking for lease in lender.leases), "nobody loses what it has just got"
    await cluster.clock.advance(5.0)
    lender.renew_all([lease.lease_id for lease in first])
    lender.tick()
    asked = [lease for lease in lender.leases if lease.is_revoking]
    assert [lease.expires_s for lease in asked] == [7.0, 7.0]
    await cluster.clock.advance(2.0)
    lender.tick()
    assert lender.grant(JOB, 4) == (), "kept for the one that waits"
    assert {lease.device_id for lease in lender.grant(JobId("other"), 4)} == {lease.device_id for lease in asked}


def test_a_ledger_that_was_overwritten_or_made_anew_is_put_right(cluster: Cluster, tmp_path: Path) -> None:
    (lease,) = cluster.lender.grant(JOB, 1)
    cluster.ledgers[DeviceId("a")].publish_budget(Budget(is_granted=True, expires_s=9e9))
    assert cluster.lender.check_ledgers() == ("a",)
    assert cluster.problem("a") is not None
    assert cluster.lender.check_ledgers() == ()
    anew = cluster.ledgers[lease.device_id] = Ledger.create(tmp_path / "anew")
    cluster.lender.attach(lease.device_id, anew)
    assert cluster.problem(lease.device_id) is None
    anew.publish_budget(Budget(fencing_token=99, is_granted=True, expires_s=9e9))
    cluster.lender.attach(lease.device_id, anew)
    assert cluster.lender.leases == (), "another lender was there"
    assert anew.budget().fencing_token == 100
    speak(anew, 0.1)
    (lease,) = cluster.lender.grant(JOB, 1, devices=[lease.device_id])
    for token in (300, 500):  # another lender goes on writing there: with a lease of ours in force, then without
        anew.publish_budget(Budget(fencing_token=token, is_granted=True, expires_s=9e9))
        assert cluster.lender.check_ledgers() == (lease.device_id,)
        assert cluster.lender.leases == ()
        assert anew.budget() == Budget(mode=cluster.lender.mode, fencing_token=token + 1)
