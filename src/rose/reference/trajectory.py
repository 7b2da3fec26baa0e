"""What a rollout plans and what it brings back: one trajectory a plan, whole groups, exact token ids."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import attrs
from attrs import validators as v

from rose.types import Hop, VersionSpan


def derive_seed(*parts: str | int) -> int:
    """Return a seed in ``[0, 2**31)`` that depends on every part and on nothing else."""
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1


@attrs.frozen(kw_only=True)
class TrajectoryPlan:
    """One trajectory to run: its names, the episode it plays, and the seed of its sampling."""

    trajectory_id: str
    group_id: str
    environment_seed: int
    sampling_seed: int


def plan_groups(
    label: str, environment_seeds: Sequence[int], *, group_size: int, run_seed: int
) -> list[TrajectoryPlan]:
    """Plan ``group_size`` trajectories on each of the episodes.

    Args:
        label: Distinguishes this step or evaluation from all others of the run; part of every id and seed.
        environment_seeds: One episode a group.
        group_size: Trajectories a group.
        run_seed: The run's own seed; the same run draws the same samples wherever its turns run.
    """
    return [
        TrajectoryPlan(
            trajectory_id=f"{label}/g{g}/t{t}",
            group_id=f"{label}/g{g}",
            environment_seed=seed,
            sampling_seed=derive_seed(run_seed, label, g, t),
        )
        for g, seed in enumerate(environment_seeds)
        for t in range(group_size)
    ]


@attrs.frozen(kw_only=True)
class TurnRecord:
    """One finished turn: when it was asked for and answered (seconds of the rollout's clock) and what it took."""

    started_s: float
    ended_s: float
    num_prompt_tokens: int
    num_tokens: int
    has_action: bool
    hops: tuple[Hop, ...]


@attrs.frozen(kw_only=True)
class Trajectory:
    """A finished or failed episode with the exact ids that the engines saw and made.

    Attributes:
        token_ids: Begin token, then observations and answers in turn order.
        mask: 1 where the policy made the token, 0 where it was given.
        logprobs: Natural log of the sampling probability where ``mask`` is 1, else 0.
        reward: Sum over the episode's steps; 0 for a failed trajectory.
        versions: Which weights made which made tokens; positions count in ``token_ids``.
        failure: Why the trajectory could not be finished, else ``None``. Failed ones are not trained on.
    """

    trajectory_id: str
    group_id: str
    environment_seed: int
    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...] = attrs.field()
    reward: float
    started_s: float
    ended_s: float
    turns: tuple[TurnRecord, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    failure: str | None = attrs.field(default=None, validator=v.optional(v.min_len(1)))

    @logprobs.validator
    def _check_lengths(self, _: attrs.Attribute[tuple[float, ...]], logprobs: tuple[float, ...]) -> None:
        if not len(self.token_ids) == len(self.mask) == len(logprobs):
            message = (
                f"{self.trajectory_id}: {len(self.token_ids)} ids, {len(self.mask)} mask, {len(logprobs)} log-probs"
            )
            raise ValueError(message)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the policy made."""
        return sum(self.mask)

    @property
    def is_failed(self) -> bool:
        """Return whether the trajectory could not be finished."""
        return self.failure is not None

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Return every attempt of every turn, in order."""
        return tuple(hop for turn in self.turns for hop in turn.hops)


@attrs.frozen(kw_only=True)
class GroupAccount:
    """Whether a step brought back what was planned."""

    num_planned: int
    num_finished: int
    num_failed: int
    lost: tuple[str, ...]
    doubled: tuple[str, ...]
    unplanned: tuple[str, ...]
    broken_groups: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether every plan came back exactly once and every group is complete."""
        return not (self.lost or self.doubled or self.unplanned or self.broken_groups)


def account(plans: Sequence[TrajectoryPlan], trajectories: Sequence[Trajectory]) -> GroupAccount:
    """Compare what came back with the plan; a group with a lost, doubled or failed member is broken."""
    planned = {plan.trajectory_id: plan.group_id for plan in plans}
    counts = Counter(trajectory.trajectory_id for trajectory in trajectories)
    failed = [trajectory.trajectory_id for trajectory in trajectories if trajectory.is_failed]
    lost = tuple(name for name in planned if name not in counts)
    doubled = tuple(name for name, count in counts.items() if count > 1)
    suspects = {*lost, *doubled, *failed} & planned.keys()
    return GroupAccount(
        num_planned=len(planned),
        num_finished=len(trajectories) - len(failed),
        num_failed=len(failed),
        lost=lost,
        doubled=doubled,
        unplanned=tuple(name for name in counts if name not in planned),
        broken_groups=tuple(dict.fromkeys(planned[name] for name in planned if name in suspects)),
    )
