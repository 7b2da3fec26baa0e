"""How long requests are where no trace says it of each: lognormal, with the means of a public trace and about its spread."""

from __future__ import annotations

import math

import attrs
import numpy as np
from numpy.typing import NDArray


@attrs.frozen(kw_only=True)
class Lengths:
    """Prompts or answers: mean and longest in tokens, spread of the logarithm."""

    mean_tokens: float
    sigma: float
    max_tokens: int

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return ``count`` lengths around ``mean_tokens``."""
        drawn = rng.lognormal(math.log(self.mean_tokens) - self.sigma**2 / 2, self.sigma, count)
        return self._whole(drawn, self.max_tokens)

    def draw_around(self, rng: np.random.Generator, means: NDArray[np.float64], *, max_tokens: int) -> list[int]:
        """Return one length around each of ``means``."""
        return self._whole(rng.lognormal(np.log(means) - self.sigma**2 / 2, self.sigma), max_tokens)

    def _whole(self, drawn: NDArray[np.float64], max_tokens: int) -> list[int]:
        return [int(value) for value in np.clip(np.rint(drawn), 1, max_tokens)]


# Means of the Azure 2023 conversation trace.
PROMPTS = Lengths(mean_tokens=1155.0, sigma=0.6, max_tokens=16_384)
OUTPUTS = Lengths(mean_tokens=211.0, sigma=0.8, max_tokens=4_096)
