"""How figures, settings and lists are written. A figure's unit is the end of its name, so a new figure needs no entry here."""

from __future__ import annotations

from collections.abc import Sequence

from rose.simulation.report.data import Strategy

MISSING = "-"

_THOUSANDTH = 1e-3
_DIGITS = ((0, 100.0), (1, 10.0), (2, 0.1))

_UNITS = {
    "_gpu_s": "GPU s",
    "_ms": "ms",
    "_s": "s",
    "_tokens": "tokens",
    "_bytes": "bytes",
    "_gbps": "Gbps",
    "_dollars": "$",
    "_fraction": "%",
    "_share": "%",
    "_gain": "x",
}
_LABELS = {
    "end_to_end_gain": "end-to-end gain",
    "step_s": "step",
    "rollout_s": "rollout",
    "rollout_share": "rollout's share of the step",
    "p75_fraction": "P75 done at, of the rollout",
    "violations_fraction": "requests over the SLO",
    "borrowed_tokens": "borrowed tokens",
    "borrowed_gpu_s": "borrowed GPU time",
    "overhead_fraction": "allocation overhead",
    "cost_dollars": "cost of a step",
    "num_turns": "turns",
    "reprefill_tokens": "tokens prefilled again",
}
_CAPITALS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "p50": "P50", "p90": "P90", "p99": "P99"}
_AXES = {
    "borrowed": ("GPUs that may be borrowed", "growth with borrowed GPUs"),
    "load": ("serving load, share of capacity", "fall with serving load"),
    "link": ("link between the clusters (Gbps)", "sensitivity to the link"),
    "scale": ("size of job and cluster, times the scenario's", "scale"),
    "layout": ("layout of serving", "colocated serving against prefill and decode apart"),
    "problem": ("dedicated GPUs for rollouts", "share of GPUs for rollouts"),
}
SCALE = "scale"
STANDARD_AXES = ("borrowed", "load", "link", "scale", "layout", "cluster.rollout_gpus")
_KEYS = {
    "cluster.borrowed_gpus": "borrowed",
    "serving.load_fraction": "load",
    "link.gbps": "link",
    "serving.layout": "layout",
    "cluster.rollout_gpus": "problem",
}


def axis_key(axis: str) -> str:
    """Return a sweep's short name where it has one: ``link`` for ``link.gbps``."""
    return _KEYS.get(axis, axis)


def axis_label(axis: str, unit: str) -> str:
    """Return what stands under a sweep's axis."""
    known = _AXES.get(axis_key(axis))
    if known:
        return known[0]
    return f"{axis} ({unit})" if unit else axis


def axis_title(axis: str) -> str:
    """Return what a sweep shows."""
    known = _AXES.get(axis_key(axis))
    return known[1] if known else f"change with {axis}"


def unit(figure: str) -> str:
    """Return a figure's unit, empty for a count."""
    return next((name for ending, name in _UNITS.items() if figure.endswith(ending)), "")


def label(figure: str) -> str:
    """Return a figure's name in words, without its unit."""
    if figure in _LABELS:
        return _LABELS[figure]
    ending = next((ending for ending in _UNITS if figure.endswith(ending)), "")
    return " ".join(_CAPITALS.get(word, word) for word in figure.removesuffix(ending).split("_"))


def head(figure: str) -> str:
    """Return a figure's name with its unit, for the head of a column or an axis."""
    return f"{label(figure)} ({unit(figure)})" if unit(figure) not in {"", "x", "%", "tokens"} else label(figure)


def bare(figure: str, value: float | None) -> str:
    """Return a figure's value as a table shows it: with a sign that is part of the number, without a unit."""
    if value is None:
        return MISSING
    kind = unit(figure)
    if kind == "%":
        return f"{value * 100:.{1 if abs(value) >= _THOUSANDTH or not value else 3}f} %"
    if kind == "x":
        return f"{value:.2f}x"
    if kind == "$":
        return f"${value:,.2f}"
    return f"{value:,.0f}" if kind in {"", "tokens", "bytes"} else number(value)


def show(figure: str, value: float | None) -> str:
    """Return a figure's value with its unit."""
    kind = unit(figure)
    if value is None or kind in {"", "x", "%", "$"}:
        return bare(figure, value)
    return f"{number(value)} {kind}"


def number(value: float) -> str:
    """Return a number with about three digits that count, and thousands separated."""
    if not value:
        return "0"
    digits = next((digits for digits, limit in _DIGITS if abs(value) >= limit), 3)
    return f"{value:,.{digits}f}"


def value_text(value: float | str, unit_name: str) -> str:
    """Return a swept value with its unit."""
    text = f"{value:,g}" if isinstance(value, float) else value
    if value == 1 and len(unit_name) > 1:
        unit_name = unit_name.removesuffix("s")
    return f"{text} {unit_name}" if unit_name and isinstance(value, float) else text


def with_range(strategy: Strategy, figure: str) -> str:
    """Return a strategy's figure with its unit and, where there are several seeds, its range."""
    value = show(figure, strategy.get(figure))
    limits = strategy.ranges.get(figure)
    return value if limits is None else f"{value} ({bare(figure, limits[0])} to {bare(figure, limits[1])})"


def listed(items: Sequence[str], none: str = "none") -> str:
    """Return ``a, b and c``."""
    if len(items) <= 1:
        return items[0] if items else none
    return f"{', '.join(items[:-1])} and {items[-1]}"
