"""The groups of one rollout step, by their ids: what is still to be run, what was lost, what may be learned from. Pure.

Life cycle of a trajectory
    1. [BOOK] hands out its plan (``start``, ``take``).
    2. [LOOP] runs it and brings it back once, finished or failed (``take``).
    3. [BOOK] counts it in its group; one that failed is replaced under a fresh id as long as the rules allow.

Invariants: a trajectory counts once and only while its plan is out: what comes late, twice or unasked is counted and ignored; a
trajectory that failed never counts as one of reward 0; a group is closed when none of its plans is out, and never opened again;
no more than ``max_groups`` groups and ``max_refills`` replacements a group are ever handed out.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence

import attrs

from rose import checks
from rose.reference.trajectory import Trajectory, TrajectoryPlan, derive_seed

_LEAST_MEMBERS = 2


class LostPolicy(enum.Enum):
    """What becomes of a group that lost a trajectory.

    ``partial``: the rest is compared among itself. ``refill``: another is run in its place; where that fails too, the group is
    dropped. ``drop``: the group is dropped.
    """

    PARTIAL = "partial"
    REFILL = "refill"
    DROP = "drop"


@attrs.frozen(kw_only=True)
class GroupRules:
    """How the groups of a step are made whole.

    Attributes:
        num_groups: Groups that a step wants.
        max_groups: Groups that may be started for that; more than ``num_groups`` with dynamic sampling only.
        has_dynamic_sampling: Groups whose rewards are all equal, and those that were lost, are dropped and others started.
        lost: What becomes of a group that lost a trajectory.
        max_refills: Replacements a group.
    """

    num_groups: int = attrs.field(validator=checks.integer(1))
    max_groups: int = attrs.field(validator=checks.integer(1))
    has_dynamic_sampling: bool = False
    lost: LostPolicy = LostPolicy.REFILL
    max_refills: int = attrs.field(default=8, validator=checks.integer(0))


@attrs.frozen(kw_only=True)
class StepGroups:
    """What a step's groups came to.

    Attributes:
        trajectories: Finished ones of the groups that may be learned from.
        num_groups: Those groups.
        num_flat: Groups dropped because all their rewards were equal (dynamic sampling only).
        num_broken: Groups dropped because they lost too much.
        num_started: All groups that were started.
        num_lost: Trajectories that failed.
        num_refills: Trajectories started in place of failed ones.
        num_ignored: Results that nobody waited for any more.
        last_failure: Why the last one failed, as its engine or environment said.
    """

    trajectories: tuple[Trajectory, ...]
    num_groups: int
    num_flat: int
    num_broken: int
    num_started: int
    num_lost: int
    num_refills: int
    num_ignored: int
    last_failure: str | None


@attrs.define(eq=False)
class _Group:
    number: int
    out: dict[str, TrajectoryPlan]
    members: list[Trajectory] = attrs.field(factory=list)
    num_lost: int = 0
    num_refills: int = 0


class GroupBook:
    """Keeps the groups of one step.

    Args:
        rules: How they are made whole.
        plan_group: The plans of the step's n-th group, all with the same group id.
    """

    def __init__(self, rules: GroupRules, plan_group: Callable[[int], Sequence[TrajectoryPlan]]) -> None:
        self._rules = rules
        self._plan_group = plan_group
        self._group_of: dict[str, _Group] = {}
        self._kept: list[_Group] = []
        self._num_started = self._num_open = 0
        self._num_flat = self._num_broken = self._num_lost = self._num_refills = self._num_ignored = 0
        self._last_failure: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether no plan is out."""
        return not self._group_of

    def start(self) -> list[TrajectoryPlan]:
        """Return the plans of the first groups."""
        return [plan for _ in range(self._rules.num_groups) for plan in self._open_group()]

    def take(self, trajectory: Trajectory) -> list[TrajectoryPlan]:
        """Count what came back; returns what is to be run now because of it."""
        group = self._group_of.pop(trajectory.trajectory_id, None)
        if group is None:
            self._num_ignored += 1
            return []
        plan = group.out.pop(trajectory.trajectory_id)
        if not trajectory.is_failed:
            group.members.append(trajectory)
        else:
            self._num_lost += 1
            self._last_failure = trajectory.failure
            if self._rules.lost is LostPolicy.REFILL and group.num_refills < self._rules.max_refills:
                return [self._replace(group, plan)]
            group.num_lost += 1
        return [] if group.out else self._close(group)

    def result(self) -> StepGroups:
        """Return what the groups that are closed came to, in the order in which they were started."""
        kept = sorted(self._kept, key=lambda group: group.number)
        return StepGroups(
            trajectories=tuple(member for group in kept for member in group.members),
            num_groups=len(kept),
            num_flat=self._num_flat,
            num_broken=self._num_broken,
            num_started=self._num_started,
            num_lost=self._num_lost,
            num_refills=self._num_refills,
            num_ignored=self._num_ignored,
            last_failure=self._last_failure,
        )

    def _open_group(self) -> list[TrajectoryPlan]:
        plans = list(self._plan_group(self._num_started))
        group = _Group(self._num_started, {plan.trajectory_id: plan for plan in plans})
        self._num_started += 1
        self._num_open += 1
        self._group_of.update(dict.fromkeys(group.out, group))
        return plans

    def _replace(self, group: _Group, lost: TrajectoryPlan) -> TrajectoryPlan:
        group.num_refills += 1
        self._num_refills += 1
        plan = attrs.evolve(
            lost,
            trajectory_id=f"{lost.group_id}/refill{group.num_refills}",
            sampling_seed=derive_seed(lost.sampling_seed, "refill", group.num_refills),
        )
        group.out[plan.trajectory_id] = plan
        self._group_of[plan.trajectory_id] = group
        return plan

    def _close(self, group: _Group) -> list[TrajectoryPlan]:
        self._num_open -= 1
        is_broken = group.num_lost > 0 and self._rules.lost is not LostPolicy.PARTIAL
        if is_broken or len(group.members) < _LEAST_MEMBERS:
            self._num_broken += 1
        elif self._rules.has_dynamic_sampling and is_flat(member.reward for member in group.members):
            self._num_flat += 1
        else:
            self._kept.append(group)
            return []
        is_wanted = len(self._kept) + self._num_open < self._rules.num_groups
        may_start = self._rules.has_dynamic_sampling and self._num_started < self._rules.max_groups
        return self._open_group() if is_wanted and may_start else []


def is_flat(rewards: Iterable[float]) -> bool:
    """Return whether rewards teach nothing: all equal, or fewer than two."""
    return len(set(rewards)) < _LEAST_MEMBERS


def by_group(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Return finished trajectories by their group's id, in order; a group of which none finished has none."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        members = groups.setdefault(trajectory.group_id, [])
        if not trajectory.is_failed:
            members.append(trajectory)
    return groups


def advantages(rewards: Sequence[float], *, epsilon: float) -> list[float]:
    """Return ``(reward - mean) / (std + epsilon)`` within one group; ``std`` is that of a sample (divisor n - 1)."""
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + epsilon) for reward in rewards]


def oldest_version(trajectory: Trajectory) -> int | None:
    """Return the number of the oldest weights that made a token of it; ``None`` where no version is known."""
    return min((span.version.n for span in trajectory.versions), default=None)


def split_stale(
    trajectories: Iterable[Trajectory], *, newest: int, max_staleness: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return those that may be trained on by weights ``newest``, and those whose oldest token is too old for that.

    Args:
        trajectories: Finished ones.
        newest: The version that is being trained further.
        max_staleness: Versions by which the oldest token may lie behind ``newest``.
    """
    fresh: list[Trajectory] = []
    stale: list[Trajectory] = []
    for trajectory in trajectories:
        oldest = oldest_version(trajectory)
        is_stale = oldest is not None and newest - oldest > max_staleness
        (stale if is_stale else fresh).append(trajectory)
    return fresh, stale


def without_groups_of(
    trajectories: Iterable[Trajectory], lost: Collection[Trajectory], policy: LostPolicy
) -> list[Trajectory]:
    """Return what may be learned from once ``lost`` was taken out: all the rest, or whole groups alone."""
    broken = set() if policy is LostPolicy.PARTIAL else {trajectory.group_id for trajectory in lost}
    return [trajectory for trajectory in trajectories if trajectory.group_id not in broken]
