"""Figures of a co-serving run: what serving's users saw beside what they would have seen alone, and what rollouts got.

Requests are paired with serving alone's by order of arrival. A *window* is 60 s of arrivals with at least 100 requests; it is *broken*
when its P99 TTFT or P99 TPOT passes the SLO although alone it would not. A *violation* is a request beyond either target.
Percentiles are over the requests of all runs together; those of inter-token latency over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from rose.bench.coserve.world import Observed
from rose.policies.admission import Slo

WINDOW_S = 60.0
MIN_WINDOW_REQUESTS = 100

_Floats = npt.NDArray[np.float64]


@attrs.frozen(kw_only=True, eq=False)
class Sample:
    """One run, as arrays. Seconds; requests in order of arrival; ``tpot_s`` is ``nan`` where there is none.

    Attributes:
        arrived_s, ttft_s, tpot_s: (requests).
        gap_s, gap_tokens: (gaps between steps): how long, and how many tokens waited for it.
        rest: The counts of the run.
    """

    arrived_s: _Floats
    ttft_s: _Floats
    tpot_s: _Floats
    gap_s: _Floats
    gap_tokens: _Floats
    rest: Observed

    @classmethod
    def of(cls, seen: Observed) -> Sample:
        """Take a run's lists over into arrays."""
        gaps = np.array(seen.gaps, dtype=np.float64).reshape(-1, 2)
        return cls(
            arrived_s=np.array([answer.arrived_s for answer in seen.answers]),
            ttft_s=np.array([answer.ttft_s for answer in seen.answers]),
            tpot_s=np.array([np.nan if answer.tpot_s is None else answer.tpot_s for answer in seen.answers]),
            gap_s=gaps[:, 0],
            gap_tokens=gaps[:, 1],
            rest=attrs.evolve(seen, answers=(), gaps=()),
        )

    def violates(self, slo: Slo) -> npt.NDArray[np.bool_]:
        """Return which requests missed a target."""
        result: npt.NDArray[np.bool_] = (self.ttft_s > slo.ttft_s) | (self.tpot_s > slo.tpot_s)
        return result

    def broken_windows(self, slo: Slo) -> dict[int, bool]:
        """Return for each window with enough requests whether its P99s break the SLO."""
        windows: dict[int, bool] = {}
        numbers = (self.arrived_s // WINDOW_S).astype(int)
        for number in np.unique(numbers):
            inside = numbers == number
            if inside.sum() >= MIN_WINDOW_REQUESTS:
                ttft_s, tpot_s = percentile(self.ttft_s[inside], 99), percentile(self.tpot_s[inside], 99)
                windows[int(number)] = bool(ttft_s > slo.ttft_s or tpot_s > slo.tpot_s)
        return windows


def percentile(values: _Floats, q: float) -> float:
    """Return a percentile of what is a number; ``nan`` of nothing."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, q)) if len(known) else float("nan")


def weighted_percentile(values: _Floats, weights: _Floats, q: float) -> float:
    """Return a percentile of values that count as often as their weights say; ``nan`` of nothing."""
    if not len(values):
        return float("nan")
    order = np.argsort(values)
    ranks = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(ranks, q / 100 * ranks[-1])])


def summarise_policy(
    samples: Sequence[Sample], alone: Sequence[Sample], dedicated: Sequence[Sample], slo: Slo
) -> dict[str, Any]:
    """Return one policy's figures over runs that are paired with serving alone's and a dedicated rollout engine's.

    Raises:
        ValueError: A run has other requests than its partner.
    """
    ttft, tpot = np.concatenate([s.ttft_s for s in samples]), np.concatenate([s.tpot_s for s in samples])
    gap, tokens = np.concatenate([s.gap_s for s in samples]), np.concatenate([s.gap_tokens for s in samples])
    added = np.concatenate([_added_s(s, a) for s, a in zip(samples, alone, strict=True)])
    windows = [(s.broken_windows(slo), a.broken_windows(slo)) for s, a in zip(samples, alone, strict=True)]
    hours = sum(s.rest.duration_s for s in samples) / 3600
    net = sum(s.rest.net_tokens for s in samples)
    dedicated_net = sum(s.rest.net_tokens for s in dedicated)
    yields = [value for s in samples for value in s.rest.yields_s]
    idle_s = sum(s.rest.idle_s for s in samples)
    figures = {
        "num_requests": len(ttft),
        **{f"ttft_p{q}_ms": percentile(ttft, q) * 1e3 for q in (50, 90, 99)},
        **{f"tpot_p{q}_ms": percentile(tpot, q) * 1e3 for q in (50, 90, 99)},
        **{f"itl_p{q}_ms": weighted_percentile(gap, tokens, q) * 1e3 for q in (50, 99)},
        "itl_max_ms": float(gap.max()) * 1e3 if len(gap) else None,
        "itl_tokens_over_slo": int(tokens[gap > slo.tpot_s].sum()),
        "violations_fraction": float(np.concatenate([s.violates(slo) for s in samples]).mean()),
        "windows": sum(len(own) for own, _ in windows),
        "windows_broken": sum(is_broken and not base[n] for own, base in windows for n, is_broken in own.items()),
        "added_delay_mean_ms": float(added.mean()) * 1e3,
        "added_delay_p99_ms": percentile(added, 99) * 1e3,
        "rollout_net_tokens": net,
        "rollout_decoded_tokens": sum(s.rest.decoded_tokens for s in samples),
        "rollout_thrown_tokens": sum(s.rest.thrown_tokens for s in samples),
        "rollout_over_dedicated": net / dedicated_net if dedicated_net else None,
        "evicted": sum(s.rest.num_evicted for s in samples),
        "evicted_per_hour": sum(s.rest.num_evicted for s in samples) / hours,
        "steps_held_for_kv": sum(s.rest.num_held_for_kv for s in samples),
        "yield_p99_ms": percentile(np.array(yields), 99) * 1e3 if yields else None,
        "idle_fraction": idle_s / (hours * 3600),
        "idle_used_fraction": sum(s.rest.idle_used_s for s in samples) / idle_s if idle_s > 0 else None,
        "serving_busy_fraction": sum(s.rest.serving_busy_s for s in samples) / (hours * 3600),
        "rollout_busy_fraction": sum(s.rest.rollout_busy_s for s in samples) / (hours * 3600),
        "serving_kv_peak_fraction": max(s.rest.kv_peak_fraction for s in samples),
    }
    return {key: None if isinstance(value, float) and np.isnan(value) else value for key, value in figures.items()}


def _added_s(sample: Sample, alone: Sample) -> _Floats:
    if not np.array_equal(sample.arrived_s, alone.arrived_s):
        message = f"{len(sample.arrived_s)} requests cannot be paired with {len(alone.arrived_s)} others"
        raise ValueError(message)
    return sample.ttft_s - alone.ttft_s
