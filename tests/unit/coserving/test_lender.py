"""The lender over real ledger files, on a manual clock."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest

from rose.coserving.ledger import IDLE_SERVING, Ledger
from rose.coserving.lender import LeaseChange, LeaseEvent, Lender
from rose.errors import LeaseError
from rose.policies.admission import Mode, check_lease
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
    lender = Lender(ledgers, clock, LendingConfig(ttl_s=10.0))
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
