"""The presets are the paper's set-ups: sizes, shares, tails."""

from __future__ import annotations

import itertools

import attrs
import pytest

from rose.errors import ConfigError
from rose.simulation.preflight import check_scenarios
from rose.simulation.presets import FITS, PRESETS, PUBLISHED, preset_named, with_tail
from rose.simulation.run import simulate
from rose.simulation.scenario import Algorithm, Scenario, Tail


def test_presets_are_the_two_set_ups_times_three_loops() -> None:
    names = [
        f"{job}-{loop}" for job, loop in itertools.product(("frozenlake-8b", "alfworld-32b"), ("grpo", "dapo", "async"))
    ]
    assert list(PRESETS) == names
    assert set(PUBLISHED) == set(names)
    check_scenarios(PRESETS.values())


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "slo_s"),
    [("frozenlake-8b", (8, 8, 16), 256, (0.5, 0.15)), ("alfworld-32b", (16, 32, 64), 1024, (1.0, 0.45))],
)
def test_sizes_are_the_papers(name: str, gpus: tuple[int, int, int], batch: int, slo_s: tuple[float, float]) -> None:
    for loop in Algorithm:
        scenario = PRESETS[f"{name}-{loop.value}"]
        cluster = scenario.cluster
        assert (cluster.rollout_gpus, cluster.training_gpus, cluster.borrowed_gpus) == gpus
        assert (scenario.rollout.num_trajectories, scenario.rollout.group_size) == (batch, 16)
        assert scenario.rollout.max_context_tokens == 32_768
        assert (scenario.serving.ttft_slo_s, scenario.serving.tpot_slo_s) == slo_s
        assert scenario.assumptions


def shares(scenario: Scenario, seeds: int) -> tuple[float, float, float]:
    steps = [simulate(scenario, "fixed", seed).steps[0] for seed in range(seeds)]
    return (
        sum(step.rollout_s for step in steps) / sum(step.step_s for step in steps),
        sum(step.own_p75_fraction for step in steps) / seeds,
        sum(step.end_p75_fraction for step in steps) / seeds,
    )


def test_the_fixed_8b_baseline_has_the_papers_share_and_tail_under_both_readings() -> None:
    preset = PRESETS["frozenlake-8b-grpo"]
    share, own, _ = shares(preset, seeds=4)
    assert share == pytest.approx(0.869, abs=0.015)
    assert own == pytest.approx(0.30, abs=0.04)
    share, _, end = shares(with_tail(preset, Tail.END_TIME), seeds=4)
    assert share == pytest.approx(0.869, abs=0.02)
    assert end == pytest.approx(0.30, abs=0.05)


def test_the_fixed_32b_baseline_has_the_papers_share_and_a_tail_within_the_papers() -> None:
    share, own, _ = shares(PRESETS["alfworld-32b-grpo"], seeds=1)
    assert share == pytest.approx(0.705, abs=0.03)
    assert own <= 0.30


def test_a_tail_without_a_fit_is_refused() -> None:
    assert ("swe", Tail.END_TIME) not in FITS
    base = PRESETS["frozenlake-8b-grpo"]
    with pytest.raises(ConfigError, match="no fit for workload 'swe'"):
        with_tail(attrs.evolve(base, rollout=attrs.evolve(base.rollout, workload="swe")), Tail.END_TIME)


def test_an_unknown_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'frozenlake-8b-dapo'"):
        preset_named("frozenlake-8b-dabo")
