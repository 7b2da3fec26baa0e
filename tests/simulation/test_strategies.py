"""The whole system in virtual time, under every strategy: nothing is lost, nothing is invented, the same bytes each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from rose.errors import ConfigError
from rose.simulation.outcome import Outcome
from rose.simulation.presets import PRESETS
from rose.simulation.run import pool_config, simulate, simulate_serving, train_s
from rose.simulation.scenario import Algorithm, Layout, Scenario
from rose.simulation.strategies import STRATEGIES, strategy_named
from rose.simulation.trajectories import TrajectorySource

GOLDEN = Path(__file__).parent / "golden.json"
SEED = 3


def small(algorithm: Algorithm = Algorithm.GRPO, **cluster: int) -> Scenario:
    """Return the paper's 8B job at an eighth of its size."""
    base = PRESETS["frozenlake-8b-grpo"]
    sizes = {"rollout_gpus": 2, "training_gpus": 2, "borrowed_gpus": 2, **cluster}
    return attrs.evolve(
        base,
        name="small",
        cluster=attrs.evolve(base.cluster, **sizes),
        rollout=attrs.evolve(
            base.rollout, num_trajectories=32, group_size=8, median_tokens=1500.0, sigma=0.6, cap_per_gpu=8
        ),
        loop=attrs.evolve(base.loop, algorithm=algorithm, num_steps=2, train_s=20.0, max_demand=3.0),
    )


def planned_tokens(scenario: Scenario, steps: int) -> int:
    source = TrajectorySource(scenario.rollout, seed=SEED)
    scale = scenario.rollout.resolution_tokens
    return sum(
        max(1, round(turn.num_output_tokens / scale)) * scale
        for step in range(steps)
        for index in range(scenario.rollout.num_trajectories // scenario.rollout.group_size)
        for plan in source.group(step, index).trajectories
        for turn in plan.turns
    )


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "areal"])
def test_every_strategy_makes_exactly_what_was_planned(name: str) -> None:
    scenario = small()
    outcome = simulate(scenario, name, SEED)
    assert len(outcome.steps) == 2
    assert outcome.num_trajectories == 64
    # a turn that moves is rounded up to whole ids at each hop, and one that is cut short by its context is not planned longer
    planned = planned_tokens(scenario, 2)
    assert planned <= outcome.num_tokens <= 1.001 * planned
    assert outcome.rollout_s >= outcome.floor_s
    assert [point[1] for point in outcome.completion] == sorted(point[1] for point in outcome.completion)
    assert outcome.completion[-1][1] == 1.0
    assert 0 <= outcome.overhead_fraction <= 1
    has_serving = outcome.serving is not None
    assert has_serving == (name not in ("fixed", "fixed-uncapped", "spot", "serverless"))


def test_borrowing_helps_and_serving_keeps_its_slo() -> None:
    scenario = small()
    fixed, default = simulate(scenario, "fixed", SEED), simulate(scenario, "default", SEED)
    assert default.rollout_s < fixed.rollout_s
    assert default.borrowed_tokens > 0
    assert default.serving is not None
    assert default.serving.violations_fraction == 0
    alone = simulate_serving(scenario, SEED)
    assert alone.tpot_p50_ms is not None
    assert default.serving.tpot_p50_ms is not None
    assert alone.tpot_p50_ms < default.serving.tpot_p50_ms <= scenario.serving.tpot_slo_s * 1e3


def test_serving_alone_is_measured_over_the_same_phases() -> None:
    outcome = simulate(small(), "default", SEED)
    serving = outcome.serving
    assert serving is not None
    pairs = (
        (outcome.alone_ttft_p50_ms, serving.ttft_p50_ms),
        (outcome.alone_tpot_p50_ms, serving.tpot_p50_ms),
        (outcome.alone_tpot_p99_ms, serving.tpot_p99_ms),
    )
    for alone_ms, shared_ms in pairs:
        assert alone_ms is not None
        assert shared_ms is not None
        assert alone_ms < shared_ms
    assert simulate(small(), "fixed", SEED).alone_ttft_p50_ms is None


def test_a_job_that_borrows_nothing_does_not_pay_for_the_thin_link() -> None:
    scenario = small()
    thin = attrs.evolve(scenario, link=attrs.evolve(scenario.link, gbps=0.5))
    wide, narrow = simulate(scenario, "fixed", SEED), simulate(thin, "fixed", SEED)
    assert narrow.steps[0].sync_s == wide.steps[0].sync_s
    assert simulate(thin, "default", SEED).steps[0].sync_s > narrow.steps[0].sync_s


def test_with_nothing_to_borrow_every_policy_is_the_fixed_baseline_or_no_slower() -> None:
    scenario = small(borrowed_gpus=0)
    fixed = simulate(scenario, "fixed", SEED)
    for name in ("paper", "spot"):
        assert simulate(scenario, name, SEED).rollout_s == fixed.rollout_s
    assert (
        simulate(scenario, "default", SEED).rollout_s <= fixed.rollout_s
    )  # it moves trajectories between the job's own engines


def test_a_single_borrowed_engine_does_not_make_a_step_slower() -> None:
    scenario = small(borrowed_gpus=1)
    assert simulate(scenario, "default", SEED).rollout_s <= simulate(scenario, "fixed", SEED).rollout_s / 0.99


def test_a_dapo_step_runs_until_enough_groups_tell_something() -> None:
    outcome = simulate(small(Algorithm.DAPO), "default", SEED)
    assert all(step.demand >= 1 for step in outcome.steps)
    assert max(step.demand for step in outcome.steps) > 1
    early = simulate(small(Algorithm.DAPO), "eager-groups", SEED)
    assert early.rollout_s < outcome.rollout_s


def test_an_asynchronous_job_overlaps_training_with_rollouts() -> None:
    scenario = small(Algorithm.ASYNC)
    outcome = simulate(scenario, "fixed", SEED)
    synchronous = simulate(small(), "fixed", SEED)
    assert outcome.step_s < synchronous.step_s


def test_prefill_and_decode_apart_serve_the_same_load() -> None:
    scenario = small()
    apart = attrs.evolve(scenario, serving=attrs.evolve(scenario.serving, layout=Layout.DISAGGREGATED))
    together, pair = simulate_serving(scenario, SEED), simulate_serving(apart, SEED)
    assert pair.num_requests == pytest.approx(together.num_requests, rel=0.02)
    assert pair.itl_p99_ms is not None
    assert together.itl_p99_ms is not None
    assert pair.itl_p99_ms < together.itl_p99_ms  # no prefill between two tokens
    assert simulate(apart, "default", SEED).borrowed_tokens > 0


def test_training_is_as_long_as_the_rollout_share_says() -> None:
    scenario = small()
    scenario = attrs.evolve(scenario, loop=attrs.evolve(scenario.loop, train_s=None, rollout_share=0.75, num_steps=1))
    assert train_s(scenario, SEED) > 0
    step = simulate(scenario, "fixed", SEED).steps[0]
    assert step.rollout_s / step.step_s == pytest.approx(0.75, rel=1e-6)


def test_an_unknown_strategy_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'default'"):
        simulate(small(), "defaults", SEED)


def test_engines_that_do_not_fit_are_refused() -> None:
    scenario = small()
    odd = attrs.evolve(scenario, rollout=attrs.evolve(scenario.rollout, profile="h800x4:qwen3-32b"))
    with pytest.raises(ConfigError, match=r"cluster\.rollout_gpus = 2 is no multiple of the 4 GPUs"):
        simulate(odd, "fixed", SEED)
    mixed = attrs.evolve(odd, cluster=attrs.evolve(odd.cluster, rollout_gpus=4, borrowed_gpus=4))
    with pytest.raises(ConfigError, match=r"takes 4 GPUs and serving\.profile"):
        simulate(mixed, "default", SEED)


def as_text(outcome: Outcome) -> str:
    return repr(attrs.astuple(outcome))


def test_the_same_seed_gives_the_same_outcome_under_any_hash_seed() -> None:
    script = (
        "from test_strategies import *; import sys; "
        "sys.stdout.write(''.join(as_text(simulate(small(), name, SEED)) for name in ('default', 'spot', 'paper')))"
    )
    texts = set()
    for hash_seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        texts.add(done.stdout)
    assert len(texts) == 1
    assert texts == {"".join(as_text(simulate(small(), name, SEED)) for name in ("default", "spot", "paper"))}


def figures(name: str) -> dict[str, float | int | None]:
    outcome = simulate(small(), name, SEED)
    serving = outcome.serving
    return {
        "rollout_s": round(outcome.rollout_s, 6),
        "num_turns": outcome.num_turns,
        "num_hops": outcome.num_hops,
        "borrowed_tokens": outcome.borrowed_tokens,
        "ttft_p99_ms": None if serving is None or serving.ttft_p99_ms is None else round(serving.ttft_p99_ms, 6),
        "tpot_p99_ms": None if serving is None or serving.tpot_p99_ms is None else round(serving.tpot_p99_ms, 6),
    }


@pytest.mark.parametrize("name", ["fixed", "default", "paper", "spot"])
def test_golden_figures(name: str) -> None:
    """A change here is a change of a policy or of the model: look at it, then run this file as a program."""
    assert figures(name) == json.loads(GOLDEN.read_text(encoding="utf-8"))[name]


if __name__ == "__main__":
    GOLDEN.write_text(
        json.dumps({name: figures(name) for name in ("fixed", "default", "paper", "spot")}, indent=1) + "\n",
        encoding="utf-8",
    )


@pytest.mark.parametrize(
    ("name", "is_adaptive"), [("default", True), ("paper", False), ("fixed", False), ("spot", False)]
)
def test_only_the_projects_own_policies_adapt_the_number_of_turns(name: str, *, is_adaptive: bool) -> None:
    assert pool_config(small(), strategy_named(name)).concurrency.is_adaptive == is_adaptive
