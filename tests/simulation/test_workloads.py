from __future__ import annotations

import statistics

import pytest

from rose.errors import ConfigError
from rose.simulation.traces import Arrival
from rose.simulation.workloads import clip_lengths, cut, generate_bursty, peak_to_mean, scale_rate, split_devices

EVEN = tuple(Arrival(i * 0.5, 100 + i, 10) for i in range(200))  # 2 req/s for 100 s


def test_a_cut_is_half_open_and_starts_at_zero():
    part = cut(EVEN, offset_s=10.0, duration_s=2.0)
    assert part == (Arrival(0.0, 120, 10), Arrival(0.5, 121, 10), Arrival(1.0, 122, 10), Arrival(1.5, 123, 10))
    assert cut(EVEN, offset_s=1000.0, duration_s=1.0) == ()


def test_thinning_keeps_times_and_hits_the_rate():
    thin = scale_rate(EVEN, 0.5, duration_s=100.0, seed=3)
    assert len(thin) == 50
    assert set(thin) <= set(EVEN)
    assert list(thin) == sorted(thin, key=lambda arrival: arrival.at_s)
    assert thin == scale_rate(EVEN, 0.5, duration_s=100.0, seed=3)
    assert thin != scale_rate(EVEN, 0.5, duration_s=100.0, seed=4)


def test_thinning_cannot_raise_the_rate():
    with pytest.raises(ConfigError, match=r"2.00 req/s, thinning cannot raise it to 3"):
        scale_rate(EVEN, 3.0, duration_s=100.0)


def test_stretching_keeps_every_request():
    fast = scale_rate(EVEN, 4.0, duration_s=100.0, method="stretch")
    assert len(fast) == len(EVEN)
    assert fast[-1].at_s == pytest.approx(EVEN[-1].at_s / 2)
    assert [arrival.prompt_tokens for arrival in fast] == [arrival.prompt_tokens for arrival in EVEN]


@pytest.mark.parametrize(("arrivals", "rate", "duration"), [((), 1.0, 1.0), (EVEN, 0.0, 1.0), (EVEN, 1.0, 0.0)])
def test_nothing_to_scale_is_refused(arrivals, rate, duration):
    with pytest.raises(ConfigError, match="cannot scale"):
        scale_rate(arrivals, rate, duration_s=duration)


def test_clipping_shortens_and_drops_none():
    clipped = clip_lengths((Arrival(0, 50, 5), Arrival(1, 5, 50)), max_prompt_tokens=10, max_output_tokens=20)
    assert clipped == (Arrival(0, 10, 5), Arrival(1, 5, 20))


def test_a_split_is_whole_even_and_repeatable():
    shares = split_devices(EVEN, 4, seed=1)
    assert shares == split_devices(EVEN, 4, seed=1)
    assert sorted(sum(shares, ()), key=lambda arrival: arrival.at_s) == list(EVEN)
    assert all(30 <= len(share) <= 70 for share in shares)


def test_peak_to_mean_counts_windows_from_zero():
    arrivals = (Arrival(0.1, 1, 1), Arrival(0.2, 1, 1), Arrival(0.9, 1, 1), Arrival(3.5, 1, 1))
    assert peak_to_mean(arrivals, 1.0) == 3.0
    assert peak_to_mean(arrivals, 4.0) == 1.0
    assert peak_to_mean(arrivals, 1.0, duration_s=8.0) == 6.0


@pytest.mark.parametrize("rate_rps", [5.5, 20.0])
def test_a_generated_day_has_the_wanted_bursts_and_lengths(rate_rps: float):
    day = generate_bursty(rate_rps, 86_400.0, seed=1)
    assert len(day) / 86_400 == pytest.approx(rate_rps, rel=0.01)
    assert 3.7 <= peak_to_mean(day, 1.0, duration_s=86_400.0) <= 4.8
    assert 1.55 <= peak_to_mean(day, 60.0, duration_s=86_400.0) <= 1.85
    assert statistics.fmean(arrival.prompt_tokens for arrival in day) == pytest.approx(1155, rel=0.02)
    assert statistics.fmean(arrival.output_tokens for arrival in day) == pytest.approx(211, rel=0.02)


def test_generated_loads_are_sorted_repeatable_and_inside_their_time():
    load = generate_bursty(5.5, 90.5, seed=7)
    assert load == generate_bursty(5.5, 90.5, seed=7)
    assert load != generate_bursty(5.5, 90.5, seed=8)
    times = [arrival.at_s for arrival in load]
    assert times == sorted(times)
    assert 0 <= times[0]
    assert times[-1] < 90.5
    assert len(load) / 90.5 == pytest.approx(5.5, rel=0.25)


@pytest.mark.parametrize(("rate", "duration"), [(0.0, 10.0), (1.0, 0.0), (1.0, float("inf"))])
def test_a_generated_load_needs_rate_and_duration(rate: float, duration: float):
    with pytest.raises(ConfigError, match="positive rate and duration"):
        generate_bursty(rate, duration, seed=0)
