"""The lender: who may borrow which device, until when. In process, on an injected clock.

Invariants:

* At most one lease a device; a device's fencing token grows with every grant and every end of a lease, so a borrower with
  an outdated lease is refused by the ledger whatever its clock says.
* The ledger is written before anybody is told: once ``revoke`` returns, the rollout engine starts no further device turn
  and evicts its requests at its next look, at most one turn plus the governor's ``max_hold_s`` later.
* Decisions are ``rose.policies.lending``; this class keeps the state and writes the ledgers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping

import attrs

from rose.coserving.ledger import Ledger
from rose.errors import LeaseError, LedgerError
from rose.interfaces.clock import Clock
from rose.policies.admission import Budget, Mode
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


@attrs.define
class _Device:
    ledger: Ledger
    last_token: int
    lease: Lease | None = None


class Lender:
    """Grants, renews and ends leases of the devices of one serving cluster."""

    def __init__(
        self,
        ledgers: Mapping[DeviceId, Ledger],
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
        self._devices = {device_id: _Device(ledger, _token_in(ledger) + 1) for device_id, ledger in ledgers.items()}
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
        leases = plan_grants(self._config, self._uses(), job, num_devices, self._clock.now())
        for lease in leases:
            device = self._devices[lease.device_id]
            device.lease, device.last_token = lease, lease.fencing_token
            self._publish(device)
            self._tell(LeaseChange.GRANTED, lease)
        return leases

    def renew(self, lease_id: LeaseId) -> Lease:
        """Extend a lease by the full time to live from now.

        Raises:
            LeaseError: The lease is unknown, expired or revoked.
        """
        self.expire()
        for device in self._devices.values():
            if device.lease is not None and device.lease.lease_id == lease_id:
                device.lease = attrs.evolve(device.lease, expires_s=self._clock.now() + self._config.ttl_s)
                self._publish(device)
                self._tell(LeaseChange.RENEWED, device.lease)
                return device.lease
        message = f"lease {lease_id} is not in force (never granted, expired or revoked); ask for a new one"
        raise LeaseError(message)

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
        return self._end(plan_expiry(self._uses(), self._clock.now()), LeaseChange.EXPIRED)

    def stop(self) -> tuple[Lease, ...]:
        """Serving's kill switch: end every lease and grant none until ``allow``."""
        self._is_stopped = True
        return self.revoke()

    def allow(self) -> None:
        """Lend again after ``stop``."""
        self._is_stopped = False

    def _end(self, leases: Iterable[Lease], change: LeaseChange) -> tuple[Lease, ...]:
        ended = tuple(leases)
        for lease in ended:
            device = self._devices[lease.device_id]
            device.lease, device.last_token = None, device.last_token + 1
            self._publish(device)
        for lease in ended:
            self._tell(change, lease)
        return ended

    def _uses(self) -> list[DeviceUse]:
        return [
            DeviceUse(
                device_id=device_id,
                kv_use_fraction=_kv_use(device.ledger),
                last_token=device.last_token,
                lease=device.lease,
            )
            for device_id, device in self._devices.items()
        ]

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


def _token_in(ledger: Ledger) -> int:
    try:
        return ledger.budget().fencing_token
    except LedgerError:
        return 0


def _kv_use(ledger: Ledger) -> float | None:
    """Return serving's KV use as a fraction, ``None`` when serving never spoke or cannot be read."""
    try:
        serving = ledger.serving()
    except LedgerError:
        return None
    if serving.heartbeat_s == -math.inf:
        return None
    return serving.kv_used_bytes / serving.kv_pool_bytes
