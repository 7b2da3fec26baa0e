"""Fair shares of devices: max-min fair by weight, among tenants first, then among the jobs of each.

Invariants: shares add up to no more than the capacity; nobody's share is above its demand; what one does not want the others
of its level share by weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import TypeVar

from rose.types import JobId

Name = TypeVar("Name", bound=Hashable)


def water_fill(demands: Mapping[Name, float], weights: Mapping[Name, float], capacity: float) -> dict[Name, float]:
    """Divide ``capacity``: everybody gets its demand or, where that is more than its weighted share of the rest, that share."""
    shares: dict[Name, float] = {}
    left = capacity
    names = sorted(demands, key=lambda name: demands[name] / weights[name])
    # of each and those after it; a running difference could cancel to nothing where weights are far apart
    sums = list(itertools.accumulate(weights[name] for name in reversed(names)))
    for name, weight in zip(names, reversed(sums), strict=True):
        shares[name] = min(demands[name], left * weights[name] / weight)
        left -= shares[name]
    return shares


def fair_shares(
    demands: Mapping[JobId, float],
    weights: Mapping[JobId, float],
    tenants: Mapping[JobId, str],
    tenant_weights: Mapping[str, float],
    capacity: float,
) -> dict[JobId, float]:
    """Return each job's share of ``capacity`` devices, as a real number.

    Args:
        demands: Devices that each job wants in all.
        weights: Of the jobs in ``demands``, within their tenants.
        tenants: Of the jobs in ``demands``.
        tenant_weights: Of those tenants.
        capacity: Devices that can be lent.
    """
    jobs: dict[str, dict[JobId, float]] = {}
    for job, demand in demands.items():
        jobs.setdefault(tenants[job], {})[job] = demand
    of_tenants = water_fill({name: sum(members.values()) for name, members in jobs.items()}, tenant_weights, capacity)
    shares: dict[JobId, float] = {}
    for name, members in jobs.items():
        shares |= water_fill(members, weights, of_tenants[name])
    return shares


def accrue(
    deficits: Mapping[JobId, float],
    shares: Mapping[JobId, float],
    held: Mapping[JobId, int],
    elapsed_s: float,
    bound_s: float,
) -> dict[JobId, float]:
    """Return by how many device seconds each job is behind its share (negative: ahead) after ``elapsed_s`` more.

    Jobs without a share want nothing and are forgotten. Old debts are bounded by ``bound_s``.
    """
    return {
        job: min(bound_s, max(-bound_s, deficits.get(job, 0.0) + (share - held.get(job, 0)) * elapsed_s))
        for job, share in shares.items()
    }
