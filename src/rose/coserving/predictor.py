"""Predicting the next step's time: a device's guess, corrected by what its steps really took, plus a margin from its own errors.

Pure state: no clock, no I/O. Feed it the work, the guess and the truth of each step.

A step's time is fitted as a sum of terms in the guess, the step itself, its prompt tokens, its decodes, their context and the positions that
the prompt attends to. It starts from "the guess is right" and moves, by recursive least squares over relative errors, as far
as the steps say: a guess that is off by a factor is corrected within a few steps, one with wrong proportions a little later.

Invariants: a prediction is positive and finite; one hiccup moves it by a bounded amount; the margin is a quantile of
the predictor's own recent errors, within bounds.
"""

from __future__ import annotations

import math
from collections import deque

import attrs
from attrs import validators as v

from rose.interfaces.device import StepWork

_RESORT_EVERY = 16
_MIN_SHARE, _MAX_SHARE = 0.05, 20.0
_SMALLEST_ERROR, _LARGEST_ERROR = -0.5, 1.0
# What a step, a prompt token, a decode, a token of context and a position roughly take, in seconds: the units of the fit.
_UNITS_S = (2e-3, 2e-5, 1e-4, 5e-8, 1e-9)
_GUESS_VARIANCE, _TERM_VARIANCE, _MOST_VARIANCE = 0.5, 0.05, 4.0


@attrs.frozen(kw_only=True)
class PredictorConfig:
    """How the predictor learns.

    Attributes:
        forgetting: Weight of a step relative to the one after it; 0.99 remembers some hundred steps.
        error_quantile: The margin covers this share of the recent relative errors.
        window: How many recent errors count.
        min_margin: The margin never falls below this.
        initial_margin: Used until a quarter of the window is filled.
        max_margin: Nor above this, so that one hiccup does not stop lending.
    """

    forgetting: float = attrs.field(default=0.99, validator=[v.gt(0), v.le(1)])
    error_quantile: float = attrs.field(default=0.95, validator=[v.gt(0), v.le(1)])
    window: int = attrs.field(default=128, validator=v.ge(4))
    min_margin: float = attrs.field(default=0.05, validator=v.ge(0))
    initial_margin: float = attrs.field(default=0.08, validator=v.ge(0))
    max_margin: float = attrs.field(default=0.5, validator=v.ge(0))


class StepPredictor:
    """Corrects guesses of step times by what steps really took."""

    def __init__(self, config: PredictorConfig | None = None) -> None:
        """Start with the guess taken at face value and the initial margin."""
        self._config = config or PredictorConfig()
        self._errors: deque[float] = deque(maxlen=self._config.window)
        self._num_seen = 0
        self._margin = self._config.initial_margin
        size = 1 + len(_UNITS_S)
        self._weights = [1.0] + [0.0] * len(_UNITS_S)
        variances = [_GUESS_VARIANCE] + [_TERM_VARIANCE] * len(_UNITS_S)
        self._covariance = [[variances[i] if i == j else 0.0 for j in range(size)] for i in range(size)]

    @property
    def margin(self) -> float:
        """Relative margin in force."""
        return self._margin

    def predict_s(self, work: StepWork, guess_s: float) -> float:
        """Return the expected time of a step; ``guess_s`` is the device's own guess, 0 for a step of nothing."""
        return guess_s * self._share(_terms(work, guess_s)) if guess_s > 0 else 0.0

    def upper_s(self, work: StepWork, guess_s: float) -> float:
        """Return a time that the step exceeds only rarely."""
        return self.predict_s(work, guess_s) * (1 + self._margin)

    def observe(self, work: StepWork, guess_s: float, actual_s: float) -> None:
        """Learn from one finished step. Steps without a positive guess and truth are ignored."""
        if not (guess_s > 0 and actual_s > 0 and math.isfinite(actual_s)):
            return
        terms = _terms(work, guess_s)
        share = self._share(terms)
        error = actual_s / (guess_s * share) - 1
        self._errors.append(error)
        self._learn(terms, share * min(_LARGEST_ERROR, max(_SMALLEST_ERROR, error)))
        self._num_seen += 1
        if self._num_seen % _RESORT_EVERY == 0 and len(self._errors) * 4 >= self._config.window:
            ranked = sorted(self._errors)
            at = min(len(ranked) - 1, math.ceil(self._config.error_quantile * len(ranked)) - 1)
            self._margin = min(self._config.max_margin, max(self._config.min_margin, ranked[at]))

    def _share(self, terms: tuple[float, ...]) -> float:
        """Return the predicted time as a multiple of the guess."""
        share = sum(weight * term for weight, term in zip(self._weights, terms, strict=True))
        return min(_MAX_SHARE, max(_MIN_SHARE, share))

    def _learn(self, terms: tuple[float, ...], innovation: float) -> None:
        """Make one step of recursive least squares; directions that nothing is seen of do not become ever more uncertain."""
        covariance = self._covariance
        reach = [sum(c * term for c, term in zip(row, terms, strict=True)) for row in covariance]
        forgetting = self._config.forgetting
        scale = forgetting + sum(r * term for r, term in zip(reach, terms, strict=True))
        self._weights = [w + r / scale * innovation for w, r in zip(self._weights, reach, strict=True)]
        if max(covariance[i][i] for i in range(len(terms))) > _MOST_VARIANCE:
            forgetting = 1.0
        self._covariance = [
            [(c - r_i * r_j / scale) / forgetting for c, r_j in zip(row, reach, strict=True)]
            for row, r_i in zip(covariance, reach, strict=True)
        ]


def _terms(work: StepWork, guess_s: float) -> tuple[float, ...]:
    """Return the terms of the fit, each as a share of the guess."""
    step, token, decode, context, position = _UNITS_S
    return (
        1.0,
        step / guess_s,
        work.num_prefill_tokens * token / guess_s,
        work.num_decodes * decode / guess_s,
        work.context_tokens * context / guess_s,
        work.prefill_positions * position / guess_s,
    )
