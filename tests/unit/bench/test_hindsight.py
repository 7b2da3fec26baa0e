"""Replays of a serving device and the best schedule in hindsight."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rose.bench.coserve.hindsight import (
    KnownBudgets,
    LiveQuiet,
    Moment,
    Promise,
    QuietSetup,
    Replay,
    Rule,
    compare_quiet,
    find_hindsight,
    keeps_promise,
    merge_quiet,
    replay,
)
from rose.simulation.traces import Arrival

GAP_S = 0.001


@attrs.frozen
class PlainTimes:
    """8 ms a step, 0.1 ms a decoding request, 10 ms a thousand prompt tokens."""

    host_gap_s: float = GAP_S
    kv_bytes_per_token: int = 1

    def step_s(self, num_prefill: int, num_decodes: int, context_tokens: int, positions: float) -> float:
        del context_tokens, positions
        return 0.008 + 1e-4 * num_decodes + 1e-5 * num_prefill

    def growth_s(self, num_decodes: int) -> float:
        del num_decodes
        return 0.0


SETUP = QuietSetup(times=PlainTimes(), rollout_s=0.012, rollout_gap_s=0.0015)


class Always(Rule):
    def allows(self, moment: Moment) -> bool:
        del moment
        return True


class AtPlaces(Rule):
    """Makes a rollout step at the chosen ones of the places where it is asked for the first time after a serving step."""

    def __init__(self, places: Sequence[bool]) -> None:
        self.places = list(places)
        self.last_own_s = -1.0

    def allows(self, moment: Moment) -> bool:
        if moment.own_s == self.last_own_s or not self.places:
            return False
        self.last_own_s = moment.own_s
        return self.places.pop(0)


def poisson(rate_rps: float, num: int, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    times = itertools.accumulate(rng.expovariate(rate_rps) for _ in range(num))
    return [Arrival(at_s, rng.randrange(50, 1500), 1 + int(rng.expovariate(1 / 80))) for at_s in times]


@pytest.fixture(scope="module")
def load() -> list[Arrival]:
    return poisson(4.0, 250, 1)


@pytest.fixture(scope="module")
def alone(load: list[Arrival]) -> Replay:
    return replay(SETUP, load, None)


def test_alone_a_request_takes_its_prefill_and_its_steps() -> None:
    run = replay(SETUP, [Arrival(1.0, 1000, 11)], None)
    assert run.ttft_s[0] == pytest.approx(0.018)
    assert run.tpot_s[0] == pytest.approx(0.0081 + GAP_S)
    assert run.own_s[0] == pytest.approx(10 * (0.0081 + GAP_S))
    assert (run.idle_s, run.share) == (1.0, 0.0)


def test_a_rollout_step_costs_what_it_takes_beyond_the_host_gap_and_one_goes_between_two_steps() -> None:
    run = replay(SETUP, [Arrival(0.0, 1000, 11)], Always())
    assert run.lent_s == pytest.approx(10 * 0.012)
    assert run.tpot_s[0] == pytest.approx(0.0081 + 0.012)
    assert run.own_s[0] == pytest.approx(10 * (0.0081 + GAP_S))


def test_an_idle_device_is_used_and_an_arrival_waits_for_the_rest_of_one_step() -> None:
    run = replay(SETUP, [Arrival(0.0, 100, 1), Arrival(1.0, 1000, 1)], Rule())
    assert run.idle_used_s == pytest.approx(run.idle_s)
    assert 0.018 <= run.ttft_s[1] <= 0.018 + SETUP.rollout_s


def test_nothing_is_lent_while_a_prompt_waits() -> None:
    run = replay(SETUP, [Arrival(0.0, 10_000, 1)], Always())
    assert run.lent_s == 0.0
    assert math.isnan(run.tpot_s[0])


@settings(max_examples=25, deadline=None)
@example(requests=[(3, 0.0223)])  # two steps take 0.022 s beyond the host gaps
@given(requests=st.lists(st.tuples(st.integers(2, 9), st.floats(0.0, 0.06)), min_size=1, max_size=4))
def test_the_greedy_schedule_lends_as_much_as_the_best_of_all(requests: list[tuple[int, float]]) -> None:
    arrivals = [Arrival(0.0, 10, num_tokens) for num_tokens, _ in requests]
    budgets_s = [budget_s for _, budget_s in requests]
    greedy = replay(SETUP, arrivals, KnownBudgets(budgets_s, host_gap_s=GAP_S))
    best = 0
    for places in itertools.product([False, True], repeat=max(num_tokens for num_tokens, _ in requests) - 1):
        if sum(places) > best:
            run = replay(SETUP, arrivals, AtPlaces(places))
            delays_s = [
                pace_s * (arrival.output_tokens - 1) - own_s
                for pace_s, arrival, own_s in zip(run.tpot_s, arrivals, run.own_s, strict=True)
            ]
            if all(delay_s <= budget_s + 1e-9 for delay_s, budget_s in zip(delays_s, budgets_s, strict=True)):
                best = sum(places)
    assert round(greedy.lent_s / SETUP.rollout_s) == best


def test_hindsight_keeps_the_promise_and_lends_more_than_idle_time(load: list[Arrival], alone: Replay) -> None:
    found = find_hindsight(SETUP, load, alone)
    assert keeps_promise(SETUP, alone, found)
    assert found.lent_s > 0.05 * found.span_s
    for q in (50, 75, 90, 99):
        assert found.tpot_at(q) <= 1.1 * alone.tpot_at(q) + 1e-4
    assert find_hindsight(SETUP, load, alone) == found


def test_a_promise_of_two_points_lends_no_less(load: list[Arrival], alone: Replay) -> None:
    assert find_hindsight(SETUP, load, alone, Promise.TWO_POINTS).share >= find_hindsight(SETUP, load, alone).share


def test_a_promise_that_is_broken_is_seen(alone: Replay) -> None:
    slower = attrs.evolve(alone, tpot_s=tuple(1.11 * pace_s for pace_s in alone.tpot_s))
    later = attrs.evolve(alone, ttft_s=tuple(0.5 + ttft_s for ttft_s in alone.ttft_s))
    assert keeps_promise(SETUP, alone, alone)
    assert not keeps_promise(SETUP, alone, slower)
    assert not keeps_promise(SETUP, alone, later)


def test_the_live_rule_is_near_hindsight_and_keeps_the_promise(load: list[Arrival], alone: Replay) -> None:
    quiet = replay(SETUP, load, LiveQuiet(0.1))
    assert quiet.share >= 0.8 * find_hindsight(SETUP, load, alone).share
    assert keeps_promise(SETUP, alone, quiet)
    assert quiet.idle_used_s >= 0.95 * quiet.idle_s


def test_figures_are_json_and_seeds_are_merged(load: list[Arrival]) -> None:
    row = compare_quiet(SETUP, load[:60])
    assert json.loads(json.dumps(row)) == row
    assert row["bound_share"] == pytest.approx(row["idle_fraction"] + (1 - row["idle_fraction"]) / 11)
    other = {**row, "quiet_share": row["quiet_share"] + 0.02}
    merged = merge_quiet([row, other])
    assert merged["quiet_share"] == pytest.approx(row["quiet_share"] + 0.01)
    assert merged["spread"]["max"]["quiet_share"] == other["quiet_share"]
    assert merged["growth"]["quiet"] == pytest.approx(row["growth"]["quiet"])
    assert merged["num_seeds"] == 2
