"""The two numbers of the tail and the training time of the presets: what a choice of them gives under the fixed baseline.

    .venv/bin/python benchmarks/fit_tail.py frozenlake 4000,0.85 2500,1.3 --seeds 10

Prints, for each ``median_tokens,sigma``, means over the seeds: rollout time, P75 of own durations and of end times over it,
the longest trajectory alone over it, and the training time that makes the paper's share of rollouts. ``presets.FITS`` holds what was
chosen: P75 at 30 % under its reading (32B, own-duration: below, since four waves of trajectories leave each at most a quarter),
and a longest trajectory that leaves about the paper's bound.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import attrs

from rose.simulation.outcome import Outcome
from rose.simulation.presets import PRESETS
from rose.simulation.run import simulate

BASES = {"frozenlake": "frozenlake-8b-grpo", "alfworld": "alfworld-32b-grpo"}


def run(case: tuple[str, float, float, int]) -> Outcome:
    """Simulate the fixed baseline of one choice."""
    workload, median, sigma, seed = case
    base = PRESETS[BASES[workload]]
    scenario = attrs.evolve(
        base,
        rollout=attrs.evolve(base.rollout, median_tokens=median, sigma=sigma),
        loop=attrs.evolve(base.loop, train_s=0.0),
    )
    return simulate(scenario, "fixed", seed)


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(BASES))
    parser.add_argument("choices", nargs="+", metavar="MEDIAN,SIGMA")
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    share = PRESETS[BASES[arguments.workload]].loop.rollout_share
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for choice in arguments.choices:
            median, sigma = map(float, choice.split(","))
            cases = [(arguments.workload, median, sigma, seed) for seed in range(arguments.seeds)]
            outcomes = list(pool.map(run, cases))
            steps = [outcome.steps[0] for outcome in outcomes]
            rollout_s = mean([step.rollout_s for step in steps])
            sync_s = mean([step.sync_s for step in steps])
            print(
                f"{choice}: rollout {rollout_s:.1f} s, own P75 {mean([s.own_p75_fraction for s in steps]):.3f}, "
                f"end P75 {mean([s.end_p75_fraction for s in steps]):.3f}, "
                f"longest {mean([o.floor_s for o in outcomes]) / rollout_s:.3f}, "
                f"train_s {rollout_s * (1 - share) / share - sync_s:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
