"""Who may borrow which device: pure plans over a snapshot of devices and leases.

Invariants: at most one lease a device; fencing tokens of a device grow for ever; a job holds at most its quota.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from attrs import validators as v

from rose.types import DeviceId, JobId, LeaseId


@attrs.frozen(kw_only=True)
class LendingConfig:
    """Terms of leases.

    Attributes:
        ttl_s: A lease not renewed for this long ends.
        quota: Most devices of one job; jobs in ``quotas`` have their own.
        max_kv_use_fraction: Devices whose recent KV use is above this are not lent.
    """

    ttl_s: float = attrs.field(default=30.0, validator=v.gt(0))
    quota: int = attrs.field(default=64, validator=v.ge(0))
    quotas: Mapping[str, int] = attrs.field(factory=dict)
    max_kv_use_fraction: float = attrs.field(default=0.8, validator=[v.gt(0), v.le(1)])

    def quota_of(self, job: JobId) -> int:
        """Return how many devices ``job`` may hold."""
        return self.quotas.get(job, self.quota)


@attrs.frozen(kw_only=True)
class Lease:
    """The right of one job to borrow one device until ``expires_s``, unless revoked earlier."""

    lease_id: LeaseId
    job: JobId
    device_id: DeviceId
    fencing_token: int
    expires_s: float


@attrs.frozen(kw_only=True)
class DeviceUse:
    """What the lender knows of a device: recent KV use of its serving engine as a fraction, ``None`` if unknown."""

    device_id: DeviceId
    kv_use_fraction: float | None
    last_token: int
    lease: Lease | None = None


def plan_grants(
    config: LendingConfig, devices: Sequence[DeviceUse], job: JobId, num_devices: int, now_s: float
) -> tuple[Lease, ...]:
    """Return the new leases of ``job``: up to ``num_devices`` free devices, lowest recent KV use first.

    Devices whose serving engine does not report are never lent. May be fewer than asked, down to none.
    """
    num_held = sum(use.lease is not None and use.lease.job == job for use in devices)
    num_new = max(0, min(num_devices, config.quota_of(job) - num_held))
    free = [
        (use.kv_use_fraction, use.device_id, use)
        for use in devices
        if use.lease is None and use.kv_use_fraction is not None and use.kv_use_fraction <= config.max_kv_use_fraction
    ]
    chosen = sorted(free, key=lambda item: item[:2])[:num_new]
    return tuple(_lease(config, use, job, now_s) for _, _, use in chosen)


def _lease(config: LendingConfig, use: DeviceUse, job: JobId, now_s: float) -> Lease:
    token = use.last_token + 1
    return Lease(
        lease_id=LeaseId(f"{use.device_id}#{token}"),
        job=job,
        device_id=use.device_id,
        fencing_token=token,
        expires_s=now_s + config.ttl_s,
    )


def plan_expiry(devices: Sequence[DeviceUse], now_s: float) -> tuple[Lease, ...]:
    """Return the leases whose time is over."""
    return tuple(use.lease for use in devices if use.lease is not None and now_s >= use.lease.expires_s)
