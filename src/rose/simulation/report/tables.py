"""The tables' rows. A cell has the mean and, where there are several seeds, least and greatest value in a second line. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rose.observe.summary import Row
from rose.simulation.report import words
from rose.simulation.report.bounds import floor_gain, rivals
from rose.simulation.report.data import FIXED, Strategy, Study, Sweep

JOB = (
    "end_to_end_gain",
    "step_s",
    "rollout_s",
    "rollout_share",
    "p75_fraction",
    "borrowed_tokens",
    "borrowed_gpu_s",
    "overhead_fraction",
    "reprefill_tokens",
    "cost_dollars",
)
SERVING = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "itl_p99_ms", "violations_fraction")
SWEPT = ("end_to_end_gain", "rollout_s", "ttft_p99_ms", "tpot_p99_ms", "violations_fraction", "cost_dollars")

_PAPER, _OWN, _ALONE = "paper", "default", "serving_alone"
_OF_FIXED = {"rollout_share", "p75_fraction"}

Table = tuple[Row, list[Row]]


def by_strategy(strategies: Sequence[Strategy], figures: Sequence[str]) -> Table | None:
    """Return heads and rows, a row a strategy; a figure or strategy without any value is left out, ``None`` without any."""
    shown = [figure for figure in figures if any(strategy.get(figure) is not None for strategy in strategies)]
    rows = [
        (strategy.name, *(cell(strategy, figure) for figure in shown))
        for strategy in strategies
        if any(strategy.get(figure) is not None for figure in shown)
    ]
    return (("", *(words.head(figure) for figure in shown)), rows) if rows else None


def serving(study: Study) -> Table | None:
    """Return serving's latency, alone first."""
    alone = (study.serving_alone,) if study.serving_alone else ()
    named = tuple(Strategy(name="alone", values=s.values, ranges=s.ranges) for s in alone)
    return by_strategy((*named, *study.strategies), SERVING)


def sweep(study: Study, swept: Sweep) -> Table | None:
    """Return what each strategy reached at each value."""
    rows = []
    for point in swept.points:
        at = words.value_text(point.value, swept.unit)
        for name in [strategy.name for strategy in study.strategies]:
            strategy = point.get(name)
            if strategy and any(strategy.get(figure) is not None for figure in SWEPT):
                rows.append((at, name, *(cell(strategy, figure) for figure in SWEPT)))
    heads = (words.axis_label(swept.axis, swept.unit), "strategy", *(words.head(figure) for figure in SWEPT))
    return (heads, rows) if rows else None


def published(study: Study) -> Table | None:
    """Return the paper's figures beside ours: the same strategy, the ratio of the two, and our own policy.

    A figure named ``strategy.figure`` is that strategy's, ``rollout_share`` and ``p75_fraction`` are those of ``fixed``, and
    every other one is the paper's own policy's.
    """
    rows: list[Row] = []
    for key, value in study.published.items():
        name, figure = _owner(key)
        same = study.serving_alone if name == _ALONE else study.get(name)
        ours = study.get(_OWN) if name == _PAPER else None
        simulated = same.get(figure) if same else None
        rows.append(
            (
                f"{name}: {words.label(figure)}",
                words.show(figure, value),
                cell(same, figure, has_unit=True),
                words.MISSING if simulated is None or not value else f"{simulated / value:.2f}",
                cell(ours, figure, has_unit=True),
            )
        )
    return (("", "published", "simulated", "simulated / published", _OWN), rows) if rows else None


def overview(studies: Sequence[Study]) -> Table | None:
    """Return the end-to-end gain of every strategy in every study beside the published one and the bounds."""
    figure = "end_to_end_gain"
    names = list(dict.fromkeys(s.name for study in studies for s in rivals(study, figure)))
    if not names:
        return None
    rows = [
        (
            study.name,
            words.show(figure, study.published.get(figure, study.published.get(f"{_PAPER}.{figure}"))),
            *(cell(study.get(name), figure) for name in names),
            words.show(figure, floor_gain(study)),
            words.show(figure, study.amdahl_gain),
        )
        for study in studies
    ]
    return ("", "published", *names, "floor", "Amdahl bound"), rows


def settings(config: Mapping[str, object]) -> list[Row]:
    """Return every setting of a scenario under its dotted name."""
    rows: list[Row] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            rows += [(f"{key}.{inner}", text) for inner, text in settings(value)]
        elif isinstance(value, str | int | float | bool):
            rows.append((str(key), str(value)))
    return rows


def cell(strategy: Strategy | None, figure: str, *, has_unit: bool = False) -> str:
    """Return a cell: the mean, and in a second line the range over the seeds."""
    if strategy is None or strategy.get(figure) is None:
        return words.MISSING
    value = words.show(figure, strategy.get(figure)) if has_unit else words.bare(figure, strategy.get(figure))
    limits = strategy.ranges.get(figure)
    return value if limits is None else f"{value}\n{words.bare(figure, limits[0])}..{words.bare(figure, limits[1])}"


def _owner(key: str) -> tuple[str, str]:
    name, _, figure = key.rpartition(".")
    if name:
        return name, figure
    return (FIXED if figure in _OF_FIXED else _PAPER), figure
