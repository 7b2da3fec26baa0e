"""Two figures of one report: latency by policy, and what rollouts got beside what it cost serving's users."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from rose.bench.figure_files import save_figure

_BARS = (
    ("ttft_p50_ms", "TTFT P50"),
    ("ttft_p99_ms", "TTFT P99"),
    ("tpot_p50_ms", "TPOT P50"),
    ("tpot_p99_ms", "TPOT P99"),
)


def draw_plots(out: Path, report: Mapping[str, Any]) -> tuple[Path, ...]:
    """Draw what the report has the figures for, each load apart; returns the files (SVG)."""
    loads = {name: load["policies"] for name, load in report.get("workloads", {}).items()}
    loads = loads or {report.get("load", "load"): report["policies"]}
    drawn = []
    for load, policies in loads.items():
        if policies:
            for name, draw in (("latency", _draw_latency), ("trade", _draw_trade)):
                path, title = out / f"coserve-{load}-{name}.svg", f"{load}, {report['kind']}"
                drawn.append(save_figure(path, partial(draw, policies=policies), title=title))
    return tuple(drawn)


def _draw_latency(axes: Axes, policies: Mapping[str, Any]) -> None:
    width = 0.8 / len(_BARS)
    for place, (key, label) in enumerate(_BARS):
        at = [index + (place - (len(_BARS) - 1) / 2) * width for index in range(len(policies))]
        spread = [(figures.get("spread") or {}).get(key) or 0.0 for figures in policies.values()]
        heights = [figures[key] or 0.0 for figures in policies.values()]
        axes.bar(at, heights, width, yerr=spread if any(spread) else None, label=label)
    axes.set_xticks(range(len(policies)), list(policies))
    axes.set(yscale="log", ylabel="ms")
    axes.legend(ncols=2)


def _draw_trade(axes: Axes, policies: Mapping[str, Any]) -> None:
    for name, figures in policies.items():
        spread = figures.get("spread") or {}
        axes.errorbar(
            figures["added_delay_mean_ms"],
            figures["rollout_net_tokens"],
            xerr=spread.get("added_delay_mean_ms"),
            yerr=spread.get("rollout_net_tokens"),
            fmt="o",
            label=name,
        )
    axes.set(xlabel="added to a request's first token, mean, ms", ylabel="net rollout tokens")
    axes.legend()
