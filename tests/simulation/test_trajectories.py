from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.simulation.scenario import RolloutConfig
from rose.simulation.trajectories import (
    WORKLOADS,
    GroupPlan,
    TrajectoryPlan,
    TrajectorySource,
    TurnPlan,
    prefill_fraction,
)

SHARED = Path(__file__).parents[2] / ".." / "shared" / "workloads"


def config(workload: str = "uniform", **changes) -> RolloutConfig:
    return attrs.evolve(RolloutConfig(profile="any", workload=workload), **changes)


def groups(rollout: RolloutConfig, num: int, *, seed: int = 1) -> list[GroupPlan]:
    source = TrajectorySource(rollout, seed=seed)
    return [source.group(0, index) for index in range(num)]


def trajectories(rollout: RolloutConfig, num_groups: int, *, seed: int = 1) -> list[TrajectoryPlan]:
    return [trajectory for group in groups(rollout, num_groups, seed=seed) for trajectory in group.trajectories]


def test_the_uniform_workload_is_plain():
    (group,) = groups(config(num_trajectories=2, group_size=2), 1)
    turns = (TurnPlan(128, 64, 0.1), TurnPlan(64, 64, 0.1), TurnPlan(64, 64, 0.1), TurnPlan(64, 64, 0.0))
    assert group == GroupPlan(
        group_id="s0/g0",
        trajectories=(
            TrajectoryPlan(trajectory_id="s0/g0/t0", group_id="s0/g0", turns=turns),
            TrajectoryPlan(trajectory_id="s0/g0/t1", group_id="s0/g0", turns=turns),
        ),
        is_informative=True,
    )
    assert (group.trajectories[0].num_output_tokens, group.trajectories[0].num_context_tokens) == (256, 576)


def test_a_group_depends_on_seed_step_and_index_only():
    source = TrajectorySource(config("alfworld"), seed=7, max_demand=5.7)
    places = list(itertools.product(range(3), range(3)))
    forward = {place: source.group(*place) for place in places}
    other = TrajectorySource(config("alfworld"), seed=7, max_demand=5.7)
    assert {place: other.group(*place) for place in reversed(places)} == forward
    turns = {tuple(trajectory.turns for trajectory in group.trajectories) for group in forward.values()}
    assert len(turns) == len(places)
    reseeded = TrajectorySource(config("alfworld"), seed=8).group(0, 0)
    assert tuple(trajectory.turns for trajectory in reseeded.trajectories) not in turns


def test_ids_are_unique_over_the_run():
    source = TrajectorySource(config(num_trajectories=3, group_size=3), seed=1)
    plans = [t for place in itertools.product(range(3), range(12)) for t in source.group(*place).trajectories]
    assert len({plan.trajectory_id for plan in plans}) == len(plans) == 3 * 12 * 3
    assert all(plan.trajectory_id.rpartition("/")[0] == plan.group_id for plan in plans)


def test_plans_are_the_same_under_any_hash_seed(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(log_line(100 + i, i + 1, group=f"g{i % 5}")) + "\n" for i in range(20)))
    program = f"""
from rose.simulation.scenario import RolloutConfig
from rose.simulation.trajectories import TrajectorySource
for changes in ({{"workload": "swe"}}, {{"logs": {str(log)!r}}}):
    source = TrajectorySource(RolloutConfig(profile="any", **changes), seed=3, max_demand=4.0)
    print([source.group(1, index) for index in range(4)], source.informative_fraction(1))
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    }
    assert len(outputs) == 1
    assert b"s1/g3/t15" in outputs.pop()


@pytest.mark.parametrize("workload", ["frozenlake", "alfworld", "tau-bench", "swe"])
@pytest.mark.parametrize("changes", [{}, {"median_tokens": 3000.0, "sigma": 0.4}])
def test_generated_tokens_have_the_wanted_median_and_spread(workload: str, changes: dict[str, float]):
    rollout = config(workload, max_context_tokens=400_000, max_turn_tokens=100_000, **changes)
    plans = trajectories(rollout, 250)
    logs = np.log([plan.num_output_tokens for plan in plans])
    median = changes.get("median_tokens", WORKLOADS[workload].median_tokens)
    assert math.exp(float(np.median(logs))) == pytest.approx(median, rel=0.06)
    assert float(logs.std()) == pytest.approx(changes.get("sigma", WORKLOADS[workload].sigma), rel=0.06)
    num_turns = statistics.median(len(plan.turns) for plan in plans)
    assert num_turns == pytest.approx(WORKLOADS[workload].median_turns, rel=0.06)


@pytest.mark.parametrize("workload", ["frozenlake", "tau-bench"])
def test_a_group_shares_its_prompt_and_some_of_its_length(workload: str):
    made = groups(config(workload, max_context_tokens=400_000), 400)
    prompts = [{trajectory.turns[0].num_new_tokens for trajectory in group.trajectories} for group in made]
    assert all(len(prompt) == 1 for prompt in prompts)
    assert len(set.union(*prompts)) > 20
    logs = np.array([[math.log(t.num_output_tokens) for t in group.trajectories] for group in made])
    shared = 1 - float(logs.var(axis=1, ddof=1).mean() / logs.var(ddof=1))
    assert shared == pytest.approx(WORKLOADS[workload].group_share, abs=0.06)


@pytest.mark.parametrize("workload", ["frozenlake", "alfworld", "tau-bench", "swe"])
def test_longer_trajectories_have_more_turns_and_longer_ones(workload: str):
    plans = sorted(trajectories(config(workload), 40), key=lambda plan: plan.num_output_tokens)
    short, long = plans[: len(plans) // 4], plans[-len(plans) // 4 :]

    def mean_turns(some: list[TrajectoryPlan]) -> float:
        return statistics.fmean(len(plan.turns) for plan in some)

    def mean_answer(some: list[TrajectoryPlan]) -> float:
        return sum(plan.num_output_tokens for plan in some) / sum(len(plan.turns) for plan in some)

    assert mean_turns(long) > 1.25 * mean_turns(short)
    assert mean_answer(long) > 1.1 * mean_answer(short)


def test_answers_differ_mildly_within_a_trajectory():
    plans = trajectories(config("alfworld", max_context_tokens=400_000), 20)
    spreads = [statistics.stdev(math.log(turn.num_output_tokens) for turn in plan.turns) for plan in plans]
    assert statistics.fmean(spreads) == pytest.approx(WORKLOADS["alfworld"].turn_sigma, rel=0.1)


@pytest.mark.parametrize(
    ("max_context_tokens", "expected"),
    [
        (577, [(128, 64), (64, 64), (64, 64), (64, 64)]),
        (575, [(128, 64), (64, 64), (64, 64), (64, 63)]),
        (400, [(128, 64), (64, 64), (64, 16)]),
        (384, [(128, 64), (64, 64)]),
        (129, [(128, 1)]),
    ],
)
def test_the_context_ends_a_trajectory(max_context_tokens: int, expected: list[tuple[int, int]]):
    (plan,) = trajectories(config(group_size=1, max_context_tokens=max_context_tokens), 1)
    assert [(turn.num_new_tokens, turn.num_output_tokens) for turn in plan.turns] == expected
    assert [turn.env_s for turn in plan.turns] == [0.1] * (len(expected) - 1) + [0.0]


def test_a_bound_on_answers_gives_more_turns_and_loses_nothing():
    (plan,) = trajectories(config(group_size=1, max_turn_tokens=50), 1)
    assert len(plan.turns) == 6
    assert plan.num_output_tokens == 256
    uneven = config("swe", median_tokens=5000.0, sigma=1e-9, max_turn_tokens=100, max_context_tokens=400_000)
    assert {plan.num_output_tokens for plan in trajectories(uneven, 4)} == {5000}


def test_a_trajectory_never_has_more_turns_than_the_task():
    (plan,) = trajectories(config(group_size=1, max_turn_tokens=2, median_tokens=1000.0), 1)
    assert [turn.num_output_tokens for turn in plan.turns] == [2] * WORKLOADS["uniform"].max_turns


def test_a_tiny_trajectory_has_no_more_turns_than_tokens():
    (plan,) = trajectories(config("alfworld", group_size=1, median_tokens=3.0, sigma=1e-9), 1)
    assert [turn.num_output_tokens for turn in plan.turns] == [1, 1, 1]


@settings(max_examples=150, deadline=None)
@given(
    workload=st.sampled_from(sorted(WORKLOADS)),
    median_tokens=st.none() | st.floats(0.01, 1e7),
    sigma=st.none() | st.floats(1e-6, 30.0),
    room_tokens=st.integers(1, 200_000) | st.integers(1, 500),
    max_turn_tokens=st.integers(1, 200) | st.integers(1, 10_000),
    group_size=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 2**64),
    index=st.integers(0, 10_000),
)
def test_limits_hold_for_every_plan(
    workload, median_tokens, sigma, room_tokens, max_turn_tokens, group_size, seed, index
):
    max_context_tokens = int(WORKLOADS[workload].prompt_tokens) + room_tokens
    rollout = config(
        workload,
        median_tokens=median_tokens,
        sigma=sigma,
        max_context_tokens=max_context_tokens,
        max_turn_tokens=max_turn_tokens,
        group_size=group_size,
    )
    group = TrajectorySource(rollout, seed=seed).group(2, index)
    assert len(group.trajectories) == group_size
    for trajectory in group.trajectories:
        assert 1 <= len(trajectory.turns) <= WORKLOADS[workload].max_turns
        assert trajectory.num_context_tokens <= max_context_tokens
        assert trajectory.turns[-1].env_s == 0
        for turn in trajectory.turns:
            assert type(turn.num_new_tokens) is int
            assert turn.num_new_tokens >= 1
            assert type(turn.num_output_tokens) is int
            assert 1 <= turn.num_output_tokens <= max_turn_tokens
            assert type(turn.env_s) is float
            assert 0 <= turn.env_s < math.inf


def test_everything_is_informative_where_nothing_filters():
    source = TrajectorySource(config(), seed=1)
    assert {source.informative_fraction(step) for step in range(20)} == {1.0}
    assert all(source.group(step, index).is_informative for step in range(3) for index in range(30))


def test_the_informative_fraction_stays_in_its_band_and_uses_it():
    source = TrajectorySource(config(), seed=5, max_demand=5.7)
    fractions = [source.informative_fraction(step) for step in range(2000)]
    assert fractions == [source.informative_fraction(step) for step in range(2000)]
    assert all(1 / 5.7 <= fraction <= 1 for fraction in fractions)
    assert min(fractions) < 1.01 / 5.7
    assert max(fractions) > 0.99
    assert statistics.median(fractions) == pytest.approx(5.7**-0.5, rel=0.06)
    assert fractions[:9] != [
        TrajectorySource(config(), seed=6, max_demand=5.7).informative_fraction(s) for s in range(9)
    ]


@pytest.mark.parametrize("step", range(8))
def test_groups_that_count_are_spread_evenly_over_a_step(step: int):
    source = TrajectorySource(config(group_size=1), seed=5, max_demand=5.7)
    counts = itertools.accumulate(source.group(step, index).is_informative for index in range(400))
    fraction = source.informative_fraction(step)
    assert all(abs(count - fraction * num) < 2.5 for num, count in enumerate(counts, start=1))


def test_which_groups_count_differs_between_steps_and_seeds():
    patterns = {
        tuple(
            TrajectorySource(config(group_size=1), seed=seed, max_demand=4.0).group(step, i).is_informative
            for i in range(40)
        )
        for seed in range(3)
        for step in range(3)
    }
    assert len(patterns) == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"workload": "chess"},
            r"rollout.workload = 'chess' is not known; choose one of frozenlake, .*uniform, or give logs",
        ),
        (
            {"max_context_tokens": 128},
            r"rollout.max_context_tokens = 128 leaves no room .* uniform, about 128 tokens; raise",
        ),
        ({"logs": "any.jsonl", "sigma": 0.5}, r"rollout.sigma cannot be set beside rollout.logs.*remove one"),
        ({"logs": "any.jsonl", "median_tokens": 5.0}, r"rollout.median_tokens cannot be set beside rollout.logs"),
        ({"logs": "/nowhere/any.jsonl"}, r"trajectory log /nowhere/any.jsonl: cannot be read"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        TrajectorySource(config(**changes), seed=1)


@pytest.mark.parametrize("max_demand", [0.99, math.inf, math.nan])
def test_a_demand_below_one_or_endless_is_refused(max_demand: float):
    with pytest.raises(ValueError, match="max_demand must be"):
        TrajectorySource(config(), seed=1, max_demand=max_demand)


def test_the_prompt_share_can_be_counted_both_ways():
    plan = TrajectoryPlan(trajectory_id="t", group_id="g", turns=(TurnPlan(10, 2, 0.0), TurnPlan(5, 3, 0.0)))
    assert prefill_fraction([plan]) == 15 / 20
    assert prefill_fraction([plan, plan], is_cached=False) == (10 + 17) / (27 + 5)


@pytest.mark.parametrize(("workload", "num_groups"), [("frozenlake", 16), ("alfworld", 64)])
def test_the_papers_jobs_have_its_prompt_share_and_tail(workload: str, num_groups: int):
    tails = []
    for seed in range(5):
        plans = trajectories(config(workload), num_groups, seed=seed)
        assert 0.77 <= prefill_fraction(plans) <= 0.86
        lengths = np.array([plan.num_output_tokens for plan in plans])
        tails.append(float(np.percentile(lengths, 75) / lengths.max()))
    assert statistics.fmean(tails) == pytest.approx(0.3, abs=0.06)


def test_tau_bench_looks_like_the_measured_trajectories():
    path = SHARED / "tau_bench_airline_turns.json"
    if not path.exists():
        pytest.skip("needs shared/workloads beside the repository")
    measured = [row["turns"] for row in json.loads(path.read_text())]
    answers = [[num for role, num in turns if role == "a"] for turns in measured]
    # What follows the last answer was never read.
    prompt = sum(num for turns in measured for role, num in turns if role != "a") - sum(
        turns[-1][1] for turns in measured
    )
    plans = trajectories(config("tau-bench"), 150)
    for percent in (25, 50, 75, 90):
        expected = np.percentile([sum(answer) for answer in answers], percent)
        assert np.percentile([plan.num_output_tokens for plan in plans], percent) == pytest.approx(expected, rel=0.2)
        turns = np.percentile([len(answer) for answer in answers], percent)
        assert np.percentile([len(plan.turns) for plan in plans], percent) == pytest.approx(turns, rel=0.15)
    assert prefill_fraction(plans) == pytest.approx(prompt / (prompt + sum(map(sum, answers))), abs=0.03)


def log_line(first_prompt: int, num_turns: int, *, group: str | None = None, output: int = 20) -> dict[str, object]:
    turns = [{"new_tokens": 30 if i else first_prompt, "output_tokens": output, "env_s": 0.5} for i in range(num_turns)]
    return {"turns": turns} if group is None else {"turns": turns, "group": group}


def write_log(path: Path, lines: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_logged_trajectories_fill_groups_of_one_prompt(tmp_path):
    logs = write_log(tmp_path / "log.jsonl", [log_line(100 + i, i + 1) for i in range(10)])
    made = groups(config(logs=logs), 40)
    assert made == groups(config(logs=logs), 40)
    assert made != groups(config(logs=logs), 40, seed=2)
    for group in made:
        assert len(group.trajectories) == 16
        assert len({trajectory.turns[0].num_new_tokens for trajectory in group.trajectories}) == 1
    plans = [trajectory for group in made for trajectory in group.trajectories]
    assert {len(plan.turns) for plan in plans} == set(range(1, 11))
    longest = next(plan for plan in plans if len(plan.turns) == 10)
    assert longest.turns[1:] == (TurnPlan(30, 20, 0.5),) * 8 + (TurnPlan(30, 20, 0.0),)


def test_logged_groups_stay_together(tmp_path):
    lines = [log_line(100 * g, g, group=f"task{g}") for g in (1, 2, 3) for _ in range(4)]
    for group in groups(config(logs=write_log(tmp_path / "log.jsonl", lines), group_size=8), 20):
        assert len({len(trajectory.turns) for trajectory in group.trajectories}) == 1
        assert group.trajectories[0].turns[0].num_new_tokens == 100 * len(group.trajectories[0].turns)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_turn_tokens": 7}, [(100, 7), (30, 7), (30, 7)]),
        ({"max_context_tokens": 175}, [(100, 20), (30, 20)]),
        ({"max_context_tokens": 155}, [(100, 20), (30, 5)]),
        ({"max_context_tokens": 150}, [(100, 20)]),
        ({"max_context_tokens": 110}, [(100, 10)]),
        ({"max_context_tokens": 90}, [(89, 1)]),
    ],
)
def test_logged_trajectories_are_cut_to_the_limits(tmp_path, changes: dict[str, int], expected: list[tuple[int, int]]):
    logs = write_log(tmp_path / "log.jsonl", [log_line(100, 3)])
    (plan,) = trajectories(config(logs=logs, group_size=1, **changes), 1)
    assert [(turn.num_new_tokens, turn.num_output_tokens) for turn in plan.turns] == expected
    assert [turn.env_s for turn in plan.turns] == [0.5] * (len(expected) - 1) + [0.0]
