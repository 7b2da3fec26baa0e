"""A simulator that is arithmetic, for tests of ``rose simulate``."""

from __future__ import annotations

import attrs

from rose.cli.simulation_study import Simulator
from rose.errors import ConfigError
from rose.simulation.outcome import Outcome, ServingOutcome, StepOutcome
from rose.simulation.scenario import ClusterConfig, RolloutConfig, Scenario, ServingConfig

TOY = Scenario(
    name="toy-8b-grpo",
    cluster=ClusterConfig(rollout_gpus=8, training_gpus=8, borrowed_gpus=16),
    serving=ServingConfig(profile="h100:qwen2.5-7b"),
    rollout=RolloutConfig(profile="h100:qwen3-8b"),
    assumptions=("a toy",),
)
LARGE = attrs.evolve(TOY, name="toy-32b-grpo")


@attrs.frozen
class About:
    kind: str
    summary: str


STRATEGIES = {
    "fixed": About("baseline", "own engines only"),
    "paper": About("policy", "as published"),
    "default": About("policy", "ours"),
    "spot": About("baseline", "spot instances"),
}
SPEED = {"fixed": 1.0, "paper": 1.25, "default": 1.6, "spot": 1.1}


def serving(seed: int, stretch: float = 1.0) -> ServingOutcome:
    return ServingOutcome(
        num_requests=100, ttft_mean_ms=90.0, ttft_p50_ms=80.0, ttft_p90_ms=200.0, ttft_p99_ms=310.0 * stretch,
        tpot_p50_ms=20.0, tpot_p90_ms=60.0, tpot_p99_ms=110.0 * stretch + seed, itl_p50_ms=19.0, itl_p99_ms=120.0,
        violations_fraction=0.001, busy_fraction=0.5,
    )  # fmt: skip


def outcome(scenario: Scenario, strategy: str, seed: int) -> Outcome:
    rollout_s = (400.0 + 10 * seed) / SPEED[strategy]
    step = StepOutcome(
        rollout_s=rollout_s, train_s=90.0, sync_s=10.0, demand=1.0, own_p75_fraction=0.3, end_p75_fraction=0.6
    )
    borrowed = 0 if strategy == "fixed" else scenario.cluster.borrowed_gpus
    return Outcome(
        strategy=strategy, seed=seed, steps=(step,), step_s=step.step_s, rollout_s=rollout_s, floor_s=200.0,
        completion=((0.0, 0.0), (rollout_s, 1.0)), num_turns=1000, num_tokens=500_000, num_trajectories=256, num_hops=0,
        num_evicted=0, num_stalled=0, num_lost=0, reprefill_tokens=0, borrowed_tokens=1000 * borrowed,
        borrowed_gpu_s=0.0, overhead_fraction=0.0, cost_dollars=4.5, num_events=1, made_tokens=500_000,
        alone_ttft_p50_ms=30.0, alone_ttft_p99_ms=120.0, alone_tpot_p50_ms=9.0, alone_tpot_p99_ms=14.0,
        serving=serving(seed, 1.4 if strategy == "spot" else 1.1) if borrowed else None,
    )  # fmt: skip


def simulator(calls: list[tuple[Scenario, str, int]], trouble: dict[str, BaseException]) -> Simulator:
    """Return a simulator that keeps its calls; ``trouble`` is raised for a strategy, or for ``check``."""

    def simulate(scenario: Scenario, strategy: str, seed: int) -> Outcome:
        calls.append((scenario, strategy, seed))
        if strategy in trouble:
            raise trouble[strategy]
        return outcome(scenario, strategy, seed)

    def simulate_serving(scenario: Scenario, seed: int) -> ServingOutcome:
        calls.append((scenario, "alone", seed))
        if "alone" in trouble:
            raise trouble["alone"]
        return serving(seed)

    def check(scenarios: object) -> None:
        if "check" in trouble:
            raise ConfigError(str(trouble["check"]))

    return Simulator(
        presets={scenario.name: scenario for scenario in (TOY, LARGE)},
        published={TOY.name: {"end_to_end_gain": 1.3, "alone_ttft_p99_ms": 300.0}},
        strategies=STRATEGIES,
        check=check,
        simulate=simulate,
        simulate_serving=simulate_serving,
    )
