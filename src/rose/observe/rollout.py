"""Rollout speed: from the trajectories of a step to the figures of an arm. Pure; times on one clock, in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

_P75 = 0.75


@attrs.frozen(kw_only=True)
class TrajectoryTime:
    """When one trajectory started and ended, and how many tokens were generated for it."""

    started_s: float
    ended_s: float
    num_tokens: int


@attrs.frozen(kw_only=True)
class StepTime:
    """One step: the rollout from the first start to the last end, and what it gave.

    Attributes:
        rollout_s: First start to last end.
        step_s: The rollout and everything after it until the next step may start.
        num_tokens: Tokens generated.
        p75_fraction: Share of ``rollout_s`` after which 75 % of the trajectories had ended (nearest rank, by end time).
    """

    rollout_s: float
    step_s: float
    num_tokens: int
    p75_fraction: float


@attrs.frozen(kw_only=True)
class ArmSummary:
    """One arm over its steps; names as in ``summary.json``.

    Attributes:
        rollout_s: Mean rollout time of a step.
        step_s: Mean step time.
        rollout_tokens_per_s: All tokens over all rollout time.
        rollout_share: All rollout time over all step time.
        p75_fraction: Mean over the steps.
        success_first: Success on the held-out maps before the first step; ``None`` where it was not measured.
        success_last: The same after the last step.
    """

    rollout_s: float
    step_s: float
    rollout_tokens_per_s: float
    rollout_share: float
    p75_fraction: float
    success_first: float | None = None
    success_last: float | None = None


def completion_s(trajectories: Sequence[TrajectoryTime]) -> tuple[float, ...]:
    """Return when each trajectory ended after the step's first start, ascending: the step's completion curve."""
    if not trajectories:
        return ()
    start_s = min(trajectory.started_s for trajectory in trajectories)
    return tuple(sorted(trajectory.ended_s - start_s for trajectory in trajectories))


def summarise_step(trajectories: Sequence[TrajectoryTime], *, rest_s: float) -> StepTime:
    """Summarise one step.

    Args:
        trajectories: All trajectories of the step.
        rest_s: Time of the step after the rollout: training and weight sync.

    Raises:
        ValueError: There is no trajectory, or no time passed.
    """
    ends_s = completion_s(trajectories)
    if not ends_s or ends_s[-1] <= 0:
        message = f"a step needs trajectories that take time, got {len(ends_s)} of {ends_s[-1] if ends_s else 0} s"
        raise ValueError(message)
    return StepTime(
        rollout_s=ends_s[-1],
        step_s=ends_s[-1] + rest_s,
        num_tokens=sum(trajectory.num_tokens for trajectory in trajectories),
        p75_fraction=ends_s[math.ceil(_P75 * len(ends_s)) - 1] / ends_s[-1],
    )


def summarise_arm(
    steps: Sequence[StepTime], *, success_first: float | None = None, success_last: float | None = None
) -> ArmSummary:
    """Summarise an arm.

    Raises:
        ValueError: The arm has no step.
    """
    if not steps:
        message = "an arm without a step has no figures; run at least one step"
        raise ValueError(message)
    rollout_s = math.fsum(step.rollout_s for step in steps)
    step_s = math.fsum(step.step_s for step in steps)
    return ArmSummary(
        rollout_s=rollout_s / len(steps),
        step_s=step_s / len(steps),
        rollout_tokens_per_s=sum(step.num_tokens for step in steps) / rollout_s,
        rollout_share=rollout_s / step_s,
        p75_fraction=math.fsum(step.p75_fraction for step in steps) / len(steps),
        success_first=success_first,
        success_last=success_last,
    )
