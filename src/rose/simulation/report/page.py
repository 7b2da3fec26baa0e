"""The page: key figures, then sections whose titles say the finding; for several studies an overview before their chapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rose.observe.report import html
from rose.simulation.report import cards, sections, tables, words
from rose.simulation.report.bounds import headline
from rose.simulation.report.data import Study
from rose.simulation.report.looks import CSS

Figures = Mapping[str, str]

LIMIT_BYTES = 2_000_000

_NOTE = "All figures are simulated, not measured: the live scheduling code in virtual time against modelled engines and links."


def render_study(study: Study, figures: Figures) -> str:
    """Return the page of one study; ``figures`` are SVG elements by name, a missing one is left out."""
    return html.page(study.name, [html.heading(study.name, subtitle(study)), *_body(study, figures)], css=CSS)


def render_reproduction(studies: Sequence[Study], figures: Sequence[Figures], over_all: Figures) -> str:
    """Return the page of several studies: an overview, then a chapter each; too large a page goes without the sweeps' tables."""
    page = _render_chapters(studies, figures, over_all, has_sweep_tables=True)
    if len(page.encode()) <= LIMIT_BYTES:
        return page
    return _render_chapters(studies, figures, over_all, has_sweep_tables=False)


def _render_chapters(
    studies: Sequence[Study], figures: Sequence[Figures], over_all: Figures, *, has_sweep_tables: bool
) -> str:
    title = "The paper's evaluation, simulated"
    anchors = {f"study-{index}": study.name for index, study in enumerate(studies)}
    parts = [html.heading(title, _NOTE), html.links(anchors), _overview(studies, over_all)]
    for anchor, study, drawn in zip(anchors, studies, figures, strict=True):
        parts += [html.heading(study.name, subtitle(study), anchor=anchor)]
        parts += _body(study, drawn, has_sweep_tables=has_sweep_tables)
    return html.page(title, parts, css=CSS)


def subtitle(study: Study) -> str:
    """Return one line on the size of a study."""
    cluster = [
        f"{count:,.0f} {what}"
        for key, what in (
            ("rollout_gpus", "rollout"),
            ("training_gpus", "training"),
            ("borrowed_gpus", "borrowable"),
        )
        if (count := study.setting("cluster", key)) is not None
    ]
    parts = [f"GPUs: {words.listed(cluster)}"] if cluster else []
    parts += [f"{study.num_seeds} seed{'' if study.num_seeds == 1 else 's'}"] if study.num_seeds else []
    parts += [f"{study.num_turns:,} simulated turns"] if study.num_turns is not None else []
    return "; ".join(parts)


def _body(study: Study, figures: Figures, *, has_sweep_tables: bool = True) -> list[str]:
    return [
        _failures(study),
        cards.cards(study),
        sections.gain(study, figures),
        sections.time(study, figures),
        sections.serving(study, figures),
        sections.published(study),
        sections.completion(study, figures),
        sections.overhead(study, figures),
        sections.cost(study, figures),
        *sections.sweeps(study, figures, has_tables=has_sweep_tables),
        sections.scenario(study),
        sections.left_out(study),
    ]


def _failures(study: Study) -> str:
    if not study.failures:
        return ""
    text = f"{len(study.failures)} of the study's cases have no outcome; every figure is over the seeds that are left."
    lines = html.folded("Which cases failed, and why", html.bullets(study.failures))
    return html.verdict("Incomplete", text, is_good=False) + lines


def _overview(studies: Sequence[Study], figures: Figures) -> str:
    table = tables.overview(studies)
    found = [(study, headline(study)) for study in studies]
    told = [
        f"{study.name} {words.show('_gain', best.get('end_to_end_gain'))} ({best.name})"
        for study, best in found
        if best
    ]
    return html.section(
        "End-to-end gain by preset",
        html.figure(
            figures,
            "overview",
            alt=f"End-to-end gain of every strategy by preset; the best that keep the SLO: {', '.join(told)}.",
            caption=f"Step time of fixed over that of each strategy. Of the policies that keep the SLO the best gains: {', '.join(told)}.",
        ),
        html.table(table[0], table[1], strong=1) if table else "",
    )
