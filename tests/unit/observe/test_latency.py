from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.observe.latency import RequestRecord, Slo, paired_delay_ms, percentile, summarise

SLO = Slo(ttft_ms=500, tpot_ms=150)


def record(index=0, *, device="gpu0", arrived_s=10.0, times=(10.1, 10.2, 10.4)):
    return RequestRecord.from_token_times(index=index, device=device, arrived_s=arrived_s, token_times_s=times)


def test_a_record_has_first_token_gaps_and_their_mean():
    made = record()
    assert made.ttft_s == pytest.approx(0.1)
    assert made.gaps_s == pytest.approx((0.1, 0.2))
    assert made.tpot_s == pytest.approx(0.15)
    assert (made.num_tokens, made.finished_s) == (3, 10.4)


def test_tokens_of_one_chunk_have_a_gap_of_zero():
    assert record(times=(10.1, 10.1, 10.3)).gaps_s == pytest.approx((0.0, 0.2))


def test_one_token_has_no_tpot():
    made = record(times=(10.1,))
    assert made.tpot_s is None
    assert made.gaps_s == ()


@pytest.mark.parametrize("times", [(), (9.9,), (10.2, 10.1)])
def test_impossible_times_are_refused(times):
    with pytest.raises(ValueError, match="request 0 on gpu0"):
        record(times=times)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms"])
def test_an_slo_must_be_above_zero(name, bad):
    with pytest.raises(ConfigError, match=name):
        Slo(**{"ttft_ms": 500, "tpot_ms": 150, name: bad})


def test_percentiles_interpolate_linearly():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([10, 20], 90) == pytest.approx(19)
    assert percentile(range(101), 99) == 99
    assert percentile([7], 99) == 7
    assert percentile([], 50) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_rise_with_q_and_stay_inside(values, q, r):
    low, high = percentile(values, min(q, r)), percentile(values, max(q, r))
    tolerance = 1e-9 * max(values)
    assert min(values) - tolerance <= low <= high + tolerance <= max(values) + 2 * tolerance


def test_the_summary_separates_requests_from_tokens():
    slow_token = record(1, times=(10.1, *(10.1 + 0.01 * n for n in range(1, 100)), 11.6))
    summary = summarise([record(0, times=(10.1, 10.11, 10.12)), slow_token], SLO)
    assert summary.num_requests == 2
    assert summary.tpot_p99_ms < 20
    assert summary.itl_p99_ms > 9.9
    assert summary.violations_fraction == 0


def test_a_request_over_either_budget_is_a_violation_once():
    late = record(0, times=(10.6, 10.61))
    slow = record(1, times=(10.1, 10.3))
    both = record(2, times=(10.6, 10.8))
    exactly = record(3, arrived_s=0.0, times=(0.5, 0.625))
    summary = summarise([late, slow, both, exactly], Slo(ttft_ms=500, tpot_ms=125))
    assert summary.violations_fraction == 0.75


def test_unanswered_requests_count_as_requests_and_violations():
    summary = summarise([record(times=(10.1, 10.2))], SLO, num_unanswered=3)
    assert summary.num_requests == 4
    assert summary.violations_fraction == 0.75


def test_nothing_measured_is_none_and_not_zero():
    summary = summarise([], SLO)
    assert summary.ttft_p99_ms is None
    assert summary.violations_fraction == 0
    assert summary.as_dict()["requests"] == 0


def test_pairs_are_by_device_and_index_whatever_the_order():
    alone = [record(i, device=device, times=(10.1, 10.2)) for device in ("a", "b") for i in range(20)]
    shared = [
        record(i, device=device, times=(10.1 + (0.008 if device == "a" else 0.012), 10.3))
        for device in ("a", "b")
        for i in range(20)
    ]
    random.Random(1).shuffle(shared)
    delay = paired_delay_ms(alone, shared)
    assert delay.mean_ms == pytest.approx(10)
    assert delay.num_pairs == 40
    assert delay.standard_error_ms == pytest.approx(2 / 39**0.5)


def test_requests_of_one_arm_only_are_left_out_of_the_pairs():
    delay = paired_delay_ms([record(0), record(1)], [record(1, times=(10.2,)), record(2)])
    assert (delay.num_pairs, delay.standard_error_ms) == (1, None)
    assert delay.mean_ms == pytest.approx(100)


def test_arms_without_a_common_request_cannot_be_paired():
    with pytest.raises(ValueError, match="no request is in both arms"):
        paired_delay_ms([record(0)], [record(0, device="other")])


def test_a_request_recorded_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        paired_delay_ms([record(0), record(0)], [record(0)])
