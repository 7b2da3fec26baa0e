"""``summary.json``: its one shape, made from typed figures, and the rows in which tables show it. Pure.

Everything else that shows a run's result (command line, report) reads the summary and nothing else, so that a figure
cannot differ between them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose.observe.latency import LatencySummary, PairedDelay, Slo
from rose.observe.metrics import plain
from rose.observe.rollout import ArmSummary

MISSING = "-"


@attrs.frozen(kw_only=True)
class VersionRecord:
    """One published weight version and what it cost.

    Attributes:
        n: Number of the version.
        phase: ``learn`` or ``sparse``.
        lr: Learning rate of the step that made it.
        changed_fraction: Share of the values whose bits changed, 0 to 1.
        codec: ``sparse``, ``dense``, or ``mixed`` where tensors differ.
        bytes_dense: Bytes that the full weights have on the wire.
        bytes_sent: Bytes that were put on the wire.
        stage_s: Longest time an engine took to fetch, check and decode it, in wall seconds.
        pause_s: Longest time an engine was paused to write it in place, in wall seconds.
    """

    n: int
    phase: str
    lr: float
    changed_fraction: float
    codec: str
    bytes_dense: int
    bytes_sent: int
    stage_s: float
    pause_s: float


@attrs.frozen(kw_only=True)
class BorrowedFigures:
    """What the borrowed engines did: turns begun there, turns evicted, turns moved elsewhere, device time used."""

    turns: int
    evicted: int
    rerouted: int
    device_seconds: float


@attrs.frozen(kw_only=True)
class ServingFigures:
    """Serving latency of one arm, and the delay that sharing added.

    Attributes:
        latency: Of all requests of the arm.
        added_delay: To the requests that the arm has in common with ``alone``.
        added_delay_on_ungated: The same over those that the shorter ungated arm has too, for a like comparison with it.
    """

    latency: LatencySummary
    added_delay: PairedDelay | None = None
    added_delay_on_ungated: PairedDelay | None = None


@attrs.frozen(kw_only=True)
class RunFigures:
    """Everything that ``summary.json`` is made from.

    Attributes:
        device: Name of the devices that figures were taken on, such as ``paced:h100``.
        k: Stretch of modelled time.
        invalid_reasons: Why the run does not count; empty for a valid one.
        fixed: The arm with dedicated engines only.
        rose: The arm with borrowed engines as well.
        ungated: The arm without admission control, where it was measured.
        uncapped_tokens_per_s: Rollout throughput of the fixed arm without a slot cap, where it was measured.
        rate_rps: Mean serving load, requests a second and device.
        slo: Serving's budgets.
        alone: Serving without rollouts beside it.
        shared: Serving in the rose arm.
        serving_ungated: Serving in the ungated arm.
        is_bit_exact: Every engine held the trainer's bits after every sync.
        versions: The rose arm's published versions.
        borrowed: What the borrowed engines did in the rose arm.
    """

    device: str
    k: float
    invalid_reasons: tuple[str, ...]
    fixed: ArmSummary
    rose: ArmSummary
    ungated: ArmSummary | None
    uncapped_tokens_per_s: float | None
    rate_rps: float
    slo: Slo
    alone: ServingFigures
    shared: ServingFigures
    serving_ungated: ServingFigures | None
    is_bit_exact: bool
    versions: tuple[VersionRecord, ...]
    borrowed: BorrowedFigures


def build_summary(run: RunFigures) -> dict[str, Any]:
    """Return the object of ``summary.json``; arms that were not measured are ``None``."""
    fixed, rose = run.fixed, run.rose
    uncapped = run.uncapped_tokens_per_s
    summary = {
        "device": run.device,
        "k": run.k,
        "valid": not run.invalid_reasons,
        "invalid_reasons": list(run.invalid_reasons),
        "fixed": attrs.asdict(fixed),
        "rose": attrs.asdict(rose),
        "ungated": None if run.ungated is None else attrs.asdict(run.ungated),
        "gain": {
            "rollout_throughput": rose.rollout_tokens_per_s / fixed.rollout_tokens_per_s,
            "rollout_throughput_over_uncapped": rose.rollout_tokens_per_s / uncapped if uncapped else None,
            "step_time": fixed.step_s / rose.step_s,
        },
        "serving": {
            "rate_rps": run.rate_rps,
            "slo": attrs.asdict(run.slo),
            "alone": _serving(run.alone),
            "shared": _serving(run.shared),
            "ungated": None if run.serving_ungated is None else _serving(run.serving_ungated),
        },
        "sync": {"bit_exact": run.is_bit_exact, "phases": _phases(run.versions)},
        "borrowed": attrs.asdict(run.borrowed),
    }
    return dict(plain(summary))


def _serving(figures: ServingFigures) -> dict[str, Any]:
    result: dict[str, Any] = figures.latency.as_dict()
    if figures.added_delay is not None:
        result["added_delay_mean_ms"] = figures.added_delay.mean_ms
        result["added_delay_standard_error_ms"] = figures.added_delay.standard_error_ms
    if figures.added_delay_on_ungated is not None:
        result["added_delay_on_ungated_arrivals_mean_ms"] = figures.added_delay_on_ungated.mean_ms
    return result


def _phases(versions: Sequence[VersionRecord]) -> dict[str, Any]:
    names = dict.fromkeys(version.phase for version in versions)
    return {name: _phase([version for version in versions if version.phase == name]) for name in names}


def _phase(versions: Sequence[VersionRecord]) -> dict[str, Any]:
    codecs = Counter(version.codec for version in versions)
    return {
        "lr": versions[-1].lr,
        "versions": len(versions),
        "changed_fraction": math.fsum(version.changed_fraction for version in versions) / len(versions),
        "codec": codecs.most_common(1)[0][0],
        "versions_by_codec": dict(codecs),
        "bytes_dense": sum(version.bytes_dense for version in versions),
        "bytes_sent": sum(version.bytes_sent for version in versions),
        "stage_s": math.fsum(version.stage_s for version in versions) / len(versions),
        "pause_s": math.fsum(version.pause_s for version in versions) / len(versions),
    }


Row = tuple[str, ...]


def comparison_rows(summary: Mapping[str, Any]) -> list[Row]:
    """Return rows ``(what, fixed, rose, rose / fixed)``; the last cell of a success row is a difference."""
    fixed, rose = summary["fixed"], summary["rose"]

    def ratio_row(label: str, key: str, digits: int) -> Row:
        before, after = fixed.get(key), rose.get(key)
        ratio = f"{after / before:.2f}x" if before and after is not None else MISSING
        return (label, number(before, digits), number(after, digits), ratio)

    def difference_row(label: str, key: str) -> Row:
        before, after = fixed.get(key), rose.get(key)
        difference = f"{after - before:+.2f}" if before is not None and after is not None else MISSING
        return (label, number(before, 2), number(after, 2), difference)

    return [
        ratio_row("rollout throughput (tokens/s)", "rollout_tokens_per_s", 0),
        ratio_row("rollout time a step (s)", "rollout_s", 1),
        ratio_row("step time (s)", "step_s", 1),
        ratio_row("rollout's share of the step", "rollout_share", 3),
        ratio_row("75 % of trajectories done at (share of rollout)", "p75_fraction", 2),
        difference_row("success on held-out maps, before", "success_first"),
        difference_row("success on held-out maps, after", "success_last"),
    ]


def serving_rows(summary: Mapping[str, Any]) -> list[Row]:
    """Return rows ``(what, alone, shared, shared / alone, ungated, SLO)``."""
    serving = summary["serving"]
    arms = [serving.get(name) or {} for name in ("alone", "shared", "ungated")]
    over = [percent(arm.get("violations_fraction"), 2) for arm in arms]
    slo = serving["slo"]

    def row(label: str, key: str, digits: int, limit: float | None = None) -> Row:
        before, after, ungated = (arm.get(key) for arm in arms)
        inflation = f"{after / before:.2f}x" if key.endswith("_ms") and before and after is not None else MISSING
        return (
            label,
            number(before, digits),
            number(after, digits),
            inflation,
            number(ungated, digits),
            number(limit, 0),
        )

    return [
        row("requests", "requests", 0),
        row("TTFT P50 (ms)", "ttft_p50_ms", 1),
        row("TTFT P90 (ms)", "ttft_p90_ms", 1),
        row("TTFT P99 (ms)", "ttft_p99_ms", 1, slo["ttft_ms"]),
        row("TPOT P50 (ms), per request", "tpot_p50_ms", 1),
        row("TPOT P99 (ms), per request", "tpot_p99_ms", 1, slo["tpot_ms"]),
        row("inter-token P99 (ms), per token", "itl_p99_ms", 1),
        row("TTFT added to a request (ms)", "added_delay_mean_ms", 1),
        ("requests over the SLO", over[0], over[1], MISSING, over[2], MISSING),
    ]


def sync_rows(summary: Mapping[str, Any]) -> list[Row]:
    """Return rows ``(phase, learning rate, versions, changed, codec, dense bytes, sent bytes, sent / dense, stage, pause)``."""
    return [
        (
            name,
            f"{phase['lr']:g}",
            str(phase["versions"]),
            percent(phase["changed_fraction"], 1),
            phase["codec"],
            size(phase["bytes_dense"] / phase["versions"]),
            size(phase["bytes_sent"] / phase["versions"]),
            sent_share(phase),
            f"{number(phase['stage_s'] * 1e3, 0)} ms",
            f"{number(phase['pause_s'] * 1e3, 0)} ms",
        )
        for name, phase in summary["sync"]["phases"].items()
    ]


def is_over_slo(summary: Mapping[str, Any], arm: str, names: Sequence[str] = ("ttft", "tpot")) -> bool:
    """Return whether a serving arm's P99 of one of ``names`` is over the SLO."""
    serving = summary["serving"]
    measured = serving.get(arm) or {}
    values = [(measured.get(f"{name}_p99_ms"), serving["slo"][f"{name}_ms"]) for name in names]
    return any(value is not None and value > limit for value, limit in values)


def sent_share(phase: Mapping[str, Any]) -> str:
    """Return which share of the dense bytes a phase sent, in percent."""
    return percent(phase["bytes_sent"] / phase["bytes_dense"], 1) if phase["bytes_dense"] else MISSING


def number(value: float | None, digits: int) -> str:
    """Return a number with thousands separators, or a hyphen for ``None``."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent(fraction: float | None, digits: int) -> str:
    """Return a fraction in percent, or a hyphen for ``None``."""
    return MISSING if fraction is None else f"{fraction * 100:.{digits}f} %"


def size(num_bytes: float) -> str:
    """Return a size to three digits in the decimal unit that suits it."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{float(f'{num_bytes / scale:.3g}'):g} {unit}"
    return f"{num_bytes:.0f} B"
