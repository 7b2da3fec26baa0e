"""What a routing decision and a whole turn cost the pool's core: by engines, by live trajectories.

A *decision* is what the policy and its index do for one turn: a slot and KV room are given back, the next turn is looked at, an
engine is chosen, slot and KV room are reserved there, and the index follows both changes. A *turn* is everything that the core
does from ``submit`` to the result: decision, request, timers, journal, accounts, joining the tokens. Times are CPU seconds of one thread.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from rose.bench.scheduler.drive import CAP, MEAN_TURN_S, Clockwork, Drive, DriveLoad
from rose.errors import RoseError
from rose.policies.routing import Assign
from rose.pool.turns import Attempt
from rose.types import RouteReason

LOAD_FRACTION = 0.75
AFFINITY_LOADS = (0.5, 0.9, 1.2)
ENVIRONMENT_S = 0.5
P99 = 0.99
_US = 1e6


@attrs.frozen(kw_only=True)
class Costs:
    """Of one load. ``num_waiting``: turns in the queue at the end of the run."""

    num_engines: int
    num_trajectories: int
    num_waiting: int
    decisions_per_s: float
    decision_p50_us: float
    decision_p99_us: float
    turns_per_s: float
    visit_p50_us: float
    visit_p99_us: float


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which so large a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def measure_costs(load: DriveLoad, num_turns: int) -> Costs:
    """Bring a core under a load, then time turns, then decisions.

    Raises:
        RoseError: The core came to a standstill.
    """
    drive = Drive(load)
    drive.fill()
    drive.run(num_turns // 2)
    gc.collect()
    drive.clockwork.reset()
    settled = drive.num_settled
    drive.run(num_turns)
    if drive.num_settled - settled < num_turns:
        message = f"the core stopped after {drive.num_settled} turns of {load}"
        raise RoseError(message)
    turns = drive.clockwork
    num_waiting = len(drive.state.live) - len(drive.open_attempts())
    decided = _decide(drive, num_turns)
    return Costs(
        num_engines=load.num_engines,
        num_trajectories=load.num_trajectories,
        num_waiting=num_waiting,
        decisions_per_s=decided.num_assigned / sum(decided.samples_s),
        decision_p50_us=percentile(decided.samples_s, 0.5) * _US,
        decision_p99_us=percentile(decided.samples_s, P99) * _US,
        turns_per_s=num_turns / sum(turns.samples_s),
        visit_p50_us=percentile(turns.samples_s, 0.5) * _US,
        visit_p99_us=percentile(turns.samples_s, P99) * _US,
    )


def _decide(drive: Drive, num_decisions: int) -> Clockwork:
    """Time decisions on the engines as the load left them: the turn before the last takes a place, the last gives one back."""
    engines, clockwork = drive.state.engines, Clockwork()
    held = drive.open_attempts()
    drive.rng.shuffle(held)
    homeless = held.pop()
    engines.let_go(homeless.member, homeless, drive.now_s)
    for _ in range(num_decisions):
        at = drive.rng.randrange(len(held))
        leaving, record = held[at], homeless.record
        clockwork.begin()
        engines.let_go(leaving.member, leaving, drive.now_s)
        decision = engines.index.choose(record.view())
        if isinstance(decision, Assign):
            placed = _placed(homeless, engines.members[decision.engine_id])
            engines.hold(placed.member, placed, drive.now_s)
            clockwork.end()
            held[at], homeless = placed, leaving
        else:
            clockwork.end(0)
            engines.hold(leaving.member, leaving, drive.now_s)
    return clockwork


def _placed(attempt: Attempt, member: Any) -> Attempt:
    """Return the attempt on another engine."""
    return Attempt(
        record=attempt.record,
        member=member,
        request=attempt.request,
        reason=attempt.reason,
        number=attempt.number,
        last_progress_s=attempt.last_progress_s,
    )


def by_engines(counts: Sequence[int], num_turns: int, tell: Callable[[str], None]) -> list[Costs]:
    """Measure with three quarters of all slots taken."""
    return [
        _told(DriveLoad(num_engines=n, num_trajectories=int(n * CAP * LOAD_FRACTION)), num_turns, tell) for n in counts
    ]


def by_trajectories(
    counts: Sequence[int], num_engines: int, num_turns: int, tell: Callable[[str], None]
) -> list[Costs]:
    """Measure with so many live trajectories; those beyond all slots wait."""
    return [_told(DriveLoad(num_engines=num_engines, num_trajectories=n), num_turns, tell) for n in counts]


def _told(load: DriveLoad, num_turns: int, tell: Callable[[str], None]) -> Costs:
    costs = measure_costs(load, num_turns)
    tell(
        f"{load.num_engines} engines, {load.num_trajectories} trajectories: {costs.decisions_per_s:.0f} decisions/s, "
        f"{costs.turns_per_s:.0f} turns/s"
    )
    return costs


def measure_affinity(num_engines: int, num_turns: int) -> dict[str, Any]:
    """Count later turns that were kept on their trajectory's engine, of those that could be, over loads.

    Environments take half as long as turns, so that others take places meanwhile; at the highest load a part of the turns waits.
    """
    found: dict[str, dict[str, Any]] = {}
    for load_fraction in AFFINITY_LOADS:
        num_trajectories = int(num_engines * CAP * load_fraction * (1 + ENVIRONMENT_S / MEAN_TURN_S))
        load = DriveLoad(num_engines=num_engines, num_trajectories=num_trajectories, environment_s=ENVIRONMENT_S)
        drive = Drive(load)
        drive.fill()
        drive.run(num_turns)
        reasons = {reason.value: count for reason, count in sorted((+drive.could_keep).items(), key=_name)}
        found[f"{load_fraction:g}"] = {
            "could_keep": drive.could_keep.total(),
            "kept": drive.num_kept,
            "by_reason": reasons,
        }
    kept, could = (sum(row[key] for row in found.values()) for key in ("kept", "could_keep"))
    return {"by_load": found, "fraction": kept / could if could else 1.0}


def _name(item: tuple[RouteReason, int]) -> str:
    return item[0].value
