"""A user's own RL loop, small enough to test: guess a hidden number in at most three turns.

The loop knows ``rose.RolloutPool`` and nothing of engines, so a unit test can give it fakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import attrs

import rose

TOO_LOW, TOO_HIGH = 101, 102
NUM_TURNS = 3


@attrs.frozen(kw_only=True)
class Trajectory:
    """One attempt: every token, which of them the policy made, and what it earned."""

    token_ids: tuple[int, ...]
    is_sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]
    reward: float
    num_moves: int


@attrs.frozen(kw_only=True)
class Batch:
    """The trajectories of one step, group by group, with each one's advantage over its group."""

    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]


async def play(
    pool: rose.RolloutPool, *, secret: int, group_id: str, trajectory_id: str, min_version: int
) -> Trajectory:
    """Play one game: a guess a turn, and a hint after a wrong one."""
    token_ids, is_sampled, logprobs = [0], [False], []
    num_moves = 0
    for _ in range(NUM_TURNS):
        turn = rose.Turn(
            trajectory_id=trajectory_id,
            group_id=group_id,
            prompt_ids=tuple(token_ids),
            sampling=rose.Sampling(max_tokens=1),
            versions=rose.AtLeast(min_version),
        )
        result = await pool.generate(turn)
        guess = result.token_ids[-1]
        token_ids.extend(result.token_ids)
        is_sampled.extend([True] * len(result.token_ids))
        logprobs.extend(result.logprobs)
        num_moves += len(result.hops) - 1
        if guess == secret:
            break
        token_ids.append(TOO_LOW if guess < secret else TOO_HIGH)
        is_sampled.append(False)
    return Trajectory(
        token_ids=tuple(token_ids),
        is_sampled=tuple(is_sampled),
        logprobs=tuple(logprobs),
        reward=float(guess == secret),
        num_moves=num_moves,
    )


async def train(
    pool: rose.RolloutPool,
    secrets: Sequence[int],
    *,
    num_steps: int,
    group_size: int,
    learn: Callable[[Batch], Awaitable[None]],
) -> None:
    """Run the loop: roll out one group a secret, give the batch to ``learn``, which publishes new weights."""
    for step in range(num_steps):
        async with asyncio.TaskGroup() as tasks:
            groups = [
                [
                    tasks.create_task(
                        play(
                            pool,
                            secret=secret,
                            group_id=f"s{step}g{g}",
                            trajectory_id=f"s{step}g{g}t{t}",
                            min_version=step,
                        )
                    )
                    for t in range(group_size)
                ]
                for g, secret in enumerate(secrets)
            ]
        trajectories = tuple(task.result() for group in groups for task in group)
        advantages: list[float] = []
        for group in groups:
            mean = sum(task.result().reward for task in group) / group_size
            advantages.extend(task.result().reward - mean for task in group)
        await learn(Batch(trajectories=trajectories, advantages=tuple(advantages)))
