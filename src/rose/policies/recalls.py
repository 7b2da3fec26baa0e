"""Fair shares of the devices of a lender, and which leases are asked back for their sake. Pure; see ``rose.policies.lending``."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rose.policies.fair_shares import fair_shares
from rose.policies.lending import Ask, DeviceUse, Lease, LendingConfig, is_behind, lendable
from rose.types import JobId

_EPSILON = 1e-9


def plan_shares(config: LendingConfig, devices: Sequence[DeviceUse], wishes: Sequence[Ask]) -> dict[JobId, float]:
    """Return the fair share of each job that holds or wants devices, in devices."""
    free = lendable(config, devices)
    lent = [(use.lease.job, use) for use in devices if use.lease is not None]
    demands = Counter(job for job, _ in lent)
    for wish in wishes:
        others = [use for job, use in lent if job != wish.job]
        num_fit = sum(wish.fits(use) for use in (*free, *others))
        demands[wish.job] += min(wish.num_devices, num_fit)
    wanted = {job: min(demand, config.quota_of(job)) for job, demand in demands.items()}
    tenants = {job: config.tenant_of(job) for job in wanted}
    return fair_shares(
        wanted,
        {job: config.terms_of(job).weight for job in wanted},
        tenants,
        {tenant: config.tenant_weight(tenant) for tenant in tenants.values()},
        len(lent) + len(free),
    )


def plan_recalls(
    config: LendingConfig,
    devices: Sequence[DeviceUse],
    wishes: Sequence[Ask],
    shares: Mapping[JobId, float],
    deficits: Mapping[JobId, float],
    now_s: float,
) -> tuple[Lease, ...]:
    """Return the leases to ask back, so that who waits gets nearer to its share.

    Taken from the job that is furthest above its share, the lease that it got last; what is free or comes back anyway counts first. For
    an engine over several devices all that it lacks is asked back, or nothing.
    """
    coming = [use for use in devices if use.lease is not None and use.lease.is_revoking] + lendable(config, devices)
    kept = [use for use in devices if use.lease is not None and not use.lease.is_revoking]
    held = Counter(use.lease.job for use in kept if use.lease is not None)
    recalled: list[Lease] = []
    for wish in sorted(wishes, key=lambda wish: (-deficits.get(wish.job, 0.0), wish.job)):
        needed = _num_due(config, wish, shares.get(wish.job, 0.0) - held[wish.job], deficits.get(wish.job, 0.0))
        arriving = list(itertools.islice(filter(wish.fits, coming), needed))
        old = [use for use in kept if use.lease is not None and now_s - use.lease.granted_s >= config.min_hold_s]
        taken = _plan_taking(old, wish, needed - len(arriving), held, shares, deficits, num_coming=len(arriving))
        if wish.is_whole and len(arriving) + len(taken) < wish.num_devices:
            continue  # a part would help nobody and cost another job an engine
        held[wish.job] += len(arriving) + len(taken)
        held.subtract(use.lease.job for use in taken if use.lease is not None)
        coming = [use for use in coming if use not in arriving]
        kept = [use for use in kept if use not in taken]
        recalled += [use.lease for use in taken if use.lease is not None]
    return tuple(recalled)


def _num_due(config: LendingConfig, wish: Ask, lacking: float, deficit_s: float) -> int:
    """Return how many devices a job that lacks so many of its share is to have now; an engine over several: all or none."""
    due = math.floor(lacking + _EPSILON)
    if is_behind(config, deficit_s):
        due = math.ceil(lacking - _EPSILON) if abs(lacking) > _EPSILON else 1
        due = max(due, wish.num_devices) if wish.is_whole else due
    due = max(0, min(wish.num_devices, due))
    return 0 if wish.is_whole and due < wish.num_devices else due


def _plan_taking(
    kept: Sequence[DeviceUse],
    wish: Ask,
    number: int,
    held_before: Mapping[JobId, int],
    shares: Mapping[JobId, float],
    deficits: Mapping[JobId, float],
    *,
    num_coming: int,
) -> list[DeviceUse]:
    """Return up to ``number`` devices that others give for a wish, which has ``num_coming`` already."""
    held = Counter(held_before)
    held[wish.job] += num_coming
    taken: list[DeviceUse] = []
    for _ in range(number):
        is_extra = shares.get(wish.job, 0.0) - held[wish.job] <= _EPSILON
        ahead = [
            use
            for use in kept
            if use.lease is not None
            and use not in taken
            and wish.fits(use)
            and _may_give(use.lease.job, wish.job, deficits, is_extra=is_extra)
        ]
        found = _most_above(ahead, held, shares, _EPSILON - is_extra)
        if found is None or found.lease is None:
            break
        held[found.lease.job] -= 1
        held[wish.job] += 1
        taken.append(found)
    return taken


def _may_give(job: JobId, other: JobId, deficits: Mapping[JobId, float], *, is_extra: bool) -> bool:
    """Tell whether a job may give a device to another: it is not behind itself and, below its share, it is ahead."""
    deficit_s = deficits.get(job, 0.0)
    return job != other and (deficit_s < 0 if is_extra else deficit_s <= 0)


def _most_above(
    uses: Sequence[DeviceUse], held: Mapping[JobId, int], shares: Mapping[JobId, float], least: float
) -> DeviceUse | None:
    """Return a device of the job that is furthest above its share, by more than ``least``: the one that it got last."""

    def order(use: DeviceUse) -> tuple[float, float, str]:
        job, granted_s = ("", 0.0) if use.lease is None else (use.lease.job, use.lease.granted_s)
        return held.get(JobId(job), 0) - shares.get(JobId(job), 0.0), granted_s, use.device_id

    above = [use for use in uses if order(use)[0] > least]
    return max(above, key=order, default=None)
