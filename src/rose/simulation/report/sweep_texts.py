"""Texts and captions of the figures over a swept setting, made from the data. Pure."""

from __future__ import annotations

from rose.simulation.report import words
from rose.simulation.report.bounds import SlotUse, headline
from rose.simulation.report.data import FIXED, Study, Sweep
from rose.simulation.report.sweep_data import GAIN, drawn_figures, names_of, series, slot_uses, values_of, view
from rose.simulation.report.texts import Missing, Text


def sweep(study: Study, swept: Sweep) -> Text | Missing:
    """Describe gain and P99s against a swept setting, a line a strategy."""
    figures = drawn_figures(study, swept)
    if not figures:
        return Missing(reason=f"sweep over {swept.axis}: no strategy but fixed has a gain or a P99 at any point")
    parts = [_course(study, swept)] if GAIN in figures else []
    parts += [line for figure in figures if (line := _over_slo(study, swept, figure))]
    has_ranges = any(strategy.ranges for point in swept.points for strategy in point.strategies)
    if has_ranges:
        is_cut = any(view(study, swept, figure).is_cut for figure in figures)
        cut = "; those that leave the panel are cut" if is_cut else ""
        parts.append(f"Whiskers: least and greatest of {study.num_seeds} seeds{cut}.")
    lines = "; ".join(_line_text(study, swept, figure) for figure in figures)
    return Text(
        alt=f"{words.axis_title(swept.axis)}: {lines}.", caption=" ".join(parts) or "The values stand in the table."
    )


def problem(study: Study, swept: Sweep) -> Text | Missing:
    """Describe idle slots against queueing as the fixed baseline's share of GPUs for rollouts grows."""
    uses = slot_uses(study, swept)
    if not uses:
        return Missing(
            reason="the problem itself: fixed has neither idle_fraction and queued_fraction nor completion at any point"
        )
    (first_at, first), (last_at, last) = uses[0], uses[-1]
    told = "; ".join(
        f"{words.value_text(at, 'GPUs')}: {words.bare('_share', use.idle_fraction)} idle, "
        f"{words.bare('_share', use.queued_fraction)} queued"
        for at, use in uses
    )
    is_derived = any("idle_fraction" not in fixed.values for _, fixed in series(swept, FIXED))
    how = (
        " Both follow from the completion curve: an unfinished trajectory holds a slot as far as slots go."
        if is_derived
        else ""
    )
    return Text(
        alt=f"Slots of the fixed baseline by dedicated GPUs for rollouts: {told}.",
        caption=(
            f"From {first_at:,g} to {last_at:,g} dedicated GPUs the empty share of the slots' time goes from "
            f"{words.bare('_share', first.idle_fraction)} to {words.bare('_share', last.idle_fraction)}, while the share of "
            f"the trajectories' time spent queueing goes from {words.bare('_share', first.queued_fraction)} to "
            f"{words.bare('_share', last.queued_fraction)}: no fixed number avoids both.{how}"
            if _is_trade(first, last)
            else f"At {first_at:,g} dedicated GPUs {words.bare('_share', first.idle_fraction)} of the slots' time is empty and "
            f"{words.bare('_share', first.queued_fraction)} of the trajectories' time is spent queueing; at {last_at:,g} "
            f"{words.bare('_share', last.idle_fraction)} and {words.bare('_share', last.queued_fraction)}.{how}"
        ),
    )


def _course(study: Study, swept: Sweep) -> str:
    names = names_of(study, swept, GAIN)
    chosen = headline(study)
    name = chosen.name if chosen and chosen.name in names else names[0]
    points = values_of(swept, name, GAIN)
    best_at, best = max(points, key=lambda point: point[1])
    (first_at, first), (last_at, last) = points[0], points[-1]
    text = f"{name}: gain {words.show('_gain', first)} at {_at(swept, first_at)}"
    if len(points) > 1:
        text += f", {words.show('_gain', last)} at {_at(swept, last_at)}"
    if best_at not in {first_at, last_at}:
        text += f", most at {_at(swept, best_at)}: {words.show('_gain', best)}"
    losing = [other for other in names if any(value < 1 for _, value in values_of(swept, other, GAIN))]
    return f"{text}. Slower than fixed somewhere: {words.listed(losing)}."


def _over_slo(study: Study, swept: Sweep, figure: str) -> str:
    limit = study.slo_ms(figure)
    if limit is None:
        return ""
    over = []
    for name in names_of(study, swept, figure):
        points = values_of(swept, name, figure)
        places = [_at(swept, at, with_unit=False) for at, value in points if value > limit]
        if places:
            over.append(f"{name} {'everywhere' if len(places) == len(points) else f'at {words.listed(places)}'}")
    return f"Over the {words.label(figure).removesuffix(' P99')} SLO: {'; '.join(over) or 'none'}."


def _line_text(study: Study, swept: Sweep, figure: str) -> str:
    lines = []
    for name in names_of(study, swept, figure):
        points = values_of(swept, name, figure)
        lines.append(f"{name} {words.show(figure, points[0][1])} to {words.show(figure, points[-1][1])}")
    return f"{words.label(figure)} {', '.join(lines)}"


def _at(swept: Sweep, value: float | str, *, with_unit: bool = True) -> str:
    return words.value_text(value, swept.unit if with_unit else "")


def _is_trade(first: SlotUse, last: SlotUse) -> bool:
    return last.idle_fraction > first.idle_fraction and last.queued_fraction < first.queued_fraction
