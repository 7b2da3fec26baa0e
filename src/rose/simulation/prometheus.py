"""Requests from what a Prometheus server knows of a serving cluster: the JSON of ``/api/v1/query_range``.

Series are told apart by name, which a query keeps when it selects raw series
(``{__name__=~"vllm:(request_success|prompt_tokens|generation_tokens)_total"}``). Names that end in ``_total``, ``_count`` or
``_sum`` are counters; all else, in particular a series without a name, as ``sum(rate(...))`` gives it, is a rate a second.
Series of the same name (instances, finish reasons) are added up.

Arrivals are not in such an export: they are drawn, always the same, as a Poisson process with each interval's rate. Lengths
are lognormal around the interval's tokens a request; since tokens and ends of requests are not counted at the same moment,
an interval's mean is drawn towards that of the whole export with the weight of 20 requests. Without token counters they
have the means of ``rose.simulation.lengths``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from rose.simulation.lengths import OUTPUTS, PROMPTS, Lengths

_Floats = NDArray[np.float64]

_START = re.compile(r"\s*\{\s*\"(status|data)\"\s*:")
_COUNTER_ENDS = ("_total", "_count", "_sum")
_UNUSED_ENDS = ("_bucket", "_created")
_REQUESTS = ("vllm:request_success_total", "sglang:num_requests_total")
_TOKENS = {"prompt_tokens": "prompt tokens", "generation_tokens": "generated tokens"}
_MIN_SAMPLES = 2
_GAP_STEPS = 1.5
_PRIOR_REQUESTS = 20.0
_MAX_TOKENS = 131_072
_MAX_REQUESTS = 20e6
_NUM_SHOWN = 6


@attrs.frozen(kw_only=True, eq=False)
class _Series:
    """One series as a total that rises evenly between its knots.

    Attributes:
        name: "" without one.
        label: How messages call it.
        knots_s: Seconds, not falling.
        totals: Counted from the first knot on.
    """

    name: str
    label: str
    knots_s: _Floats
    totals: _Floats


def looks_like_prometheus(start: str) -> bool:
    """Return whether a file that begins so is the answer of a Prometheus server."""
    return _START.match(start) is not None


def prometheus_rows(text: str) -> list[tuple[float, int, int]]:
    """Return ``(seconds, prompt tokens, output tokens)`` of requests that fit the export, in order.

    Raises:
        ValueError: The text is no range query's answer, lacks a request series, or has a malformed sample; the message says
            which series and sample, and what to do.
    """
    requests, prompts, outputs = _by_role(_parse(text))
    grid_s = np.unique(np.concatenate([series.knots_s for series in requests]))
    num_requests = _in_intervals(requests, grid_s)
    total = float(num_requests.sum())
    if total > _MAX_REQUESTS:
        message = (
            f"{requests[0].label} would be {total:.3g} requests; a counter's name must end in _total, all else is read as a "
            "rate a second"
        )
        raise ValueError(message)
    rng = np.random.default_rng(0)
    counts = rng.poisson(num_requests)
    at_s = np.repeat(grid_s[:-1], counts) + rng.random(int(counts.sum())) * np.repeat(np.diff(grid_s), counts)
    at_s.sort()
    lengths = [
        _lengths(rng, shape, counts, num_requests, _in_intervals(series, grid_s) if series else None)
        for shape, series in ((PROMPTS, prompts), (OUTPUTS, outputs))
    ]
    return list(zip(at_s.tolist(), *lengths, strict=True))


def _in_intervals(series: Sequence[_Series], grid_s: _Floats) -> _Floats:
    """Return what all the series count together in each interval of the grid."""
    counts = [np.diff(np.interp(grid_s, one.knots_s, one.totals)) for one in series]
    return np.asarray(np.sum(counts, axis=0))


def _lengths(
    rng: np.random.Generator, shape: Lengths, counts: NDArray[np.int64], num_requests: _Floats, tokens: _Floats | None
) -> list[int]:
    if tokens is None or not tokens.sum() > 0:
        return shape.draw(rng, int(counts.sum()))
    mean = tokens.sum() / num_requests.sum()
    means = (tokens + _PRIOR_REQUESTS * mean) / (num_requests + _PRIOR_REQUESTS)
    return shape.draw_around(rng, np.repeat(np.maximum(means, 1.0), counts), max_tokens=_MAX_TOKENS)


def _by_role(series: Sequence[_Series]) -> tuple[list[_Series], list[_Series], list[_Series]]:
    """Sort the series into requests, prompt tokens and generated tokens."""
    used = [one for one in series if not one.name.endswith(_UNUSED_ENDS)]
    tokens = {part: [one for one in used if part in one.name and not one.name.endswith("_count")] for part in _TOKENS}
    others = [one for one in used if not any(one in found for found in tokens.values())]
    names = {one.name for one in others}
    known = [name for name in _REQUESTS if name in names]
    requests = [one for one in others if one.name == known[0]] if known else others
    for what, found in (("requests", requests), *((_TOKENS[part], found) for part, found in tokens.items())):
        _check_one_name(what, found)
    if not requests:
        message = f"no request counter or rate among the series {_listed(series)}; export {_REQUESTS[0]} too"
        raise ValueError(message)
    return requests, tokens["prompt_tokens"], tokens["generation_tokens"]


def _check_one_name(what: str, series: Sequence[_Series]) -> None:
    if len({one.name for one in series}) > 1:
        message = f"several series could be the {what}: {_listed(series)}; export only one of them"
        raise ValueError(message)


def _listed(series: Sequence[_Series]) -> str:
    names = list(dict.fromkeys(one.name or "one without a name" for one in series))
    return ", ".join(names[:_NUM_SHOWN]) + (", ..." if len(names) > _NUM_SHOWN else "")


def _parse(text: str) -> list[_Series]:
    try:
        answer = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"not JSON ({error.msg}, line {error.lineno}, column {error.colno}); export it again"
        raise ValueError(message) from error
    if answer.get("status") != "success":
        said = str(answer.get("error", "no reason given"))[:120]
        message = f"Prometheus answered with status {answer.get('status')!r} ({said}); repeat the query"
        raise ValueError(message)
    data = answer.get("data")
    kind = data.get("resultType") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or kind != "matrix":
        message = f"resultType is {kind!r}, not 'matrix'; ask /api/v1/query_range, which gives values over time"
        raise ValueError(message)
    result = data.get("result")
    if not isinstance(result, list) or not result:
        message = "the result has no series; check the query and its time range"
        raise ValueError(message)
    return [_one_series(number, one) for number, one in enumerate(result, start=1)]


def _one_series(number: int, series: Any) -> _Series:
    metric = series.get("metric") if isinstance(series, Mapping) else None
    samples = series.get("values") if isinstance(series, Mapping) else None
    if not isinstance(metric, Mapping) or not isinstance(samples, list):
        message = f"series {number} has no metric or no values; export it again"
        raise ValueError(message)  # noqa: TRY004 - a malformed file is a value problem
    name = str(metric.get("__name__", ""))
    label = f"series {number} ({name or 'without a name'})"
    if len(samples) < _MIN_SAMPLES:
        message = f"{label} has {len(samples)} sample, at least {_MIN_SAMPLES} are needed; ask for more time or a smaller step"
        raise ValueError(message)
    pairs = np.array([_sample(label, place, sample) for place, sample in enumerate(samples, start=1)])
    back = np.flatnonzero(np.diff(pairs[:, 0]) <= 0)
    if len(back):
        message = f"{label}, sample {back[0] + 2}: its time is not after the one before; correct or remove it"
        raise ValueError(message)
    return _accumulated(name, label, pairs[:, 0], pairs[:, 1])


def _accumulated(name: str, label: str, times_s: _Floats, values: _Floats) -> _Series:
    """Add up what a counter gained, or a rate stood for, in the interval before each sample."""
    widths_s = np.diff(times_s)
    if name.endswith(_COUNTER_ENDS):
        change = np.diff(values)
        gains = np.where(change < 0, values[1:], change)  # a counter that fell began anew at 0
    else:
        step_s = float(np.median(widths_s))
        widths_s = np.where(widths_s > _GAP_STEPS * step_s, step_s, widths_s)  # nothing is known of a gap
        gains = values[1:] * widths_s
    ends = np.cumsum(gains)
    return _Series(
        name=name,
        label=label,
        knots_s=np.column_stack((times_s[1:] - widths_s, times_s[1:])).ravel(),
        totals=np.column_stack((ends - gains, ends)).ravel(),
    )


def _sample(label: str, place: int, sample: Any) -> tuple[float, float]:
    """Read ``[unix seconds, "value"]``."""
    try:
        at_s, value = sample
        pair = float(at_s), float(value)
    except (TypeError, ValueError):
        pair = (0.0, -1.0)
    if not (np.isfinite(pair).all() and pair[1] >= 0):
        message = (
            f"{label}, sample {place} is {str(sample)[:60]}, not a time and a finite number >= 0; correct or remove it, or change "
            "the query"
        )
        raise ValueError(message)
    return pair
