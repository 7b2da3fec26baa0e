"""The serving load of a demo, from a trace or generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.reference.load import HORIZON_S, ServingLoad, plan_load

RATE_RPS = 2.0


def plan(trace: Path | None = None, *, offset_s: float = 0.0, num_devices: int = 2, seed: int = 0) -> ServingLoad:
    return plan_load(
        None if trace is None else str(trace),
        rate_rps=RATE_RPS,
        offset_s=offset_s,
        num_devices=num_devices,
        seed=seed,
        max_prompt_tokens=1000,
        max_output_tokens=100,
    )


def trace_of(folder: Path, times_s: list[float]) -> Path:
    """Write a trace whose n-th request has n + 1 prompt tokens."""
    path = folder / "trace.csv"
    rows = [f"{at_s},{index + 1},7" for index, at_s in enumerate(times_s)]
    path.write_text("\n".join(["timestamp_s,input_tokens,output_tokens", *rows]) + "\n")
    return path


def test_a_generated_load_depends_on_seed_and_device_alone():
    load = plan()
    assert load == plan()
    assert load != plan(seed=1)
    assert load.by_device[0] != load.by_device[1]
    for device in load.by_device:
        assert len(device) / HORIZON_S == pytest.approx(RATE_RPS, rel=0.25)
        assert max(arrival.prompt_tokens for arrival in device) == 1000
        assert max(arrival.output_tokens for arrival in device) == 100
        assert device[-1].at_s < HORIZON_S
    assert "2 requests a second" in load.source


def test_a_replay_has_the_wanted_rate_in_its_first_half_minute_and_the_traces_lengths(tmp_path):
    trace = trace_of(tmp_path, [0.1 * index for index in range(900)])
    load = plan(trace)
    for device in load.by_device:
        assert sum(arrival.at_s < 30.0 for arrival in device) == pytest.approx(RATE_RPS * 30, abs=1)
        assert device[0].at_s == 0.0
        lengths = [arrival.prompt_tokens for arrival in device[:50]]
        assert lengths == list(range(lengths[0], lengths[0] + 50)), "the trace's own order and lengths"
    starts = [device[0].prompt_tokens for device in load.by_device]
    assert starts == pytest.approx([226, 676], abs=1), "each device has its own window"
    assert load.source == "servegen trace at 2 requests a second and device"


def test_rows_that_were_left_out_or_sorted_are_told(tmp_path):
    path = trace_of(tmp_path, [*map(float, range(40)), 38.5])
    path.write_text(path.read_text() + "50,0,1\n51,1,0\n")
    assert plan(path).source == (
        "servegen trace at 2 requests a second and device, "
        "2 rows without a prompt or an answer left out, 1 row out of order sorted"
    )


def test_a_short_trace_goes_round_and_stays_in_order(tmp_path):
    device = plan(trace_of(tmp_path, [float(index) for index in range(30)]), num_devices=1).by_device[0]
    times = [arrival.at_s for arrival in device]
    assert times == sorted(times)
    assert times[-1] > 0.95 * HORIZON_S
    assert device[0].prompt_tokens == device[30].prompt_tokens == device[60].prompt_tokens


def test_the_offset_moves_every_window(tmp_path):
    trace = trace_of(tmp_path, [0.1 * index for index in range(900)])
    before, after = plan(trace), plan(trace, offset_s=10.0)
    for old, new in zip(before.by_device, after.by_device, strict=True):
        assert new[0].prompt_tokens - old[0].prompt_tokens == 100


@pytest.mark.parametrize(
    ("times_s", "offset_s", "complaint"),
    [
        ([float(index) for index in range(19)], 0.0, "has 19 requests, at least 20 are needed"),
        ([0.0], 0.0, "has 1 request, at least 20"),
        ([float(index) for index in range(30)], 29.0, r"trace_offset_s = 29 is outside trace .*lasts 29 s"),
        ([0.0] * 30, 0.0, "all its 30 requests come at the same time"),
        ([*[0.0] * 100, 1.0], 0.5, "at the same time"),
    ],
)
def test_a_trace_that_is_of_no_use_is_refused_in_one_line(tmp_path, times_s, offset_s, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        plan(trace_of(tmp_path, times_s), offset_s=offset_s, num_devices=1)
    assert "\n" not in str(caught.value)
