"""What the lender writes down of every change, and the proof from it that no device ever had two holders.

Invariants: entries are only ever added; their numbers grow; an entry of an end says what the lease came to.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Any, Protocol

import attrs

from rose.errors import LedgerError
from rose.policies.lending import Lease


class LeaseChange(enum.Enum):
    """What happened to a lease. ``revoking``: it was asked back and ends soon; ``released``: the job gave the device back."""

    GRANTED = "granted"
    RENEWED = "renewed"
    REVOKING = "revoking"
    REVOKED = "revoked"
    EXPIRED = "expired"
    RELEASED = "released"


@attrs.frozen
class LeaseEvent:
    """One change of one lease, told to a lender's listeners in order."""

    change: LeaseChange
    lease: Lease


ENDS = frozenset({LeaseChange.REVOKED, LeaseChange.EXPIRED, LeaseChange.RELEASED})


@attrs.frozen(kw_only=True)
class Counters:
    """Running counters of a device at one moment, as its ledger has them, and whose they are.

    Attributes:
        serving, rollout: The processes that count; another one began at zero.
        rollout_s: Device time of the rollout engine.
        num_requests, num_broken: Serving's requests, and those beyond their SLO.
        debt_s: Seconds beyond the SLO, summed over requests.
        delay_s: Serving's waits for rollout turns, summed.
    """

    serving: str = ""
    rollout: str = ""
    rollout_s: float = 0.0
    num_requests: int = 0
    num_broken: int = 0
    debt_s: float = 0.0
    delay_s: float = 0.0

    def since(self, start: Counters) -> Counters:
        """Return what was added since ``start``; of a process that was started anew meanwhile, all that it counted."""
        serving = start if start.serving == self.serving else _NOTHING
        rollout_s = start.rollout_s if start.rollout == self.rollout else 0.0
        return Counters(
            rollout_s=max(0.0, self.rollout_s - rollout_s),
            num_requests=max(0, self.num_requests - serving.num_requests),
            num_broken=max(0, self.num_broken - serving.num_broken),
            debt_s=max(0.0, self.debt_s - serving.debt_s),
            delay_s=max(0.0, self.delay_s - serving.delay_s),
        )


_NOTHING = Counters()


class CountingLedger(Protocol):
    """A device's ledger that says how the device was used lately. ``rose.coserving.ledger.Ledger`` does."""

    def usage(self) -> Any:
        """Read serving's recent past, a ``rose.coserving.ledger.UsageState``."""

    def rollout(self) -> Any:
        """Read the rollout engine's state, a ``rose.coserving.ledger.RolloutState``."""


def read_counters(ledger: object) -> Counters:
    """Return a device's counters; what cannot be read counts as zero of nobody's."""
    if not (hasattr(ledger, "usage") and hasattr(ledger, "rollout")):
        return _NOTHING
    counting: CountingLedger = ledger
    found: dict[str, Any] = {}
    try:
        usage = counting.usage()
        names = ("num_requests", "num_broken", "debt_s", "delay_s")
        found |= {name: getattr(usage, name) for name in names}
        found["serving"] = f"{usage.pid}.{usage.pid_start}"
        rollout = counting.rollout()
        found |= {"rollout": f"{rollout.pid}.{rollout.pid_start}", "rollout_s": rollout.busy_s}
    except LedgerError:
        pass
    return Counters(**found)


@attrs.frozen(kw_only=True)
class Entry:
    """One line of the audit ledger.

    Attributes:
        change: A ``LeaseChange`` by value, or ``started``, ``switch_thrown``, ``switch_lifted``, ``mode``.
        who: Who caused it: ``job NAME``, ``serving NAME`` or ``lender``.
        at_s: When, on the monotonic clock of the boot ``boot_id``; every decision is by this one.
        wall_s: When, in seconds since 1970; for people.
        expires_s: End of the lease as it then stood, on the monotonic clock.
        held_s: With the end of a lease: how long the device was lent.
        used: With the end of a lease: what was counted meanwhile.
        seq: Number of the entry; 0 before it is written.
    """

    change: str
    who: str
    at_s: float
    wall_s: float
    boot_id: str = ""
    reason: str = ""
    job: str = ""
    tenant: str = ""
    device_id: str = ""
    lease_id: str = ""
    fencing_token: int = 0
    expires_s: float = 0.0
    held_s: float | None = None
    used: Counters = _NOTHING
    seq: int = 0

    def about(self, lease: Lease, tenant: str) -> Entry:
        """Return the entry with what it says of a lease filled in."""
        return attrs.evolve(
            self,
            job=lease.job,
            tenant=tenant,
            device_id=lease.device_id,
            lease_id=lease.lease_id,
            fencing_token=lease.fencing_token,
            expires_s=lease.expires_s,
        )

    def closing(self, lease: Lease, used: Counters) -> Entry:
        """Return the entry as that of a lease's end, which came to ``used``."""
        return attrs.evolve(self, held_s=max(0.0, min(self.at_s, lease.expires_s) - lease.granted_s), used=used)


def check_audit(entries: Iterable[Entry]) -> list[str]:
    """Prove that no device ever had two holders; returns what contradicts it, one line each.

    For every device in the order of the entries: it is granted only while nobody holds it, under a token larger than all before;
    it is renewed, asked back and ended only as its holder's. In one boot the clock of the decisions never goes back, and nobody is
    granted a device before the time at which the holder before had lost it.
    """
    holders: dict[str, Entry] = {}
    tokens: dict[str, int] = {}
    problems = []
    last_seq, clock = 0, ("", -math.inf)
    for entry in entries:
        where = f"entry {entry.seq} ({entry.change} {entry.device_id or '-'} {entry.job})".rstrip()
        if entry.seq <= last_seq:
            problems.append(f"{where}: its number does not grow")
        if entry.boot_id == clock[0] and entry.at_s < clock[1]:
            problems.append(f"{where}: the monotonic clock went back from {clock[1]:.6f} to {entry.at_s:.6f} s")
        last_seq, clock = entry.seq, (entry.boot_id, entry.at_s)
        if not entry.lease_id:
            continue
        holder = holders.get(entry.device_id)
        if entry.change == LeaseChange.GRANTED.value:
            if holder is not None:
                problems.append(f"{where}: {holder.job} holds it under {holder.lease_id}, so it has two holders")
            if entry.fencing_token <= tokens.get(entry.device_id, -1):
                problems.append(f"{where}: token {entry.fencing_token} is not above {tokens[entry.device_id]}")
            holders[entry.device_id] = entry
            tokens[entry.device_id] = entry.fencing_token
        elif holder is None or (holder.lease_id, holder.job) != (entry.lease_id, entry.job):
            problems.append(f"{where}: {entry.lease_id} is not the lease in force there")
        elif LeaseChange(entry.change) in ENDS:
            del holders[entry.device_id]
    return problems
