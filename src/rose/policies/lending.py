"""Who may borrow which device: pure plans over a snapshot of devices, leases and wishes.

Invariants: at most one lease a device; fencing tokens of a device grow for ever; a job holds at most its quota; of the devices
that may be lent those with the lowest recent KV use go first; nobody is asked back a device before ``min_hold_s``.

Fairness: a free device goes to the tenant, then to the job in it, that stays poorest for its weight. Who waits and has a whole device
less than its share gets one back from a job that is above its own. Who is behind by ``min_hold_s`` device seconds gets the odd device
too, which so goes round, or one more than its share until it has caught up. Nobody who is behind gives anything back.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
from attrs import validators as v

from rose import checks
from rose.types import DeviceId, JobId, LeaseId


@attrs.frozen(kw_only=True)
class JobTerms:
    """What one job may have.

    Attributes:
        tenant: To whom it belongs; ``None``: a tenant of its own.
        weight: Its share among the jobs of its tenant, or among the tenants if it is one of its own.
        quota: Most devices at once; ``None``: the common one.
    """

    tenant: str | None = None
    weight: float = attrs.field(default=1.0, validator=checks.number(above=0))
    quota: int | None = attrs.field(default=None, validator=v.optional(v.ge(0)))


@attrs.frozen(kw_only=True)
class LendingConfig:
    """Terms of leases.

    Attributes:
        ttl_s: A lease not renewed for this long ends.
        quota: Most devices of one job; ``jobs`` may say otherwise.
        jobs: Terms of jobs by name.
        tenants: Weights of tenants by name; 1 where nothing is said.
        max_kv_use_fraction: Devices whose recent KV use is above this are not lent.
        stale_after_s: Nor are those whose serving engine was silent for longer.
        grace_s: Between asking a device back and taking it.
        min_hold_s: No device is asked back for another job's sake before it was held for this long. Also by how many device
            seconds a job may be behind its share before others make up for it.
        rest_s: How long a device that serving took back is not lent again.
        audits_renewals: Enter renewals in the audit ledger too; three a ``ttl_s`` and device. Without them the entry of the end
            says until when a lease was renewed last.
    """

    ttl_s: float = attrs.field(default=30.0, validator=checks.number(above=0))
    quota: int = attrs.field(default=64, validator=v.ge(0))
    jobs: Mapping[str, JobTerms] = attrs.field(factory=dict)
    tenants: Mapping[str, float] = attrs.field(factory=dict)
    max_kv_use_fraction: float = attrs.field(default=0.8, validator=[v.gt(0), v.le(1)])
    stale_after_s: float = attrs.field(default=10.0, validator=v.gt(0))
    grace_s: float = attrs.field(default=5.0, validator=checks.number(at_least=0))
    min_hold_s: float = attrs.field(default=60.0, validator=checks.number(at_least=0))
    rest_s: float = attrs.field(default=30.0, validator=checks.number(at_least=0))
    audits_renewals: bool = False

    def __attrs_post_init__(self) -> None:
        """Check the weights, whose validators the mapping has none of."""
        if wrong := sorted(name for name, weight in self.tenants.items() if not 0 < weight < math.inf):
            message = f"tenants: weights must be > 0 and finite, which those of {', '.join(wrong)} are not"
            raise ValueError(message)
        if "" in self.jobs or "" in self.tenants:
            message = f"{'jobs' if '' in self.jobs else 'tenants'}: a name must not be empty"
            raise ValueError(message)

    def terms_of(self, job: JobId) -> JobTerms:
        """Return the terms of ``job``."""
        return self.jobs.get(job, _DEFAULT_TERMS)

    def quota_of(self, job: JobId) -> int:
        """Return how many devices ``job`` may hold."""
        quota = self.terms_of(job).quota
        return self.quota if quota is None else quota

    def tenant_of(self, job: JobId) -> str:
        """Return to whom ``job`` belongs."""
        tenant = self.terms_of(job).tenant
        return job if tenant is None else tenant

    def tenant_weight(self, tenant: str) -> float:
        """Return a tenant's weight among tenants; a job that is a tenant of its own has its own weight there."""
        own = self.jobs.get(tenant)
        return self.tenants.get(tenant, own.weight if own is not None and own.tenant is None else 1.0)


_DEFAULT_TERMS = JobTerms()


@attrs.frozen(kw_only=True)
class Lease:
    """The right of one job to borrow one device until ``expires_s``, unless revoked earlier.

    Attributes:
        granted_s: When it was granted; times are seconds of the lender's clock.
        model: What the job runs there, where it was said.
        is_revoking: It was asked back: ``expires_s`` is its last moment, and it is not renewed.
    """

    lease_id: LeaseId
    job: JobId
    device_id: DeviceId
    fencing_token: int
    expires_s: float
    granted_s: float = 0.0
    model: str | None = None
    is_revoking: bool = False


def job_key(job: JobId) -> int:
    """Return a positive number of 63 bits that stands for a job where there is no room for its name."""
    digest = hashlib.sha256(job.encode(errors="backslashreplace")).digest()
    return int.from_bytes(digest[:8]) >> 1 | 1


@attrs.frozen(kw_only=True)
class Ask:
    """A job's wish for more devices.

    Attributes:
        num_devices: More than it holds, at most.
        model: What it would run; only devices whose rollout engine can serve it are lent. ``None``: whatever is there.
        devices: Those where it has an engine; ``None``: all.
        but: Those that are of no use to it.
        is_whole: All of them or none, as for an engine that spans several devices.
    """

    job: JobId
    num_devices: int
    model: str | None = None
    devices: frozenset[DeviceId] | None = None
    but: frozenset[DeviceId] = frozenset()
    is_whole: bool = False

    def fits(self, use: DeviceUse) -> bool:
        """Tell whether a device is of use to this job."""
        is_useful = (self.devices is None or use.device_id in self.devices) and use.device_id not in self.but
        return is_useful and (self.model is None or use.models is None or self.model in use.models)


@attrs.frozen(kw_only=True)
class DeviceUse:
    """What the lender knows of a device.

    Attributes:
        kv_use_fraction: Recent KV use of its serving engine; ``None`` if unknown, or if the device must not be lent now.
        last_token: The largest fencing token that was given out for it.
        models: What its rollout engine can serve; ``None``: anything.
    """

    device_id: DeviceId
    kv_use_fraction: float | None
    last_token: int
    lease: Lease | None = None
    models: frozenset[str] | None = None


def plan_grants(
    config: LendingConfig,
    devices: Sequence[DeviceUse],
    asks: Sequence[Ask],
    now_s: float,
    *,
    wishes: Sequence[Ask] = (),
    deficits: Mapping[JobId, float] | None = None,
) -> tuple[Lease, ...]:
    """Return the new leases for ``asks``, which are planned together, in the order in which they are given out.

    Devices whose serving engine does not report are never lent. May be fewer than asked, down to none.

    Args:
        config: The terms.
        devices: All devices.
        asks: What jobs want now.
        now_s: The time.
        wishes: What jobs still want that asked before: their fair part of the free devices is kept for them.
        deficits: How far jobs are behind their shares, which decides between equals.
    """
    free = sorted(lendable(config, devices), key=lambda use: (use.kv_use_fraction, use.device_id))
    held = Counter(use.lease.job for use in devices if use.lease is not None)
    chosen = _fill(config, free, [*asks, *wishes], held, deficits or {})
    if wishes:
        numbers = Counter(index for index, _ in chosen)
        limited = [attrs.evolve(ask, num_devices=numbers[index]) for index, ask in enumerate(asks)]
        chosen = _fill(config, free, limited, held, deficits or {})
    return tuple(_lease(config, use, asks[index], now_s) for index, use in chosen)


def lendable(config: LendingConfig, devices: Iterable[DeviceUse]) -> list[DeviceUse]:
    """Return the devices that are free and idle enough."""
    return [
        use
        for use in devices
        if use.lease is None and use.kv_use_fraction is not None and use.kv_use_fraction <= config.max_kv_use_fraction
    ]


def _fill(
    config: LendingConfig,
    free: Sequence[DeviceUse],
    asks: Sequence[Ask],
    held_before: Mapping[JobId, int],
    deficits: Mapping[JobId, float],
) -> list[tuple[int, DeviceUse]]:
    """Give out free devices, each time to the poorest ask that can use one; returns (number of the ask, device)."""
    held = Counter(held_before)
    extra = {job: int(is_behind(config, deficit_s)) for job, deficit_s in deficits.items()}
    by_tenant: Counter[str] = Counter()
    for job in {*held, *extra}:
        by_tenant[config.tenant_of(job)] += held[job] - extra.get(job, 0)
    tenant_deficits: dict[str, float] = defaultdict(float)
    for job, deficit_s in deficits.items():
        tenant_deficits[config.tenant_of(job)] += deficit_s
    taken: set[DeviceId] = set()
    left = {index: ask.num_devices for index, ask in enumerate(asks) if ask.num_devices > 0}
    usable = {index: _usable(free, asks[index], taken) for index in left}

    def standing(index: int) -> tuple[float, float, str, float, float, str, int]:
        job = asks[index].job
        tenant = config.tenant_of(job)
        of_tenant = ((by_tenant[tenant] + 1) / config.tenant_weight(tenant), -tenant_deficits[tenant], tenant)
        level = (held[job] - extra.get(job, 0) + 1) / config.terms_of(job).weight
        return (*of_tenant, level, -deficits.get(job, 0.0), job, index)

    chosen = []
    while left:
        index = min(left, key=standing) if len(left) > 1 else next(iter(left))
        job, wanted, is_whole = asks[index].job, left[index], asks[index].is_whole
        size = min(wanted if is_whole or len(left) == 1 else 1, max(0, config.quota_of(job) - held[job]))
        uses = list(itertools.islice(usable[index], size))
        if not uses or (is_whole and len(uses) < wanted):
            del left[index]
            continue
        chosen += [(index, use) for use in uses]
        taken |= {use.device_id for use in uses}
        held[job] += len(uses)
        by_tenant[config.tenant_of(job)] += len(uses)
        left[index] -= len(uses)
        if not left[index]:
            del left[index]
    return chosen


def is_behind(config: LendingConfig, deficit_s: float) -> bool:
    """Tell whether a job is behind its share by so much that others make up for it."""
    return 0 < config.min_hold_s <= deficit_s


def _usable(free: Sequence[DeviceUse], ask: Ask, taken: set[DeviceId]) -> Iterator[DeviceUse]:
    return (use for use in free if use.device_id not in taken and ask.fits(use))


def _lease(config: LendingConfig, use: DeviceUse, ask: Ask, now_s: float) -> Lease:
    token = use.last_token + 1
    model = ask.model
    if model is None and use.models is not None and len(use.models) == 1:
        (model,) = use.models
    return Lease(
        lease_id=LeaseId(f"{use.device_id}#{token}"),
        job=ask.job,
        device_id=use.device_id,
        fencing_token=token,
        expires_s=now_s + config.ttl_s,
        granted_s=now_s,
        model=model,
    )


def plan_expiry(devices: Sequence[DeviceUse], now_s: float) -> tuple[Lease, ...]:
    """Return the leases whose time is over."""
    return tuple(use.lease for use in devices if use.lease is not None and now_s >= use.lease.expires_s)
