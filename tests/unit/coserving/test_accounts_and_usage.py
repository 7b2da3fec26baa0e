"""What serving knows of its requests, and the means that it publishes."""

from __future__ import annotations

import itertools
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.coserving.serving_accounts import ServiceCounters, ServingAccounts
from rose.coserving.usage import UsageMeter
from rose.policies.admission import Slo

SLO = Slo(ttft_s=0.5, tpot_s=0.1)


@given(
    plans=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=6
    ),  # arrives before step, steps until its first token, tokens
    steps=st.lists(st.floats(0.01, 0.4), min_size=24, max_size=24),
)
def test_counters_equal_those_of_an_onlooker(plans: list[tuple[int, int, int]], steps: list[float]) -> None:
    """Every request is counted once, with its TTFT, its gaps and its mean pace, whatever order they come and go in."""
    ends = [sum(steps[: i + 1]) for i in range(len(steps))]
    accounts = ServingAccounts()
    for i, end_s in enumerate(ends):
        for n, (arrives, _, _) in enumerate(plans):
            if arrives == i:
                accounts.note_prompt(str(n), end_s - steps[i], math.inf, SLO)
        here = [(str(n), i - a - w, count) for n, (a, w, count) in enumerate(plans) if a <= i]
        waiting = [name for name, made, _ in here if made < 0]
        decoding = [(name, made + 1) for name, made, count in here if 0 <= made < count - 1]
        accounts.follow(waiting, decoding, ended_s=end_s, own_s=end_s, default=SLO)
    expected = ServiceCounters()
    for arrives, waits, count in plans:
        times = ends[arrives + waits : arrives + waits + count]
        ttft_s = times[0] - (ends[arrives] - steps[arrives])
        gaps = [b - a for a, b in itertools.pairwise(times)]
        expected.num_requests += 1
        expected.num_tokens += count
        expected.num_gaps_broken += sum(gap > SLO.tpot_s for gap in gaps)
        over_s = [ttft_s - SLO.ttft_s, *(gap - SLO.tpot_s for gap in gaps)]
        expected.debt_s += sum(max(0.0, each) for each in over_s)
        is_slow = bool(gaps) and times[-1] - times[0] > SLO.tpot_s * len(gaps)
        expected.num_broken += ttft_s > SLO.ttft_s or is_slow
    seen = accounts.counters
    assert seen.debt_s == pytest.approx(expected.debt_s, abs=1e-9)
    seen.debt_s = expected.debt_s
    assert seen.num_broken == pytest.approx(expected.num_broken, abs=0)
    for name in ("num_requests", "num_tokens", "num_gaps_broken"):
        assert getattr(seen, name) == getattr(expected, name), name


def test_own_time_is_what_serving_spent_since_the_first_token() -> None:
    accounts = ServingAccounts()
    accounts.note_prompt("a", 1.0, 1.4, SLO)
    assert (accounts.oldest_arrival_s, accounts.first_token_deadline_s) == (1.0, 1.4)
    accounts.follow([], [("a", 1)], ended_s=2.0, own_s=0.7, default=SLO)
    accounts.follow([], [("a", 4)], ended_s=9.0, own_s=0.9, default=SLO)
    (decoding,) = accounts.decoding(["a"], 0.9)
    assert decoding == (2.0, 4, pytest.approx(0.2), SLO)


def test_a_preempted_request_keeps_its_account() -> None:
    accounts = ServingAccounts()
    accounts.follow([], [("a", 1)], ended_s=1.0, own_s=0.0, default=SLO)
    accounts.follow(["a"], [], ended_s=2.0, own_s=0.0, default=SLO)
    accounts.follow([], [("a", 2)], ended_s=3.0, own_s=0.0, default=SLO)
    assert accounts.counters.num_requests == 1
    assert next(accounts.decoding(["a"], 0.0)).first_token_s == 1.0


def test_usage_is_a_mean_over_the_window() -> None:
    """Half busy for long gives half; a rollout engine that starts anew is no negative use."""
    meter, counters = UsageMeter(2.0, os.getpid()), ServiceCounters()
    rollout_s = 100.0
    for i in range(200):
        meter.note_step(0.05)
        rollout_s += 0.02
        if i == 150:
            rollout_s = 0.0
        usage = meter.read(i * 0.1, rollout_s, counters)
    assert usage.busy_fraction == pytest.approx(0.5, abs=0.01)
    assert usage.rollout_fraction == pytest.approx(0.2, abs=0.02)


def test_the_kv_peak_slides_and_misses_nothing() -> None:
    """A peak between two readings counts; after the window it is forgotten."""
    meter, counters = UsageMeter(1.0, os.getpid()), ServiceCounters()
    meter.note_kv(0.9)
    meter.note_kv(0.1)
    peaks = [meter.read(i * 0.25, None, counters).kv_peak_fraction for i in range(8)]
    assert peaks[:4] == [0.9] * 4
    assert peaks[5:] == [0.1] * 3
    assert meter.read(9.0, None, counters).kv_mean_fraction == pytest.approx(0.1, abs=0.01)


def test_a_counter_that_could_not_be_read_is_no_use() -> None:
    meter, counters = UsageMeter(1.0, os.getpid()), ServiceCounters()
    readings = [None, 100.0, None, 100.0, None, 100.05]
    fractions = [meter.read(i * 0.1, rollout_s, counters).rollout_fraction for i, rollout_s in enumerate(readings)]
    assert fractions[:5] == [0.0] * 5
    assert 0.0 < fractions[5] < 0.06


def test_a_prompt_computed_elsewhere_counts_from_when_it_is_here() -> None:
    """Its transfer is no wait for the first token."""
    accounts = ServingAccounts()
    for name in ("a", "b"):
        accounts.note_prompt(name, 1.0, 1.4, SLO)
    accounts.follow(["a", "b"], [], ended_s=0.0, own_s=0.0, default=SLO)
    accounts.restart("a", 3.0)
    accounts.restart("gone", 3.0)
    accounts.follow(["b"], [("a", 1)], ended_s=3.4, own_s=0.0, default=SLO)
    assert (accounts.counters.num_requests, accounts.counters.num_broken) == (1, 0)
