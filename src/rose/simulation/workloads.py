"""Request loads: cut, scale, clip and split what a trace gave, or generate a bursty day.

Everything is a pure function of its arguments; times are seconds from the start of the load, rates are requests a second.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np

from rose.errors import ConfigError
from rose.simulation.lengths import OUTPUTS, PROMPTS
from rose.simulation.traces import Arrival

_DAY_S = 86_400.0
# Peak to mean over a day: the tide lifts the busiest minutes to about 1.7, gusts of one second reach about 4.2.
_TIDE = 0.45
_SECOND_PEAK_TO_MEAN = 4.2
_GUST_QUANTILE = 5.6


def cut(arrivals: Sequence[Arrival], *, offset_s: float, duration_s: float) -> tuple[Arrival, ...]:
    """Return the arrivals in ``[offset_s, offset_s + duration_s)``, with times from ``offset_s``."""
    return tuple(
        attrs.evolve(arrival, at_s=arrival.at_s - offset_s)
        for arrival in arrivals
        if offset_s <= arrival.at_s < offset_s + duration_s
    )


def scale_rate(
    arrivals: Sequence[Arrival],
    rate_rps: float,
    *,
    duration_s: float,
    seed: int = 0,
    method: Literal["thin", "stretch"] = "thin",
) -> tuple[Arrival, ...]:
    """Bring a load of ``duration_s`` to ``rate_rps``.

    ``thin`` keeps a random choice of requests at their times: bursts and their lengths in time stay, the rate can only fall.
    ``stretch`` keeps all requests and multiplies their times, so that the load lasts longer or shorter: the shape stays, but a
    burst of one second becomes one of two at half the rate. Both keep the lengths of the requests.

    Raises:
        ConfigError: Thinning cannot raise the rate; or nothing to scale.
    """
    if not arrivals or rate_rps <= 0 or duration_s <= 0:
        message = (
            f"cannot scale {len(arrivals)} requests over {duration_s:g} s to {rate_rps:g} req/s; all must be positive"
        )
        raise ConfigError(message)
    mean_rps = len(arrivals) / duration_s
    if method == "stretch":
        return tuple(attrs.evolve(arrival, at_s=arrival.at_s * mean_rps / rate_rps) for arrival in arrivals)
    num_kept = round(rate_rps * duration_s)
    if num_kept > len(arrivals):
        message = (
            f"the load has {mean_rps:.2f} req/s, thinning cannot raise it to {rate_rps:g}; "
            "ask for less, choose a busier trace, or stretch it"
        )
        raise ConfigError(message)
    kept = sorted(random.Random(seed).sample(range(len(arrivals)), num_kept))
    return tuple(arrivals[i] for i in kept)


def clip_lengths(arrivals: Sequence[Arrival], *, max_prompt_tokens: int, max_output_tokens: int) -> tuple[Arrival, ...]:
    """Shorten requests that are longer than an engine takes; none is dropped."""
    return tuple(
        attrs.evolve(
            arrival,
            prompt_tokens=min(arrival.prompt_tokens, max_prompt_tokens),
            output_tokens=min(arrival.output_tokens, max_output_tokens),
        )
        for arrival in arrivals
    )


def split_devices(arrivals: Sequence[Arrival], num_devices: int, *, seed: int = 0) -> list[tuple[Arrival, ...]]:
    """Send each request to one of ``num_devices`` at random (seeded), as a front end without load knowledge would.

    Random and not in turn: taking turns would smooth the bursts that each device sees.
    """
    rng = random.Random(seed)
    shares: list[list[Arrival]] = [[] for _ in range(num_devices)]
    for arrival in arrivals:
        shares[rng.randrange(num_devices)].append(arrival)
    return [tuple(share) for share in shares]


def peak_to_mean(arrivals: Sequence[Arrival], window_s: float, *, duration_s: float | None = None) -> float:
    """Return the busiest window's count over the mean count, in windows of ``window_s`` from 0.

    Args:
        arrivals: The load; must not be empty.
        window_s: Length of a window.
        duration_s: Length of the load; by default up to the end of the last arrival's window.
    """
    counts = Counter(int(arrival.at_s // window_s) for arrival in arrivals)
    num_windows = max(counts) + 1 if duration_s is None else duration_s / window_s
    return max(counts.values()) * num_windows / len(arrivals)


def generate_bursty(rate_rps: float, duration_s: float, seed: int) -> tuple[Arrival, ...]:
    """Generate a load with a daily tide, gusts of one second and Azure-like lengths.

    Over a day the busiest minute has about 1.7 times and the busiest second about 4.2 times the mean count. Below about
    4 req/s plain chance alone makes single seconds busier than that. A load shorter than a day is its mean hour: the tide is
    then near its mean and peaks are lower.

    Raises:
        ConfigError: Rate or duration is not positive.
    """
    if not (rate_rps > 0 and duration_s > 0 and math.isfinite(rate_rps * duration_s)):
        message = f"a generated load needs a positive rate and duration, got {rate_rps:g} req/s and {duration_s:g} s"
        raise ConfigError(message)
    rng = np.random.default_rng(seed)
    seconds = np.arange(math.ceil(duration_s))
    widths_s = np.minimum(1.0, duration_s - seconds)
    mean = rate_rps * (1 + _TIDE * np.sin(2 * np.pi * seconds / _DAY_S)) * widths_s
    gust_variance = _gust_variance(rate_rps)
    if gust_variance > 0:
        mean *= rng.gamma(1 / gust_variance, gust_variance, len(mean))
    counts = rng.poisson(mean)
    at_s = np.repeat(seconds, counts) + rng.random(int(counts.sum())) * np.repeat(widths_s, counts)
    at_s.sort()
    prompts, outputs = PROMPTS.draw(rng, len(at_s)), OUTPUTS.draw(rng, len(at_s))
    return tuple(map(Arrival, at_s.tolist(), prompts, outputs))


def _gust_variance(rate_rps: float) -> float:
    """Return the squared variation of a gust (gamma, mean 1) that lifts the tide's busiest second to the wanted peak."""
    high = (1 + _TIDE) * rate_rps
    wanted_sd = (_SECOND_PEAK_TO_MEAN * rate_rps - high) / _GUST_QUANTILE
    return max(0.0, (wanted_sd**2 - high) / high**2)
