"""Loads of serving engines: capacity, rates, windows of traces."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.backends.paced.profiles import PROFILES
from rose.errors import ConfigError
from rose.simulation.replay import Tape
from rose.simulation.scenario import ServingConfig
from rose.simulation.serving_load import (
    MAX_OUTPUT_TOKENS,
    MAX_REQUEST_TOKENS,
    LoadShape,
    ServingPlan,
    capacity_rps,
    plan_serving,
    serving_profile,
)
from rose.simulation.traces import Arrival
from rose.simulation.workloads import peak_to_mean

CONFIG = ServingConfig(profile="h100:qwen2.5-7b", load_fraction=0.3)
SHARED = Path(__file__).parents[3] / ".." / "shared" / "traces"


def trace_of(folder: Path, times_s: list[float], prompt: int | None = None, output: int = 7) -> str:
    """Write a trace whose n-th request has n + 1 prompt tokens."""
    path = folder / "trace.csv"
    rows = [f"{at_s},{prompt or index + 1},{output}" for index, at_s in enumerate(times_s)]
    path.write_text("\n".join(["timestamp_s,input_tokens,output_tokens", *rows]) + "\n")
    return str(path)


def test_the_capacity_is_that_of_an_engine_that_is_always_busy():
    assert capacity_rps(PROFILES["h100:qwen2.5-7b"]) == pytest.approx(14, rel=0.05)
    assert 8 < capacity_rps(PROFILES["h800x4:qwen2.5-32b"]) < capacity_rps(PROFILES["h100x4:qwen2.5-32b"]) < 12


def test_capacity_counts_decode_steps_gaps_and_prompts():
    """40 decodes at a time; without prompts worth mentioning a request takes one fortieth of its tokens' steps."""
    profile = PROFILES["h100:qwen3-8b"]
    steps_s = profile.decode_run(40, 40 * 501, 1) + profile.host_gap_s
    assert 1 / capacity_rps(profile, LoadShape(prompt_tokens=1, output_tokens=1000)) == pytest.approx(
        1000 / 40 * steps_s, rel=1e-3
    )
    one, two = (
        1 / capacity_rps(profile, LoadShape(prompt_tokens=4096, output_tokens=200), chunk_tokens=chunk)
        for chunk in (4096, 2048)
    )
    assert 1e-3 < one - two < steps_s, (
        "in two chunks a prompt has more decodes beside it, for less than a step of their own"
    )


@given(prompt=st.floats(1, 30_000), output=st.floats(1, 4000), more=st.floats(1.1, 3))
def test_longer_requests_are_fewer(prompt, output, more):
    profile = PROFILES["h800x4:qwen3-32b"]
    rate = capacity_rps(profile, LoadShape(prompt_tokens=prompt, output_tokens=output))
    assert capacity_rps(profile, LoadShape(prompt_tokens=prompt + 200 * more, output_tokens=output)) < rate
    assert capacity_rps(profile, LoadShape(prompt_tokens=prompt, output_tokens=output * more)) < rate


@pytest.mark.parametrize("is_replayed", [False, True])
def test_one_engine_s_load_does_not_depend_on_the_others(tmp_path, is_replayed):
    trace = trace_of(tmp_path, [0.1 * index for index in range(900)]) if is_replayed else None
    config = attrs.evolve(CONFIG, trace=trace)
    plan = ServingPlan.of(config, duration_s=60.0, seed=5)
    few, many = (plan_serving(config, num_engines=number, duration_s=60.0, seed=5) for number in (2, 6))
    assert few == many[:2]
    assert few[1] == plan.engine(1) == plan.engine(1)
    assert plan.engine(9_999)
    assert len({engine[:10] for engine in many}) == 6, "each engine has its own"
    assert plan_serving(config, num_engines=2, duration_s=60.0, seed=6) != few


def test_the_load_is_the_same_in_every_process():
    code = (
        "from rose.simulation.serving_load import *; "
        "print(ServingPlan.of(ServingConfig(profile='h100:qwen2.5-7b'), duration_s=20.0, seed=1).engine(3)[:5])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("0", "1")
    }
    assert seen == {f"{ServingPlan.of(CONFIG, duration_s=20.0, seed=1).engine(3)[:5]}\n"}


def test_a_load_fraction_is_of_the_capacity_for_the_load_s_own_lengths(tmp_path):
    plan = ServingPlan.of(CONFIG, duration_s=300.0, seed=0)
    assert plan.rate_rps == 0.3 * capacity_rps(PROFILES[CONFIG.profile])
    rates = [len(plan.engine(index)) / 300 for index in range(20)]
    assert sum(rates) / 20 == pytest.approx(plan.rate_rps, rel=0.05)
    trace = trace_of(tmp_path, [float(index) for index in range(100)], prompt=8000, output=100)
    longer = ServingPlan.of(attrs.evolve(CONFIG, trace=trace), duration_s=300.0, seed=0)
    shape = LoadShape(prompt_tokens=8000, output_tokens=100)
    assert longer.rate_rps == pytest.approx(0.3 * capacity_rps(PROFILES[CONFIG.profile], shape))
    assert longer.rate_rps < plan.rate_rps / 2


def test_a_rate_that_is_given_holds(tmp_path):
    trace = trace_of(tmp_path, [0.1 * index for index in range(900)])
    for config in (CONFIG, attrs.evolve(CONFIG, trace=trace)):
        plan = ServingPlan.of(attrs.evolve(config, rate_rps=2.5), duration_s=400.0, seed=0)
        assert plan.rate_rps == 2.5
        assert "2.5 requests a second and engine" in plan.source
        for index in range(3):
            arrivals = plan.engine(index)
            assert len(arrivals) / 400 == pytest.approx(2.5, rel=0.15 if config is CONFIG else 0.01)
            times = [arrival.at_s for arrival in arrivals]
            assert times == sorted(times)
            assert 0 <= times[0]
            assert times[-1] < 400


def test_a_replay_keeps_the_trace_s_order_lengths_and_bursts(tmp_path):
    quiet_then_busy = [*(float(index) for index in range(100)), *(100 + 0.1 * index for index in range(1000))]
    config = attrs.evolve(CONFIG, rate_rps=3.0, trace=trace_of(tmp_path, quiet_then_busy))
    arrivals = ServingPlan.of(config, duration_s=1100.0 / 3, seed=0).engine(0)
    numbers = [arrival.prompt_tokens for arrival in arrivals]
    assert sorted(numbers) == list(range(1, 1101)), "one whole round"
    assert all((after - before) % 1100 == 1 for before, after in itertools.pairwise(numbers))
    assert peak_to_mean(arrivals, 10.0) > 1.5


def test_windows_are_spread_over_the_whole_trace(tmp_path):
    config = attrs.evolve(CONFIG, rate_rps=1.0, trace=trace_of(tmp_path, [float(index) for index in range(1000)]))
    starts = sorted(engine[0].prompt_tokens for engine in plan_serving(config, num_engines=20, duration_s=9, seed=1))
    assert max(after - before for before, after in itertools.pairwise(starts)) < 100
    moved = attrs.evolve(config, trace_offset_s=40.0)
    before, after = (ServingPlan.of(one, duration_s=9.0, seed=1).engine(2)[0] for one in (config, moved))
    assert (after.prompt_tokens - before.prompt_tokens) % 999 in {40, 41}


def test_requests_are_cut_to_what_a_model_takes(tmp_path):
    trace = trace_of(tmp_path, [float(index) for index in range(50)], prompt=70_000, output=20_000)
    plan = ServingPlan.of(attrs.evolve(CONFIG, trace=trace), duration_s=60.0, seed=0)
    assert {(arrival.prompt_tokens, arrival.output_tokens) for arrival in plan.engine(0)} == {
        (MAX_REQUEST_TOKENS - MAX_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)
    }
    trace = trace_of(tmp_path, [float(index) for index in range(50)], prompt=30_000, output=2000)
    assert (
        ServingPlan.of(attrs.evolve(CONFIG, trace=trace), duration_s=60.0, seed=0).engine(0)[0].prompt_tokens == 30_000
    )


@pytest.mark.parametrize(
    ("times_s", "changes", "complaint"),
    [
        (
            [float(index) for index in range(30)],
            {"trace_offset_s": 29.0},
            r"^serving\.trace_offset_s = 29 is outside trace",
        ),
        ([float(index) for index in range(19)], {}, "has 19 requests, at least 20 are needed"),
        ([1.0] * 30, {}, "all its 30 requests come at the same time"),
        (
            [0.0, *[10.0] * 500, 10.01],
            {"rate_rps": 1.0},
            r"choose another serving\.rate_rps or serving\.trace_offset_s, or a trace",
        ),
    ],
)
def test_a_trace_that_is_of_no_use_is_refused_in_one_line(tmp_path, times_s, changes, complaint):
    config = attrs.evolve(CONFIG, trace=trace_of(tmp_path, times_s), **changes)
    with pytest.raises(ConfigError, match=complaint) as caught:
        plan_serving(config, num_engines=1, duration_s=60.0, seed=0)
    assert "\n" not in str(caught.value)


def test_a_bad_row_is_named(tmp_path):
    path = Path(trace_of(tmp_path, [1.0, 2.0]))
    path.write_text(path.read_text() + "3,many,5\n")
    with pytest.raises(ConfigError, match="line 4: input_tokens is 'many'"):
        ServingPlan.of(attrs.evolve(CONFIG, trace=str(path)), duration_s=60.0, seed=0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"profile": "h100:gpt"}, r"^serving\.profile: unknown device profile 'h100:gpt'; known are"),
        ({"operators": "/nowhere.csv"}, r"^serving\.operators: operators /nowhere\.csv: cannot be read"),
    ],
)
def test_a_profile_of_no_use_is_refused_with_its_key(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ServingPlan.of(attrs.evolve(CONFIG, **changes), duration_s=60.0, seed=0)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_plan_needs_a_duration(duration_s):
    with pytest.raises(ConfigError, match="the duration must be positive"):
        ServingPlan.of(CONFIG, duration_s=duration_s, seed=0)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not beside this checkout")
def test_measured_operators_change_the_profile_and_with_it_the_rate():
    config = attrs.evolve(CONFIG, operators=str(SHARED / "vidur_h100_llama2_7b_mlp.csv.gz"))
    measured = serving_profile(config)
    assert attrs.evolve(measured, linear_table=None) == serving_profile(CONFIG)
    rate = ServingPlan.of(config, duration_s=60.0, seed=0).rate_rps
    assert 1.02 < rate / ServingPlan.of(CONFIG, duration_s=60.0, seed=0).rate_rps < 1.1


@settings(max_examples=50)
@given(
    gaps_s=st.lists(st.floats(0.01, 50.0), min_size=20, max_size=60),
    share=st.floats(0, 0.999),
    rate_rps=st.floats(0.05, 20.0),
    duration_s=st.floats(1.0, 100.0),
)
def test_a_window_goes_round_in_order_at_the_wanted_rate(gaps_s, share, rate_rps, duration_s):
    times_s = [sum(gaps_s[:index]) for index in range(len(gaps_s) + 1)]
    arrivals = tuple(Arrival(at_s, index + 1, 1) for index, at_s in enumerate(times_s))
    tape = Tape(arrivals=arrivals, name="trace t")
    window = tape.window(share * tape.span_s, rate_rps, duration_s=duration_s, calibration_s=duration_s)
    times = [arrival.at_s for arrival in window]
    numbers = [arrival.prompt_tokens for arrival in window]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] < duration_s
    assert all((after - before) % len(arrivals) == 1 for before, after in itertools.pairwise(numbers))
    num_calibrated = max(20, round(rate_rps * duration_s))
    if len(window) > num_calibrated:
        assert times[num_calibrated] == pytest.approx(num_calibrated / rate_rps)
    else:
        assert num_calibrated / rate_rps >= duration_s * (1 - 1e-9)
