"""The serving load of a demo: one list of arrivals a serving device, from a trace file or generated. Pure but for reading.

Each device replays a window of its own of the trace, from the middle of its share of it on, brought to the wanted rate by stretching its
times (lengths stay true), and goes round when the trace ends. Prompts are given their token ids where they are sent, fresh
in every arm.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import count, takewhile

import attrs

from rose.errors import ConfigError
from rose.reference.trajectory import derive_seed
from rose.simulation.traces import Arrival, Trace, read_trace
from rose.simulation.workloads import clip_lengths, generate_bursty

HORIZON_S = 600.0
_CALIBRATION_S = 30.0
_MIN_REQUESTS = 20


@attrs.frozen(kw_only=True)
class ServingLoad:
    """What the serving devices answer: arrivals by device (seconds from an arm's start), and where they come from."""

    by_device: tuple[tuple[Arrival, ...], ...]
    source: str


def plan_load(
    trace: str | None,
    *,
    rate_rps: float,
    offset_s: float,
    num_devices: int,
    seed: int,
    max_prompt_tokens: int,
    max_output_tokens: int,
) -> ServingLoad:
    """Plan ``HORIZON_S`` seconds of load for each device.

    Args:
        trace: File to replay; ``None`` generates a bursty load.
        rate_rps: Mean requests a second and device over the first half minute.
        offset_s: By how much all windows are moved on in the trace.
        num_devices: Serving devices.
        seed: Of the generated load.
        max_prompt_tokens: Longest prompt that the engines take; longer ones are cut.
        max_output_tokens: Longest answer that the engines take.

    Raises:
        ConfigError: The trace is unreadable, malformed or too short.
    """
    if trace is None:
        loads = [
            generate_bursty(rate_rps, HORIZON_S, derive_seed(seed, "load", device)) for device in range(num_devices)
        ]
        source = f"generated, {rate_rps:g} requests a second and device"
    else:
        loads, source = _replay(trace, rate_rps=rate_rps, offset_s=offset_s, num_devices=num_devices)
    clipped = (
        clip_lengths(load, max_prompt_tokens=max_prompt_tokens, max_output_tokens=max_output_tokens) for load in loads
    )
    return ServingLoad(by_device=tuple(clipped), source=source)


def _replay(path: str, *, rate_rps: float, offset_s: float, num_devices: int) -> tuple[list[tuple[Arrival, ...]], str]:
    trace = read_trace(path)
    if len(trace.arrivals) < _MIN_REQUESTS:
        message = (
            f"trace {path} has {_counted(len(trace.arrivals), 'request')}, at least {_MIN_REQUESTS} are needed; "
            "use a longer one"
        )
        raise ConfigError(message)
    span_s = trace.arrivals[-1].at_s
    if span_s == 0:
        message = f"trace {path}: all its {len(trace.arrivals)} requests come at the same time; use one with times that differ"
        raise ConfigError(message)
    if not 0 <= offset_s < span_s:
        message = f"trace_offset_s = {offset_s:g} is outside trace {path}, which lasts {span_s:g} s; choose less"
        raise ConfigError(message)
    starts = [(offset_s + span_s * (device + 0.5) / num_devices) % span_s for device in range(num_devices)]
    loads = [_window(trace.arrivals, start, rate_rps) for start in starts]
    return loads, _describe(trace, rate_rps)


def _describe(trace: Trace, rate_rps: float) -> str:
    parts = [f"{trace.source_format} trace at {rate_rps:g} requests a second and device"]
    if trace.num_skipped:
        parts.append(f"{_counted(trace.num_skipped, 'row')} without a prompt or an answer left out")
    if trace.num_reordered:
        parts.append(f"{_counted(trace.num_reordered, 'row')} out of order sorted")
    return ", ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _window(arrivals: Sequence[Arrival], start_s: float, rate_rps: float) -> tuple[Arrival, ...]:
    """Return ``HORIZON_S`` of the trace from ``start_s`` on, going round, stretched to ``rate_rps``."""
    num_arrivals = len(arrivals)
    lap_s = arrivals[-1].at_s * num_arrivals / (num_arrivals - 1)
    first = bisect_left(arrivals, start_s, key=lambda arrival: arrival.at_s)

    def at_s(i: int) -> float:
        laps, index = divmod(first + i, num_arrivals)
        return laps * lap_s + arrivals[index].at_s - arrivals[first].at_s

    num_calibrated = max(_MIN_REQUESTS, round(rate_rps * _CALIBRATION_S))
    if not at_s(num_calibrated) > 0:
        message = (
            f"{num_calibrated} requests of the trace come at the same time, {start_s:g} s into it, so that no rate can "
            "be made of them; choose another rate_rps or trace_offset_s, or a trace with finer times"
        )
        raise ConfigError(message)
    stretch = num_calibrated / rate_rps / at_s(num_calibrated)
    times_s = takewhile(lambda time_s: time_s < HORIZON_S, (at_s(i) * stretch for i in count()))
    return tuple(attrs.evolve(arrivals[(first + i) % num_arrivals], at_s=time_s) for i, time_s in enumerate(times_s))
