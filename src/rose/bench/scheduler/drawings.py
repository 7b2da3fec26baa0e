"""Two figures of one result: cost of a decision by engines, added latency by way."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rose.bench.figure_files import save_figure


def draw_plots(out: Path, result: Mapping[str, Any]) -> tuple[Path, ...]:
    """Draw what the result has the figures for; returns the files (SVG)."""
    drawn = []
    for name, draw in (("by_engines", _draw_decisions), ("gateway", _draw_gateway)):
        if result[name]:
            path = out / f"scheduler-{name.replace('_', '-')}.svg"
            drawn.append(save_figure(path, partial(draw, result=result)))
    return tuple(drawn)


def _draw_decisions(axes: Any, result: Mapping[str, Any]) -> None:
    rows = result["by_engines"]
    engines = [row["num_engines"] for row in rows]
    for key, label in (("decision_p50_us", "P50"), ("decision_p99_us", "P99")):
        axes.plot(engines, [row[key] for row in rows], "o-", label=label)
    axes.set(xscale="log", xlabel="engines", ylabel="us a decision", ylim=(0, None))
    axes.legend()


def _draw_gateway(axes: Any, result: Mapping[str, Any]) -> None:
    rows = {name: row for name, row in result["gateway"].items() if row["baseline"] != name}
    places = range(len(rows))
    for shift, key, label in ((-0.2, "added_p50_ms", "P50"), (0.2, "added_p99_ms", "P99")):
        axes.barh([place + shift for place in places], [row[key] for row in rows.values()], height=0.4, label=label)
    axes.set_yticks(list(places), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel="ms added to a turn")
    axes.legend()
