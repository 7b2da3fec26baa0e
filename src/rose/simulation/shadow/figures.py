"""The figures of a shadow report as SVG text by name. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from rose.observe.report import style
from rose.observe.report.svg import embed, new_figure

_COLOURS = (style.ROLLOUT, style.SERVING, style.ROSE, style.UNGATED)
_MINUTES_ABOVE_S, _HOURS_ABOVE_S = 300.0, 4 * 3600.0


def draw(result: Mapping[str, Any]) -> dict[str, str]:
    """Return ``time0``, ``kv0``, ... for each engine."""
    drawn = {}
    with mpl.rc_context(style.RC_PARAMS):
        for place, engine in enumerate(result["engines"]):
            for name, figure in (("time", _time(engine)), ("kv", _kv(engine))):
                drawn[f"{name}{place}"] = embed(f"{name}{place}", figure)
    return drawn


def _unit(engine: Mapping[str, Any]) -> tuple[float, str]:
    if engine["duration_s"] > _HOURS_ABOVE_S:
        return 3600.0, "hours"
    return (60.0, "minutes") if engine["duration_s"] > _MINUTES_ABOVE_S else (1.0, "seconds")


def _edges(bins: list[Mapping[str, float]], unit_s: float) -> list[float]:
    return [*(each["start_s"] / unit_s for each in bins), (bins[-1]["start_s"] + bins[-1]["width_s"]) / unit_s]


def _time(engine: Mapping[str, Any]) -> Figure:
    figure, (unit_s, unit) = new_figure(2.7), _unit(engine)
    axis = figure.subplots()
    alone = engine["alone"]["series"]
    edges = _edges(alone, unit_s)
    axis.stairs([each["serving_fraction"] for each in alone], edges, fill=True, color="#dfe4e9", label="serving alone")
    for colour, (name, mode) in zip(_COLOURS, engine["modes"].items(), strict=False):
        axis.stairs(
            [each["lent_fraction"] for each in mode["series"]],
            edges,
            color=colour,
            label=f"lent, {name}",
            linewidth=1.7,
        )
    axis.set(ylim=(0, 1.02), xlim=(edges[0], edges[-1]), xlabel=f"{unit} into the recording")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.legend(loc="outside upper right", ncols=4)
    return figure


def _kv(engine: Mapping[str, Any]) -> Figure:
    figure, (unit_s, unit) = new_figure(2.2), _unit(engine)
    axis = figure.subplots()
    for colour, (name, mode) in zip(_COLOURS, engine["modes"].items(), strict=False):
        edges = _edges(mode["series"], unit_s)
        axis.stairs(
            [each["kv_free_gb"] for each in mode["series"]],
            edges,
            color=colour,
            linestyle=(0, (4, 2)),
            label=f"free of serving, {name}",
        )
        axis.stairs(
            [each["rollout_kv_gb"] for each in mode["series"]], edges, color=colour, label=f"for rollouts, {name}"
        )
        axis.set(xlim=(edges[0], edges[-1]))
    axis.set(ylim=(0, engine["kv_pool_gb"] * 1.05), xlabel=f"{unit} into the recording", ylabel="GB")
    figure.legend(loc="outside upper right", ncols=4)
    return figure
