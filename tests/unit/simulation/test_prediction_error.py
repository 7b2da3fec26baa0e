from __future__ import annotations

import math

import attrs
import pytest
from run_standins import alone_run, policy_run, small_record

from rose.simulation.prediction_error import (
    Comparison,
    check_orders,
    compare,
    measured_figures,
    predicted_figures,
)
from rose.simulation.profile_fit import StepScale
from rose.simulation.run_replay import RunPrediction
from rose.simulation.serving_site import Answer

RECORD = small_record()
SLO = policy_run(RECORD, "slo", ttft_s=0.05, rollout_s=20.0)


def comparison(arm: str, low: float, high: float, predicted: float, figure: str = "rollout_s") -> Comparison:
    return Comparison(
        arm=arm,
        figure=figure,
        measured=(low + high) / 2,
        measured_low=low,
        measured_high=high,
        predicted=predicted,
        tolerance=0.15,
    )


def test_a_live_runs_figures_count_borrowed_tokens_apart() -> None:
    figures = measured_figures(RECORD, SLO)

    assert figures["ttft_p50_ms"] == pytest.approx(50)
    assert figures["tpot_p90_ms"] == pytest.approx(25)
    assert figures["rollout_s"] == 20
    assert (figures["window_tokens"], figures["borrowed_tokens"]) == (20, 8)


def test_tokens_are_counted_as_modelled_ones() -> None:
    figures = measured_figures(attrs.evolve(RECORD, tokens_per_token=4), SLO)

    assert (figures["window_tokens"], figures["borrowed_tokens"]) == (80, 32)


def test_serving_alone_has_no_rollout_figures() -> None:
    run, _ = alone_run(RECORD, scale=StepScale(), overhead_s=0.0)

    assert "rollout_s" not in measured_figures(RECORD, run)


def test_a_request_of_one_token_has_a_ttft_and_no_tpot() -> None:
    requests = (Answer(0.0, 0.1, None), Answer(1.0, 0.3, 0.02))
    prediction = RunPrediction(requests=requests, rollout_s=None, num_tokens=0, borrowed_tokens=0, window_tokens=0)

    figures = predicted_figures(prediction)

    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert figures["tpot_p50_ms"] == pytest.approx(20)


def test_errors_are_of_the_means_and_have_their_sign() -> None:
    [ttft, rollout] = compare(
        "slo",
        [{"ttft_p50_ms": 40.0, "rollout_s": 20.0}, {"ttft_p50_ms": 60.0, "rollout_s": 20.0}],
        [{"ttft_p50_ms": 40.0, "rollout_s": 25.0}],
    )

    assert (ttft.measured, ttft.measured_low, ttft.measured_high) == (50, 40, 60)
    assert ttft.error == pytest.approx(-0.2)
    assert rollout.error == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("arm", "error", "within"),
    [("alone", 0.04, True), ("alone", 0.06, False), ("slo", 0.14, True), ("slo", 0.16, False)],
)
def test_serving_alone_is_held_to_five_percent_and_policies_to_fifteen(arm: str, error: float, within: object) -> None:
    [result] = compare(arm, [{"ttft_p90_ms": 100.0}], [{"ttft_p90_ms": 100.0 * (1 - error)}])

    assert result.is_within is within


def test_the_p99_is_shown_and_not_judged() -> None:
    [result] = compare("slo", [{"ttft_p99_ms": 100.0}], [{"ttft_p99_ms": 300.0}])

    assert result.is_within is None


def test_what_one_side_lacks_is_left_out() -> None:
    assert compare("slo", [{"tpot_p50_ms": None}], [{"tpot_p50_ms": 3.0}]) == []
    assert compare("slo", [{"tpot_p50_ms": 3.0}], []) == []


def test_nothing_where_nothing_was_is_no_error() -> None:
    figures = {"borrowed_tokens": 0.0}

    assert compare("slo", [figures], [figures])[0].error == 0
    assert compare("slo", [figures], [{"borrowed_tokens": 1.0}])[0].error == math.inf


def test_the_order_is_judged_where_it_was_measured() -> None:
    [order] = check_orders(
        [comparison("ungated", 10, 12, 14), comparison("paper", 11, 13, 11), comparison("slo", 20, 21, 22)]
    )

    assert order.measured == ("ungated", "paper", "slo")
    assert order.predicted == ("paper", "ungated", "slo")
    assert order.tied == (("ungated", "paper"),)
    assert order.is_same


@pytest.mark.parametrize("predicted", [9.0, 14.0])
def test_an_order_that_was_measured_must_be_predicted(predicted: float) -> None:
    [order] = check_orders([comparison("ungated", 10, 12, 14), comparison("slo", 20, 21, predicted)])

    assert order.wrong == (("ungated", "slo"),)
    assert not order.is_same


def test_only_judged_figures_of_several_policies_are_put_in_order() -> None:
    lone = comparison("slo", 1, 1, 1, figure="ttft_p50_ms")
    shown = attrs.evolve(comparison("slo", 1, 1, 1, figure="ttft_p99_ms"), tolerance=None)
    alone = comparison("alone", 1, 1, 1, figure="ttft_p50_ms")

    assert check_orders([lone, alone, shown, attrs.evolve(shown, arm="paper")]) == []
