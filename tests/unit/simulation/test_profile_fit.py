from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.backends.paced import profile_named
from rose.backends.paced.linear_table import LinearTable
from rose.interfaces.device import StepWork
from rose.simulation.profile_fit import StepScale, TimedStep, fit_profile, scaled_profile

PROFILE = profile_named("h100:qwen2.5-7b")


def some_work(num_steps: int, *, seed: int = 0, has_prompts: bool = True) -> list[StepWork]:
    rng = random.Random(seed)
    works = []
    for _ in range(num_steps):
        decodes = rng.randint(1, 60)
        chunk = rng.choice([0, 0, rng.randint(50, 2000)]) if has_prompts else 0
        works.append(StepWork(chunk, decodes, decodes * rng.randint(200, 4000), chunk * chunk / 2))
    return works


def timed(profile_scale: StepScale, works: list[StepWork]) -> list[TimedStep]:
    truth = scaled_profile(PROFILE, profile_scale)
    return [TimedStep(work, truth.step_s(work)) for work in works]


@given(linear=st.floats(0.7, 1.4), kv=st.floats(0.7, 1.4), prefill=st.floats(0.7, 1.4))
def test_recovers_the_factors_that_steps_were_timed_with(linear: float, kv: float, prefill: float) -> None:
    fit = fit_profile(PROFILE, timed(StepScale(linear=linear, kv=kv, prefill=prefill), some_work(300)))

    assert fit.scale.linear == pytest.approx(linear, rel=0.01)
    assert fit.scale.kv == pytest.approx(kv, rel=0.05)
    assert fit.error_p99 < 0.01
    assert fit.error_mean <= fit.nominal_error_mean + 1e-9


@given(scale=st.builds(StepScale, linear=st.floats(0.5, 2), kv=st.floats(0.5, 2), prefill=st.floats(0.5, 2)))
def test_scaling_multiplies_each_term_by_its_own_factor(scale: StepScale) -> None:
    bare, scaled = PROFILE, scaled_profile(PROFILE, scale)
    launch_s = PROFILE.gpu.launch_s
    one, context, positions = StepWork(0, 1), StepWork(0, 1, 5000), StepWork(0, 1, 0, 1e7)

    linear_s = bare.step_s(one) - launch_s
    assert scaled.step_s(one) - launch_s == pytest.approx(scale.linear * linear_s)
    assert scaled.step_s(context) - scaled.step_s(one) == pytest.approx(
        scale.kv * (bare.step_s(context) - bare.step_s(one))
    )
    assert scaled.step_s(positions) - scaled.step_s(one) == pytest.approx(
        scale.prefill * (bare.step_s(positions) - bare.step_s(one))
    )
    assert scaled.kv_bytes_per_token == bare.kv_bytes_per_token


def test_scaling_multiplies_a_measured_curve_as_well() -> None:
    table = LinearTable(source="test", num_tokens=(1, 1000), seconds=(0.005, 0.02))
    profile = PROFILE.with_linear_table(table)

    scaled = scaled_profile(profile, StepScale(linear=1.5))

    assert scaled.linear_s(1) == pytest.approx(1.5 * 0.005)
    assert scaled.linear_s(1000) == pytest.approx(1.5 * 0.02)


def test_a_host_gap_replaces_the_profiles_own_only_when_given() -> None:
    assert scaled_profile(PROFILE, StepScale()).host_gap_s == PROFILE.host_gap_s
    assert scaled_profile(PROFILE, StepScale(host_gap_s=0.003)).host_gap_s == 0.003


def test_a_factor_of_which_the_steps_say_nothing_stays_at_one() -> None:
    fit = fit_profile(PROFILE, timed(StepScale(linear=1.2, kv=1.2), some_work(100, has_prompts=False)))

    assert fit.scale.prefill == pytest.approx(1.0, abs=1e-6)
    assert fit.prefill_ratio is None
    assert fit.decode_ratio == pytest.approx(1.2, rel=0.02)


def test_the_error_is_that_of_what_cannot_be_explained() -> None:
    steps = timed(StepScale(), some_work(200))
    noisy = [attrs.evolve(s, duration_s=s.duration_s * (1.1 if i % 2 else 0.9)) for i, s in enumerate(steps)]

    fit = fit_profile(PROFILE, noisy)

    assert fit.error_mean == pytest.approx(0.1, abs=0.02)
    assert fit.error_p99 == pytest.approx(0.11, abs=0.03)


@pytest.mark.parametrize("steps", [[], [TimedStep(StepWork(0, 1, 10), 0.0)]])
def test_refuses_steps_that_took_no_time(steps: list[TimedStep]) -> None:
    with pytest.raises(ValueError, match="steps that took time"):
        fit_profile(PROFILE, steps)
