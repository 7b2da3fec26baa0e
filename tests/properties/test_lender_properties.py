"""The lender keeps its leases as one would that looks at every device for everything, and asks the ledgers far less."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.coserving.ledger import IDLE_SERVING
from rose.coserving.lender import LeaseChange, LeaseEvent, Lender
from rose.errors import LeaseError, LedgerError
from rose.interfaces.clock import Clock
from rose.policies.admission import Budget, Mode
from rose.policies.lending import Ask, DeviceUse, JobTerms, LendingConfig, job_key, plan_expiry, plan_grants
from rose.types import DeviceId, JobId

CONFIG = LendingConfig(ttl_s=10.0, quota=4, jobs={"small": JobTerms(quota=2)}, rest_s=0.0, stale_after_s=math.inf)
DEVICES = [DeviceId(name) for name in "hgfedcba"]


class SetClock(Clock):
    now_s = 0.0

    def now(self):
        return self.now_s

    async def sleep(self, duration_s):
        raise NotImplementedError


@attrs.define
class MemoryLedger:
    """A ledger without a file; the lender needs no more."""

    use: float
    written: Budget = attrs.field(factory=Budget)
    num_read: int = 0

    def publish_budget(self, budget):
        self.written = budget

    def budget(self):
        return self.written

    def serving(self):
        self.num_read += 1
        if self.use < 0:
            message = "torn"
            raise LedgerError(message)
        return attrs.evolve(IDLE_SERVING, kv_used_bytes=self.use, kv_pool_bytes=1.0, heartbeat_s=0.0)


class PlainLender:
    """Reads every device for every call."""

    def __init__(self, ledgers, clock):
        self.ledgers, self.clock, self.events = ledgers, clock, []
        self.tokens = dict.fromkeys(ledgers, 1)
        self.held = dict.fromkeys(ledgers)
        self.wishes = {}

    @property
    def leases(self):
        return tuple(lease for lease in self.held.values() if lease is not None)

    def uses(self):
        return [
            DeviceUse(
                device_id=device,
                kv_use_fraction=None if ledger.use < 0 else ledger.use,
                last_token=self.tokens[device],
                lease=self.held[device],
            )
            for device, ledger in self.ledgers.items()
        ]

    def end(self, leases, change):
        for lease in leases:
            self.held[lease.device_id] = None
            self.tokens[lease.device_id] += 1
        self.events += [LeaseEvent(change, lease) for lease in leases]
        return tuple(leases)

    def expire(self):
        return self.end(plan_expiry(self.uses(), self.clock.now()), LeaseChange.EXPIRED)

    def grant(self, job, num_devices):
        self.expire()
        now_s = self.clock.now()
        others = [
            Ask(job=name, num_devices=number)
            for name, (number, until_s) in self.wishes.items()
            if name != job and until_s > now_s
        ]
        leases = plan_grants(CONFIG, self.uses(), [Ask(job=job, num_devices=num_devices)], now_s, wishes=others)
        self.wishes[job] = (num_devices - len(leases), now_s + CONFIG.ttl_s)
        for lease in leases:
            self.held[lease.device_id] = lease
            self.tokens[lease.device_id] = lease.fencing_token
            self.events.append(LeaseEvent(LeaseChange.GRANTED, lease))
        return leases

    def renew(self, lease_id):
        self.expire()
        lease = next(lease for lease in self.leases if lease.lease_id == lease_id)
        lease = self.held[lease.device_id] = attrs.evolve(lease, expires_s=self.clock.now() + CONFIG.ttl_s)
        self.events.append(LeaseEvent(LeaseChange.RENEWED, lease))
        return lease

    def revoke(self, device):
        return self.end([lease for lease in self.leases if device in (None, lease.device_id)], LeaseChange.REVOKED)


STEPS = st.one_of(
    st.tuples(st.just("grant"), st.sampled_from(["one", "two", "small"]), st.integers(0, 4)),
    st.tuples(st.just("renew"), st.integers(0, 99)),
    st.tuples(st.just("renew"), st.integers(0, 99)),
    st.tuples(st.just("revoke"), st.sampled_from([None, *DEVICES])),
    st.tuples(st.just("expire")),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 1.0, 3.0, 5.0, 10.0])),
    st.tuples(st.just("use"), st.sampled_from(DEVICES), st.sampled_from([-1.0, 0.1, 0.5, 0.9])),
)


@attrs.define
class Both:
    """The lender and the plain one, told the same."""

    clock: SetClock = attrs.field(factory=SetClock)
    ledgers: dict = attrs.field(factory=lambda: {name: MemoryLedger(i / 10) for i, name in enumerate(DEVICES)})
    granted: list = attrs.field(factory=list)
    events: list = attrs.field(factory=list)
    lender: Lender = attrs.field(init=False)
    plain: PlainLender = attrs.field(init=False)

    def __attrs_post_init__(self):
        self.lender, self.plain = Lender(self.ledgers, self.clock, CONFIG), PlainLender(self.ledgers, self.clock)
        self.lender.subscribe(self.events.append)

    def grant(self, job, num_devices):
        leases = self.lender.grant(JobId(job), num_devices)
        self.granted += leases
        assert leases == self.plain.grant(JobId(job), num_devices)

    def renew(self, index):
        if not self.granted:
            return
        lease_id = self.granted[index % len(self.granted)].lease_id
        self.plain.expire()
        if lease_id in {lease.lease_id for lease in self.plain.leases}:
            assert self.lender.renew(lease_id) == self.plain.renew(lease_id)
        else:
            with pytest.raises(LeaseError, match="not in force"):
                self.lender.renew(lease_id)

    def revoke(self, device):
        assert self.lender.revoke(device) == self.plain.revoke(device)

    def expire(self):
        assert self.lender.expire() == self.plain.expire()

    def wait(self, duration_s):
        self.clock.now_s += duration_s

    def use(self, device, use):
        self.ledgers[device].use = use

    def check(self):
        assert self.lender.leases == self.plain.leases
        assert self.events == self.plain.events
        held = {lease.lease_id for lease in self.plain.leases}
        assert all(self.lender.is_in_force(lease.lease_id) == (lease.lease_id in held) for lease in self.granted)
        for device, ledger in self.ledgers.items():
            lease = self.plain.held[device]
            assert ledger.written == Budget(
                mode=Mode.SLO,
                fencing_token=self.plain.tokens[device],
                expires_s=0.0 if lease is None else lease.expires_s,
                is_granted=lease is not None,
                holder=0 if lease is None else job_key(lease.job),
            )


@given(st.lists(STEPS, min_size=15, max_size=60))
@settings(max_examples=150, deadline=None)
def test_the_lender_does_as_one_that_looks_at_every_device(steps):
    both = Both()
    for step in steps:
        getattr(both, step[0])(*step[1:])
        both.check()


def test_ledgers_are_read_to_grant_only_and_once_each():
    clock = SetClock()
    ledgers = {DeviceId(f"d{i}"): MemoryLedger(0.0) for i in range(100)}
    lender = Lender(ledgers, clock, LendingConfig(quota=100, ttl_s=10.0))
    leases = lender.grant(JobId("job"), 60)
    assert {ledger.num_read for ledger in ledgers.values()} == {1}
    for _ in range(20):
        clock.now_s += 3.0
        for lease in leases:
            lender.renew(lease.lease_id)
    assert {ledger.num_read for ledger in ledgers.values()} == {1}
    assert len(lender._ends) == 60, "renewing leaves nothing behind"
    lender.grant(JobId("job"), 1)
    assert sum(ledger.num_read for ledger in ledgers.values()) == 140, "those that are lent are not asked"
