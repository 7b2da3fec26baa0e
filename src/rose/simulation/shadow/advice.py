"""What a serving team should make of a shadow study, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAFE_ADDED_VIOLATIONS = 0.001
_WORTH_FRACTION = 0.02
_LEAST_REQUESTS = 100
_SLACK = 0.15


def is_safe(mode: Mapping[str, Any]) -> bool:
    """Return whether lending adds at most 0.1 percentage points of violations in every draw, and breaks no window."""
    return bool(mode["added_violations_fraction_max"] <= SAFE_ADDED_VIOLATIONS and mode["added_windows_broken"] == 0)


def advise(result: Mapping[str, Any]) -> list[str]:
    """Return one recommendation an engine, and one on how far to trust it where that is little."""
    return [sentence for engine in result["engines"] for sentence in _of_engine(engine, result["slo"])]


def _of_engine(engine: Mapping[str, Any], slo: Mapping[str, float]) -> list[str]:
    modes: Mapping[str, Mapping[str, Any]] = engine["modes"]
    sentences = [f"{engine['name']}: '{name}' is refused: {reason}." for name, reason in engine["refused"].items()]
    if not modes:
        return sentences
    chosen = next((name for name, mode in modes.items() if is_safe(mode)), None)
    alone = engine["alone"]
    if chosen is None:
        least = min(modes, key=lambda name: modes[name]["added_violations_fraction"])
        sentences.append(
            f"{engine['name']}: do not lend yet. Even '{least}' would add {_points(modes[least]['added_violations_fraction'])} "
            f"of requests beyond the SLO of {slo['ttft_ms']:g} ms TTFT and {slo['tpot_ms']:g} ms TPOT."
        )
    elif modes[chosen]["lent_fraction"] < _WORTH_FRACTION:
        sentences.append(
            f"{engine['name']}: little to lend. Serving takes {alone['busy_fraction']:.0%} of the device, and '{chosen}' would "
            f"lend {modes[chosen]['lent_fraction']:.1%} of it."
        )
    else:
        sentences.append(_recommendation(engine, chosen, slo))
    if alone["violations_fraction"] > SAFE_ADDED_VIOLATIONS:
        sentences.append(
            f"{engine['name']}: serving alone is already beyond this SLO for {alone['violations_fraction']:.1%} of its requests; "
            "lending is judged by what it adds."
        )
    if engine["requests"] < _LEAST_REQUESTS:
        sentences.append(
            f"{engine['name']}: only {engine['requests']} requests were seen; record for longer before you decide."
        )
    return sentences + _distrust(engine)


def _recommendation(engine: Mapping[str, Any], chosen: str, slo: Mapping[str, float]) -> str:
    mode, alone = engine["modes"][chosen], engine["alone"]
    span = _span(engine["duration_s"])
    lent = f"{mode['lent_fraction']:.0%} of the device's time ({_span(mode['lent_s'])} of {span})"
    parts = [
        f"{engine['name']}: '{chosen}' could have lent {lent}",
        f"P99 TTFT {_change(alone['ttft_p99_ms'], mode['ttft_p99_ms'])} (SLO {slo['ttft_ms']:g} ms)",
        f"P99 TPOT {_change(alone['tpot_p99_ms'], mode['tpot_p99_ms'])} (SLO {slo['tpot_ms']:g} ms)",
        f"violations {_points(mode['added_violations_fraction'])} more",
    ]
    others = [
        f"'{name}' would lend {other['lent_fraction']:.0%} at a P99 TPOT of {other['tpot_p99_ms'] or 0:.0f} ms"
        for name, other in engine["modes"].items()
        if name != chosen
    ]
    return "; ".join([*parts, *others]) + "."


def _change(before_ms: float | None, after_ms: float | None) -> str:
    if before_ms is None or after_ms is None:
        return "not known"
    return f"{before_ms:.0f} -> {after_ms:.0f} ms ({after_ms / before_ms - 1:+.0%})"


def _points(fraction: float) -> str:
    return f"{100 * fraction:.2f} percentage points"


def _span(seconds: float) -> str:
    if seconds < 120:  # noqa: PLR2004 - two minutes
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"  # noqa: PLR2004 - two hours


def _distrust(engine: Mapping[str, Any]) -> list[str]:
    """Return where serving alone, as simulated, is not as the engine measured itself."""
    measured, alone = engine["measured"], engine["alone"]
    far = []
    for name, label in (("ttft_mean_ms", "mean TTFT"), ("itl_mean_ms", "mean time between tokens")):
        if measured.get(name) and alone[name] and abs(alone[name] / measured[name] - 1) > _SLACK:
            far.append(f"{label} {alone[name]:.1f} ms simulated, {measured[name]:.1f} ms measured")
    if not far:
        return []
    return [f"{engine['name']}: trust this with care, the simulation of serving alone is off ({'; '.join(far)})."]
