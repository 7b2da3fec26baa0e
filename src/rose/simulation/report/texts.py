"""What stands beside each figure: a text that replaces it and a caption that says what to see, both made from the data. Pure.

A figure with nothing to draw has a ``Missing`` instead, which says why.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from rose.simulation.report import words
from rose.simulation.report.bounds import (
    LIMITED,
    allocating,
    are_alike,
    broken,
    floor_gain,
    floor_step_s,
    has_floor,
    headline,
    mean_sync_s,
    measured,
    ordered,
    rivals,
)
from rose.simulation.report.data import FIXED, Strategy, Study

_P75 = 0.75


@attrs.frozen(kw_only=True)
class Text:
    """The text that stands for a figure, and its caption."""

    alt: str
    caption: str


@attrs.frozen(kw_only=True)
class Missing:
    """Why a figure was not drawn."""

    reason: str


def gain(study: Study) -> Text | Missing:
    """Describe the end-to-end gain by strategy."""
    known = ordered(rivals(study, "end_to_end_gain"), "end_to_end_gain")
    if not known:
        return Missing(reason="end-to-end gain: no strategy but fixed has end_to_end_gain")
    best, worst = known[-1], known[0]
    parts = [
        f"Step time of fixed over that of each strategy. {best.name} gains most, {_value(best, 'end_to_end_gain')}"
    ]
    parts[0] += f"; {worst.name} least, {_value(worst, 'end_to_end_gain')}." if worst is not best else "."
    slower = [strategy.name for strategy in known if strategy.values["end_to_end_gain"] < 1]
    if slower:
        parts.append(f"Slower than not borrowing: {words.listed(slower)}.")
    parts.append(_bound_sentence(study, best))
    return Text(
        alt=f"End-to-end gain: {_values(rivals(study), 'end_to_end_gain')}; {_bounds(study)}.",
        caption=_caption(study, known, "end_to_end_gain", parts),
    )


def time(study: Study) -> Text | Missing:
    """Describe rollout and step time by strategy."""
    known = ordered(study.strategies, "rollout_s") or ordered(study.strategies, "step_s")
    if not known:
        return Missing(reason="rollout time: no strategy has rollout_s or step_s")
    figure = "rollout_s" if known[0].get("rollout_s") is not None else "step_s"
    parts = [f"Shortest {words.label(figure)}: {known[0].name}, {_value(known[0], figure)}"]
    parts[0] += f"; longest: {known[-1].name}, {_value(known[-1], figure)}." if len(known) > 1 else "."
    parts.append(_floor_sentence(study, known, figure))
    return Text(
        alt=f"Rollout time: {_values(study.strategies, 'rollout_s')}. Step time: {_values(study.strategies, 'step_s')}.",
        caption=_caption(study, known, figure, parts),
    )


def micro(study: Study) -> Text | Missing:
    """Describe rollout time against serving's P99s."""
    shown = [strategy for strategy in measured(study.strategies, "rollout_s") if _is_beside_serving(strategy)]
    if not shown:
        return Missing(reason="co-serving: no strategy has both rollout_s and a P99 of serving's latency")
    parts = ["Left and low is better."]
    with_slo = [strategy for strategy in shown if any(study.slo_ms(figure) is not None for figure in LIMITED)]
    if with_slo:
        kept = [strategy.name for strategy in with_slo if not broken(study, strategy)]
        parts.append(f"Within both SLOs: {words.listed(kept)}.")
        parts += [
            f"Over the {words.label(figure).removesuffix(' P99')} SLO: {words.listed(over)}."
            for figure in LIMITED
            if (over := [strategy.name for strategy in with_slo if figure in broken(study, strategy)])
        ]
    apart = [s.name for s in rivals(study, "rollout_s") if not _is_beside_serving(s)]
    if apart:
        parts.append(f"No point, as it runs beside no serving engine: {words.listed(apart)}.")
    points = "; ".join(f"{s.name} {', '.join(_value(s, figure) for figure in ('rollout_s', *LIMITED))}" for s in shown)
    return Text(
        alt=f"Rollout time, TTFT P99 and TPOT P99: {points}; {_alone(study)}.",
        caption=_caption(study, shown, "rollout_s", parts),
    )


def overhead(study: Study) -> Text | Missing:
    """Describe allocation overhead and the time of weight sync."""
    allocated = ordered(allocating(study), "overhead_fraction")
    synced = [(s.name, mean_s) for s in study.strategies if (mean_s := mean_sync_s(s)) is not None]
    if not allocated and not synced:
        return Missing(reason="overhead: no strategy has overhead_fraction, sync_by_version_s or sync_s")
    parts = []
    if allocated:
        least, most = allocated[0], allocated[-1]
        parts.append(
            f"Share of the held GPU time that allocation takes: from {_value(least, 'overhead_fraction')} "
            f"({least.name}) to {_value(most, 'overhead_fraction')} ({most.name})."
            if most is not least
            else f"Allocation takes {_value(least, 'overhead_fraction')} of the GPU time that {least.name} holds."
        )
    parts.append(_sync_sentence(synced))
    return Text(
        alt=f"Allocation overhead: {_values(allocated, 'overhead_fraction')}. {_sync_sentence(synced)}",
        caption=_caption(study, allocated, "overhead_fraction", parts),
    )


def completion(study: Study) -> Text | Missing:
    """Describe the curves of trajectories done over time."""
    shown = [strategy for strategy in study.strategies if strategy.completion]
    if not shown:
        return Missing(reason="completion: no strategy has completion")
    facts = [(s.name, _done_at(s, _P75), s.completion[-1][0]) for s in shown]
    chosen = headline(study)
    told = [fact for fact in facts if fact[0] in {FIXED, chosen.name if chosen else facts[0][0]}] or facts[:1]
    sentences = [
        f"{name} has 75 % done after {words.show('_s', p75_s)} and all after {words.show('_s', end_s)}, so the last quarter takes "
        f"{words.bare('_share', 1 - p75_s / end_s)} of the time."
        for name, p75_s, end_s in told
        if p75_s > 0
    ]
    ends = "; ".join(f"{name} 75 % {_when(p75_s)}, all {_when(end_s)}" for name, p75_s, end_s in facts)
    return Text(
        alt=f"Share of trajectories done over time in the first step: {ends}.",
        caption=" ".join(["First step of the first seed.", *sentences]),
    )


def cost(study: Study) -> Text | Missing:
    """Describe the cost of a step by strategy."""
    known = ordered(study.strategies, "cost_dollars")
    if not known:
        return Missing(reason="cost: no strategy has cost_dollars")
    parts = [f"Cheapest: {known[0].name}, {_value(known[0], 'cost_dollars')} a step"]
    parts[0] += f"; dearest: {known[-1].name}, {_value(known[-1], 'cost_dollars')}." if len(known) > 1 else "."
    fixed = study.fixed.get("cost_dollars") if study.fixed else None
    saving = [s.name for s in known if fixed is not None and s.values["cost_dollars"] < fixed]
    if fixed is not None:
        parts.append(f"Cheaper than fixed: {words.listed(saving)}.")
    return Text(
        alt=f"Cost of a step: {_values(study.strategies, 'cost_dollars')}.",
        caption=_caption(study, known, "cost_dollars", parts),
    )


def _value(strategy: Strategy, figure: str) -> str:
    return words.show(figure, strategy.get(figure))


def _values(strategies: Sequence[Strategy], figure: str) -> str:
    return "; ".join(f"{s.name} {words.with_range(s, figure)}" for s in measured(strategies, figure)) or "not measured"


def _caption(study: Study, shown: Sequence[Strategy], figure: str, parts: Sequence[str]) -> str:
    has_whiskers = any(figure in strategy.ranges for strategy in shown)
    whiskers = f"Whiskers: least and greatest of {study.num_seeds} seeds." if has_whiskers else ""
    return " ".join(part for part in (*parts, whiskers) if part)


def _bounds(study: Study) -> str:
    bounds = [("Amdahl bound", study.amdahl_gain), ("floor", floor_gain(study))]
    return (
        ", ".join(f"{name} {words.show('_gain', value)}" for name, value in bounds if value is not None) or "no bound"
    )


def _bound_sentence(study: Study, best: Strategy) -> str:
    value = best.values["end_to_end_gain"]
    bounds = [("the Amdahl bound", study.amdahl_gain), ("the floor of the longest trajectory", floor_gain(study))]
    parts = [
        f"{words.bare('_share', (value - 1) / (limit - 1))} of the way to {name}, {words.show('_gain', limit)}"
        for name, limit in bounds
        if limit is not None and limit > 1
    ]
    return f"{best.name} has gone {words.listed(parts)}." if parts and value > 1 else ""


def _floor_sentence(study: Study, known: Sequence[Strategy], figure: str) -> str:
    if study.floor_s is None:
        return ""
    if not has_floor(study):
        return f"The loop is asynchronous: the longest trajectory, {words.show('_s', study.floor_s)}, bounds no single step."
    limit = study.floor_s if figure == "rollout_s" else floor_step_s(study)
    if not limit:
        return ""
    sentence = (
        f"The longest trajectory alone takes {words.show('_s', study.floor_s)}; {known[0].name} is at "
        f"{known[0].values[figure] / limit:.2f} times this floor."
    )
    under = [strategy.name for strategy in known if strategy.values[figure] < limit]
    return (
        f"{sentence} Under it, as a step there does not wait for its longest trajectory: {words.listed(under)}."
        if under
        else sentence
    )


def _is_beside_serving(strategy: Strategy) -> bool:
    return any(strategy.get(figure) is not None for figure in LIMITED)


def _alone(study: Study) -> str:
    alone = study.serving_alone
    if alone is None:
        return "serving alone was not measured"
    return f"serving alone {', '.join(_value(alone, figure) for figure in LIMITED)}"


def _sync_sentence(synced: Sequence[tuple[str, float]]) -> str:
    if not synced:
        return "Weight sync was not measured."
    (least, least_s), (most, most_s) = min(synced, key=lambda each: each[1]), max(synced, key=lambda each: each[1])
    if are_alike([least_s, most_s]):
        return f"Weight sync of a version takes {words.show('_s', most_s)} on average, under every strategy alike."
    return (
        f"Weight sync of a version takes on average from {words.show('_s', least_s)} ({least}) to "
        f"{words.show('_s', most_s)} ({most})."
    )


def _when(at_s: float) -> str:
    return f"at {words.show('_s', at_s)}" if at_s >= 0 else "before the step began"


def _done_at(strategy: Strategy, share: float) -> float:
    return next((at_s for at_s, done in strategy.completion if done >= share), strategy.completion[-1][0])
