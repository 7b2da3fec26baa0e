"""The report's sections. Each title is the finding, made from the summary; each figure has a text that stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose.observe.report import html
from rose.observe.report.data import ReportData
from rose.observe.summary import (
    comparison_rows,
    is_over_slo,
    number,
    percent,
    sent_share,
    serving_rows,
    sync_rows,
)

Figures = Mapping[str, str]

_SYNC_HEADS = ("phase", "lr", "versions", "changed", "codec", "dense", "sent", "sent / dense", "stage", "pause")


def rollout(data: ReportData, figures: Figures) -> str:
    """Return the comparison of the arms: table and completion curve."""
    summary = data.summary
    gain = summary["gain"]["rollout_throughput"]
    title = (
        f"Borrowed GPUs raise rollout throughput {gain:.2f}x"
        if gain > 1
        else f"Borrowed GPUs do not pay here: rollout throughput {gain:.2f}x"
    )
    last_s = {arm: max(ends) for arm, ends in data.completion_s.items() if ends}
    ends = ", ".join(f"{arm} {end_s:.1f} s" for arm, end_s in last_s.items())
    borrowed = summary["borrowed"]
    note = (
        f"{borrowed['turns']:,} turns ran on borrowed GPUs ({borrowed['device_seconds']:,.0f} device seconds); "
        f"{borrowed['evicted']:,} were evicted and {borrowed['rerouted']:,} moved to another engine."
    )
    return html.section(
        title,
        html.paragraph(note),
        html.table(("", "fixed", "rose", "rose / fixed"), comparison_rows(summary), strong=3),
        html.figure(
            figures,
            "completion",
            alt=f"Share of trajectories done over time in step {data.completion_step}; the last ends at: {ends}.",
            caption=f"Step {data.completion_step}: share of trajectories done over time. The dotted line marks 75 %.",
        ),
    )


def devices(data: ReportData, figures: Figures) -> str:
    """Return what each device did."""
    means = {arm: _mean_busy(data, arm) for arm in dict.fromkeys(share.arm for share in data.busy)}
    if {"fixed", "rose"} <= means.keys():
        title = (
            f"The same GPUs are busy {percent(means['rose'], 0)} of the time instead of {percent(means['fixed'], 0)}"
        )
    else:
        title = "What each device did"
    bars = "; ".join(
        f"{share.arm} {share.device}: serving {share.serving_fraction:.0%}, rollout {share.rollout_fraction:.0%}"
        for share in data.busy
    )
    bin_s = data.strips[0].bin_s if data.strips else 0
    return html.section(
        title,
        html.figure(
            figures,
            "strips",
            alt="Strips of serving, rollout and idle time of each device over one window of each arm.",
            caption=f"One window of each arm: share of each {bin_s:g} s that serving and rollout steps took. "
            "An arm's gaps between steps are training and weight sync.",
        ),
        html.figure(figures, "busy", alt=f"Share of the whole arm: {bars}.", caption="The same over whole arms."),
    )


def _mean_busy(data: ReportData, arm: str) -> float:
    shares = [share.serving_fraction + share.rollout_fraction for share in data.busy if share.arm == arm]
    return sum(shares) / len(shares)


def latency(data: ReportData, figures: Figures) -> str:
    """Return serving latency alone, shared and ungated against the SLO."""
    serving = data.summary["serving"]
    alone, shared = serving["alone"], serving["shared"]
    title = (
        f"{_slo_finding(data.summary)}: TTFT P99 {number(alone['ttft_p99_ms'], 0)} → {number(shared['ttft_p99_ms'], 0)} ms, "
        f"TPOT P99 {number(alone['tpot_p99_ms'], 0)} → {number(shared['tpot_p99_ms'], 0)} ms"
    )
    limits = f"SLO {serving['slo']['ttft_ms']:g} ms TTFT, {serving['slo']['tpot_ms']:g} ms TPOT"
    return html.section(
        title,
        html.paragraph(_latency_note(serving)),
        html.figure(
            figures,
            "latency",
            alt=f"Distribution of TTFT and TPOT by arm ({limits}); the figures are in the table below.",
            caption="Share of requests at most this slow, logarithmic time. A dot marks each arm's P99.",
        ),
        html.table(("", "alone", "shared", "shared / alone", "ungated", "SLO"), serving_rows(data.summary), strong=2),
    )


def _slo_finding(summary: Mapping[str, Any]) -> str:
    if not is_over_slo(summary, "shared"):
        return "Serving stays within its SLO"
    return "Serving is over its SLO even alone" if is_over_slo(summary, "alone") else "Serving breaks its SLO"


def _latency_note(serving: Mapping[str, Any]) -> str:
    shared, ungated = serving["shared"], serving.get("ungated") or {}
    load = f"{serving['rate_rps']:.2f} requests a second and device."
    added, added_ungated = shared.get("added_delay_mean_ms"), ungated.get("added_delay_mean_ms")
    if added is None:
        return load
    against = f", {added_ungated:.1f} ms without admission control" if added_ungated is not None else ""
    return f"{load} Sharing added {added:.1f} ms to the first token of the same request on average{against}."


def learning(data: ReportData, figures: Figures) -> str:
    """Return reward and success of both arms."""
    fixed, rose = data.summary["fixed"], data.summary["rose"]
    gains = (_learned(rose), _learned(fixed))
    title = "Reward and success of both arms"
    if gains[0] is not None:
        without = f", {gains[1]:+.2f} without" if gains[1] is not None else ""
        verb = "learns" if gains[0] > 0 else "does not learn"
        title = f"The policy {verb}: success {gains[0]:+.2f} with borrowed GPUs{without}"
    ends = f"rose {number(rose.get('success_last'), 2)}, fixed {number(fixed.get('success_last'), 2)}"
    return html.section(
        title,
        html.figure(
            figures,
            "learning",
            alt=f"Reward and success by step. Success at the end: {ends}.",
            caption="Left: the rollouts that train. Right: maps never trained on. Step 0 is before the first step; "
            "a policy that does not read the map stays under the dashed line.",
        ),
    )


def _learned(arm: Mapping[str, Any]) -> float | None:
    first, last = arm.get("success_first"), arm.get("success_last")
    return None if first is None or last is None else last - first


def sync(data: ReportData, figures: Figures) -> str:
    """Return what the weight sync sent."""
    phases = data.summary["sync"]["phases"]
    parts = [f"{sent_share(phase)} of dense in the {name} phase" for name, phase in phases.items()]
    is_exact = data.summary["sync"]["bit_exact"]
    note = (
        "After each sync every tensor of every engine was checked and held the trainer's bits."
        if is_exact
        else "At least one tensor of an engine did not hold the trainer's bits after a sync: do not trust this run."
    )
    return html.section(
        f"Weight sync: {', '.join(parts)}" if parts else "No weights were sent",
        html.paragraph(note),
        html.figure(
            figures,
            "sync",
            alt=f"Bytes sent and share of changed values for each of {len(data.versions)} versions, coloured by codec.",
            caption="The codec follows the measured density. The dashed line is the full set of weights.",
        ),
        html.table(_SYNC_HEADS, sync_rows(data.summary), strong=7) if phases else "",
    )


def assumptions(data: ReportData) -> str:
    """Return what was modelled or assumed."""
    return html.section("What was modelled or assumed", html.bullets(data.assumptions))
