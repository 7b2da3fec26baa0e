"""Figures over a swept setting: gain and serving's P99s with a line a strategy, and the problem itself. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from rose.observe.report import style
from rose.observe.report.svg import new_figure
from rose.simulation.report import words
from rose.simulation.report.canvas import (
    DASH_DOTTED,
    DASHED,
    DOTTED,
    LONG_DASHED,
    Looks,
    draw_line,
    legend_below,
    legend_rows,
    line_handle,
    make_logarithmic,
    measure_axis,
    place_values,
)
from rose.simulation.report.data import FIXED, Study, Sweep
from rose.simulation.report.looks import PALETTE
from rose.simulation.report.sweep_data import (
    GAIN,
    axis_label,
    bound_lines,
    bounds_at,
    drawn_figures,
    gain_bounds,
    names_of,
    series,
    slot_uses,
    values_of,
    view,
)

# Lines stand this far apart, so that whiskers at the same value do not cover each other.
_ASIDE_PT = 0.8
_WHOLE_WIDTH = {FIXED, "SLO"}
_BOUNDS: dict[str, dict[str, Any]] = {
    FIXED: {"color": style.MUTED, "linestyle": DOTTED, "linewidth": 1.0},
    "Amdahl bound": {"color": style.INK, "linestyle": DASH_DOTTED, "linewidth": 1.2},
    "floor": {"color": style.INK, "linestyle": LONG_DASHED, "linewidth": 1.2},
    "serving alone": {"color": style.INK, "linestyle": DOTTED, "linewidth": 1.4},
    "SLO": {"color": style.INK, "linestyle": DASHED, "linewidth": 1.2},
}


def sweep(study: Study, swept: Sweep, looks: Looks) -> Figure:
    """Draw gain and P99s against the swept setting; a panel for each of them that any strategy has."""
    figures = drawn_figures(study, swept)
    handles = _handles(study, swept, figures, looks)
    drawing = new_figure(2.9 + 0.2 * legend_rows(len(handles)))
    for axis, figure in zip(drawing.subplots(1, len(figures), squeeze=False)[0], figures, strict=True):
        _panel(axis, study, swept, figure, looks)
        axis.set_title(words.head(figure))
        axis.set_xlabel(axis_label(study, swept))
    legend_below(drawing, handles)
    return drawing


def problem(study: Study, swept: Sweep) -> Figure:
    """Draw empty slots against queueing, and rollout time with its floor, as the dedicated GPUs for rollouts grow."""
    uses = slot_uses(study, swept)
    times = values_of(swept, FIXED, "rollout_s")
    figure = new_figure(3.0)
    axes = figure.subplots(1, 2 if times else 1, squeeze=False)[0]
    places = place_values(axes[0], [at for at, _ in uses])
    curves = (
        ("slots empty, share of their time", [use.idle_fraction for _, use in uses], PALETTE[0], "o"),
        ("trajectories queueing, share of their time", [use.queued_fraction for _, use in uses], PALETTE[1], "s"),
    )
    for label, shares, colour, marker in curves:
        axes[0].plot([places[at] for at, _ in uses], shares, color=colour, marker=marker, markersize=5, label=label)
    axes[0].set(ylim=(0, 1.22), xlabel=axis_label(study, swept), yticks=[0, 0.25, 0.5, 0.75, 1.0])
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].legend(loc="upper left")
    if times:
        _time_panel(axes[1], study, swept, times)
    return figure


def _time_panel(axis: Any, study: Study, swept: Sweep, times: list[tuple[float | str, float]]) -> None:
    places = place_values(axis, [at for at, _ in times])
    axis.plot(
        [places[at] for at, _ in times], [value for _, value in times], color=style.FIXED, marker="d", label="fixed"
    )
    floors = [(places[at], value) for at, value in bounds_at(swept, lambda point: point.floor_s) if at in places]
    if floors:
        axis.plot(*zip(*floors, strict=True), color=style.INK, linestyle=DASHED, linewidth=1.2, label="floor")
    axis.set(ylim=(0, None), xlabel=axis_label(study, swept), ylabel="rollout time (s)")
    axis.legend(loc="upper right")


def _panel(axis: Any, study: Study, swept: Sweep, figure: str, looks: Looks) -> None:
    places = place_values(axis, [point.value for point in swept.points])
    names = names_of(study, swept, figure)
    for index, name in enumerate(names):
        found = [(places[at], strategy) for at, strategy in series(swept, name) if strategy.get(figure) is not None]
        draw_line(axis, found, figure, looks[name], (index - (len(names) - 1) / 2) * _ASIDE_PT)
    for label, limits in bound_lines(study, swept, figure):
        if label in _WHOLE_WIDTH:
            axis.axhline(limits[0][1], **_BOUNDS[label])
        else:
            axis.plot([places[at] for at, _ in limits], [value for _, value in limits], **_BOUNDS[label])
    shown = view(study, swept, figure)
    axis.set_ylim(shown.low, shown.high)
    if shown.is_log:
        make_logarithmic(axis, shown.low, shown.high, which="y")
    measure_axis(axis.yaxis, figure)


def _handles(study: Study, swept: Sweep, figures: list[str], looks: Looks) -> list[Any]:
    names = dict.fromkeys(name for figure in figures for name in names_of(study, swept, figure))
    handles = [line_handle(name, looks[name]) for name in names]
    drawn = dict.fromkeys(label for figure in figures for label, _ in bound_lines(study, swept, figure))
    handles += [Line2D([], [], label=label, **_BOUNDS[label]) for label in drawn if label != FIXED]
    far = [label for label, _ in gain_bounds(swept) if GAIN in figures and label not in drawn]
    return handles + [Line2D([], [], label=f"{label} (out of view)", **_BOUNDS[label]) for label in far]
