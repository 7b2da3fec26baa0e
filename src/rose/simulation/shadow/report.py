"""The page that a serving team reads: what could have been lent, when, and what it would have cost their users."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rose.errors import ConfigError
from rose.observe.report import html
from rose.observe.report.style import CSS
from rose.simulation.shadow.advice import is_safe

SERVING_HEADS = ("", "TTFT P50", "P90", "P99", "TPOT P50", "P99", "beyond SLO", "minutes broken")
LENT_HEADS = ("mode", "lent", "of the time", "tokens", "evicted", "beyond SLO", "verdict")


def number(value: float | None, digits: int = 0) -> str:
    """Return a figure, or a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def serving_rows(engine: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return what users would see: alone, and with each mode."""
    return [_serving_row("alone", engine["alone"]), *(_serving_row(*item) for item in engine["modes"].items())]


def _serving_row(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        *(f"{number(figures[f'ttft_p{q}_ms'])} ms" for q in (50, 90, 99)),
        *(f"{number(figures[f'tpot_p{q}_ms'], 1)} ms" for q in (50, 99)),
        f"{figures['violations_fraction']:.2%}",
        f"{figures['windows_broken']:.3g} of {figures['windows']:.3g}",
    )


def lent_rows(engine: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return what each mode would lend; modes that cannot run at all come last."""
    judged = [
        (
            name,
            f"{mode['lent_s']:,.0f} s",
            f"{mode['lent_fraction']:.1%}",
            f"{mode['rollout_tokens']:,.0f}",
            number(mode["evicted"]),
            f"{mode['added_violations_fraction'] * 100:+.2f} pp",
            "safe" if is_safe(mode) else "not safe",
        )
        for name, mode in engine["modes"].items()
    ]
    return [*judged, *((name, *["-"] * (len(LENT_HEADS) - 2), "refused") for name in engine["refused"])]


def fit_rows(engine: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return serving alone as the engine measured it and as it was simulated; empty without measurements."""
    measured, alone = engine["measured"], engine["alone"]
    pairs = (
        ("TTFT mean", "ttft_mean_ms"),
        ("TTFT P50", "ttft_p50_ms"),
        ("TTFT P99", "ttft_p99_ms"),
        ("time between tokens", "itl_mean_ms"),
    )
    return [
        (label, f"{number(measured[key], 1)} ms", f"{number(alone[key], 1)} ms")
        for label, key in pairs
        if measured.get(key) is not None
    ]


def write_report(path: Path, result: Mapping[str, Any]) -> bool:
    """Write the page; returns whether it has figures (they need matplotlib).

    Raises:
        ConfigError: The file cannot be written.
    """
    figures: dict[str, str] = {}
    if importlib.util.find_spec("matplotlib") is not None:
        from rose.simulation.shadow.figures import draw  # noqa: PLC0415 - loads matplotlib

        figures = draw(result)
    try:
        path.write_text(render(result, figures), encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}; choose a folder that you may write to"
        raise ConfigError(message) from error
    return bool(figures)


def render(result: Mapping[str, Any], figures: Mapping[str, str]) -> str:
    """Return the whole page; ``figures`` are those of ``rose.simulation.shadow.figures``, a missing one is left out."""
    slo = result["slo"]
    title = "What could have been lent"
    subtitle = (
        f"{result['source']} ({result['kind']}); SLO {slo['ttft_ms']:g} ms TTFT, {slo['tpot_ms']:g} ms TPOT; rollouts of "
        f"{result['rollout_profile']}. Nothing was sent to the engine but reads of its metrics."
    )
    verdict_is_good = all(any(is_safe(mode) for mode in engine["modes"].values()) for engine in result["engines"])
    parts = [
        html.heading(title, subtitle),
        html.verdict("Recommendation", " ".join(result["advice"]), is_good=verdict_is_good),
        _cards(result),
        *(_engine(place, engine, figures) for place, engine in enumerate(result["engines"])),
        _how(),
    ]
    return html.page(title, parts, css=CSS)


def _cards(result: Mapping[str, Any]) -> str:
    cards = [
        html.card(
            f"Lendable, '{name}'",
            f"{total['lent_fraction']:.0%}",
            f"{total['lent_engine_s'] / 3600:.2f} of {total['engine_s'] / 3600:.2f} engine hours",
        )
        for name, total in result["total"].items()
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _engine(place: int, engine: Mapping[str, Any], figures: Mapping[str, str]) -> str:
    intro = (
        f"{engine['requests']:,} requests in {engine['duration_s']:,.0f} s ({engine['rate_rps']:.2f} a second; "
        f"{number(engine['prompt_tokens_mean'])} prompt and {number(engine['output_tokens_mean'])} answer tokens in the mean). "
        f"Serving alone takes {engine['alone']['busy_fraction']:.0%} of the device."
    )
    lent = "; ".join(f"{name} {mode['lent_fraction']:.0%}" for name, mode in engine["modes"].items()) or "nothing"
    fit = fit_rows(engine)
    return html.section(
        f"{engine['name']}: {lent} lendable",
        html.paragraph(intro),
        html.table(LENT_HEADS, lent_rows(engine), strong=2),
        html.figure(
            figures,
            f"time{place}",
            alt=f"Share of device time over time: serving alone, and what each mode would lend ({lent}).",
            caption="Share of the device's time: serving alone (grey), and what each mode would lend.",
        ),
        html.table(SERVING_HEADS, serving_rows(engine), strong=3),
        html.figure(
            figures,
            f"kv{place}",
            alt="KV memory that serving does not use over time, and what rollouts may hold of it.",
            caption="KV memory that serving does not use, and what rollouts may hold of it (the rest is head-room).",
        ),
        html.folded(
            "How far the simulation of serving alone is from what the engine measured",
            html.table(("", "measured", "simulated"), fit, strong=2) if fit else "",
        ),
        html.bullets(engine["notes"]),
    )


def _how() -> str:
    return html.section(
        "How to read this",
        html.bullets(
            [
                "Requests are reconstructed from the engine's counters and simulated in virtual time beside a rollout engine that always "
                "wants more; what may run when is decided by the same functions that decide on a live device.",
                "'Lent' is device time of rollout steps. A mode is called safe if in every draw at most 0.1 percentage points more "
                "requests are beyond the SLO than alone, and no window of a minute with 100 requests or more breaks that would not alone.",
                "Not to be seen from metrics: bursts shorter than the time between two readings, which prompt had which answer, and "
                "when conversations come back. TPOT is a request's mean; a single gap between tokens may be longer.",
            ]
        ),
    )
