"""A measured curve that takes the place of a roofline's linear part."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import attrs

from rose import checks

_MIN_POINTS = 2


@attrs.frozen(kw_only=True)
class LinearTable:
    """Seconds of a step's linear part by the tokens of the step: straight between the points, never falling.

    Below the first point the first value holds. Beyond the last the line goes on with the mean slope of the upper half of
    the measured range, so that the noise of the last points does not decide it.

    Attributes:
        source: Where the figures come from.
        num_tokens: Rising.
        seconds: As many, positive, not falling.
    """

    source: str = attrs.field(validator=checks.text())
    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __attrs_post_init__(self) -> None:
        """Check what goes together.

        Raises:
            ValueError: Fewer than two points, or points out of order.
        """
        if not len(self.num_tokens) == len(self.seconds) >= _MIN_POINTS:
            message = f"{self.source}: {len(self.num_tokens)} token counts and {len(self.seconds)} times are no curve"
            raise ValueError(message)
        if not all(before < after for before, after in pairwise(self.num_tokens)):
            message = f"{self.source}: the token counts of a curve must rise"
            raise ValueError(message)
        if self.seconds[0] <= 0 or not all(before <= after for before, after in pairwise(self.seconds)):
            message = f"{self.source}: the times of a curve must be positive and must not fall"
            raise ValueError(message)

    def at(self, num_tokens: float) -> float:
        """Return the seconds for this many tokens."""
        tokens, seconds = self.num_tokens, self.seconds
        if num_tokens <= tokens[0]:
            return seconds[0]
        after = bisect_right(tokens, num_tokens)
        if after == len(tokens):
            low = max(bisect_right(tokens, tokens[-1] / 2) - 1, 0)
            slope = (seconds[-1] - seconds[low]) / (tokens[-1] - tokens[low])
            return seconds[-1] + slope * (num_tokens - tokens[-1])
        low = after - 1
        share = (num_tokens - tokens[low]) / (tokens[after] - tokens[low])
        return seconds[low] + share * (seconds[after] - seconds[low])
