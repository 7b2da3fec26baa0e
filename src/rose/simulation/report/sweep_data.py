"""What the figures and texts of a sweep share: who has which figure where, bounds, and how much of an axis is shown. Pure."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from rose.simulation.report import words
from rose.simulation.report.bounds import LIMITED, SlotUse, are_far_apart, reach, slot_use
from rose.simulation.report.data import FIXED, Strategy, Study, Sweep, SweepPoint

GAIN = "end_to_end_gain"
SWEPT = (GAIN, *LIMITED)
PROBLEM = "problem"

_CUT_BEYOND = 0.6
_NEAR = 3.5
_LOG_ROOM, _LOG_MARGIN = 2.0, 1.15

Place = float | str


def is_problem(swept: Sweep) -> bool:
    """Return whether a sweep is the one over the fixed baseline's GPUs for rollouts."""
    return words.axis_key(swept.axis) == PROBLEM


def slot_uses(study: Study, swept: Sweep) -> list[tuple[float, SlotUse]]:
    """Return the use of the slots at each number of GPUs where it is known."""
    found = [(point.value, slot_use(study, point)) for point in swept.points]
    return [(at, use) for at, use in found if use is not None and isinstance(at, float)]


def series(swept: Sweep, name: str) -> list[tuple[Place, Strategy]]:
    """Return a strategy's figures at each value where it was run."""
    found = [(point.value, point.get(name)) for point in swept.points]
    return [(value, strategy) for value, strategy in found if strategy is not None]


def values_of(swept: Sweep, name: str, figure: str) -> list[tuple[Place, float]]:
    """Return one figure of a strategy at each value where it was measured."""
    return [
        (value, strategy.values[figure]) for value, strategy in series(swept, name) if strategy.get(figure) is not None
    ]


def names_of(study: Study, swept: Sweep, figure: str) -> list[str]:
    """Return the strategies that have a figure somewhere, in order of display; ``fixed`` is the line at a gain of 1."""
    return [
        strategy.name
        for strategy in study.strategies
        if values_of(swept, strategy.name, figure) and not (strategy.name == FIXED and figure == GAIN)
    ]


def drawn_figures(study: Study, swept: Sweep) -> list[str]:
    """Return which of gain and P99s any strategy has somewhere in the sweep."""
    return [figure for figure in SWEPT if names_of(study, swept, figure)]


def bounds_at(swept: Sweep, bound: Callable[[SweepPoint], float | None]) -> list[tuple[Place, float]]:
    """Return a bound, such as a point's ``floor_s``, at each value where the result tells it."""
    found = [(point.value, bound(point)) for point in swept.points]
    return [(at, value) for at, value in found if value is not None]


def axis_label(study: Study, swept: Sweep) -> str:
    """Return what stands under a sweep's axis; a multiple of the job's size says of which."""
    label = words.axis_label(swept.axis, swept.unit)
    counts = [study.setting("cluster", key) for key in ("rollout_gpus", "training_gpus", "borrowed_gpus")]
    num_gpus = sum(count for count in counts if count is not None)
    return f"{label} {num_gpus:,.0f} GPUs" if words.axis_key(swept.axis) == words.SCALE and num_gpus else label


@attrs.frozen(kw_only=True)
class View:
    """The part of a figure's axis that a panel shows.

    Attributes:
        low, high: Its ends; every mean and every bound lies between them.
        is_log: The axis is logarithmic, as the means lie far apart.
        is_cut: A whisker leaves the view.
    """

    low: float
    high: float
    is_log: bool
    is_cut: bool


def view(study: Study, swept: Sweep, figure: str) -> View:
    """Return what a panel shows: all means and bounds, and whiskers as long as they do not flatten the rest."""
    means = [value for _, limits in bound_lines(study, swept, figure) for _, value in limits]
    ends: list[float] = []
    for name in names_of(study, swept, figure):
        for _, strategy in series(swept, name):
            value = strategy.get(figure)
            if value is not None:
                means.append(value)
                ends += reach(strategy, figure, value)
    is_log = are_far_apart(means)
    widest_low, widest_high = _widest(min(means), max(means), is_log=is_log)
    low, high = max(min(ends), widest_low), min(max(ends), widest_high)
    low, high = min(low, *means), max(high, *means)
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return View(
        low=low / _LOG_MARGIN if is_log else low - margin,
        high=high * _LOG_MARGIN if is_log else high + margin,
        is_log=is_log,
        is_cut=min(ends) < low or max(ends) > high,
    )


def _widest(low: float, high: float, *, is_log: bool) -> tuple[float, float]:
    room = _CUT_BEYOND * (high - low) or 0.05 * abs(high)
    return (low / _LOG_ROOM, high * _LOG_ROOM) if is_log else (low - room, high + room)


def bound_lines(study: Study, swept: Sweep, figure: str) -> list[tuple[str, list[tuple[Place, float]]]]:
    """Return the bounds of a panel that are near enough to draw, by name: of a gain, or of serving's latency."""
    found: list[tuple[str, list[tuple[Place, float]]]]
    if figure == GAIN:
        gains = [value for name in names_of(study, swept, GAIN) for _, value in values_of(swept, name, GAIN)]
        found = [("fixed", [(point.value, 1.0) for point in swept.points]), *gain_bounds(swept)]
        return [(name, at) for name, at in found if name == "fixed" or is_near(at, gains)]
    limit = study.slo_ms(figure)
    alone = [(point.value, point.serving_alone.get(figure)) for point in swept.points if point.serving_alone]
    found = [("serving alone", [(at, value) for at, value in alone if value is not None])]
    found += [] if limit is None else [("SLO", [(point.value, limit) for point in swept.points])]
    return [(name, at) for name, at in found if at]


def gain_bounds(swept: Sweep) -> list[tuple[str, list[tuple[Place, float]]]]:
    """Return the Amdahl bound and the floor at each value where the result tells them."""
    found = [
        ("Amdahl bound", bounds_at(swept, lambda point: point.amdahl_gain)),
        ("floor", bounds_at(swept, lambda point: point.floor_gain)),
    ]
    return [(name, limits) for name, limits in found if limits]


def is_near(limits: list[tuple[Place, float]], gains: list[float]) -> bool:
    """Return whether a bound is near enough to the gains that drawing it does not flatten them."""
    return max(value for _, value in limits) - 1 <= _NEAR * (max(gains) - 1)
