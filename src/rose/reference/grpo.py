"""GRPO's mathematics, without state and without importing torch: advantages, whole-batch shares, clipped surrogate.

The gradient of a minibatch is a mean over the *whole* minibatch, whatever the number of ranks and micro-batches: over its
tokens, or over its trajectories of each one's token mean. Every share is divided by the minibatch's divisor, which the planner puts beside it. All ranks run the same number of
micro-batches (an empty one stands in where a rank has less), because each is a collective step of FSDP.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from rose.reference.groups import advantages, by_group, is_flat
from rose.reference.trajectory import Trajectory

_STD_FLOOR = 1e-4


@attrs.frozen(kw_only=True)
class Sample:
    """One trajectory to learn from: ``token_ids``, ``mask`` and ``logprobs`` of one length, and its advantage."""

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are learned from."""
        return sum(self.mask)


@attrs.frozen(kw_only=True)
class Signal:
    """What a step's trajectories teach.

    Attributes:
        samples: Trajectories of the groups whose rewards differ.
        num_flat_groups: Groups without a signal: all rewards equal, or fewer than two finished trajectories.
        num_failed: Trajectories left out because they failed.
    """

    samples: tuple[Sample, ...]
    num_flat_groups: int
    num_failed: int


def find_signal(trajectories: Sequence[Trajectory]) -> Signal:
    """Give each finished trajectory ``(reward - mean) / (std + 1e-4)`` of its group; groups of equal rewards are dropped."""
    samples: list[Sample] = []
    num_flat_groups = 0
    for members in by_group(trajectories).values():
        rewards = [member.reward for member in members]
        if is_flat(rewards):
            num_flat_groups += 1
            continue
        samples += map(_sample, members, advantages(rewards, epsilon=_STD_FLOOR))
    return Signal(
        samples=tuple(sample for sample in samples if sample.num_tokens),
        num_flat_groups=num_flat_groups,
        num_failed=sum(trajectory.is_failed for trajectory in trajectories),
    )


def _sample(trajectory: Trajectory, advantage: float) -> Sample:
    return Sample(
        token_ids=trajectory.token_ids, mask=trajectory.mask, logprobs=trajectory.logprobs, advantage=advantage
    )


@attrs.frozen(kw_only=True)
class Minibatch:
    """One optimizer step, shared out.

    Attributes:
        num_tokens: Learned tokens over all ranks.
        divisor: Of every share: the tokens, or the trajectories where each of these weighs the same.
        shares: One a rank, each a list of micro-batches; equally many for every rank, some possibly empty.
    """

    num_tokens: int
    divisor: int
    shares: tuple[tuple[tuple[Sample, ...], ...], ...]


def plan_minibatches(
    samples: Sequence[Sample],
    *,
    num_minibatches: int,
    num_ranks: int,
    micro_rows: int,
    seed: int,
    loss: Literal["token", "sequence"] = "token",
) -> list[Minibatch]:
    """Shuffle the samples into minibatches and share each over the ranks so that their tokens are about equal.

    A minibatch without samples is left out, so an all-flat step gives no minibatch at all. With ``loss="sequence"`` a
    trajectory's advantage is spread over its tokens; what the clip does is the same, since it compares products of one factor.
    """
    shuffled = list(samples)
    random.Random(seed).shuffle(shuffled)
    chunks = [shuffled[k::num_minibatches] for k in range(num_minibatches)]
    return [_share_out(chunk, num_ranks, micro_rows, loss) for chunk in chunks if chunk]


def _share_out(samples: Sequence[Sample], num_ranks: int, micro_rows: int, loss: str) -> Minibatch:
    num_tokens = sum(sample.num_tokens for sample in samples)
    if loss == "sequence":
        samples = [attrs.evolve(sample, advantage=sample.advantage / sample.num_tokens) for sample in samples]
    by_length = sorted(samples, key=lambda sample: len(sample.token_ids))
    rows = [by_length[rank::num_ranks] for rank in range(num_ranks)]
    num_micro = -(-max(map(len, rows)) // micro_rows)
    return Minibatch(
        num_tokens=num_tokens,
        divisor=num_tokens if loss == "token" else len(samples),
        shares=tuple(
            tuple(tuple(mine[i * micro_rows : (i + 1) * micro_rows]) for i in range(num_micro)) for mine in rows
        ),
    )


@attrs.frozen(kw_only=True)
class Surrogate:
    """Tensors of one micro-batch: the objective summed over tokens, and what to report (sums and maxima, no gradient)."""

    objective_sum: Any
    ratio_max: Any
    num_clipped: Any
    mismatch_sum: Any
    mismatch_max: Any


def clipped_surrogate(
    logprobs: Any, engine_logprobs: Any, advantages: Any, mask: Any, *, clip_low: float, clip_high: float
) -> Surrogate:
    """Return PPO's clipped objective, the ratio taken against the log-probs that the engines sampled with.

    Args:
        logprobs: ``[rows, tokens]`` of the model under training, with gradient.
        engine_logprobs: ``[rows, tokens]``.
        advantages: ``[rows]``.
        mask: ``[rows, tokens]``, 1 where the policy made the token.
        clip_low: Ratios below ``1 - clip_low`` earn nothing more for a bad token.
        clip_high: Ratios above ``1 + clip_high`` earn nothing more for a good token.
    """
    difference = (logprobs - engine_logprobs) * mask
    ratio = difference.exp()
    gain = advantages[:, None]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = (ratio * gain).minimum(clipped * gain) * mask
    is_clipped = ((clipped * gain) < (ratio * gain)) & (mask > 0)
    mismatch = difference.detach().abs()
    return Surrogate(
        objective_sum=objective.sum(),
        ratio_max=ratio.detach().max(),
        num_clipped=is_clipped.sum(),
        mismatch_sum=mismatch.sum(),
        mismatch_max=mismatch.max(),
    )
