"""The sections of a study's chapter. Each title is the finding, made from the figures; what has nothing to show is left out."""

from __future__ import annotations

from collections.abc import Mapping

from rose.observe.report import html
from rose.simulation.report import sweep_texts, tables, texts, words
from rose.simulation.report.bounds import broken, headline
from rose.simulation.report.data import Study, Sweep
from rose.simulation.report.sweep_data import PROBLEM, is_problem
from rose.simulation.report.tables import Table
from rose.simulation.report.texts import Missing, Text

Figures = Mapping[str, str]


def gain(study: Study, figures: Figures) -> str:
    """Return the end-to-end gain with what each strategy is."""
    best = headline(study)
    title = "End-to-end gain"
    if best:
        value = words.show("end_to_end_gain", best.get("end_to_end_gain"))
        is_gain = best.values["end_to_end_gain"] > 1
        title = (
            f"{best.name} makes a step {value} as fast as fixed"
            if is_gain
            else f"Borrowing does not pay here: {value} at best"
        )
    known = [
        f"{strategy.name} ({strategy.kind}): {strategy.summary}" for strategy in study.strategies if strategy.summary
    ]
    return html.section(
        title,
        _figure(figures, "gain", texts.gain(study)),
        html.folded("What the strategies are", html.bullets(known)),
    )


def time(study: Study, figures: Figures) -> str:
    """Return rollout and step time and the table of the job's figures."""
    best, fixed = headline(study), study.fixed
    before, after = (s.get("rollout_s") if s else None for s in (fixed, best))
    title = "Rollout and step time"
    if best and before is not None and after is not None:
        title = f"Rollout time {words.show('_s', before)} fixed, {words.show('_s', after)} under {best.name}"
    return html.section(
        title, _figure(figures, "time", texts.time(study)), _table(tables.by_strategy(study.strategies, tables.JOB))
    )


def serving(study: Study, figures: Figures) -> str:
    """Return the micro-benchmark of co-serving and the table of serving's latency."""
    return html.section(
        _serving_title(study), _figure(figures, "micro", texts.micro(study)), _table(tables.serving(study))
    )


def completion(study: Study, figures: Figures) -> str:
    """Return the completion curves."""
    return html.section("When trajectories are done", _figure(figures, "completion", texts.completion(study)))


def overhead(study: Study, figures: Figures) -> str:
    """Return allocation overhead and sync."""
    return html.section("What allocation and weight transfer take", _figure(figures, "overhead", texts.overhead(study)))


def cost(study: Study, figures: Figures) -> str:
    """Return the cost of a step."""
    best, fixed = headline(study), study.fixed
    before, after = (s.get("cost_dollars") if s else None for s in (fixed, best))
    title = "What a step costs"
    if best and before and after is not None:
        change = after / before - 1
        title = f"A step costs {abs(change):.0%} {'less' if change < 0 else 'more'} under {best.name} than fixed"
    return html.section(title, _figure(figures, "cost", texts.cost(study)))


def sweeps(study: Study, figures: Figures, *, has_tables: bool = True) -> list[str]:
    """Return a section for each swept setting; the one over the fixed baseline's GPUs also shows the problem itself."""
    return [_sweep(study, swept, index, figures, has_table=has_tables) for index, swept in enumerate(study.sweeps)]


def published(study: Study) -> str:
    """Return the paper's figures beside ours."""
    table = tables.published(study)
    return html.section("The paper's figures and these", _table(table)) if table else ""


def left_out(study: Study) -> str:
    """Return which figures were not drawn, and why."""
    found = [texts.gain(study), texts.time(study), texts.micro(study), texts.overhead(study)]
    found += [texts.completion(study), texts.cost(study)]
    for swept in study.sweeps:
        found.append(sweep_texts.sweep(study, swept))
        found += [sweep_texts.problem(study, swept)] if is_problem(swept) else []
    reasons = [text.reason for text in found if isinstance(text, Missing)]
    swept_axes = {words.axis_key(swept.axis) for swept in study.sweeps}
    reasons += [
        f"{words.axis_title(axis)}: no sweep over {axis} in the result"
        for axis in words.STANDARD_AXES
        if words.axis_key(axis) not in swept_axes
    ]
    return html.section("Not drawn, and why", html.bullets(reasons))


def scenario(study: Study) -> str:
    """Return what was assumed, and every setting."""
    rows = tables.settings(study.config)
    table = html.table(("setting", "value"), rows, strong=-1) if rows else ""
    return html.section(
        "What was simulated and assumed", html.bullets(study.assumptions), html.folded("The scenario in full", table)
    )


def _sweep(study: Study, swept: Sweep, index: int, figures: Figures, *, has_table: bool) -> str:
    title = words.axis_title(swept.axis)
    problem = sweep_texts.problem(study, swept) if is_problem(swept) else Missing(reason="")
    return html.section(
        title[0].upper() + title[1:],
        _figure(figures, PROBLEM, problem),
        _figure(figures, f"sweep-{index}", sweep_texts.sweep(study, swept)),
        html.folded("The figures behind it", _table(tables.sweep(study, swept)))
        if has_table
        else html.paragraph(
            "The table of this sweep is left out, as the page would be too large; the result has its figures."
        ),
    )


def _serving_title(study: Study) -> str:
    best = headline(study)
    chosen = best if best and best.get("ttft_p99_ms") is not None else None
    if chosen is None:
        return "Rollout time against serving's latency"
    ttft, tpot = (words.show(figure, chosen.get(figure)) for figure in ("ttft_p99_ms", "tpot_p99_ms"))
    if study.slo_ms("ttft_p99_ms") is None:
        return f"Serving under {chosen.name}: TTFT P99 {ttft}, TPOT P99 {tpot}"
    verb = "breaks" if broken(study, chosen) else "keeps"
    return f"{chosen.name} {verb} serving's SLO: TTFT P99 {ttft}, TPOT P99 {tpot}"


def _figure(figures: Figures, name: str, text: Text | Missing) -> str:
    return html.figure(figures, name, alt=text.alt, caption=text.caption) if isinstance(text, Text) else ""


def _table(table: Table | None) -> str:
    return html.table(table[0], table[1], strong=-1) if table else ""
