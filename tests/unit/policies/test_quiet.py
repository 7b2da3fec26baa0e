"""The quiet rule: what it allows, what it learns, and that nobody is ever later than allowed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.policies.admission import AdmissionConfig, Decoding, Mode, Slo, decode_deadline_s
from rose.policies.quiet import CREDIT_TOKENS, Allowance, OwnPaces, quiet_start_s

LONE_S, USUAL_S, STRETCH = 0.008, 0.010, 0.1

seconds = st.floats(min_value=0.0, max_value=100.0)
counts = st.integers(min_value=1, max_value=5000)


def learned(lone_s: float = LONE_S, usual_s: float = USUAL_S) -> OwnPaces:
    return OwnPaces(lone_s=lone_s, usual_s=usual_s, slow_s=0.015, short_tokens=5, usual_tokens=130)


def allowance_s(paces: OwnPaces, own_s: float, num_tokens: int) -> float:
    return Allowance.of(STRETCH, paces).at_s(own_s, num_tokens)


@given(own_s=seconds, more_s=seconds, num_tokens=counts, more_tokens=st.integers(min_value=0, max_value=100))
def test_an_allowance_never_falls_while_a_request_goes_on(
    own_s: float, more_s: float, num_tokens: int, more_tokens: int
) -> None:
    before_s = allowance_s(learned(), own_s, num_tokens)
    assert before_s <= allowance_s(learned(), own_s + more_s, num_tokens)
    assert before_s <= allowance_s(learned(), own_s, num_tokens + more_tokens)
    assert before_s >= own_s


@given(num_tokens=counts, pace_s=st.floats(min_value=LONE_S, max_value=0.1))
def test_a_request_is_stretched_by_no_more_than_it_was_promised_and_one_credit(num_tokens: int, pace_s: float) -> None:
    own_s = pace_s * num_tokens
    credit_s = STRETCH * LONE_S * CREDIT_TOKENS
    promised_s = (1 + STRETCH) * max(own_s, USUAL_S * num_tokens)
    assert allowance_s(learned(), own_s, num_tokens) <= promised_s + credit_s + 1e-9


def test_a_slow_request_earns_by_token_and_a_fast_one_may_take_the_usual_time() -> None:
    credit_s = STRETCH * LONE_S * CREDIT_TOKENS
    assert allowance_s(learned(), own_s=2.0, num_tokens=100) == pytest.approx(2.0 + 0.08 + credit_s)
    assert allowance_s(learned(), own_s=0.8, num_tokens=100) == pytest.approx(1.1 * 1.0 - LONE_S + credit_s)


def test_without_experience_nothing_is_lent() -> None:
    request = Decoding(5.0, 100, 1.0, Slo())
    assert quiet_start_s(STRETCH, OwnPaces(), [request]) == 6.0


def test_the_nearest_request_sets_the_time_and_nobody_sets_none() -> None:
    requests = [Decoding(1.0, 50, 0.6, Slo()), Decoding(1.3, 10, 0.1, Slo())]
    times_s = [quiet_start_s(STRETCH, learned(), [request]) for request in requests]
    assert quiet_start_s(STRETCH, learned(), requests) == min(times_s)
    assert quiet_start_s(STRETCH, learned(), []) == math.inf


def test_the_admission_policy_asks_this_rule_and_keeps_the_limits_of_slo_mode() -> None:
    config, paces = AdmissionConfig(quiet_stretch=STRETCH), learned()
    requests = [Decoding(10.0, 100, 1.0, Slo())]

    def deadline_s(mode: Mode, requests: list[Decoding]) -> float:
        return decode_deadline_s(config, mode, 0.05, 11.08, requests, next_decode_s=0.009, paces=paces)

    assert deadline_s(Mode.QUIET, requests) == pytest.approx(quiet_start_s(STRETCH, paces, requests) + 0.009)
    hasty = [Decoding(10.0, 100, 90.0, Slo())]  # its own time is beyond the SLO
    assert deadline_s(Mode.QUIET, hasty) == deadline_s(Mode.SLO, hasty)


@given(
    lives=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 80)), min_size=1, max_size=8),
    step_s=st.lists(st.floats(min_value=0.008, max_value=0.06), min_size=10, max_size=10),
    rollout_s=st.floats(min_value=0.001, max_value=0.02),
)
def test_a_rollout_step_that_keeps_its_time_makes_nobody_later_than_allowed(
    lives: list[tuple[int, int]], step_s: list[float], rollout_s: float
) -> None:
    now_s = own_s = 0.0
    open_since: dict[int, tuple[float, float]] = {}
    for step in range(140):
        for who, (begin, length) in enumerate(lives):
            if step == begin:
                open_since[who] = (now_s, own_s)
            if step == begin + length:
                open_since.pop(who, None)
        requests = [
            Decoding(first_s, step - lives[who][0] + 1, own_s - own_first_s, Slo())
            for who, (first_s, own_first_s) in open_since.items()
        ]
        if requests and now_s + rollout_s <= quiet_start_s(STRETCH, learned(), requests):
            now_s += rollout_s
            for request in requests:
                latest_s = allowance_s(learned(), request.own_s, request.num_tokens)
                assert now_s - request.first_token_s <= latest_s + 1e-9
        now_s += step_s[step % len(step_s)]
        own_s += step_s[step % len(step_s)]


@pytest.mark.parametrize("growing_share", [0.0, 0.2, 0.5])
def test_delays_that_feed_on_themselves_stretch_by_no_more_than_asked(growing_share: float) -> None:
    # fluid model: a token takes lone + growing_share * (time per token), rollouts add to it
    alone_s = LONE_S / (1 - growing_share)
    own_pace_s, delay_s, num_tokens = alone_s, 0.0, 100_000
    for _ in range(50):
        allowed_s = allowance_s(learned(usual_s=0.0), own_pace_s * num_tokens, num_tokens)
        delay_s = allowed_s / num_tokens - own_pace_s
        own_pace_s = LONE_S + growing_share * (own_pace_s + delay_s)
    assert (own_pace_s + delay_s) / alone_s == pytest.approx(1 + STRETCH, abs=1e-3)


@given(
    lone_s=st.floats(0.001, 0.02),
    growths=st.tuples(st.floats(1.0, 2.0), st.floats(1.0, 2.0)),
    lengths=st.tuples(st.integers(2, 500), st.integers(1, 10)),
)
def test_the_credit_is_what_short_answers_can_bear(
    lone_s: float, growths: tuple[float, float], lengths: tuple[int, int]
) -> None:
    usual_s, slow_s = lone_s * growths[0], lone_s * growths[0] * growths[1]
    short, usual = lengths[0], lengths[0] * lengths[1]
    paces = OwnPaces(lone_s=lone_s, usual_s=usual_s, slow_s=slow_s, short_tokens=short, usual_tokens=usual)
    credit_s = paces.credit_s(STRETCH)
    assert 0 < credit_s <= STRETCH * lone_s * CREDIT_TOKENS
    assert usual_s + credit_s / short <= (1 + STRETCH) * slow_s * (1 + 1e-9)
    assert credit_s / usual <= 0.2 * STRETCH * usual_s * (1 + 1e-9)


class TestOwnPaces:
    def test_it_learns_the_lone_and_the_usual_pace(self) -> None:
        paces = OwnPaces()
        for i in range(101):
            paces.observe(own_s=(0.008 + i * 0.0001) * 99, elapsed_s=(0.008 + i * 0.0001) * 99, num_tokens=100)
        assert paces.lone_s == pytest.approx(0.0081)
        assert paces.usual_s == pytest.approx(0.0115)

    def test_it_knows_nothing_from_a_few_or_from_answers_of_one_token(self) -> None:
        paces = OwnPaces()
        for _ in range(19):
            paces.observe(own_s=1.0, elapsed_s=1.0, num_tokens=100)
        for _ in range(100):
            paces.observe(own_s=0.0, elapsed_s=0.0, num_tokens=1)
        assert (paces.lone_s, paces.usual_s) == (0.0, 0.0)

    def test_it_takes_out_what_its_own_delays_added(self) -> None:
        growing_share, delay_s = 0.2, 0.001
        alone_s = LONE_S / (1 - growing_share)
        own_s = LONE_S + growing_share * (LONE_S + delay_s) / (1 - growing_share)
        paces = OwnPaces()
        for _ in range(40):
            paces.observe(own_s=LONE_S * 100, elapsed_s=LONE_S * 100, num_tokens=101)
        for _ in range(400):
            paces.observe(own_s=own_s * 100, elapsed_s=(own_s + delay_s) * 100, num_tokens=101)
        assert own_s > 1.02 * alone_s
        assert paces.usual_s == pytest.approx(alone_s, rel=0.005)

    @given(values=st.lists(st.floats(min_value=0.001, max_value=1.0), min_size=20, max_size=60))
    def test_its_figures_are_quantiles_of_what_it_saw(self, values: list[float]) -> None:
        paces = OwnPaces()
        for value in values:
            paces.observe(own_s=value, elapsed_s=value, num_tokens=2)
        assert paces.usual_s == sorted(values)[int(0.35 * len(values))]
        assert paces.lone_s == min(values)

    def test_it_forgets_what_is_long_ago(self) -> None:
        paces = OwnPaces()
        for own_s in [1.0] * 100 + [2.0] * 4096:
            paces.observe(own_s=own_s, elapsed_s=own_s, num_tokens=2)
        assert paces.lone_s == 2.0
