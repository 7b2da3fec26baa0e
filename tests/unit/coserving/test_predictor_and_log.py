"""The step-time predictor and the step log."""

from __future__ import annotations

import math
import random

import pytest

from rose.coserving.predictor import PredictorConfig, StepPredictor
from rose.coserving.step_log import StepLog
from rose.interfaces.device import StepWork

DECODES = StepWork(num_decodes=16, context_tokens=200_000)


def test_it_learns_a_wrong_profile() -> None:
    predictor = StepPredictor()
    for _ in range(20):
        predictor.observe(DECODES, 0.010, 0.020)
    assert predictor.predict_s(DECODES, 0.010) == pytest.approx(0.020, rel=0.05)
    longer = StepWork(num_decodes=16, context_tokens=400_000)
    assert predictor.predict_s(longer, 0.016) == pytest.approx(0.032, rel=0.25)


def test_it_learns_wrong_proportions() -> None:
    """The guess knows nothing of contexts; the truth is all context."""
    predictor, rng = StepPredictor(), random.Random(3)
    works = [StepWork(num_decodes=4, context_tokens=rng.randint(10_000, 300_000)) for _ in range(400)]
    for work in works:
        predictor.observe(work, 0.002, 0.001 + work.context_tokens * 5e-8)
    for work in works[:20]:
        assert predictor.predict_s(work, 0.002) == pytest.approx(0.001 + work.context_tokens * 5e-8, rel=0.1)


def test_one_hiccup_moves_it_a_little() -> None:
    predictor = StepPredictor()
    for _ in range(100):
        predictor.observe(DECODES, 0.010, 0.010)
    predictor.observe(DECODES, 0.010, 10.0)
    assert predictor.predict_s(DECODES, 0.010) < 0.0115


def test_the_margin_comes_from_its_own_errors() -> None:
    calm, noisy = StepPredictor(), StepPredictor()
    assert calm.margin == PredictorConfig().initial_margin
    for i in range(256):
        calm.observe(DECODES, 0.010, 0.010)
        noisy.observe(DECODES, 0.010, 0.010 * (1.3 if i % 5 == 0 else 1.0))
    assert calm.margin == PredictorConfig().min_margin
    assert 0.15 < noisy.margin <= 0.35
    assert noisy.upper_s(DECODES, 0.010) >= 0.0125


def test_the_margin_is_bounded_and_nonsense_ignored() -> None:
    predictor = StepPredictor()
    for i in range(256):
        predictor.observe(DECODES, 0.010, 1.0 if i % 4 == 0 else 0.001)
        predictor.observe(DECODES, 0.0, 1.0)
        predictor.observe(DECODES, 1.0, -1.0)
        predictor.observe(DECODES, 1.0, math.inf)
    assert predictor.predict_s(DECODES, 0.0) == 0.0
    assert math.isfinite(predictor.predict_s(DECODES, 0.010))
    assert predictor.margin == PredictorConfig().max_margin


def turn(start_s: float, late_s: float, slip_s: float = 0.0) -> tuple[float, ...]:
    return (start_s, 0.010, late_s, slip_s, 0.001, 0, 4)


def test_a_calm_run_is_valid_and_a_late_one_is_not() -> None:
    log = StepLog()
    for i in range(100):
        log.append(turn(i, 0.0001))
    assert log.report().is_valid
    for i in range(5):
        log.append(turn(100 + i, 0.006))
    report = log.report()
    assert (report.is_valid, report.late_p99_s, report.median_step_s) == (False, 0.006, 0.010)
    assert report.device_s == pytest.approx(1.05)
    assert log.report(since_s=100).num_steps == 5


def test_lost_time_makes_a_run_invalid() -> None:
    log = StepLog()
    for i in range(100):
        log.append(turn(i, 0.0, slip_s=0.00011))
    assert log.report().rate_error == pytest.approx(0.011)
    assert not log.report().is_valid


def test_unwatched_ends_do_not_count_as_punctual() -> None:
    log = StepLog()
    for i in range(7):
        log.append(turn(i, math.nan))
    log.set_lateness(0.009)
    assert log.report().late_p50_s == 0.009


def test_the_log_is_bounded_and_empty_is_valid() -> None:
    log = StepLog(max_records=2)
    assert log.report().is_valid
    for i in range(3):
        log.append(turn(i, 0.0))
    assert (len(log), log.num_dropped) == (2, 1)
    assert log.records()[1].start_s == 1
    assert log.records()[1].num_decodes == 4
