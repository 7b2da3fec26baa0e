"""Live runs of all policies, and their figures under the names of the virtual ones.

Order: every policy once, then every policy again, so that a drift of the machine meets all. A run whose pacing was disturbed is
repeated, at most ``num_retries`` times, and never counted. Each request's added delay is its TTFT less the mean of the same request's in
the runs of serving alone; a run of serving alone is held against the others of its kind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rose.bench.coserve.figures import Sample, summarise_policy
from rose.bench.coserve.live import ROLLOUT, LiveRig, LiveRun, RunPlan
from rose.bench.coserve.settings import LiveSettings
from rose.bench.coserve.world import Observed

_SPREAD_KEYS = (
    "ttft_p50_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "itl_p99_ms",
    "added_delay_mean_ms",
    "added_delay_p99_ms",
    "rollout_net_tokens",
)
_VIRTUAL_ONLY_KEYS = (
    "rollout_over_dedicated",
    "steps_held_for_kv",
    "yield_p99_ms",
    "idle_fraction",
    "idle_used_fraction",
    "serving_busy_fraction",
    "serving_kv_peak_fraction",
)

Runs = Mapping[str, Sequence[LiveRun]]


def plan_runs(settings: LiveSettings) -> Iterator[tuple[str, int]]:
    """Yield ``(policy, number)`` in the order of the runs."""
    policies = tuple(dict.fromkeys(("alone", *settings.policies))) if settings.policies else ()
    for number in range(1, settings.num_runs + 1):
        for policy in policies:
            yield policy, number


async def make_runs(rig: LiveRig, tell: Callable[[str], None]) -> list[LiveRun]:
    """Make all runs, invalid ones among them."""
    settings = rig.settings
    arrivals = settings.workload.arrivals(
        duration_s=settings.duration_s, seed=settings.seed, serving_profile=settings.setup.serving
    )
    runs: list[LiveRun] = []
    for policy, number in plan_runs(settings):
        for attempt in range(1, settings.num_retries + 2):
            begun_s = time.monotonic()
            label = f"{policy}-{number}.{attempt}"
            plan = RunPlan(policy=policy, label=label, arrivals=arrivals, duration_s=settings.duration_s)
            run = await rig.run(plan)
            runs.append(run)
            tell(f"{_line(run)}, {time.monotonic() - begun_s:.0f} s")
            if not run.problems:
                break
    return runs


def _line(run: LiveRun) -> str:
    ttft_ms = np.array([record.ttft_s * 1e3 for record in run.requests] or [np.nan])
    verdict = "valid" if not run.problems else "INVALID, " + "; ".join(run.problems)
    return (
        f"{run.label}: {len(run.requests)} requests, TTFT P50/P90 {np.percentile(ttft_ms, 50):.1f}/"
        f"{np.percentile(ttft_ms, 90):.1f} ms, {run.net_tokens} rollout tokens, {verdict}"
    )


def summarise_runs(settings: LiveSettings, runs: Sequence[LiveRun]) -> dict[str, Any]:
    """Return the report of the runs: ``policies`` by name and how they compare. Policies without a valid run are left out."""
    valid: dict[str, list[LiveRun]] = {}
    for run in runs:
        if not run.problems:
            valid.setdefault(run.policy, []).append(run)
    if "alone" not in valid:
        return {"policies": {}, "num_runs": len(runs), "num_invalid": len(runs)}
    policies = {policy: _policy(settings, kept, valid["alone"]) for policy, kept in valid.items()}
    for policy, figures in policies.items():
        figures["num_runs"] = len(valid[policy])
    return {
        "policies": policies,
        "comparison": compare(policies),
        "num_runs": len(runs),
        "num_invalid": sum(bool(run.problems) for run in runs),
        "problems": {run.label: list(run.problems) for run in runs if run.problems},
    }


def _policy(settings: LiveSettings, runs: Sequence[LiveRun], alone: Sequence[LiveRun]) -> dict[str, Any]:
    pairs = []
    for run in runs:
        others = [other for other in alone if other is not run] or list(alone)
        pairs.append(_pair(run, mean_ttft_s(others)))
    slo = settings.setup.slo
    figures = summarise_policy([own for own, _ in pairs], [base for _, base in pairs], [], slo)
    single = [summarise_policy([own], [base], [], slo) for own, base in pairs]
    for key in _VIRTUAL_ONLY_KEYS:
        del figures[key]
    num_lost = sum(run.num_unanswered for run in runs)
    num_all = figures["num_requests"] + num_lost
    figures["violations_fraction"] = (figures["violations_fraction"] * figures["num_requests"] + num_lost) / num_all
    for key in ("rollout_net_tokens", "rollout_decoded_tokens", "rollout_thrown_tokens"):
        figures[key] = round(figures[key] / len(runs))  # of one run, like the spread
    figures["spread"] = {
        key: statistics.stdev(one[key] for one in single) if len(single) > 1 else None for key in _SPREAD_KEYS
    }
    figures["runs"] = [{key: one[key] for key in _SPREAD_KEYS} for one in single]
    figures["late_p99_ms"] = max(
        (report.late_p99_s * 1e3 for run in runs for report in run.pacing.values()), default=None
    )
    figures["longest_rollout_step_ms"] = max((row[1] * 1e3 for run in runs for row in run.turns[ROLLOUT]), default=None)
    return figures


def mean_ttft_s(runs: Sequence[LiveRun]) -> dict[int, float]:
    """Return each request's mean TTFT over the runs; requests that one of them did not answer are left out."""
    tables = [{record.index: record.ttft_s for record in run.requests} for run in runs]
    common = set.intersection(*(set(table) for table in tables))
    return {index: statistics.fmean(table[index] for table in tables) for index in common}


def _pair(run: LiveRun, alone_ttft_s: Mapping[int, float]) -> tuple[Sample, Sample]:
    """Return the run and serving alone over the requests that both have."""
    records = sorted((r for r in run.requests if r.index in alone_ttft_s), key=lambda record: record.index)
    gaps = np.array([gap for record in records for gap in record.gaps_s])
    own = Sample(
        arrived_s=np.array([record.arrived_s for record in records]),
        ttft_s=np.array([record.ttft_s for record in records]),
        tpot_s=np.array([np.nan if record.tpot_s is None else record.tpot_s for record in records]),
        gap_s=gaps,
        gap_tokens=np.ones(len(gaps)),
        rest=Observed(
            answers=(),
            gaps=(),
            duration_s=run.duration_s,
            net_tokens=run.net_tokens,
            decoded_tokens=run.decoded_tokens,
            thrown_tokens=run.thrown_tokens,
            num_evicted=run.num_evicted,
            rollout_busy_s=sum(row[1] for row in run.turns[ROLLOUT]),
        ),
    )
    base = attrs.evolve(
        own,
        ttft_s=np.array([alone_ttft_s[record.index] for record in records]),
        tpot_s=np.full(len(records), np.nan),
    )
    return own, base


def compare(policies: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return how ``slo`` does beside ``paper`` and ``ungated``: their mean added delays over its own, its tokens over theirs."""
    found: dict[str, float] = {}
    own = policies.get("slo")
    for name in ("paper", "ungated"):
        other = policies.get(name)
        if own is None or other is None:
            continue
        if own["added_delay_mean_ms"] > 0:
            found[f"{name}_delay_over_slo"] = other["added_delay_mean_ms"] / own["added_delay_mean_ms"]
        if other["rollout_net_tokens"]:
            found[f"slo_tokens_over_{name}"] = own["rollout_net_tokens"] / other["rollout_net_tokens"]
    return found
