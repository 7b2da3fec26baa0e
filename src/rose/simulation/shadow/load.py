"""The requests of one engine, drawn so that they fit what its metrics counted. Pure.

What is known, and how it is used:

* Requests that got a first token between two scrapes, and how many more wait at the second: those arrived in between (without the
  histogram of TTFTs: those that ended, and how many more are there). When within the interval is not known: drawn evenly.
* Prompt tokens of an interval: lengths follow the histogram of prompts, scaled so that the interval's sum is right (with one request
  in an interval its length is exact).
* Answers: lengths follow the histogram of answers, scaled so that the mean is that of all tokens over all requests. Which request
  got which answer is not known.
* Requests that ran at the first scrape: load of the same kind goes before (``warm_s``), so that as many run.

Not to be known from metrics: bursts shorter than the time between two scrapes, prompts and answers that belong together, when
conversations return to their prefixes (the share of cached tokens is taken from every prompt alike).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from rose.errors import ConfigError
from rose.simulation.lengths import OUTPUTS, PROMPTS, Lengths
from rose.simulation.shadow import series
from rose.simulation.shadow.series import EngineSeries, Floats, Histogram
from rose.simulation.traces import Arrival

_MAX_REQUEST_TOKENS = 131_072
_MAX_REQUESTS = 2_000_000
_WARM_LIVES = 3.0
_MAX_WARM_S = 300.0
_FEW_VALUES = 20
_MOST_LEAD_S, _REST_S = 600.0, 10.0
_TAIL_FACTOR = 2.0


@attrs.frozen(kw_only=True)
class EngineLoad:
    """What one engine was asked for.

    Attributes:
        arrivals: In order, from 0.
        warm_s: So long before what was observed began.
        duration_s: Of the whole, ``warm_s`` included.
        cached_fraction: Share of prompt tokens that the prefix cache had.
    """

    arrivals: tuple[Arrival, ...]
    warm_s: float
    duration_s: float
    cached_fraction: float = 0.0


def load_of(engine: EngineSeries, seed: int) -> EngineLoad:
    """Return a load that fits what the engine counted, the same for the same seed.

    Raises:
        ConfigError: It answered nothing, or more than can be simulated.
    """
    rng = np.random.default_rng(seed)
    edges_s, counts, prompt_sums = _intervals(engine)
    num = int(counts.sum())
    if num == 0:
        message = (
            f"metrics: engine {engine.name} answered no request in {engine.duration_s:.0f} s; record while it serves"
        )
        raise ConfigError(message)
    if num > _MAX_REQUESTS:
        message = (
            f"metrics: engine {engine.name} answered {num} requests, {_MAX_REQUESTS} at most; use a shorter recording"
        )
        raise ConfigError(message)
    at_s = np.repeat(edges_s[:-1], counts) + rng.random(num) * np.repeat(np.diff(edges_s), counts)
    prompts = _draw(rng, engine.histograms.get(series.PROMPT_LENGTHS), PROMPTS, num)
    sums = _sums(prompts, counts)
    prompts *= np.repeat(np.divide(prompt_sums, sums, out=np.ones_like(sums), where=sums > 0), counts)
    mean_output = float(engine.counters[series.GENERATED][-1]) / num
    outputs = _to_mean(_draw(rng, engine.histograms.get(series.OUTPUT_LENGTHS), OUTPUTS, num), mean_output)
    warm_s, early = _warm_up(rng, engine, prompts, outputs, num / engine.duration_s)
    shifted = np.column_stack((at_s + warm_s, prompts, outputs))
    rows = np.concatenate((early, shifted)) if len(early) else shifted
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return EngineLoad(
        arrivals=tuple(_arrival(*row) for row in rows.tolist()),
        warm_s=warm_s,
        duration_s=warm_s + engine.duration_s,
        cached_fraction=_cached_fraction(engine),
    )


def _arrival(at_s: float, prompt: float, output: float) -> Arrival:
    output_tokens = int(min(max(1, round(output)), _MAX_REQUEST_TOKENS // 2))
    return Arrival(at_s, int(min(max(1, round(prompt)), _MAX_REQUEST_TOKENS - output_tokens)), output_tokens)


def _intervals(engine: EngineSeries) -> tuple[Floats, np.ndarray[tuple[int], np.dtype[np.int64]], Floats]:
    """Return edges, requests and prompt tokens of intervals that have either both or neither."""
    firsts = engine.histograms.get(series.TTFT)
    if firsts is not None:
        totals = firsts.totals + _rise(engine, series.WAITING)
    else:
        totals = engine.counters[series.FINISHED] + _rise(engine, series.RUNNING) + _rise(engine, series.WAITING)
    totals = np.maximum.accumulate(np.maximum(np.rint(totals), 0))
    prompts = engine.counters[series.PROMPT]
    kept = [0]
    for place in range(1, len(totals)):
        has_requests, has_tokens = totals[place] > totals[kept[-1]], prompts[place] > prompts[kept[-1]]
        if has_requests == has_tokens or place == len(totals) - 1:
            kept.append(place)
    return engine.times_s[kept], np.diff(totals[kept]).astype(np.int64), np.diff(prompts[kept])


def _rise(engine: EngineSeries, role: str) -> Floats:
    gauge = engine.gauges.get(role)
    return np.zeros_like(engine.times_s) if gauge is None else gauge - gauge[0]


def _sums(values: Floats, counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
    ends = np.cumsum(counts)
    totals = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray(totals[ends] - totals[ends - counts])


def _draw(rng: np.random.Generator, histogram: Histogram | None, shape: Lengths, num: int) -> Floats:
    """Draw lengths from a histogram, log-evenly within a bucket; of the general shape where it holds too little."""
    if histogram is None or histogram.num < _FEW_VALUES or not len(histogram.bounds):
        return np.asarray(shape.draw(rng, num), dtype=np.float64)
    cumulative = histogram.counts[-1] / histogram.counts[-1][-1]
    places = np.searchsorted(cumulative, rng.random(num))
    lows = np.concatenate(([1.0], histogram.bounds[:-1]))
    highs = np.where(np.isfinite(histogram.bounds), histogram.bounds, _TAIL_FACTOR * lows)
    lows, highs = np.maximum(lows, 1.0), np.maximum(highs, 1.0)
    drawn = np.exp(np.log(lows[places]) + rng.random(num) * (np.log(highs[places]) - np.log(lows[places])))
    return np.asarray(drawn)


def _to_mean(values: Floats, mean: float) -> Floats:
    return np.asarray(np.maximum(1.0, values * (mean / values.mean()))) if mean > 0 else np.ones_like(values)


def _warm_up(
    rng: np.random.Generator, engine: EngineSeries, prompts: Floats, outputs: Floats, rate_rps: float
) -> tuple[float, Floats]:
    """Return how long the load before lasts, and its rows of ``(arrival, prompt, output)``."""
    running = engine.gauges.get(series.RUNNING)
    life_s = _life_s(engine)
    num_running = 0.0 if running is None else float(running[0])
    if num_running < 1 or life_s <= 0:
        return 0.0, np.zeros((0, 3))
    warm_s = min(_MAX_WARM_S, _WARM_LIVES * life_s)
    num = round(min(num_running / life_s, _WARM_LIVES * rate_rps + 1) * warm_s)
    chosen = rng.integers(0, len(prompts), num)
    return warm_s, np.column_stack((rng.random(num) * warm_s, prompts[chosen], outputs[chosen]))


def _life_s(engine: EngineSeries) -> float:
    """Return how long a request takes in the mean; 0: not known."""
    e2e = engine.histograms.get(series.E2E)
    return (e2e.mean or 0.0) if e2e is not None else 0.0


def _cached_fraction(engine: EngineSeries) -> float:
    cached = engine.counters.get(series.CACHED)
    total = float(engine.counters[series.PROMPT][-1])
    return 0.0 if cached is None or total <= 0 else min(0.99, max(0.0, float(cached[-1]) / total))


def load_of_trace(arrivals: Sequence[Arrival], duration_s: float | None) -> EngineLoad:
    """Return a request trace's load, or its first ``duration_s``."""
    used = tuple(arrival for arrival in arrivals if duration_s is None or arrival.at_s < duration_s)
    return EngineLoad(arrivals=used, warm_s=0.0, duration_s=duration_s or used[-1].at_s + 1.0)


def with_lead(load: EngineLoad, num_requests: int) -> EngineLoad:
    """Return the load behind about ``num_requests`` of its own kind, so that a policy which learns has learned, and a short rest.

    An engine that was watched for a minute has served for hours; what it learned there is not in its metrics.
    """
    length_s = load.duration_s - load.warm_s
    lap = [attrs.evolve(each, at_s=each.at_s - load.warm_s) for each in load.arrivals if each.at_s >= load.warm_s]
    if not lap or not num_requests:
        return load
    lead: list[Arrival] = []
    start_s = 0.0
    while start_s < _MOST_LEAD_S and len(lead) < num_requests:
        lead += [attrs.evolve(each, at_s=each.at_s + start_s) for each in lap if each.at_s + start_s < _MOST_LEAD_S]
        start_s += length_s
    shift_s = min(start_s, _MOST_LEAD_S) + _REST_S
    return attrs.evolve(
        load,
        arrivals=(*lead, *(attrs.evolve(each, at_s=each.at_s + shift_s) for each in load.arrivals)),
        warm_s=load.warm_s + shift_s,
        duration_s=load.duration_s + shift_s,
    )
