"""The lender: who may borrow which device, until when. In process, on an injected clock.

Invariants:

* At most one lease a device; a device's fencing token grows with every grant and every end of a lease, so a borrower with
  an outdated lease is refused by the ledger whatever its clock says.
* The ledger is written before anybody is told: once ``revoke`` returns, the rollout engine starts no further device turn
  and evicts its requests at its next look, at most one turn plus the governor's ``max_hold_s`` later.
* Decisions are ``rose.policies.lending``; this class keeps the state and writes the ledgers.
* ``_leases`` has exactly the leases in force, which their devices have too; each has one entry in the heap ``_ends``, never
  later than its end. So renewing takes the same time for any number of devices.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import attrs

from rose.errors import LeaseError, LedgerError
from rose.interfaces.clock import Clock
from rose.policies.admission import Budget, Mode, ServingState
from rose.policies.lending import DeviceUse, Lease, LendingConfig, plan_expiry, plan_grants
from rose.types import DeviceId, JobId, LeaseId


class LeaseChange(enum.Enum):
    """What happened to a lease."""

    GRANTED = "granted"
    RENEWED = "renewed"
    REVOKED = "revoked"
    EXPIRED = "expired"


@attrs.frozen
class LeaseEvent:
    """One change of one lease, told to listeners in order."""

    change: LeaseChange
    lease: Lease


Listener = Callable[[LeaseEvent], None]


class LenderLedger(Protocol):
    """What the lender needs of a device's ledger. ``rose.coserving.ledger.Ledger`` has it, over a shared file."""

    def publish_budget(self, budget: Budget) -> None:
        """Write what is allowed on the device."""

    def budget(self) -> Budget:
        """Read what was written last.

        Raises:
            LedgerError: It cannot be read.
        """

    def serving(self) -> ServingState:
        """Read serving's state.

        Raises:
            LedgerError: It cannot be read.
        """


@attrs.define(eq=False, kw_only=True)
class _Device:
    device_id: DeviceId
    number: int
    ledger: LenderLedger
    last_token: int
    lease: Lease | None = None


class Lender:
    """Grants, renews and ends leases of the devices of one serving cluster."""

    def __init__(
        self,
        ledgers: Mapping[DeviceId, LenderLedger],
        clock: Clock,
        config: LendingConfig | None = None,
        mode: Mode = Mode.SLO,
    ) -> None:
        """Lend the devices whose ledgers are given. The lender is the one writer of their budget sections.

        Tokens continue from what the ledgers hold; leases found there are ended, since nobody renews them any more.
        """
        self._clock = clock
        self._config = config or LendingConfig()
        self._mode = mode
        self._is_stopped = False
        self._listeners: list[Listener] = []
        self._devices = {
            device_id: _Device(device_id=device_id, number=number, ledger=ledger, last_token=_token_in(ledger) + 1)
            for number, (device_id, ledger) in enumerate(ledgers.items())
        }
        self._leases: dict[LeaseId, Lease] = {}
        self._ends: list[tuple[float, LeaseId]] = []
        for device in self._devices.values():
            self._publish(device)

    @property
    def mode(self) -> Mode:
        """How much of serving's slack is lent on all devices."""
        return self._mode

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases in force."""
        return tuple(device.lease for device in self._devices.values() if device.lease is not None)

    def is_in_force(self, lease_id: LeaseId) -> bool:
        """Tell whether a lease was granted and not ended since; one that is over but not yet ended still counts."""
        return lease_id in self._leases

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` after every change, on the caller's thread. It must not call the lender back."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Call ``listener`` no more. A no-op when it was not subscribed."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def set_mode(self, mode: Mode) -> None:
        """Change how much is lent, at once, on all devices."""
        self._mode = mode
        for device in self._devices.values():
            self._publish(device)

    def grant(self, job: JobId, num_devices: int) -> tuple[Lease, ...]:
        """Lend up to ``num_devices`` more devices to ``job``, those with the lowest recent KV use first.

        Returns:
            The new leases, fewer than asked (down to none) when devices are busy, silent, or the quota is used up.
        """
        self.expire()
        if self._is_stopped:
            return ()
        uses = [_use(device) for device in self._devices.values()]
        leases = plan_grants(self._config, uses, job, num_devices, self._clock.now())
        for lease in leases:
            device = self._devices[lease.device_id]
            device.lease, device.last_token = lease, lease.fencing_token
            self._leases[lease.lease_id] = lease
            heapq.heappush(self._ends, (lease.expires_s, lease.lease_id))
            self._publish(device)
            self._tell(LeaseChange.GRANTED, lease)
        return leases

    def renew(self, lease_id: LeaseId) -> Lease:
        """Extend a lease by the full time to live from now.

        Raises:
            LeaseError: The lease is unknown, expired or revoked.
        """
        self.expire()
        if lease_id not in self._leases:
            message = f"lease {lease_id} is not in force (never granted, expired or revoked); ask for a new one"
            raise LeaseError(message)
        lease = attrs.evolve(self._leases[lease_id], expires_s=self._clock.now() + self._config.ttl_s)
        device = self._devices[lease.device_id]
        device.lease = self._leases[lease_id] = lease
        self._publish(device)
        self._tell(LeaseChange.RENEWED, lease)
        return lease

    def revoke(self, device_id: DeviceId | None = None) -> tuple[Lease, ...]:
        """End the lease of one device, or of all when none is named. A device without a lease is left alone.

        Raises:
            LeaseError: There is no such device.
        """
        if device_id is not None and device_id not in self._devices:
            message = f"no device {device_id!r} is lent here; known are {', '.join(sorted(self._devices))}"
            raise LeaseError(message)
        chosen = self._devices.values() if device_id is None else (self._devices[device_id],)
        return self._end([device.lease for device in chosen if device.lease is not None], LeaseChange.REVOKED)

    def expire(self) -> tuple[Lease, ...]:
        """End the leases whose time is over; call it now and then. Engines refuse expired leases by themselves."""
        now_s = self._clock.now()
        devices = [self._devices[lease.device_id] for lease in self._pop_due(now_s)]
        devices.sort(key=lambda device: device.number)
        return self._end(plan_expiry([_use(device) for device in devices], now_s), LeaseChange.EXPIRED)

    def stop(self) -> tuple[Lease, ...]:
        """Serving's kill switch: end every lease and grant none until ``allow``."""
        self._is_stopped = True
        return self.revoke()

    def allow(self) -> None:
        """Lend again after ``stop``."""
        self._is_stopped = False

    def _pop_due(self, now_s: float) -> Iterator[Lease]:
        """Take the leases that may be over out of the heap; those renewed since they were put there go back into it."""
        while self._ends and self._ends[0][0] <= now_s:
            lease = self._leases.get(heapq.heappop(self._ends)[1])
            if lease is not None and lease.expires_s > now_s:
                heapq.heappush(self._ends, (lease.expires_s, lease.lease_id))
            elif lease is not None:
                yield lease

    def _end(self, leases: Iterable[Lease], change: LeaseChange) -> tuple[Lease, ...]:
        ended = tuple(leases)
        for lease in ended:
            del self._leases[lease.lease_id]
            device = self._devices[lease.device_id]
            device.lease, device.last_token = None, device.last_token + 1
            self._publish(device)
        for lease in ended:
            self._tell(change, lease)
        return ended

    def _publish(self, device: _Device) -> None:
        lease = device.lease
        device.ledger.publish_budget(
            Budget(
                mode=self._mode,
                fencing_token=device.last_token,
                expires_s=0.0 if lease is None else lease.expires_s,
                is_granted=lease is not None,
            )
        )

    def _tell(self, change: LeaseChange, lease: Lease) -> None:
        for listener in self._listeners:
            listener(LeaseEvent(change, lease))


def _token_in(ledger: LenderLedger) -> int:
    try:
        return ledger.budget().fencing_token
    except LedgerError:
        return 0


def _use(device: _Device) -> DeviceUse:
    """Describe a device; serving is asked only where nothing is lent yet."""
    return DeviceUse(
        device_id=device.device_id,
        kv_use_fraction=_kv_use(device.ledger) if device.lease is None else None,
        last_token=device.last_token,
        lease=device.lease,
    )


def _kv_use(ledger: LenderLedger) -> float | None:
    """Return serving's KV use as a fraction, ``None`` when serving never spoke or cannot be read."""
    try:
        serving = ledger.serving()
    except LedgerError:
        return None
    if serving.heartbeat_s == -math.inf:
        return None
    return serving.kv_used_bytes / serving.kv_pool_bytes
