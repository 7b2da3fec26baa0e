"""Serving loads of the co-serving bench: windows of a trace, thinned or as they are, and a generated step burst. Pure but for files.

A workload and a seed name one list of arrivals; every policy gets the same one. Lengths stay true (cut to what a model's context
takes). A trace is never sped up unless a share of the capacity asks for it; lowering a rate thins requests at random, so that bursts keep
their length in time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import attrs
import numpy as np
from attrs import validators as v

from rose.backends.paced.profiles import profile_named
from rose.errors import ConfigError
from rose.simulation.lengths import OUTPUTS, PROMPTS
from rose.simulation.serving_load import MAX_OUTPUT_TOKENS, MAX_REQUEST_TOKENS, LoadShape, capacity_rps
from rose.simulation.traces import Arrival, read_trace

BURST_FACTOR = 4.22
_BURST_S = 1.0
_BURST_EVERY_S = 30.0
_GOLDEN_SHARE = 0.6180339887498949


@attrs.frozen(kw_only=True)
class CoserveWorkload:
    """Arrivals at one serving engine.

    Attributes:
        name: In reports.
        trace: File to replay; ``None``: generated.
        rate_fraction: Share of the trace's own rate that is kept (thinned).
        rate_rps: Wanted rate instead, by thinning or, where the trace has fewer, by stretching its times.
        load_fraction: Wanted rate instead, as a share of what one device serves of such requests at most.
        busiest_s: Take windows inside the busiest ``busiest_s`` of the trace.
        burst_factor: Generated: for one second of every 30 the rate is so many times the mean; 1: none.
        devices: The trace is for so many devices; each gets a random share.
    """

    name: str
    trace: str | None = None
    rate_fraction: float = attrs.field(default=1.0, validator=[v.gt(0), v.le(1)])
    rate_rps: float | None = attrs.field(default=None, validator=v.optional(v.gt(0)))
    load_fraction: float | None = attrs.field(default=None, validator=v.optional(v.gt(0)))
    busiest_s: float | None = attrs.field(default=None, validator=v.optional(v.gt(0)))
    burst_factor: float = attrs.field(default=BURST_FACTOR, validator=v.ge(1))

    def arrivals(self, *, duration_s: float, seed: int, serving_profile: str) -> tuple[Arrival, ...]:
        """Return the arrivals of ``duration_s`` seconds, from 0.

        Raises:
            ConfigError: The trace cannot be read, or has nothing to send in the window.
        """
        if self.trace is None:
            rate_rps = self.rate_rps or self._fraction_rps(_SHAPE, serving_profile) or 1.0
            return step_burst(rate_rps, duration_s, seed, factor=self.burst_factor)
        arrivals, span_s = _tape(self.trace)
        window, start_s = arrivals, 0.0
        if self.busiest_s is not None and self.busiest_s < span_s:
            start_s = _busiest_start_s(arrivals, self.busiest_s)
            span_s = self.busiest_s
            window = _cut(arrivals, start_s, span_s)
        own_rps = len(window) / span_s
        wanted_rps = self.rate_rps or self._fraction_rps(LoadShape.of(window), serving_profile)
        if wanted_rps is None:
            wanted_rps = own_rps * self.rate_fraction
        stretch = min(1.0, own_rps / wanted_rps)
        share = (random.Random(f"coserve {self.name}").random() + seed * _GOLDEN_SHARE) % 1
        taken = _window(window, start_s, span_s, share * span_s, duration_s / stretch)
        taken = tuple(attrs.evolve(arrival, at_s=arrival.at_s * stretch) for arrival in taken)
        share_kept = min(1.0, wanted_rps / own_rps)
        if share_kept < 1:
            chooser = random.Random(f"thin {self.name} {seed}")
            taken = tuple(arrival for arrival in taken if chooser.random() < share_kept)
        if not taken:
            message = f"trace {self.trace}: no request in the window of seed {seed}; ask for a longer duration or a higher rate"
            raise ConfigError(message)
        return taken

    def _fraction_rps(self, shape: LoadShape, serving_profile: str) -> float | None:
        if self.load_fraction is None:
            return None
        return self.load_fraction * capacity_rps(profile_named(serving_profile), shape)


_SHAPE = LoadShape(prompt_tokens=PROMPTS.mean_tokens, output_tokens=OUTPUTS.mean_tokens)


def step_burst(rate_rps: float, duration_s: float, seed: int, *, factor: float) -> tuple[Arrival, ...]:
    """Return a load of mean ``rate_rps`` whose rate steps up to ``factor`` times the mean for a second, every 30 seconds."""
    rng = np.random.default_rng(seed)
    num_bursts = max(1, int(duration_s // _BURST_EVERY_S))
    quiet = max(0.0, (_BURST_EVERY_S - factor * _BURST_S) / (_BURST_EVERY_S - _BURST_S))
    spans = []
    for burst in range(num_bursts):
        begin = burst * _BURST_EVERY_S
        end = begin + _BURST_EVERY_S if burst < num_bursts - 1 else duration_s
        middle = begin + (end - begin - _BURST_S) // 2
        spans += [(begin, middle, quiet), (middle, middle + _BURST_S, factor), (middle + _BURST_S, end, quiet)]
    times = [
        t
        for begin, end, share in spans
        for t in (begin + (end - begin) * rng.random(rng.poisson(rate_rps * share * (end - begin)))).tolist()
    ]
    times.sort()
    prompts, outputs = PROMPTS.draw(rng, len(times)), OUTPUTS.draw(rng, len(times))
    return tuple(_fit(Arrival(t, p, o)) for t, p, o in zip(times, prompts, outputs, strict=True))


@lru_cache(maxsize=4)
def _tape(path: str) -> tuple[tuple[Arrival, ...], float]:
    trace = read_trace(Path(path))
    arrivals = tuple(map(_fit, trace.arrivals))
    gap_s = arrivals[-1].at_s / max(1, len(arrivals) - 1)
    return arrivals, max(arrivals[-1].at_s + gap_s, 1e-3)


def _fit(arrival: Arrival) -> Arrival:
    output_tokens = min(arrival.output_tokens, MAX_OUTPUT_TOKENS)
    return Arrival(arrival.at_s, min(arrival.prompt_tokens, MAX_REQUEST_TOKENS - output_tokens), output_tokens)


def _busiest_start_s(arrivals: Sequence[Arrival], span_s: float) -> float:
    times = np.array([arrival.at_s for arrival in arrivals])
    starts = np.arange(0.0, max(1e-9, times[-1] - span_s), span_s / 12)
    if not len(starts):
        return 0.0
    counts = np.searchsorted(times, starts + span_s) - np.searchsorted(times, starts)
    return float(starts[int(counts.argmax())])


def _cut(arrivals: Sequence[Arrival], start_s: float, span_s: float) -> tuple[Arrival, ...]:
    return tuple(arrival for arrival in arrivals if start_s <= arrival.at_s < start_s + span_s)


def _window(
    arrivals: Sequence[Arrival], start_s: float, span_s: float, offset_s: float, duration_s: float
) -> tuple[Arrival, ...]:
    """Return ``duration_s`` from ``offset_s`` into a span that goes round, with times from 0."""
    taken: list[Arrival] = []
    lap = 0
    while lap * span_s < offset_s + duration_s:
        taken += [
            attrs.evolve(arrival, at_s=max(0.0, at_s))
            for arrival in arrivals
            if 0 <= (at_s := arrival.at_s - start_s + lap * span_s - offset_s) < duration_s
        ]
        lap += 1
    return tuple(taken)


def mean_rps(arrivals: Sequence[Arrival], duration_s: float) -> float:
    """Return the mean rate."""
    return len(arrivals) / duration_s


def mean_tokens(arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Return mean prompt and answer lengths."""
    return fmean(a.prompt_tokens for a in arrivals), fmean(a.output_tokens for a in arrivals)
