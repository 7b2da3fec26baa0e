"""Fitting a profile to steps that were timed: a factor for each term of the step's time. Pure.

A profile's step is launch + linear + context x KV + positions x prefill (+ collectives). The launch and the collectives are
kept, the other three get a factor each. A factor that the steps say nothing about (no prompts among them, all contexts
alike) stays at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rose import checks
from rose.backends.paced import Profile
from rose.interfaces.device import StepWork

_PULL_TO_ONE = 1e-7  # of the squared error: enough to hold a factor at 1 of which the steps say nothing
_LEAST_FACTOR = 1e-3
_NUM_TERMS = 3
_DIGITS = 4  # finer than any step is timed, and a profile that is right stays as it is

Array = np.ndarray[Any, np.dtype[np.float64]]


@attrs.frozen(kw_only=True)
class StepScale:
    """What a profile's terms are multiplied by. ``host_gap_s``: its host gap in place of the profile's, where one was measured."""

    linear: float = attrs.field(default=1.0, validator=checks.number(above=0))
    kv: float = attrs.field(default=1.0, validator=checks.number(above=0))
    prefill: float = attrs.field(default=1.0, validator=checks.number(above=0))
    host_gap_s: float | None = attrs.field(default=None, validator=checks.optional(checks.number(at_least=0)))


@attrs.frozen
class TimedStep:
    """What one step computed, and the seconds that it took."""

    work: StepWork
    duration_s: float


@attrs.frozen(kw_only=True)
class StepFit:
    """A profile fitted to timed steps.

    Attributes:
        scale: The factors.
        num_steps: Steps fitted to.
        error_mean, error_p99: Relative error of the fitted profile's step times, without sign.
        nominal_error_mean: The same mean of the profile as it was.
        decode_ratio, prefill_ratio: Time that steps without and with prompt tokens took over what the profile as it was says;
            ``None`` where there was none.
    """

    scale: StepScale
    num_steps: int
    error_mean: float
    error_p99: float
    nominal_error_mean: float
    decode_ratio: float | None
    prefill_ratio: float | None


def scaled_profile(profile: Profile, scale: StepScale) -> Profile:
    """Return the profile with its terms multiplied; KV bytes, which memory is counted in, stay as they are."""
    gpu = attrs.evolve(
        profile.gpu,
        bandwidth_bytes_per_s=profile.gpu.bandwidth_bytes_per_s / scale.kv,
        attention_efficiency=profile.gpu.attention_efficiency / scale.prefill,
    )
    table = profile.linear_table
    if table is not None:
        table = attrs.evolve(table, seconds=tuple(second * scale.linear for second in table.seconds))
    return attrs.evolve(
        profile,
        gpu=gpu,
        weight_bytes=profile.weight_bytes * scale.linear / scale.kv,
        num_params=profile.num_params * scale.linear,
        host_gap_s=profile.host_gap_s if scale.host_gap_s is None else scale.host_gap_s,
        linear_table=table,
    )


def fit_profile(profile: Profile, steps: Sequence[TimedStep]) -> StepFit:
    """Fit the profile's three factors to the steps by least squares of the relative error.

    Raises:
        ValueError: There is no step, or one that took no time.
    """
    if not steps or min(step.duration_s for step in steps) <= 0:
        message = f"a profile is fitted to steps that took time, got {len(steps)} of them"
        raise ValueError(message)
    durations = np.array([step.duration_s for step in steps])
    kept, terms = _terms(profile, steps)
    shares = terms / durations[:, None]
    factors = _solve(shares, 1 - kept / durations)
    scale = StepScale(linear=factors[0], kv=factors[1], prefill=factors[2])
    errors = np.abs((kept + terms @ np.array(factors)) / durations - 1)
    nominal = kept + terms.sum(axis=1)
    has_prompt = np.array([step.work.num_prefill_tokens > 0 for step in steps])
    return StepFit(
        scale=scale,
        num_steps=len(steps),
        error_mean=float(errors.mean()),
        error_p99=float(np.quantile(errors, 0.99)),
        nominal_error_mean=float(np.abs(nominal / durations - 1).mean()),
        decode_ratio=_ratio(durations[~has_prompt], nominal[~has_prompt]),
        prefill_ratio=_ratio(durations[has_prompt], nominal[has_prompt]),
    )


def _terms(profile: Profile, steps: Sequence[TimedStep]) -> tuple[Array, Array]:
    """Return what is kept of each step's nominal time, and its linear, KV and prefill terms in columns."""
    whole = np.array([profile.step_s(step.work) for step in steps])
    linear = np.array([profile.linear_s(step.work.num_decodes + step.work.num_prefill_tokens) for step in steps])
    bare = [attrs.evolve(step.work, context_tokens=0, prefill_positions=0.0) for step in steps]
    without_kv = np.array([profile.step_s(attrs.evolve(step.work, context_tokens=0)) for step in steps])
    without_both = np.array([profile.step_s(work) for work in bare])
    terms = np.stack([linear, whole - without_kv, without_kv - without_both], axis=1)
    return whole - terms.sum(axis=1), terms


def _solve(shares: Array, target: Array) -> tuple[float, float, float]:
    """Return the factors that make the shares of each step add up to ``target``, pulled to 1."""
    pull = np.sqrt(_PULL_TO_ONE * len(target)) * np.eye(_NUM_TERMS)
    stacked, wanted = np.vstack([shares, pull]), np.concatenate([target - shares.sum(axis=1), np.zeros(_NUM_TERMS)])
    factors = 1 + np.linalg.lstsq(stacked, wanted, rcond=None)[0]
    linear, kv, prefill = np.maximum(factors, _LEAST_FACTOR).round(_DIGITS).tolist()
    return linear, kv, prefill


def _ratio(durations: Array, nominal: Array) -> float | None:
    return float(durations.sum() / nominal.sum()) if len(durations) else None
