"""Loads of the co-serving bench: rates, bursts and lengths are what their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.backends.paced.profiles import profile_named
from rose.bench.coserve.cases import standard_workloads, workload_named
from rose.bench.coserve.workloads import BURST_FACTOR, CoserveWorkload, step_burst
from rose.errors import ConfigError
from rose.simulation.serving_load import LoadShape, capacity_rps
from rose.simulation.workloads import peak_to_mean

SERVING = "h100:qwen2.5-7b"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """200 s at 2 req/s, but 4 in the last 50 s; prompts name the second in which they come."""
    rows = [f"{at / 2},{1 + at // 2},10" for at in range(300)] + [
        f"{150 + at / 4},{151 + at // 4},10" for at in range(200)
    ]
    path = tmp_path / "own.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return str(path)


def rate_rps(load: CoserveWorkload, seconds: float = 40.0, seed: int = 0) -> float:
    return len(load.arrivals(duration_s=seconds, seed=seed, serving_profile=SERVING)) / seconds


def test_a_trace_is_thinned_or_stretched_to_the_wanted_rate(trace: str) -> None:
    own = CoserveWorkload(name="own", trace=trace)
    assert rate_rps(own, 200.0) == pytest.approx(2.5, rel=0.02)
    assert rate_rps(CoserveWorkload(name="own", trace=trace, rate_fraction=0.4), 200.0) == pytest.approx(1.0, rel=0.15)
    assert rate_rps(CoserveWorkload(name="own", trace=trace, rate_rps=10.0), 50.0) == pytest.approx(10.0, rel=0.05)


def test_windows_differ_by_seed_and_go_round(trace: str) -> None:
    load = CoserveWorkload(name="own", trace=trace)
    first, again, other = (load.arrivals(duration_s=30.0, seed=seed, serving_profile=SERVING) for seed in (0, 0, 1))
    assert first == again
    assert first[0].prompt_tokens != other[0].prompt_tokens
    for seed in range(8):
        taken = load.arrivals(duration_s=150.0, seed=seed, serving_profile=SERVING)
        times = [arrival.at_s for arrival in taken]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] < 150.0


def test_the_busiest_part_of_a_trace_is_found(trace: str) -> None:
    load = CoserveWorkload(name="own", trace=trace, busiest_s=50.0)
    taken = load.arrivals(duration_s=40.0, seed=3, serving_profile=SERVING)
    assert len(taken) == pytest.approx(156, abs=8)
    assert min(arrival.prompt_tokens for arrival in taken) >= 145


def test_a_load_is_a_share_of_what_a_device_serves() -> None:
    shape = LoadShape(prompt_tokens=1155.0, output_tokens=211.0)
    capacity = capacity_rps(profile_named(SERVING), shape)
    load = CoserveWorkload(name="burst-40", load_fraction=0.4)
    assert rate_rps(load, 600.0) == pytest.approx(0.4 * capacity, rel=0.05)


def test_a_burst_has_the_stated_peak_and_mean() -> None:
    arrivals = step_burst(40.0, 300.0, 5, factor=BURST_FACTOR)
    assert len(arrivals) == pytest.approx(12_000, rel=0.03)
    seconds = [0] * 300
    for arrival in arrivals:
        seconds[int(arrival.at_s)] += 1
    assert peak_to_mean(arrivals, 1.0, duration_s=300.0) == pytest.approx(BURST_FACTOR, rel=0.25)
    assert sum(count > 2.5 * 40 for count in seconds) == 10, "one burst every 30 s"


def test_loads_are_found_by_name_or_file(trace: str) -> None:
    assert workload_named("burst", None).trace is None
    assert {"azure", "azure-third", "servegen"} <= set(standard_workloads("somewhere"))
    assert workload_named(trace, None).trace == trace
    with pytest.raises(ConfigError, match=r"no load 'azure'.*burst.*give the folder of traces"):
        workload_named("azure", None)
