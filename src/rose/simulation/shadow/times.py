"""Step times fitted to what an engine measured of itself, so that a GPU or a model without a profile is of use too.

A profile says how steps compare with each other; two factors say how fast this GPU is: one on the time of decoding (weights and
contexts read), one on what prompt tokens add to it. They are found by simulating serving alone on the reconstructed load until
its mean time between tokens and its mean time to a first token are the measured ones. What the engine measured of a request's wait
and prefill is taken where it is exported; the rest of the TTFT is then the API's overhead, the same with and without rollouts.

Not to be known: the two factors are means over the load that was seen. A load without long prompts says little of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import attrs

from rose.backends.paced.profiles import Profile
from rose.simulation.shadow import series
from rose.simulation.shadow.load import EngineLoad
from rose.simulation.shadow.run import ShadowRun, Site, simulate
from rose.simulation.shadow.series import EngineSeries

_ROUNDS = 6
_CLOSE = 0.01
_LEAST_FACTOR, _MOST_FACTOR = 0.02, 50.0
_MIN_TOKENS, _MIN_REQUESTS = 200, 20
_MAX_CALIBRATED_S = 600.0


@attrs.frozen(kw_only=True)
class Factors:
    """What a profile's times are multiplied by."""

    decode: float = 1.0
    prefill: float = 1.0


@attrs.frozen
class FittedTimes:
    """A profile's step times, multiplied by two factors. The host's gap between steps stays the profile's."""

    profile: Profile
    factors: Factors = attrs.field(factory=Factors)

    @property
    def host_gap_s(self) -> float:
        """From a step's end until the next can be ready."""
        return self.profile.host_gap_s

    @property
    def kv_bytes_per_token(self) -> int:
        """On all GPUs of the engine together."""
        return self.profile.kv_bytes_per_token

    @cached_property
    def _step(self) -> Callable[[int, int, float, float], float]:
        return self.profile.fast_step()

    def step_s(self, num_prefill: int, num_decodes: int, context_tokens: int, positions: float) -> float:
        """Return the time of one step."""
        decode_s = self._step(0, num_decodes, context_tokens, 0.0)
        if not num_prefill:
            return self.factors.decode * decode_s
        whole_s = self._step(num_prefill, num_decodes, context_tokens, positions)
        return self.factors.decode * decode_s + self.factors.prefill * (whole_s - decode_s)

    @cached_property
    def _growth_s(self) -> float:
        return self.factors.decode * (self._step(0, 1, 1_000_000, 0.0) - self._step(0, 1, 0, 0.0)) / 1e6

    def growth_s(self, num_decodes: int) -> float:
        """Return by how much a pure decode step is longer than the one before it."""
        return self._growth_s * num_decodes


@attrs.frozen(kw_only=True)
class Measured:
    """Means over the recording, in seconds; ``None``: not exported, or too few to say."""

    itl_s: float | None
    ttft_s: float | None
    overhead_s: float

    @classmethod
    def of(cls, engine: EngineSeries) -> Measured:
        """Return an engine's means; the overhead is what its TTFT has beyond its queue and its prefill."""
        itl_s = _mean(engine, series.ITL, _MIN_TOKENS)
        ttft_s = _mean(engine, series.TTFT, _MIN_REQUESTS)
        queue_s = _mean(engine, series.QUEUE, _MIN_REQUESTS)
        prefill_s = _mean(engine, series.PREFILL, _MIN_REQUESTS)
        if ttft_s is None or queue_s is None or prefill_s is None:
            return cls(itl_s=itl_s, ttft_s=ttft_s, overhead_s=0.0)
        overhead_s = max(0.0, ttft_s - queue_s - prefill_s)
        return cls(itl_s=itl_s, ttft_s=ttft_s - overhead_s, overhead_s=overhead_s)


def _mean(engine: EngineSeries, role: str, at_least: int) -> float | None:
    histogram = engine.histograms.get(role)
    return histogram.mean if histogram is not None and histogram.num >= at_least else None


def fit_factors(load: EngineLoad, site: Site, profile: Profile, measured: Measured) -> Factors:
    """Return the factors with which serving alone is as fast as it was measured; 1 where nothing was measured."""
    factors = Factors()
    if measured.itl_s is None and measured.ttft_s is None:
        return factors
    part = _beginning(load)
    for _ in range(_ROUNDS):
        run = simulate(part, attrs.evolve(site, serving=FittedTimes(profile, factors)), None)
        better = _improved(factors, run, measured, profile.host_gap_s)
        if max(_change(better.decode, factors.decode), _change(better.prefill, factors.prefill)) < _CLOSE:
            return better
        factors = better
    return factors


def _beginning(load: EngineLoad) -> EngineLoad:
    end_s = min(load.duration_s, load.warm_s + _MAX_CALIBRATED_S)
    return attrs.evolve(load, arrivals=tuple(a for a in load.arrivals if a.at_s < end_s), duration_s=end_s)


def _change(new: float, old: float) -> float:
    return abs(new / old - 1)


def _improved(factors: Factors, run: ShadowRun, measured: Measured, gap_s: float) -> Factors:
    decode, prefill = factors.decode, factors.prefill
    if measured.itl_s is not None and run.itl_mean_s is not None:
        decode *= max(measured.itl_s - gap_s, 0.1 * measured.itl_s) / max(run.itl_mean_s - gap_s, 1e-6)
    if measured.ttft_s is not None and run.ttft_mean_s is not None:
        prefill *= measured.ttft_s / run.ttft_mean_s
    elif measured.itl_s is not None:
        prefill = decode  # nothing is known of prompts: the GPU is as much slower or faster in both
    return Factors(decode=_bounded(decode), prefill=_bounded(prefill))


def _bounded(factor: float) -> float:
    return min(_MOST_FACTOR, max(_LEAST_FACTOR, factor))
