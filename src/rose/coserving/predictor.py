"""Predicting the next step's time: a model's guess, times a ratio learned on line, plus a margin from its own errors.

Pure state: no clock, no I/O. Feed it the guess and the truth of each step.
"""

from __future__ import annotations

import math
from collections import deque

import attrs
from attrs import validators as v

_RESORT_EVERY = 16


@attrs.frozen(kw_only=True)
class PredictorConfig:
    """How the predictor learns.

    Attributes:
        ratio_weight: Weight of the newest step in the running ratio of truth to guess.
        error_quantile: The margin covers this share of the recent relative errors.
        window: How many recent errors count.
        min_margin: The margin never falls below this.
        initial_margin: Used until a quarter of the window is filled.
        max_margin: Nor above this, so that one hiccup does not stop lending.
    """

    ratio_weight: float = attrs.field(default=0.05, validator=[v.gt(0), v.le(1)])
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
        self._ratio = 1.0
        self._margin = self._config.initial_margin

    @property
    def margin(self) -> float:
        """Relative margin in force."""
        return self._margin

    def predict_s(self, guess_s: float) -> float:
        """Return the expected time of a step whose model guess is ``guess_s``."""
        return self._ratio * guess_s

    def upper_s(self, guess_s: float) -> float:
        """Return a time that the step exceeds only rarely."""
        return self._ratio * guess_s * (1 + self._margin)

    def observe(self, guess_s: float, actual_s: float) -> None:
        """Learn from one finished step. Steps without a positive guess and truth are ignored."""
        if guess_s <= 0 or actual_s <= 0:
            return
        ratio = actual_s / guess_s
        self._errors.append(ratio / self._ratio - 1)
        self._ratio += self._config.ratio_weight * (ratio - self._ratio)
        self._num_seen += 1
        if self._num_seen % _RESORT_EVERY == 0 and len(self._errors) * 4 >= self._config.window:
            ranked = sorted(self._errors)
            at = min(len(ranked) - 1, math.ceil(self._config.error_quantile * len(ranked)) - 1)
            self._margin = min(self._config.max_margin, max(self._config.min_margin, ranked[at]))
