"""What a lender knows of its devices, and what of the leases in its store can go on after a restart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import attrs

from rose.coserving.lease_store import DeviceRecord, SavedState, Switch, SwitchKind
from rose.coserving.lender_audit import Counters, LeaseChange, read_counters
from rose.errors import LedgerError
from rose.policies.admission import Budget, Mode, ServingState
from rose.policies.lending import DeviceUse, Lease, LendingConfig, job_key
from rose.types import DeviceId


class LenderLedger(Protocol):
    """What the lender needs of a device's ledger. ``rose.coserving.ledger.Ledger`` has it, over a shared file.

    One that also has ``usage()`` is asked for the mean KV use over its window in place of the present one.
    """

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


@attrs.frozen(kw_only=True)
class DeviceTerms:
    """What a device is good for.

    Attributes:
        models: What its rollout engine can serve; ``None``: anything.
        serving_model: What its serving engine serves.
    """

    models: frozenset[str] | None = None
    serving_model: str | None = None


@attrs.define(eq=False, kw_only=True)
class LentDevice:
    """What a lender holds of one device.

    Attributes:
        number: Its place among the devices.
        last_token: The largest fencing token that was ever given out or written for it.
        lease: The lease in force.
        start: The device's counters when that was granted.
        rests_until_s: When it may be lent again.
    """

    device_id: DeviceId
    number: int
    ledger: LenderLedger
    terms: DeviceTerms
    last_token: int
    lease: Lease | None = None
    start: Counters = attrs.field(factory=Counters)
    rests_until_s: float = -math.inf

    def record(self) -> DeviceRecord:
        """Return what is kept of it."""
        return DeviceRecord(device_id=self.device_id, last_token=self.last_token, lease=self.lease, start=self.start)

    def use(self, kv_use_fraction: float | None = None) -> DeviceUse:
        """Return what is known of it."""
        return DeviceUse(
            device_id=self.device_id,
            kv_use_fraction=kv_use_fraction,
            last_token=self.last_token,
            lease=self.lease,
            models=self.terms.models,
        )

    def budget(self, mode: Mode) -> Budget:
        """Return what its ledger should say."""
        lease = self.lease
        return Budget(
            mode=mode,
            fencing_token=self.last_token,
            expires_s=0.0 if lease is None else lease.expires_s,
            is_granted=lease is not None,
            holder=0 if lease is None else job_key(lease.job),
        )

    def is_concerned(self, switch: Switch) -> bool:
        """Tell whether a switch stops it, or what is lent on it."""
        if switch.kind is SwitchKind.DEVICE:
            return self.device_id == switch.name
        if switch.kind is SwitchKind.ALL or self.terms.serving_model == switch.name:
            return True
        model = None if self.lease is None else self.lease.model
        return model == switch.name if model is not None else switch.name in (self.terms.models or ())


def closed_reason(device: LentDevice, switches: Iterable[Switch], config: LendingConfig, now_s: float) -> str:
    """Return in a few words why a device that is not lent cannot be lent at ``now_s``; nothing where it can."""
    thrown = [switch for switch in switches if device.is_concerned(switch)]
    if thrown:
        return f"kill switch ({thrown[0]})"
    if now_s < device.rests_until_s:
        return f"resting for {device.rests_until_s - now_s:.0f} s more"
    try:
        serving = device.ledger.serving()
    except LedgerError as error:
        return str(error)
    if serving.heartbeat_s == -math.inf:
        return "no heartbeat"
    if not serving.is_heard(now_s, config.stale_after_s):
        age_s = now_s - serving.heartbeat_s
        return f"stale heartbeat ({age_s:.0f} s old)" if age_s > 0 else "heartbeat of another boot"
    use = kv_use_fraction(device.ledger, now_s, config.stale_after_s)
    return f"KV use {use:.2f}" if use is not None and use > config.max_kv_use_fraction else ""


@attrs.frozen
class Ended:
    """A lease that was found at the start and cannot go on, why, and what it came to as far as its device's ledger says."""

    lease: Lease
    change: LeaseChange
    reason: str
    used: Counters


def resume(
    devices: Mapping[DeviceId, LentDevice], saved: SavedState, now_s: float
) -> tuple[list[DeviceRecord], list[Ended]]:
    """Give devices the leases and tokens that a store knows, where those can go on.

    Args:
        devices: With the token that was found in their ledgers and no lease.
        saved: What the store knows.
        now_s: The time.

    Returns:
        What to keep of devices that are not lent any more, and the leases that are over.
    """
    gone, ended = [], []
    for record in saved.devices.values():
        device, lease = devices.get(record.device_id), record.lease
        reason = "" if lease is None else _end_reason(lease, device, saved, now_s)
        if device is None:
            if lease is not None:
                gone.append(attrs.evolve(record, lease=None, last_token=record.last_token + 1))
        else:
            device.last_token = max(device.last_token, record.last_token)
            if lease is not None and not reason:
                device.lease, device.start = lease, record.start
        if lease is not None and reason:
            used = Counters()
            if device is not None and saved.is_same_boot:
                used = read_counters(device.ledger).since(record.start)
            is_over = not saved.is_same_boot or lease.expires_s <= now_s
            ended.append(Ended(lease, LeaseChange.EXPIRED if is_over else LeaseChange.REVOKED, reason, used))
    for device in devices.values():
        if device.lease is None:
            device.last_token += 1
    return gone, ended


def _end_reason(lease: Lease, device: LentDevice | None, saved: SavedState, now_s: float) -> str:
    """Return why a lease that was in force for the store cannot go on; nothing if it can."""
    if device is None:
        return "the device is not lent any more"
    if not saved.is_same_boot:
        return "the machine was started anew"
    if device.last_token > lease.fencing_token:
        return "its end was in the ledger already"
    if lease.expires_s <= now_s:
        return "it ran out while there was no lender"
    return ""


def token_in(ledger: LenderLedger) -> int:
    """Return the fencing token that a ledger holds, 0 where it cannot be read."""
    try:
        return ledger.budget().fencing_token
    except LedgerError:
        return 0


def kv_use_fraction(ledger: LenderLedger, now_s: float, stale_after_s: float = math.inf) -> float | None:
    """Return serving's mean KV use over the ledger's window as a fraction, or the present one where no mean was written.

    ``None`` when serving never spoke, was silent for longer than ``stale_after_s``, or cannot be read.
    """
    try:
        serving = ledger.serving()
        if serving.heartbeat_s == -math.inf or not serving.is_heard(now_s, stale_after_s):
            return None
        if hasattr(ledger, "usage"):
            usage = ledger.usage()
            if usage.updated_s > -math.inf:
                return float(usage.kv_mean_fraction)
    except LedgerError:
        return None
    return serving.kv_used_bytes / serving.kv_pool_bytes
