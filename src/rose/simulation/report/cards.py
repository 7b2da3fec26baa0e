"""The key figures at the head of a chapter, of the strategy that stands for the study."""

from __future__ import annotations

from rose.observe.report import html
from rose.simulation.report import words
from rose.simulation.report.bounds import broken, headline, rivals
from rose.simulation.report.data import Strategy, Study


def cards(study: Study) -> str:
    """Return the key figures of the strategy that stands for the study."""
    best = headline(study)
    if best is None:
        return ""
    found = [_gain_card(study, best), _time_card(study, best)]
    found += [_latency_card(study, best, figure) for figure in ("ttft_p99_ms", "tpot_p99_ms")]
    found += [_borrowed_card(best), _cost_card(study, best)]
    return f'<div class="cards">{"".join(card for card in found if card)}</div>'


def _gain_card(study: Study, best: Strategy) -> str:
    value = best.values["end_to_end_gain"]
    others = [s for s in rivals(study, "end_to_end_gain") if s.name != best.name]
    second = max(others, key=lambda s: s.values["end_to_end_gain"], default=None)
    detail = (
        f"best other: {second.name} {words.show('_gain', second.get('end_to_end_gain'))}" if second else "over fixed"
    )
    return html.card(f"End to end, {best.name}", words.show("_gain", value), detail, is_good=value > 1)


def _time_card(study: Study, best: Strategy) -> str:
    fixed = study.fixed.get("rollout_s") if study.fixed else None
    floor = f", floor {words.show('_s', study.floor_s)}" if study.floor_s is not None else ""
    return _card("Rollout", best, "rollout_s", f"fixed {words.show('_s', fixed)}{floor}")


def _latency_card(study: Study, best: Strategy, figure: str) -> str:
    alone = study.serving_alone.get(figure) if study.serving_alone else None
    limit = study.slo_ms(figure)
    detail = f"SLO {words.show('_ms', limit)}, alone {words.show('_ms', alone)}"
    is_good = None if limit is None else figure not in broken(study, best)
    return _card(f"Serving {words.label(figure)}", best, figure, detail, is_good=is_good)


def _borrowed_card(best: Strategy) -> str:
    detail = f"allocation took {words.show('_fraction', best.get('overhead_fraction'))} of it"
    return _card("Borrowed", best, "borrowed_gpu_s", detail)


def _cost_card(study: Study, best: Strategy) -> str:
    fixed = study.fixed.get("cost_dollars") if study.fixed else None
    return _card("Cost of a step", best, "cost_dollars", f"fixed {words.show('_dollars', fixed)}")


def _card(label: str, best: Strategy, figure: str, detail: str, *, is_good: bool | None = None) -> str:
    value = best.get(figure)
    return "" if value is None else html.card(label, words.show(figure, value), detail, is_good=is_good)
