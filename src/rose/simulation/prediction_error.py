"""Predicted against measured: the figures of a live run, those of its simulation, and how far they are apart. Pure.

``None`` stands for "nothing to measure". A figure is judged where a tolerance is set for it; the P99 of a few hundred
requests rests on three of them and is only shown. Two policies are put in order by a figure only where their measured runs
do not overlap: chance would decide the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import attrs

from rose.observe.latency import percentile
from rose.simulation.run_record import MeasuredRun, RunRecord
from rose.simulation.run_replay import RunPrediction

ALONE = "alone"
ALONE_TOLERANCE = 0.05
POLICY_TOLERANCE = 0.15
FIGURES = (
    "ttft_p50_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p90_ms",
    "tpot_p99_ms",
    "rollout_s",
    "window_tokens",
    "borrowed_tokens",
)
_SHOWN_ONLY = ("ttft_p99_ms", "tpot_p99_ms")

Figures = Mapping[str, float | None]


@attrs.frozen(kw_only=True)
class Comparison:
    """One figure of one arm.

    Attributes:
        measured: Mean over the valid runs; ``measured_low`` and ``measured_high`` are their extremes.
        predicted: Mean over the seeds.
        tolerance: Largest relative error that counts as right; ``None`` where the figure is only shown.
    """

    arm: str
    figure: str
    measured: float
    measured_low: float
    measured_high: float
    predicted: float
    tolerance: float | None

    @property
    def error(self) -> float:
        """Return the relative error, with its sign; infinite where nothing was measured and something was predicted."""
        if not self.measured:
            return 0.0 if not self.predicted else float("inf")
        return self.predicted / self.measured - 1

    @property
    def is_within(self) -> bool | None:
        """Return whether the error is within the tolerance; ``None`` without one."""
        return None if self.tolerance is None else abs(self.error) <= self.tolerance


@attrs.frozen(kw_only=True)
class OrderCheck:
    """The policies by one figure, lowest first.

    Attributes:
        tied: Pairs whose measured runs overlap, so that no order was measured.
        wrong: Pairs that were measured in this order and predicted in the other.
    """

    figure: str
    measured: tuple[str, ...]
    predicted: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    wrong: tuple[tuple[str, str], ...]

    @property
    def is_same(self) -> bool:
        """Return whether every order that was measured was predicted."""
        return not self.wrong


def measured_figures(record: RunRecord, run: MeasuredRun) -> Figures:
    """Return the figures of a live run; tokens are modelled ones, ``window_tokens`` those of all rollout engines until ``window_s``."""
    latency = _latency(
        [request.ttft_s for request in run.requests],
        [request.tpot_s for request in run.requests if request.tpot_s is not None],
    )
    if run.rollout_s is None:
        return latency
    borrowed = sum(engine.num_tokens for engine in run.engines if engine.engine_id in record.borrowed_engines)
    return {
        **latency,
        "rollout_s": run.rollout_s,
        "window_tokens": float(sum(engine.window_tokens for engine in run.engines) * record.tokens_per_token),
        "borrowed_tokens": float(borrowed * record.tokens_per_token),
    }


def predicted_figures(prediction: RunPrediction) -> Figures:
    """Return the figures of a simulated run."""
    answers = prediction.requests
    latency = _latency([answer.ttft_s for answer in answers], [a.tpot_s for a in answers if a.tpot_s is not None])
    if prediction.rollout_s is None:
        return latency
    return {
        **latency,
        "rollout_s": prediction.rollout_s,
        "window_tokens": float(prediction.window_tokens),
        "borrowed_tokens": float(prediction.borrowed_tokens),
    }


def _latency(ttft_s: Sequence[float], tpot_s: Sequence[float]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s)):
        for q in (50, 90, 99):
            value_s = percentile(values, q)
            figures[f"{name}_p{q}_ms"] = None if value_s is None else value_s * 1e3
    return figures


def compare(arm: str, measured: Sequence[Figures], predicted: Sequence[Figures]) -> list[Comparison]:
    """Compare an arm's runs with its simulations, figure by figure; figures that either side lacks are left out."""
    tolerance = ALONE_TOLERANCE if arm == ALONE else POLICY_TOLERANCE
    comparisons = []
    for figure in FIGURES:
        ran, said = _values(measured, figure), _values(predicted, figure)
        if ran and said:
            comparisons.append(
                Comparison(
                    arm=arm,
                    figure=figure,
                    measured=sum(ran) / len(ran),
                    measured_low=min(ran),
                    measured_high=max(ran),
                    predicted=sum(said) / len(said),
                    tolerance=None if figure in _SHOWN_ONLY else tolerance,
                )
            )
    return comparisons


def _values(runs: Iterable[Figures], figure: str) -> list[float]:
    return [value for run in runs if (value := run.get(figure)) is not None]


def check_orders(comparisons: Iterable[Comparison]) -> list[OrderCheck]:
    """Put the policies in order by every figure that is judged, as measured and as predicted."""
    by_figure: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.arm != ALONE and comparison.tolerance is not None:
            by_figure.setdefault(comparison.figure, []).append(comparison)
    return [_order(figure, each) for figure, each in by_figure.items() if len(each) > 1]


def _order(figure: str, arms: Sequence[Comparison]) -> OrderCheck:
    ranked = sorted(arms, key=lambda each: each.measured)
    tied, wrong = [], []
    for low, high in combinations(ranked, 2):
        pair = (low.arm, high.arm)
        if low.measured_high >= high.measured_low:
            tied.append(pair)
        elif low.predicted >= high.predicted:
            wrong.append(pair)
    return OrderCheck(
        figure=figure,
        measured=tuple(each.arm for each in ranked),
        predicted=tuple(each.arm for each in sorted(arms, key=lambda each: each.predicted)),
        tied=tuple(tied),
        wrong=tuple(wrong),
    )
