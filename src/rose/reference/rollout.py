"""Multi-turn rollouts over any ``generate(turn)``: a pool, a single engine or a fake.

Invariants: token ids are kept as the engine gave them and never made again from text; a token has a log-prob exactly when
the policy made it; every request's seed follows from (run seed, label, group, trajectory, turn), so where and when a turn
runs does not choose its tokens; a trajectory that fills the context of the engines ends there with the turns it has; one that
cannot be finished comes back marked as failed, it never takes others along.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import attrs

from rose.errors import RoseError, TurnFailedError
from rose.interfaces.clock import Clock
from rose.reference.environment import Environment, Step
from rose.reference.groups import GroupBook, StepGroups
from rose.reference.tokenizer import BOS_ID, WordTokenizer
from rose.reference.trajectory import Trajectory, TrajectoryPlan, TurnRecord, derive_seed
from rose.types import AnyVersion, FinishReason, Sampling, Turn, TurnResult, VersionConstraint, VersionSpan

Generate = Callable[[Turn], Awaitable[TurnResult]]


class Episodes(Protocol):
    """Where episodes are played; ``EnvironmentPool`` is one."""

    async def reset(self, trajectory_id: str, seed: int) -> str:
        """Start an episode and return its first observation."""

    async def step(self, trajectory_id: str, text: str | None) -> Step:
        """Play one turn."""

    async def drop(self, trajectory_id: str) -> None:
        """Give an unfinished episode up."""


@attrs.frozen(kw_only=True)
class RolloutContext:
    """What every trajectory of a rollout shares.

    Attributes:
        generate: Answers one turn; raises a ``RoseError`` when the turn cannot be finished.
        action_ids: The tokens that end a turn.
        temperature: 0 is greedy. Log-probs are those of the sampling distribution at 1 only.
        deadline_s: Longest wait for one turn, on the pool's clock.
        trajectory_timeout_s: A trajectory that takes longer on the event loop's time has failed; its episode is dropped.
    """

    generate: Generate
    episodes: Episodes
    tokenizer: WordTokenizer
    clock: Clock
    action_ids: tuple[int, ...]
    max_turns: int
    max_tokens_per_turn: int
    temperature: float = 1.0
    versions: VersionConstraint = attrs.field(factory=AnyVersion)
    deadline_s: float | None = None
    trajectory_timeout_s: float | None = None

    @classmethod
    def of(
        cls, environment: type[Environment], *, generate: Generate, episodes: Episodes, clock: Clock
    ) -> RolloutContext:
        """Return the context that the environment's words and limits ask for; change the rest with ``attrs.evolve``."""
        tokenizer = WordTokenizer.for_environment(environment)
        return cls(
            generate=generate,
            episodes=episodes,
            tokenizer=tokenizer,
            clock=clock,
            action_ids=tokenizer.encode(environment.action_words),
            max_turns=environment.max_turns,
            max_tokens_per_turn=environment.max_tokens_per_turn,
        )


@attrs.define
class _Record:
    """A trajectory under way."""

    plan: TrajectoryPlan
    started_s: float
    token_ids: list[int] = attrs.field(factory=lambda: [BOS_ID])
    mask: list[int] = attrs.field(factory=lambda: [0])
    logprobs: list[float] = attrs.field(factory=lambda: [0.0])
    turns: list[TurnRecord] = attrs.field(factory=list)
    versions: list[VersionSpan] = attrs.field(factory=list)
    reward: float = 0.0
    is_done: bool = False

    def add_observation(self, ids: Sequence[int]) -> None:
        self.token_ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def add_answer(self, result: TurnResult) -> None:
        start = len(self.token_ids)
        self.token_ids += result.token_ids
        self.mask += [1] * len(result.token_ids)
        self.logprobs += result.logprobs
        self.versions += [
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
            for span in result.versions
        ]

    def finish(self, ended_s: float, failure: str | None = None) -> Trajectory:
        return Trajectory(
            trajectory_id=self.plan.trajectory_id,
            group_id=self.plan.group_id,
            environment_seed=self.plan.environment_seed,
            token_ids=tuple(self.token_ids),
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            reward=0.0 if failure else self.reward,
            started_s=self.started_s,
            ended_s=ended_s,
            turns=tuple(self.turns),
            versions=tuple(self.versions),
            failure=failure,
        )


async def run_trajectory(context: RolloutContext, plan: TrajectoryPlan) -> Trajectory:
    """Play one episode to its end; a ``RoseError`` on the way gives a failed trajectory with the turns made so far."""
    record = _Record(plan, context.clock.now())
    try:
        async with asyncio.timeout(context.trajectory_timeout_s):
            observation = await context.episodes.reset(plan.trajectory_id, plan.environment_seed)
            while not record.is_done and len(record.turns) < context.max_turns:
                record.add_observation(context.tokenizer.encode(observation))
                observation = await _play_turn(context, record)
    except RoseError as error:
        return record.finish(context.clock.now(), failure=f"{type(error).__name__}: {error}")
    except TimeoutError:
        limit = f"not done after trajectory_timeout_s = {context.trajectory_timeout_s:g}"
        return record.finish(context.clock.now(), failure=f"TimeoutError: {limit}, {len(record.turns)} turns made")
    finally:
        if not record.is_done:
            await _drop(context, plan)
    return record.finish(context.clock.now())


async def _drop(context: RolloutContext, plan: TrajectoryPlan) -> None:
    try:
        await context.episodes.drop(plan.trajectory_id)
    except RoseError:
        return  # the episode's process is gone, and the episode with it


async def _play_turn(context: RolloutContext, record: _Record) -> str:
    started_s, num_prompt_tokens = context.clock.now(), len(record.token_ids)
    result = await context.generate(_next_turn(context, record))
    _check(record.plan, result)
    if not result.hops and result.finish_reason is FinishReason.LENGTH:
        return await _truncate(context, record)
    record.add_answer(result)
    has_action = bool(result.token_ids) and result.token_ids[-1] in context.action_ids
    record.turns.append(
        TurnRecord(
            started_s=started_s,
            ended_s=context.clock.now(),
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=len(result.token_ids),
            has_action=has_action,
            hops=result.hops,
        )
    )
    text = context.tokenizer.decode(result.token_ids) if has_action else None
    step = await context.episodes.step(record.plan.trajectory_id, text)
    record.reward += step.reward
    record.is_done = step.is_done
    return step.observation


async def _truncate(context: RolloutContext, record: _Record) -> str:
    """End a trajectory whose prompt has filled the context of every engine: what it has counts, its episode is given up."""
    await _drop(context, record.plan)
    record.is_done = True
    return ""


def _next_turn(context: RolloutContext, record: _Record) -> Turn:
    return Turn(
        trajectory_id=record.plan.trajectory_id,
        group_id=record.plan.group_id,
        prompt_ids=tuple(record.token_ids),
        sampling=Sampling(
            max_tokens=context.max_tokens_per_turn,
            temperature=context.temperature,
            stop_token_ids=context.action_ids,
            ignore_eos=True,
            logprobs=True,
            seed=derive_seed(record.plan.sampling_seed, len(record.turns)),
        ),
        versions=context.versions,
        deadline_s=context.deadline_s,
    )


def _check(plan: TrajectoryPlan, result: TurnResult) -> None:
    """Refuse a result that must not be trained on; a missing log-prob is never filled in."""
    problem = None
    if result.finish_reason not in {FinishReason.STOP, FinishReason.LENGTH}:
        problem = f"ended as {result.finish_reason.value}"
    elif len(result.logprobs) != len(result.token_ids):
        problem = f"has {len(result.logprobs)} log-probs for {len(result.token_ids)} tokens"
    elif not all(math.isfinite(value) and value <= 0 for value in result.logprobs):
        problem = f"has log-probs that are no log of a probability: {result.logprobs}"
    if problem:
        message = f"a turn of {plan.trajectory_id} {problem}"
        raise TurnFailedError(message, result.hops)


async def rollout_step(
    context: RolloutContext,
    plans: Sequence[TrajectoryPlan],
    *,
    on_finished: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Run all trajectories at once (the pool behind ``generate`` queues) and return them in the order of ``plans``."""

    async def run(plan: TrajectoryPlan) -> Trajectory:
        trajectory = await run_trajectory(context, plan)
        if on_finished is not None:
            on_finished(trajectory)
        return trajectory

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(plan), name=plan.trajectory_id) for plan in plans]
    return [task.result() for task in tasks]


async def rollout_groups(
    context: RolloutContext,
    book: GroupBook,
    *,
    on_finished: Callable[[Trajectory], None] | None = None,
) -> StepGroups:
    """Run the groups of a step at once, and whatever the book wants in place of those that failed or teach nothing."""
    async with asyncio.TaskGroup() as group:

        def launch(plans: Sequence[TrajectoryPlan]) -> None:
            for plan in plans:
                group.create_task(run(plan), name=plan.trajectory_id)

        async def run(plan: TrajectoryPlan) -> None:
            trajectory = await run_trajectory(context, plan)
            if on_finished is not None:
                on_finished(trajectory)
            launch(book.take(trajectory))

        launch(book.start())
    return book.result()
