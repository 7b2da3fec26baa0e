"""A simulator that is arithmetic, importable by name so that worker processes find it. Some strategies misbehave."""

from __future__ import annotations

import os
import signal
import sys
import time

import attrs

from rose.errors import ConfigError
from rose.simulation.outcome import Outcome, ServingOutcome, StepOutcome
from rose.simulation.scenario import ClusterConfig, RolloutConfig, Scenario, ServingConfig

SCENARIO = Scenario(
    name="toy",
    cluster=ClusterConfig(rollout_gpus=8, training_gpus=8, borrowed_gpus=16),
    serving=ServingConfig(profile="h100:qwen2.5-7b"),
    rollout=RolloutConfig(profile="h100:qwen3-8b"),
    assumptions=("a toy",),
)
SPEED = {"fixed": 1.0, "paper": 1.25, "default": 1.6, "spot": 1.1}


def serving_outcome(num_gpus: int, seed: int, stretch: float = 1.0) -> ServingOutcome:
    return ServingOutcome(
        num_requests=100 * num_gpus, ttft_mean_ms=90.0 * stretch, ttft_p50_ms=80.0 * stretch, ttft_p90_ms=200.0 * stretch,
        ttft_p99_ms=310.0 * stretch + seed, tpot_p50_ms=20.0 * stretch, tpot_p90_ms=60.0 * stretch,
        tpot_p99_ms=(110.0 + seed) * stretch, itl_p50_ms=19.0 * stretch, itl_p99_ms=120.0 * stretch,
        violations_fraction=0.001 * seed, busy_fraction=0.5,
    )  # fmt: skip


def outcome(scenario: Scenario, strategy: str, seed: int) -> Outcome:
    rollout_s = (400.0 + 10 * seed) / SPEED[strategy]
    step = StepOutcome(
        rollout_s=rollout_s, train_s=90.0, sync_s=10.0 + seed, demand=1.0, own_p75_fraction=0.3, end_p75_fraction=0.6
    )
    borrowed = scenario.cluster.borrowed_gpus if strategy != "fixed" else 0
    return Outcome(
        strategy=strategy, seed=seed, steps=(step, step), step_s=step.step_s, rollout_s=rollout_s, floor_s=150.0,
        completion=((0.0, 0.0), (rollout_s / 3, 0.75), (rollout_s, 1.0)), num_turns=1000 + seed, num_tokens=500_000,
        num_trajectories=256, num_hops=3, num_evicted=1, num_stalled=1, num_lost=1, reprefill_tokens=7,
        borrowed_tokens=1000 * borrowed, borrowed_gpu_s=60.0 * borrowed, overhead_fraction=0.0, cost_dollars=4.5, made_tokens=500_000,
        alone_ttft_p50_ms=30.0, alone_ttft_p99_ms=120.0, alone_tpot_p50_ms=9.0, alone_tpot_p99_ms=14.0,
        serving=serving_outcome(borrowed, seed, 1.1) if borrowed else None, num_events=12345,
    )  # fmt: skip


def simulate(scenario: Scenario, strategy: str, seed: int) -> Outcome:
    match strategy:
        case "impossible":
            message = f"{scenario.cluster.rollout_gpus} GPUs are too few"
            problem = ConfigError(message)
            raise ExceptionGroup(message, [problem])
        case "mixed":
            message = "two things at once"
            raise ExceptionGroup(message, [ConfigError("bad"), ZeroDivisionError("a bug")])
        case "buggy":
            return 1 // 0
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "quitting":
            os._exit(3)
        case "nan":
            return attrs.evolve(outcome(scenario, "fixed", seed), step_s=float("nan"))
        case "chatty":
            sys.stdout.write("noise on the standard output\n")
            return attrs.evolve(outcome(scenario, "fixed", seed), strategy=strategy)
    return outcome(scenario, strategy, seed)


def simulate_serving(scenario: Scenario, seed: int) -> ServingOutcome:
    return serving_outcome(scenario.cluster.borrowed_gpus, seed)


def work(task: int) -> tuple[int, int]:
    """Double the task; 3 dies of a signal, 4 ends its process, 5 talks, 6 waits."""
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if task == 4:
        os._exit(7)
    if task == 6:
        time.sleep(60)
    return 2 * task, os.getpid()
