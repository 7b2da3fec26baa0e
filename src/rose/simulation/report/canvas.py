"""What the figures share: panels, bars, whiskers, lines of bounds, ticks and legends. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from rose.observe.report import style
from rose.simulation.report import words
from rose.simulation.report.bounds import reach
from rose.simulation.report.data import Strategy
from rose.simulation.report.looks import Look

DASHED = (0, (4, 2))
LONG_DASHED = (0, (9, 3))
DOTTED = (0, (1, 1.6))
DASH_DOTTED = (0, (5, 1.6, 1, 1.6))

_LOG_RATIO = 16.0
_ROW_IN = 0.27
_MAX_TICKS = 9
_LEAST_GAP = 0.085
_LEGEND_COLUMNS = 6
_WIDENED = 1.8
_PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}

Looks = Mapping[str, Look]


def bars_height_in(num_bars: int) -> float:
    """Return the height of a figure with that many bars, its axis and its legend."""
    return _ROW_IN * num_bars + 1.15


def draw_bars(axis: Any, strategies: Sequence[Strategy], figure: str, looks: Looks) -> None:
    """Draw one horizontal bar a strategy with its value behind it; a strategy without the figure keeps its row, empty."""
    tops = [strategy.ranges.get(figure, (0.0, 0.0))[1] for strategy in strategies]
    values = [strategy.get(figure) for strategy in strategies]
    widest = max([*tops, *(value for value in values if value is not None), 1e-9])
    for row, strategy in enumerate(strategies):
        value = strategy.get(figure)
        if value is None:
            axis.annotate(
                "not measured", (0, row), xytext=(4, 0), textcoords="offset points", va="center", color=style.MUTED
            )
            continue
        axis.barh(row, value, color=looks[strategy.name].colour, height=0.62)
        low, high = reach(strategy, figure, value)
        if high > low:
            axis.plot([low, high], [row, row], color=style.INK, linewidth=1.1, marker="|", markersize=5)
        text = words.show(figure, value)
        axis.annotate(
            text, (max(high, value), row), xytext=(5, 0), textcoords="offset points", va="center", bbox=_PLATE
        )
    axis.set(ylim=(len(strategies) - 0.4, -0.6), xlim=(0, widest * 1.17))
    axis.set_yticks(range(len(strategies)), [strategy.name for strategy in strategies])
    axis.tick_params(axis="y", labelcolor=style.INK)
    axis.grid(visible=False, axis="y")
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6))
    measure_axis(axis.xaxis, figure)


def draw_line(axis: Any, points: Sequence[tuple[float, Strategy]], figure: str, look: Look, aside_pt: float) -> None:
    """Draw a strategy's line over places and strategies as they were there, ``aside_pt`` points to the right.

    The whiskers are one path with gaps, which takes fewer bytes than a path each.
    """
    aside = axis.transData + ScaledTranslation(aside_pt / 72.0, 0, axis.figure.dpi_scale_trans)
    values = [strategy.values[figure] for _, strategy in points]
    ends = [reach(strategy, figure, value) for value, (_, strategy) in zip(values, points, strict=True)]
    if any(low < high for low, high in ends):
        xs = [at for place, _ in points for at in (place, place, math.nan)]
        ys = [at for low, high in ends for at in (low, high, math.nan)]
        axis.plot(xs, ys, color=look.colour, linewidth=0.9, transform=aside)
    axis.plot([place for place, _ in points], values, transform=aside, **line_style(look))


def draw_point(axis: Any, strategy: Strategy, figure: str, other: str, look: Look) -> None:
    """Draw a strategy as a point, ``figure`` to the right and ``other`` upwards, with whiskers both ways."""
    at, height = strategy.values[figure], strategy.values[other]
    axis.plot(reach(strategy, figure, at), [height, height], color=look.colour, linewidth=1.1)
    axis.plot([at, at], reach(strategy, other, height), color=look.colour, linewidth=1.1)
    axis.plot([at], [height], **{**line_style(look), "linestyle": "none", "markersize": 7.5})


def measure_axis(axis: Any, figure: str) -> None:
    """Write an axis's numbers as its figure's unit asks."""
    if words.unit(figure) == "%":
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value * 100, 6):g} %"))
    elif words.unit(figure) in {"x", "$"}:
        form = "{:g}x" if words.unit(figure) == "x" else "${:g}"
        axis.set_major_formatter(FuncFormatter(lambda value, _: form.format(round(value, 6))))
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def make_logarithmic(axis: Any, low: float, high: float, *, which: str) -> None:
    """Make the ``x`` or ``y`` axis logarithmic between two values, with a few round ticks."""
    getattr(axis, f"set_{which}scale")("log")
    getattr(axis, f"set_{which}lim")(low, high)
    ticks = [step * 10.0**power for power in range(-4, 8) for step in (1, 2, 5) if low <= step * 10.0**power <= high]
    own = axis.xaxis if which == "x" else axis.yaxis
    own.set_minor_locator(NullLocator())
    own.set_ticks(ticks if len(ticks) <= _MAX_TICKS else ticks[::3])


def place_values(axis: Any, values: Sequence[float | str]) -> dict[float | str, float]:
    """Set up a swept setting's axis and return where on it each value lies; words stand side by side."""
    if not all(isinstance(value, float) for value in values):
        axis.set_xticks(range(len(values)), [str(value) for value in values])
        axis.set_xlim(-0.4, len(values) - 0.6)
        return {value: float(index) for index, value in enumerate(values)}
    numbers = [float(value) for value in values]
    _scale_values(axis, numbers)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    low, high = (float(axis.transData.transform((number, 1.0))[0]) for number in (numbers[0], numbers[-1]))
    kept: list[float] = []
    for number in reversed(numbers):  # the last value always keeps its tick
        at = float(axis.transData.transform((number, 1.0))[0])
        if not kept or float(axis.transData.transform((kept[-1], 1.0))[0]) - at >= _LEAST_GAP * (high - low):
            kept.append(number)
    axis.set_xticks(kept[::-1], [f"{number:,g}" for number in reversed(kept)])
    return {number: number for number in numbers}


def _scale_values(axis: Any, numbers: Sequence[float]) -> None:
    low, high = numbers[0], numbers[-1]
    positive = [number for number in numbers if number > 0]
    if low < 0 or not positive or high < positive[0] * _LOG_RATIO:
        margin = 0.04 * (high - low) or 0.5
        axis.set_xlim(low - margin, high + margin)
    elif low == 0:
        axis.set_xscale("symlog", base=2, linthresh=positive[0], linscale=0.7)
        axis.set_xlim(-0.15 * positive[0], high * 1.15)
    else:
        axis.set_xscale("log", base=2)
        axis.set_xlim(low / 1.12, high * 1.12)


def bound(axis: Any, at: float, dashes: object, *, is_vertical: bool = True) -> None:
    """Draw a bound: a floor, a promise."""
    draw = axis.axvline if is_vertical else axis.axhline
    draw(at, color=style.INK, linestyle=dashes, linewidth=1.2, zorder=2.5)


def bound_in_view(axis: Any, at: float, dashes: object) -> None:
    """Draw a bound beside bars and widen the view for it, unless that would leave the bars with less than half."""
    widest = axis.get_xlim()[1]
    if at <= widest * _WIDENED:
        bound(axis, at, dashes)
        axis.set_xlim(0, max(widest, at * 1.04))


def note_out_of_view(axis: Any, at: float) -> str:
    """Return the words that a legend adds for a bound that was not drawn."""
    return " (out of view)" if at > axis.get_xlim()[1] else ""


def bound_handle(label: str, dashes: object) -> Line2D:
    """Return a bound's entry in a legend."""
    return Line2D([], [], color=style.INK, linestyle=dashes, linewidth=1.2, label=label)


def line_handle(name: str, look: Look) -> Line2D:
    """Return a strategy's entry in the legend of lines."""
    return Line2D([], [], label=name, **line_style(look))


def point_handle(name: str, look: Look) -> Line2D:
    """Return a strategy's entry in the legend of points."""
    return Line2D([], [], label=name, **{**line_style(look), "linestyle": "none", "markersize": 7})


def line_style(look: Look) -> dict[str, Any]:
    """Return the arguments that draw a strategy's line."""
    return {
        "color": look.colour,
        "linestyle": look.dashes,
        "linewidth": look.width,
        "marker": look.marker,
        "markersize": 5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.7,
    }


def legend_above(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Put a short legend over the panels, at the right."""
    if handles:
        figure.legend(handles=list(handles), loc="outside upper right", ncols=len(handles), handlelength=2.6)


def legend_below(figure: Figure, handles: Sequence[Line2D], *, side: str = "left") -> None:
    """Put a long legend under the panels, outside the data."""
    if handles:
        columns = min(_LEGEND_COLUMNS, len(handles))
        figure.legend(handles=list(handles), loc=f"outside lower {side}", ncols=columns, handlelength=3.0)


def legend_rows(num_handles: int) -> int:
    """Return how many rows ``legend_below`` takes."""
    return -(-num_handles // _LEGEND_COLUMNS)
