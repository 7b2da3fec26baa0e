"""The figures of a study: each a pure function from the study to a matplotlib figure. Needs matplotlib; touches no global state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rose.observe.report import style
from rose.observe.report.svg import embed, new_figure, with_variables
from rose.simulation.report import sweep_figures, sweep_texts, texts, words
from rose.simulation.report.bounds import (
    LIMITED,
    allocating,
    are_alike,
    are_far_apart,
    floor_gain,
    floor_step_s,
    has_floor,
    mean_sync_s,
    measured,
    reach,
    rivals,
    syncing,
)
from rose.simulation.report.canvas import (
    DASH_DOTTED,
    DASHED,
    DOTTED,
    Looks,
    bars_height_in,
    bound,
    bound_handle,
    bound_in_view,
    draw_bars,
    draw_point,
    legend_above,
    legend_below,
    legend_rows,
    line_handle,
    line_style,
    make_logarithmic,
    measure_axis,
    note_out_of_view,
    point_handle,
)
from rose.simulation.report.data import Strategy, Study
from rose.simulation.report.looks import RC_PARAMS, VARIABLES
from rose.simulation.report.sweep_data import PROBLEM, is_problem

Painter = Callable[[Study, Looks], Figure]

_DONE_LABELS = [0, 0.25, 0.5, 0.75, 1.0]


def draw_study(study: Study, looks: Looks, *, prefix: str = "f") -> dict[str, str]:
    """Return every figure that has data as SVG text by name; a sweep's figure is named ``sweep-0`` and so on.

    Args:
        study: What to draw.
        looks: Of every strategy (``rose.simulation.report.looks.assign_looks``).
        prefix: Keeps ids apart from those of another study on the same page.
    """
    painters: dict[str, tuple[object, Painter]] = {
        "gain": (texts.gain(study), gain),
        "time": (texts.time(study), time),
        "micro": (texts.micro(study), micro),
        "overhead": (texts.overhead(study), overhead),
        "completion": (texts.completion(study), completion),
        "cost": (texts.cost(study), cost),
    }
    drawn = {}
    with mpl.rc_context(RC_PARAMS):
        for name, (text, paint) in painters.items():
            if isinstance(text, texts.Text):
                drawn[name] = paint(study, looks)
        for index, swept in enumerate(study.sweeps):
            if isinstance(sweep_texts.sweep(study, swept), texts.Text):
                drawn[f"sweep-{index}"] = sweep_figures.sweep(study, swept, looks)
            if is_problem(swept) and isinstance(sweep_texts.problem(study, swept), texts.Text):
                drawn[PROBLEM] = sweep_figures.problem(study, swept)
        return {name: to_svg(f"{prefix}{index}", figure) for index, (name, figure) in enumerate(drawn.items())}


def draw_overview(studies: tuple[Study, ...], looks: Looks) -> Mapping[str, str]:
    """Return the figure over several studies, nothing where none has a gain."""
    if not any(rivals(study, "end_to_end_gain") for study in studies):
        return {}
    with mpl.rc_context(RC_PARAMS):
        return {"overview": to_svg("overview", overview(studies, looks))}


def to_svg(name: str, figure: Figure) -> str:
    """Return a figure as SVG that follows the page's colours; ``name`` keeps its ids apart from those of other figures."""
    return with_variables(embed(name, figure), VARIABLES)


def gain(study: Study, looks: Looks) -> Figure:
    """Draw the end-to-end gain by strategy with the Amdahl bound and the floor (the paper's figures 7a and 7b)."""
    shown = rivals(study)
    figure = new_figure(bars_height_in(len(shown)))
    axis = figure.subplots()
    _gain_panel(axis, study, shown, looks)
    axis.set_xlabel("end-to-end gain: step time of fixed over that of the strategy")
    legend_above(figure, _gain_handles(axis, study))
    return figure


def time(study: Study, looks: Looks) -> Figure:
    """Draw rollout time (the paper's figure 8a) and step time by strategy."""
    names = [name for name in ("rollout_s", "step_s") if measured(study.strategies, name)]
    figure = new_figure(bars_height_in(len(study.strategies)))
    floors = {"rollout_s": study.floor_s if has_floor(study) else None, "step_s": floor_step_s(study)}
    amdahl_s = _amdahl_step_s(study)
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False, sharey=True)[0], names, strict=True):
        draw_bars(axis, study.strategies, name, looks)
        axis.set_xlabel(f"{words.label(name)} time (s)")
        for limit, dashes in ((floors[name], DASHED), (amdahl_s if name == "step_s" else None, DASH_DOTTED)):
            if limit is not None:
                bound_in_view(axis, limit, dashes)
    handles = (
        [bound_handle("floor: the longest trajectory alone", DASHED)] if any(floors[name] for name in names) else []
    )
    if amdahl_s is not None and "step_s" in names:
        handles.append(bound_handle("Amdahl bound", DASH_DOTTED))
    legend_above(figure, handles)
    return figure


def micro(study: Study, looks: Looks) -> Figure:
    """Draw rollout time against serving's P99s, alone and SLO as lines (the paper's figure 9a)."""
    strategies = measured(study.strategies, "rollout_s")
    figures = [name for name in LIMITED if measured(strategies, name)]
    shown = [strategy for strategy in strategies if any(strategy.get(name) is not None for name in figures)]
    handles = [point_handle(strategy.name, looks[strategy.name]) for strategy in shown]
    handles += _serving_handles(study, figures)
    figure = new_figure(3.2 + 0.2 * legend_rows(len(handles)))
    axes = figure.subplots(1, len(figures), squeeze=False, sharey=True)[0]
    for axis, name in zip(axes, figures, strict=True):
        _micro_panel(axis, study, name, looks)
    axes[0].set_ylabel("rollout time (s)")
    legend_below(figure, handles)
    return figure


def overhead(study: Study, looks: Looks) -> Figure:
    """Draw allocation overhead by strategy and sync time by version (the paper's figure 10)."""
    allocated, synced = allocating(study), syncing(study)
    means = {strategy.name: mean_sync_s(strategy) for strategy in ([] if synced else study.strategies)}
    totals = [Strategy(name=name, values={"sync_s": mean_s}) for name, mean_s in means.items() if mean_s is not None]
    if allocated and are_alike([strategy.values["sync_s"] for strategy in totals]):
        totals = []  # the caption says it
    panels = [shown for shown in (allocated, synced, totals) if shown]
    figure = new_figure(max(bars_height_in(len(allocated)), bars_height_in(len(totals)), 2.9 if synced else 0.0))
    axes = iter(figure.subplots(1, len(panels), squeeze=False)[0])
    if allocated:
        axis = next(axes)
        draw_bars(axis, allocated, "overhead_fraction", looks)
        axis.set_xlabel("share of the held GPU time that allocation takes")
    if synced:
        _sync_panel(next(axes), synced, looks)
        handles = [line_handle(strategy.name, looks[strategy.name]) for strategy in synced]
        legend_below(figure, handles, side="right")
    if totals:
        axis = next(axes)
        draw_bars(axis, totals, "sync_s", looks)
        axis.set_xlabel("weight sync of a step (s)")
    return figure


def completion(study: Study, looks: Looks) -> Figure:
    """Draw the share of trajectories done over time, of the first step."""
    shown = [strategy for strategy in study.strategies if strategy.completion]
    handles = [line_handle(strategy.name, looks[strategy.name]) for strategy in shown]
    if has_floor(study):
        handles.append(bound_handle("floor: the longest trajectory alone", DASHED))
    figure = new_figure(3.1 + 0.2 * legend_rows(len(handles)))
    axis = figure.subplots()
    for strategy in shown:
        look = looks[strategy.name]
        first_s = min(0.0, strategy.completion[0][0])
        times, shares = zip((first_s, 0.0), *strategy.completion, strict=True)
        axis.step(times, shares, where="post", **{**line_style(look), "marker": "none"})
        axis.plot(times[-1:], shares[-1:], **line_style(look))
    axis.axhline(0.75, color=style.MUTED, linestyle=DOTTED, linewidth=1.0)
    longest_s = max(strategy.completion[-1][0] for strategy in shown)
    axis.set(xlabel="seconds from the start of the rollout", ylabel="trajectories done", yticks=_DONE_LABELS)
    axis.set(ylim=(0, 1.04), xlim=(0, longest_s * 1.02 if longest_s > 0 else 1.0))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if has_floor(study) and study.floor_s is not None:
        bound_in_view(axis, study.floor_s, DASHED)
    legend_below(figure, handles)
    return figure


def cost(study: Study, looks: Looks) -> Figure:
    """Draw the cost of a step by strategy."""
    figure = new_figure(bars_height_in(len(study.strategies)) - 0.3)
    axis = figure.subplots()
    draw_bars(axis, study.strategies, "cost_dollars", looks)
    fixed = study.fixed.get("cost_dollars") if study.fixed else None
    if fixed is not None:
        axis.axvline(fixed, color=style.MUTED, linestyle=DOTTED, linewidth=1.0, zorder=0.5)
    axis.set_xlabel("dollars a step, by the scenario's prices")
    return figure


def overview(studies: tuple[Study, ...], looks: Looks) -> Figure:
    """Draw the end-to-end gain of every strategy in every study, a panel a study."""
    shown = [study for study in studies if rivals(study, "end_to_end_gain")]
    names = list(dict.fromkeys(strategy.name for study in shown for strategy in rivals(study)))
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = new_figure(rows * (0.24 * len(names) + 0.65) + 0.45)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for index, axis in enumerate(axes.flat):
        axis.set_visible(index < len(shown))
        if index < len(shown):
            study = shown[index]
            rows_of = [study.get(name) or Strategy(name=name) for name in names]
            _gain_panel(axis, study, rows_of, looks)
            axis.set_title(study.name)
    panels = list(zip(axes.flat, shown, strict=False))
    limits = (
        ("Amdahl bound", [(axis, study.amdahl_gain) for axis, study in panels], DASH_DOTTED),
        ("floor", [(axis, floor_gain(study)) for axis, study in panels], DASHED),
    )
    is_drawn = {
        name: any(limit is not None and not note_out_of_view(axis, limit) for axis, limit in found)
        for name, found, _ in limits
    }
    legend_above(figure, [bound_handle(name, dashes) for name, _, dashes in limits if is_drawn[name]])
    return figure


def _gain_panel(axis: Any, study: Study, shown: list[Strategy], looks: Looks) -> None:
    draw_bars(axis, shown, "end_to_end_gain", looks)
    axis.axvline(1.0, color=style.MUTED, linestyle=DOTTED, linewidth=1.0, zorder=2.5)
    for limit, dashes in ((study.amdahl_gain, DASH_DOTTED), (floor_gain(study), DASHED)):
        if limit is not None:
            bound_in_view(axis, limit, dashes)


def _gain_handles(axis: Any, study: Study) -> list[Any]:
    limits = (
        ("Amdahl bound", study.amdahl_gain, DASH_DOTTED),
        ("floor: the longest trajectory alone", floor_gain(study), DASHED),
    )
    return [
        bound_handle(f"{name} {words.show('_gain', limit)}{note_out_of_view(axis, limit)}", dashes)
        for name, limit, dashes in limits
        if limit is not None
    ]


def _amdahl_step_s(study: Study) -> float | None:
    step_s = study.fixed.get("step_s") if study.fixed else None
    return step_s / study.amdahl_gain if step_s is not None and study.amdahl_gain else None


def _micro_panel(axis: Any, study: Study, figure: str, looks: Looks) -> None:
    shown = measured(study.strategies, "rollout_s", figure)
    lines = [(study.serving_alone.get(figure) if study.serving_alone else None, DOTTED), (study.slo_ms(figure), DASHED)]
    for strategy in shown:
        draw_point(axis, strategy, figure, "rollout_s", looks[strategy.name])
    for at, dashes in lines:
        if at is not None:
            bound(axis, at, dashes)
    axis.margins(0.08)
    known = [end for strategy in shown for end in reach(strategy, figure, strategy.values[figure])]
    known += [at for at, _ in lines if at is not None]
    if are_far_apart(known):
        make_logarithmic(axis, min(known) / 1.25, max(known) * 1.25, which="x")
    axis.set_xlabel(words.head(figure))
    measure_axis(axis.xaxis, figure)
    measure_axis(axis.yaxis, "rollout_s")


def _serving_handles(study: Study, figures: list[str]) -> list[Any]:
    alone = study.serving_alone
    has_alone = alone is not None and any(alone.get(name) is not None for name in figures)
    handles = [bound_handle("serving alone", DOTTED)] if has_alone else []
    has_slo = any(study.slo_ms(name) is not None for name in figures)
    return [*handles, bound_handle("SLO", DASHED)] if has_slo else handles


def _sync_panel(axis: Any, synced: list[Strategy], looks: Looks) -> None:
    for strategy in synced:
        times = strategy.sync_by_version_s
        axis.plot(range(1, len(times) + 1), times, **line_style(looks[strategy.name]))
    longest = max(len(strategy.sync_by_version_s) for strategy in synced)
    axis.set(xlabel="weight version", ylabel="sync (s)")
    axis.set_ylim(0, max(max(strategy.sync_by_version_s) for strategy in synced) * 1.12 or 1.0)
    axis.set_xlim(0.5, longest + 0.5)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
