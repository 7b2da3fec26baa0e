from __future__ import annotations

import asyncio
from collections.abc import Sequence

import attrs
import pytest

from rose.errors import EngineLostError, EnvironmentFailedError, TurnFailedError
from rose.interfaces.clock import Clock
from rose.reference.environment import Step
from rose.reference.lake import FrozenLake
from rose.reference.rollout import RolloutContext, rollout_step, run_trajectory
from rose.reference.trajectory import account, plan_groups
from rose.types import (
    AtLeast,
    EngineId,
    FinishReason,
    Hop,
    HopEnd,
    RouteReason,
    Turn,
    TurnResult,
    VersionSpan,
    WeightVersion,
)

V1 = WeightVersion("run", 1)
HOP = Hop(engine_id=EngineId("e0"), reason=RouteReason.DEDICATED, num_tokens=1, ended=HopEnd.FINISHED)


class TickingClock(Clock):
    """One second later at each reading."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1.0
        return self._now

    async def sleep(self, duration_s: float) -> None:
        self._now += duration_s


class LocalEpisodes:
    """The lake in this process."""

    def __init__(self) -> None:
        self.running: dict[str, FrozenLake] = {}
        self.seen: list[tuple[str, str | None]] = []

    async def reset(self, trajectory_id: str, seed: int) -> str:
        lake = self.running[trajectory_id] = FrozenLake()
        return lake.reset(seed)

    async def step(self, trajectory_id: str, text: str | None) -> Step:
        self.seen.append((trajectory_id, text))
        step = self.running[trajectory_id].step(text)
        if step.is_done:
            del self.running[trajectory_id]
        return step

    async def drop(self, trajectory_id: str) -> None:
        self.running.pop(trajectory_id, None)


def answer(ids: Sequence[int], **changes) -> TurnResult:
    values = {
        "token_ids": tuple(ids),
        "logprobs": tuple(-0.5 for _ in ids),
        "finish_reason": FinishReason.STOP,
        "versions": (VersionSpan(version=V1, start=0, end=len(ids)),),
        "hops": (HOP,),
    }
    return TurnResult(**(values | changes))


class Scripted:
    """``generate`` from a list of answers (or errors), the last one repeated."""

    def __init__(self, *answers: TurnResult | BaseException) -> None:
        self._answers = list(answers)
        self.turns: list[Turn] = []

    async def __call__(self, turn: Turn) -> TurnResult:
        self.turns.append(turn)
        given = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        await asyncio.sleep(0)
        if isinstance(given, BaseException):
            raise given
        return given


def make_context(generate, **changes) -> RolloutContext:
    base = RolloutContext.of(FrozenLake, generate=generate, episodes=LocalEpisodes(), clock=TickingClock())
    return attrs.evolve(base, **changes)


def words(context: RolloutContext, text: str) -> tuple[int, ...]:
    return context.tokenizer.encode(text)


PLAN = plan_groups("s0", [5], group_size=1, run_seed=0)[0]  # P H F F / F F F F / F H F F / F H H G
TOKENS = make_context(None)
UP, DOWN = words(TOKENS, "up"), words(TOKENS, "down")


async def test_ids_mask_and_logprobs_are_exactly_those_of_the_turns():
    generate = Scripted(answer(words(TOKENS, "right? hole down")), answer(UP))
    context = make_context(generate)
    done = await run_trajectory(context, PLAN)
    assert len(generate.turns) == len(done.turns) == 10
    assert done.token_ids[:25] == (
        1,
        *words(context, "obs P H F F / F F F F / F H F F / F H H G act"),
        *words(context, "right? hole down"),
    )
    assert done.mask == (0, *[0] * 21, 1, 1, 1, *([0] * 21 + [1]) * 9)
    assert [value for value, made in zip(done.logprobs, done.mask, strict=True) if made] == [-0.5] * 12
    assert all(value == 0 for value, made in zip(done.logprobs, done.mask, strict=True) if not made)
    for turn, nxt in zip(generate.turns, generate.turns[1:], strict=False):
        assert nxt.prompt_ids[: len(turn.prompt_ids)] == turn.prompt_ids, "a later prompt extends the earlier one"
    assert generate.turns[1].prompt_ids == done.token_ids[: 25 + 21]
    assert done.versions[0] == VersionSpan(version=V1, start=22, end=25)
    assert done.versions[1] == VersionSpan(version=V1, start=46, end=47)
    assert (done.reward, done.failure, done.num_tokens) == (0.0, None, 12)
    assert done.hops == (HOP,) * 10


async def test_each_request_says_what_the_game_needs():
    generate = Scripted(answer(UP))
    await run_trajectory(make_context(generate, temperature=0.7, versions=AtLeast(3), deadline_s=9.0), PLAN)
    first, second = generate.turns[:2]
    assert (first.trajectory_id, first.group_id, first.versions, first.deadline_s) == (
        "s0/g0/t0",
        "s0/g0",
        AtLeast(3),
        9.0,
    )
    sampling = first.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos, sampling.logprobs) == (8, 0.7, True, True)
    assert sampling.stop_token_ids == words(TOKENS, "left down right up")
    assert sampling.seed is not None
    assert sampling.seed != second.sampling.seed


async def test_seeds_depend_on_the_plan_alone():
    seeds = []
    for _ in range(2):
        generate = Scripted(answer(UP))
        await run_trajectory(make_context(generate), PLAN)
        seeds.append([turn.sampling.seed for turn in generate.turns])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 10


async def test_reaching_the_goal_pays_and_times_are_recorded():
    path = "down right right down right down"
    context = make_context(Scripted(*(answer(words(TOKENS, move)) for move in path.split())))
    done = await run_trajectory(context, PLAN)
    assert done.reward == 1.0
    assert len(done.turns) == 6
    assert done.started_s == 1.0
    assert [(turn.started_s, turn.ended_s) for turn in done.turns[:2]] == [(2.0, 3.0), (4.0, 5.0)]
    assert done.ended_s == 14.0
    assert [turn.num_prompt_tokens for turn in done.turns[:2]] == [22, 44]


@pytest.mark.parametrize("ids", [(), words(TOKENS, "right? hole left? wall up? wall right? hole")])
async def test_a_turn_without_an_action_is_no_move(ids: tuple[int, ...]):
    context = make_context(Scripted(answer(ids, finish_reason=FinishReason.LENGTH), answer(UP)))
    done = await run_trajectory(context, PLAN)
    assert context.episodes.seen[0] == ("s0/g0/t0", None)
    assert context.episodes.seen[1] == ("s0/g0/t0", "up")
    assert [turn.has_action for turn in done.turns[:2]] == [False, True]
    assert not done.is_failed


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (answer(UP, finish_reason=FinishReason.ABORTED), "ended as aborted"),
        (answer((), finish_reason=FinishReason.EVICTED), "ended as evicted"),
        (answer((*UP, *UP), logprobs=(-1.0,)), "1 log-probs for 2 tokens"),
        (answer(UP, logprobs=(float("nan"),)), "no log of a probability"),
        (answer(UP, logprobs=(0.1,)), "no log of a probability"),
        (EngineLostError("engine e3 is gone"), "EngineLostError: engine e3 is gone"),
        (TurnFailedError("tried 3 engines", (HOP,)), "TurnFailedError: tried 3 engines"),
    ],
)
async def test_a_turn_that_cannot_be_used_fails_its_trajectory_and_keeps_the_turns_before(bad, said: str):
    """Case E04: missing or impossible log-probs are refused, never filled in. Case E03 b: nothing is invented."""
    context = make_context(Scripted(answer(DOWN), bad))
    done = await run_trajectory(context, PLAN)
    assert said in (done.failure or "")
    assert (done.reward, len(done.turns), done.num_tokens) == (0.0, 1, 1)
    assert context.episodes.running == {}, "the unfinished episode was given up"


async def test_a_logprob_of_exactly_zero_is_valid():
    """Case E04: certainty is a log-prob of 0.0."""
    done = await run_trajectory(make_context(Scripted(answer(UP, logprobs=(0.0,)))), PLAN)
    assert not done.is_failed
    assert len(done.turns) == 10


async def test_a_failed_environment_is_data_too():
    class Broken(LocalEpisodes):
        async def step(self, trajectory_id: str, text: str | None) -> Step:
            message = "worker 0 ended"
            raise EnvironmentFailedError(message)

        async def drop(self, trajectory_id: str) -> None:
            message = "still gone"
            raise EnvironmentFailedError(message)

    done = await run_trajectory(make_context(Scripted(answer(UP)), episodes=Broken()), PLAN)
    assert done.failure == "EnvironmentFailedError: worker 0 ended"


async def test_cancelling_gives_the_episode_up():
    started = asyncio.Event()

    async def never(turn: Turn) -> TurnResult:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    context = make_context(never)
    task = asyncio.ensure_future(run_trajectory(context, PLAN))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert context.episodes.running == {}


async def test_a_step_runs_all_trajectories_at_once_and_returns_them_in_order():
    num_waiting = 0
    all_there = asyncio.Event()

    async def generate(turn: Turn) -> TurnResult:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 12:
            all_there.set()
        await all_there.wait()
        if turn.trajectory_id == "s1/g1/t2":
            message = "gone"
            raise EngineLostError(message)
        return answer(UP)

    plans = plan_groups("s1", [1, 2, 3], group_size=4, run_seed=0)
    finished: list[str] = []
    back = await rollout_step(make_context(generate), plans, on_finished=lambda t: finished.append(t.trajectory_id))
    assert [t.trajectory_id for t in back] == [plan.trajectory_id for plan in plans]
    assert sorted(finished) == sorted(plan.trajectory_id for plan in plans)
    report = account(plans, back)
    assert (report.lost, report.doubled, report.num_failed) == ((), (), 1)
    assert report.broken_groups == ("s1/g1",)


async def test_a_bug_in_generate_is_not_hidden_as_data():
    with pytest.raises(ExceptionGroup):
        await rollout_step(make_context(Scripted(KeyError("bug"))), [PLAN])


async def test_an_episode_that_never_ends_is_cut_at_the_turn_limit():
    context = make_context(Scripted(answer(UP)), max_turns=3)
    done = await run_trajectory(context, PLAN)
    assert len(done.turns) == 3
    assert context.episodes.running == {}


async def test_a_trajectory_that_fills_the_context_ends_with_the_turns_it_has():
    """Case E01: no failure, no further request, nothing invented; the episode is given up."""
    generate = Scripted(answer(DOWN), answer((), finish_reason=FinishReason.LENGTH, versions=(), hops=()))
    context = make_context(generate)
    done = await run_trajectory(context, PLAN)
    assert (done.failure, len(done.turns), done.num_tokens, len(generate.turns)) == (None, 1, 1, 2)
    assert context.episodes.running == {}
    assert len(context.episodes.seen) == 1
