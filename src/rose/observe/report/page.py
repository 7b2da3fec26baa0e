"""The report's page: verdict and key figures, then sections whose titles say the finding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose.observe.report import html, sections
from rose.observe.report.data import ReportData
from rose.observe.summary import is_over_slo, number, sent_share


def render(data: ReportData, figures: Mapping[str, str]) -> str:
    """Return the whole page.

    Args:
        data: What to show.
        figures: SVG elements by name (``rose.observe.report.figures.draw_all``); a missing one is left out.
    """
    return html.page(
        data.title,
        [
            html.heading(data.title, data.subtitle),
            _verdict(data.summary),
            _cards(data.summary),
            sections.rollout(data, figures),
            sections.devices(data, figures),
            sections.latency(data, figures),
            sections.learning(data, figures),
            sections.sync(data, figures),
            sections.assumptions(data),
        ],
    )


def _verdict(summary: Mapping[str, Any]) -> str:
    taken = f"on {summary['device']}, k={summary['k']:g}; times are modelled seconds"
    if summary["valid"]:
        return html.verdict("Valid run", f"The paced devices kept their bounds. Taken {taken}.", is_good=True)
    reasons = "; ".join(summary.get("invalid_reasons") or ["pacing was disturbed"])
    text = f"{reasons}. The figures below neither pass nor fail. Taken {taken}."
    return html.verdict("Invalid, repeat", text, is_good=False)


def _cards(summary: Mapping[str, Any]) -> str:
    cards = [_throughput(summary), _step_time(summary)]
    cards += [_latency_card(summary, name) for name in ("ttft", "tpot")]
    cards += [_weights(summary), _success(summary)]
    return f'<div class="cards">{"".join(cards)}</div>'


def _throughput(summary: Mapping[str, Any]) -> str:
    gain = summary["gain"]["rollout_throughput"]
    over_uncapped = summary["gain"].get("rollout_throughput_over_uncapped")
    detail = f"{over_uncapped:.2f}x over fixed without its slot cap" if over_uncapped else "over the fixed arm"
    return html.card("Rollout throughput", f"{gain:.2f}x", detail, is_good=gain > 1)


def _step_time(summary: Mapping[str, Any]) -> str:
    gain = summary["gain"]["step_time"]
    detail = f"{_arrow(summary['fixed']['step_s'], summary['rose']['step_s'], 1)} s"
    return html.card("Steps", f"{gain:.2f}x as fast", detail, is_good=gain > 1)


def _latency_card(summary: Mapping[str, Any], name: str) -> str:
    serving = summary["serving"]
    shared_ms, alone_ms = (serving[arm].get(f"{name}_p99_ms") for arm in ("shared", "alone"))
    detail = f"SLO {serving['slo'][f'{name}_ms']:g} ms, alone {number(alone_ms, 0)} ms"
    return html.card(
        f"Serving {name.upper()} P99",
        f"{number(shared_ms, 0)} ms",
        detail,
        is_good=not is_over_slo(summary, "shared", [name]),
    )


def _weights(summary: Mapping[str, Any]) -> str:
    phases = summary["sync"]["phases"]
    if not phases:
        return html.card("Weights sent", "none", "no version was published")
    last = list(phases)[-1]
    detail = ", ".join(f"{name} phase {sent_share(phase)}" for name, phase in phases.items() if name != last)
    value = sent_share(phases[last])
    return html.card(f"Bytes sent, {last} phase", value, f"of dense; {detail}" if detail else "of dense")


def _success(summary: Mapping[str, Any]) -> str:
    fixed, rose = summary["fixed"], summary["rose"]
    value = _arrow(rose["success_first"], rose["success_last"], 2)
    return html.card(
        "Success, held-out", value, f"fixed arm {_arrow(fixed['success_first'], fixed['success_last'], 2)}"
    )


def _arrow(first: float | None, last: float | None, digits: int) -> str:
    return f"{number(first, digits)} → {number(last, digits)}"
