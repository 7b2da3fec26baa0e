"""Which weight versions may serve a turn. Pure; versions are ordered within one training run only."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rose.types import AnyVersion, AtLeast, VersionConstraint, WeightVersion


def is_admissible(constraint: VersionConstraint, version: WeightVersion | None, run: str | None) -> bool:
    """Tell whether weights at ``version`` satisfy ``constraint``.

    Args:
        constraint: What the turn asks for.
        version: The acknowledged version of the weights, or ``None`` when they carry no label.
        run: The pool's current run; ``None`` while the pool knows of no run, which admits numbered versions of none.

    Returns:
        Always true for ``AnyVersion``. The two others need a label of the current run.
    """
    if isinstance(constraint, AnyVersion):
        return True
    if version is None or version.run != run:
        return False
    if isinstance(constraint, AtLeast):
        return version.n >= constraint.n
    return version.n == constraint.n


def is_out_of_reach(constraint: VersionConstraint, versions: Iterable[WeightVersion | None], run: str | None) -> bool:
    """Tell whether no engine can satisfy ``constraint`` any more, now or later.

    Versions of a run only grow. ``Exactly(n)`` is out of reach once every engine holds a later version of the run. With
    no engine at all, or with one that has no label yet, nothing is out of reach.
    """
    if isinstance(constraint, AnyVersion | AtLeast):
        return False
    held = list(versions)
    return bool(held) and all(v is not None and v.run == run and v.n > constraint.n for v in held)


def staleness(oldest: WeightVersion | None, latest: WeightVersion | None) -> float:
    """Return how many versions ``latest`` is ahead of ``oldest``: 0 while either is unknown, infinite across runs."""
    if oldest is None or latest is None:
        return 0
    return latest.n - oldest.n if latest.run == oldest.run else math.inf


def older(one: WeightVersion | None, other: WeightVersion | None) -> WeightVersion | None:
    """Return the older of two versions; one that is unknown does not count, and the first one is older than any of another run."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other) if one.run == other.run else one
