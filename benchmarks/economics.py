"""Borrowing economics on and off, side by side, in virtual time: bytes over the thin link and seconds of rollouts.

With ``economic`` a version crosses to the borrowed engines' cluster only when their loans are likely to pay for it
(``rose.policies.weight_pull``); with ``always`` it always does. Run it with
``python benchmarks/economics.py [--out benchmarks/results/economics.json]``; takes about two minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import attrs

from rose.pool import WeightPull
from rose.simulation.presets import PRESETS
from rose.simulation.run import simulate
from rose.simulation.scenario import Scenario

SEEDS = (0, 1)
NUM_STEPS = 6


@attrs.frozen(kw_only=True)
class Case:
    """A preset at a small size, with loans as long as its rollouts."""

    what: str
    preset: str
    gbps: float
    changed_fraction: float
    median_tokens: float
    rollout_gpus: int
    borrowed_gpus: int
    num_trajectories: int

    def scenario(self, mode: WeightPull) -> Scenario:
        """Return the scenario under one rule."""
        base = PRESETS[self.preset]
        cluster = attrs.evolve(
            base.cluster, rollout_gpus=self.rollout_gpus, training_gpus=2, borrowed_gpus=self.borrowed_gpus
        )
        rollout = attrs.evolve(
            base.rollout,
            num_trajectories=self.num_trajectories,
            group_size=8,
            median_tokens=self.median_tokens,
            sigma=0.6,
        )
        link = attrs.evolve(base.link, gbps=self.gbps, changed_fraction=self.changed_fraction, weight_pull=mode)
        loop = attrs.evolve(base.loop, num_steps=NUM_STEPS, train_s=20.0)
        return attrs.evolve(base, name=self.what, cluster=cluster, rollout=rollout, link=link, loop=loop)


_8B = {"preset": "frozenlake-8b-grpo", "rollout_gpus": 2, "borrowed_gpus": 4, "num_trajectories": 64}
_32B = {"preset": "alfworld-32b-grpo", "rollout_gpus": 4, "borrowed_gpus": 8, "num_trajectories": 128}
CASES = (
    Case(what="8B, loans of half a minute, 0.05 Gbps", gbps=0.05, changed_fraction=0.02, median_tokens=600.0, **_8B),
    Case(
        what="32B, loans of a minute, 10 % changed, 0.5 Gbps",
        gbps=0.5,
        changed_fraction=0.1,
        median_tokens=600.0,
        **_32B,
    ),
    Case(what="8B, loans of some minutes, 1 Gbps", gbps=1.0, changed_fraction=0.02, median_tokens=3000.0, **_8B),
    Case(what="8B, loans of half a minute, 100 Gbps", gbps=100.0, changed_fraction=0.02, median_tokens=600.0, **_8B),
)


def figures(case: Case, mode: WeightPull, strategy: str) -> dict[str, Any]:
    """Return the mean figures over the seeds; times are of one step."""
    outcomes = [simulate(case.scenario(mode), strategy, seed) for seed in SEEDS]
    steps = [step for outcome in outcomes for step in outcome.steps]
    late = [step for outcome in outcomes for step in outcome.steps[NUM_STEPS // 2 :]]
    return {
        "link_bytes_per_step": sum(outcome.link_bytes for outcome in outcomes) / len(steps),
        "rollout_s": sum(step.rollout_s for step in steps) / len(steps),
        "sync_s": sum(step.sync_s for step in steps) / len(steps),
        "step_s": sum(step.step_s for step in steps) / len(steps),
        "step_s_second_half": sum(step.step_s for step in late) / len(late),
        "borrowed_tokens": sum(outcome.borrowed_tokens for outcome in outcomes),
    }


def run(case: Case) -> dict[str, Any]:
    """Return one row: both rules, and the job without borrowing."""
    row = {mode.value: figures(case, mode, "default") for mode in WeightPull}
    row["no borrowing"] = figures(case, WeightPull.ALWAYS, "fixed")
    always, economic = row["always"], row["economic"]
    return {
        **attrs.asdict(case),
        **row,
        "bytes_saved_fraction": 1 - economic["link_bytes_per_step"] / always["link_bytes_per_step"],
        "step_s_saved_fraction": 1 - economic["step_s"] / always["step_s"],
        "rollout_s_added_fraction": economic["rollout_s"] / always["rollout_s"] - 1,
    }


def main() -> None:
    """Run all cases and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "economics.json")
    out = parser.parse_args().out
    rows = []
    for case in CASES:
        rows.append(run(case))
        always, economic, own = (rows[-1][name] for name in ("always", "economic", "no borrowing"))
        print(
            f"{case.what}: {always['link_bytes_per_step'] / 1e9:.3f} -> {economic['link_bytes_per_step'] / 1e9:.3f} GB a step,"
        )
        print(
            f"  rollout {always['rollout_s']:.1f} -> {economic['rollout_s']:.1f} s ({own['rollout_s']:.1f} without borrowing),"
            f" step {always['step_s']:.1f} -> {economic['step_s']:.1f} s ({own['step_s']:.1f})"
        )
    document = {
        "what": "weight_pull always and economic, simulated (virtual time, modelled devices and links, live policies)",
        "seeds": list(SEEDS),
        "num_steps": NUM_STEPS,
        "cases": rows,
    }
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
