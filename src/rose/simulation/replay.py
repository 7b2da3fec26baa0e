"""Replay of a trace: windows of it at a wanted rate, going round when it ends. Pure."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import attrs
import numpy as np
from numpy.typing import NDArray

from rose.errors import ConfigError
from rose.simulation.traces import Arrival, Trace

_MIN_REQUESTS = 20


@attrs.frozen(kw_only=True, eq=False)
class Tape:
    """A trace made ready for replay.

    Attributes:
        arrivals: Sorted, the first at 0; at least 20, not all at the same time.
        name: What messages call it.
        key_prefix: Before the keys that messages name: "serving.".
    """

    arrivals: tuple[Arrival, ...]
    name: str
    key_prefix: str = ""

    def __attrs_post_init__(self) -> None:
        """Refuse a trace of which no rate can be made.

        Raises:
            ConfigError: Too few requests, or all at the same time.
        """
        if len(self.arrivals) < _MIN_REQUESTS:
            message = (
                f"{self.name} has {_counted(len(self.arrivals), 'request')}, at least {_MIN_REQUESTS} are needed; "
                "use a longer one"
            )
            raise ConfigError(message)
        if self.span_s == 0:
            message = f"{self.name}: all its {len(self.arrivals)} requests come at the same time; use one with times that differ"
            raise ConfigError(message)

    @property
    def span_s(self) -> float:
        """When the last request comes."""
        return self.arrivals[-1].at_s

    def check_offset(self, offset_s: float) -> None:
        """Refuse an offset outside the trace.

        Raises:
            ConfigError: It is.
        """
        if not 0 <= offset_s < self.span_s:
            message = (
                f"{self.key_prefix}trace_offset_s = {offset_s:g} is outside {self.name}, which lasts {self.span_s:g} s; "
                "choose less"
            )
            raise ConfigError(message)

    def window(
        self, start_s: float, rate_rps: float, *, duration_s: float, calibration_s: float
    ) -> tuple[Arrival, ...]:
        """Return ``duration_s`` of the trace from ``start_s`` on, going round.

        Times are stretched so that the first ``calibration_s`` have ``rate_rps``; the first request is at 0.

        Raises:
            ConfigError: The requests to calibrate with come all at the same time.
        """
        first = bisect_left(self._times_s, start_s) % len(self._times_s)
        num_calibrated = max(_MIN_REQUESTS, round(rate_rps * calibration_s))
        calibrated_s = float(self._unrolled(first, np.array([num_calibrated]))[0])
        if not calibrated_s > 0:
            message = (
                f"{num_calibrated} requests of {self.name} come at the same time, {start_s:g} s into it, so that no rate "
                f"can be made of them; choose another {self.key_prefix}rate_rps or {self.key_prefix}trace_offset_s, or a "
                "trace with finer times"
            )
            raise ConfigError(message)
        stretch = num_calibrated / rate_rps / calibrated_s
        num_guessed = num_calibrated + 1
        while (times_s := self._unrolled(first, np.arange(num_guessed)) * stretch)[-1] < duration_s:
            num_guessed *= 2
        num_arrivals = int(np.searchsorted(times_s, duration_s))
        places = (first + np.arange(num_arrivals)) % len(self.arrivals)
        return tuple(
            Arrival(at_s, self.arrivals[place].prompt_tokens, self.arrivals[place].output_tokens)
            for at_s, place in zip(times_s[:num_arrivals].tolist(), places.tolist(), strict=True)
        )

    @cached_property
    def _times_s(self) -> NDArray[np.float64]:
        return np.array([arrival.at_s for arrival in self.arrivals])

    def _unrolled(self, first: int, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return when the requests of these numbers come, counted and timed from the ``first``, going round."""
        num_arrivals = len(self.arrivals)
        lap_s = self.span_s * num_arrivals / (num_arrivals - 1)
        laps, places = np.divmod(first + numbers, num_arrivals)
        unrolled: NDArray[np.float64] = laps * lap_s + self._times_s[places] - self._times_s[first]
        return unrolled


def describe_trace(trace: Trace, rate_rps: float, per: str) -> str:
    """Return what is replayed and what was left out of it, for reports; ``per`` is whom the rate is for."""
    parts = [f"{trace.source_format} trace at {rate_rps:g} requests a second and {per}"]
    if trace.num_skipped:
        parts.append(f"{_counted(trace.num_skipped, 'row')} without a prompt or an answer left out")
    if trace.num_reordered:
        parts.append(f"{_counted(trace.num_reordered, 'row')} out of order sorted")
    return ", ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
