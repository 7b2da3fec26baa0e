"""The serving load of a demo: one list of arrivals a serving device, from a trace file or generated. Pure but for reading.

Each device replays a window of its own of the trace, from the middle of its share of it on, brought to the wanted rate by stretching its
times (lengths stay true), and goes round when the trace ends. Prompts are given their token ids where they are sent, fresh
in every arm.
"""

from __future__ import annotations

import attrs

from rose.reference.trajectory import derive_seed
from rose.simulation.replay import Tape, describe_trace
from rose.simulation.traces import Arrival, read_trace
from rose.simulation.workloads import clip_lengths, generate_bursty

HORIZON_S = 600.0
_CALIBRATION_S = 30.0


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
    tape = Tape(arrivals=trace.arrivals, name=f"trace {path}")
    tape.check_offset(offset_s)
    starts = [(offset_s + tape.span_s * (device + 0.5) / num_devices) % tape.span_s for device in range(num_devices)]
    loads = [tape.window(start, rate_rps, duration_s=HORIZON_S, calibration_s=_CALIBRATION_S) for start in starts]
    return loads, describe_trace(trace, rate_rps, "device")
