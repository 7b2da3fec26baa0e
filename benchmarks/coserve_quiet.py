"""How `quiet` and `slo` hold at their edges, in virtual time: the best schedule in hindsight, and noisy steps with a wrong profile.

``hindsight`` puts the live ``quiet`` rule beside the best whole-step schedule found for the same arrivals (``rose.bench.coserve.hindsight``);
``noise`` runs ``slo`` with step times of 20 % noise and a profile 50 % too low. Run it with
``python benchmarks/coserve_quiet.py --traces FOLDER [--out benchmarks/results/coserve-quiet.json]``; takes about half an hour on one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rose.backends.paced.profiles import profile_named
from rose.bench.coserve.cases import workload_named
from rose.bench.coserve.hindsight import QuietSetup, compare_quiet, merge_quiet
from rose.bench.coserve.virtual import VirtualSettings, run_virtual
from rose.bench.coserve.world import CoservePolicy, DeviceSetup
from rose.bench.machine import commit, machine, versions
from rose.simulation.world import ProfileTimes

LOADS = ("azure", "azure-third", "servegen", "burst")
NOISY_LOADS = ("azure", "burst")
NUM_SEEDS = 10
HINDSIGHT_S = 330.0
NOISY_S = 100.0
SERVING = "h100:qwen2.5-7b"
NOISY = DeviceSetup(serving=SERVING, noise_fraction=0.2, guess_ratio=0.5)
_KEPT = (
    "added_violations_fraction",
    "windows_broken",
    "itl_max_ms",
    "ttft_p99_ms",
    "tpot_p99_ms",
    "inflation",
    "rollout_over_dedicated",
)


def hindsight(load: str, traces: Path) -> dict[str, Any]:
    """Return one load's row: means over seeds, with the spread."""
    workload, setup = workload_named(load, traces), QuietSetup(times=ProfileTimes(profile_named(SERVING)))
    rows = [
        compare_quiet(setup, workload.arrivals(duration_s=HINDSIGHT_S, seed=seed, serving_profile=SERVING))
        for seed in range(NUM_SEEDS)
    ]
    return merge_quiet(rows)


def noise(load: str, traces: Path) -> dict[str, Any]:
    """Return one load's row: what ``slo`` keeps under noise and a wrong profile, beside serving alone under the same."""
    report = run_virtual(
        VirtualSettings(
            workloads=(workload_named(load, traces),),
            policies=(CoservePolicy.SLO,),
            num_seeds=NUM_SEEDS,
            duration_s=NOISY_S,
            setup=NOISY,
        )
    )
    return {name: {key: report["policies"][name][key] for key in _KEPT} for name in ("alone", "slo")}


def main() -> None:
    """Run everything and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "coserve-quiet.json")
    arguments = parser.parse_args()
    measured = commit()  # before the hours in which somebody edits a file
    noisy, best = {}, {}
    for load in NOISY_LOADS:
        noisy[load] = noise(load, arguments.traces)
        print(f"noise, {load}: {json.dumps(noisy[load]['slo'])}", flush=True)
    for load in LOADS:
        best[load] = hindsight(load, arguments.traces)
        ratio = best[load]["quiet_share"] / best[load]["hindsight_two_points_share"]
        print(
            f"hindsight, {load}: {best[load]['quiet_over_hindsight']:.3f}, P50 and P99 only {ratio:.3f},"
            f" idle used {best[load]['idle_used_fraction']:.4f}",
            flush=True,
        )
    document = {
        "what": "quiet beside the best schedule in hindsight; slo with noisy steps and a wrong profile (virtual time)",
        "noise_setup": {
            "noise_fraction": NOISY.noise_fraction,
            "guess_ratio": NOISY.guess_ratio,
            "duration_s": NOISY_S,
        },
        "num_seeds": NUM_SEEDS,
        "hindsight": best,
        "noise": noisy,
        "machine": machine(),
        "versions": versions(("rose-rl", "numpy", "attrs")),
        "commit": measured,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
