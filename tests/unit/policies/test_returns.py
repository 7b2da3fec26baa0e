from __future__ import annotations

import pytest

from rose.policies.returns import ReturnModel

PREFILL_S = 0.001


def after(num: int, pause_s: float, num_context_tokens: int = 1000, *, model: ReturnModel | None = None) -> ReturnModel:
    model = model or ReturnModel()
    for _ in range(num):
        model.observe(pause_s, num_context_tokens, PREFILL_S)
    return model


def test_nothing_is_kept_before_a_trajectory_came_back():
    assert not ReturnModel().is_worth_it
    assert ReturnModel().seat_s == 1.5


def test_a_seat_is_kept_while_a_pause_is_shorter_than_computing_the_context_anew():
    assert after(1, 0.5).is_worth_it
    assert not after(200, 2.0).is_worth_it
    assert not after(9, 2.0).is_worth_it, "learned within a few"
    assert not after(200, 0.5, num_context_tokens=100).is_worth_it
    assert after(200, 0.05, num_context_tokens=100).is_worth_it


def test_once_kept_it_takes_clearly_longer_pauses_to_end_that():
    model = after(300, 0.5)
    assert after(300, 1.4, model=model).is_worth_it
    assert not after(300, 1.6, model=model).is_worth_it
    assert not after(300, 1.1, model=model).is_worth_it


def test_seats_are_not_kept_where_most_trajectories_do_not_come_back():
    model = after(100, 0.1)
    for _ in range(40):
        model.observe_absence()
    assert not model.is_worth_it
    assert not after(20, 0.1, model=model).is_worth_it, "half came back"
    assert after(50, 0.1, model=model).is_worth_it


def test_a_trajectory_that_comes_back_late_tells_the_pause_but_not_that_they_come_in_time():
    model = ReturnModel()
    for _ in range(100):
        model.observe_absence()
        model.observe(4.0, 10_000, PREFILL_S, is_expected=False)
    assert model.seat_s == pytest.approx(12.0, rel=0.05)
    assert not model.is_worth_it
    assert after(60, 4.0, 10_000, model=model).is_worth_it


def test_one_endless_pause_does_not_count_as_the_usual_one():
    model = after(100, 0.1)
    model.observe(3600.0, 1000, PREFILL_S, is_expected=False)
    assert model.seat_s < 0.4


def test_the_pause_is_learned():
    model = after(500, 0.02)
    assert model.seat_s == pytest.approx(0.06, rel=0.02)
    assert model.context_tokens == pytest.approx(1000)


def test_environments_that_take_no_time_leave_a_seat_long_enough_to_be_looked_for_and_longer_ones_are_learned_soon():
    model = after(50_000, 0.0)
    assert model.seat_s == pytest.approx(0.03)
    assert after(100, 1.0, model=model).seat_s > 1.5
