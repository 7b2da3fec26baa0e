"""The ``quiet`` rule: how much later than alone each decoding request may be, so that serving hardly feels rollouts. Pure.

A request's *own time* is what it would have taken without rollouts; its *delay* is the rest of the time since its first token.
Each request has an allowance, and serving's next step must start before anybody's is used up:

    time since the first token  <=  max(own time + s x lone x n,  (1 + s) x usual x n - lone)  +  credit

with n its tokens so far, s the stretch (0.10), *lone* the time per token of a request that is alone in the batch and *usual*
that of a request a little faster than the median (35 %). Why:

* Delays feed on themselves. Who is delayed stays for longer, so batches grow and more prompts of others come in between, and
  serving's own steps get longer. With a share x of serving's time spent on what grows with its load, a delay d ends up as
  d / (1 - x). A lone request's step is the 1 - x that does not grow: to earn s x lone for each token, instead of a share
  of the own time, stretches the request by s in the end. (Fluid model: time per token t = lone + x t, with delays t' = lone + d + x t'.)
* What is promised is the median and the P99, not each request's own time: who is faster than the usual request may be slowed
  to its pace. No quantile from the median up then grows by more than s. The median itself would be too much to slow others to:
  some of them meet prompts later, and pass it.
* A request that has just begun has earned nothing and would stop lending each time one comes. Its credit is what 8 tokens
  earn, about half a rollout step; less where answers are short: no more than a fifth of what the median answer may be
  stretched by, nor than the shortest answers (1 %) can bear without being slower than the slowest (P99) may become.

Invariants: a request is never later than its allowance when a rollout step ends that kept to its predicted time; the allowance
never falls while a request goes on, nor with its own time; without any experience nothing is lent while requests decode.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rose.policies.admission import Decoding

CREDIT_TOKENS = 8
"""What so many tokens earn is the largest credit."""

_USUAL_QUANTILE = 0.35
_CREDIT_SHARE = 0.2
_LEAST_SEEN = 20
_WINDOW = 4096


@attrs.define(eq=False)
class _Latest:
    """The latest numbers, and their quantiles."""

    _in_order: deque[float] = attrs.field(factory=deque)
    _sorted: list[float] = attrs.field(factory=list)

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, number: float) -> None:
        self._in_order.append(number)
        insort(self._sorted, number)
        if len(self._in_order) > _WINDOW:
            self._sorted.pop(bisect_left(self._sorted, self._in_order.popleft()))

    def at(self, quantile: float) -> float:
        return self._sorted[int(quantile * len(self._sorted))]


@attrs.define(eq=False)
class OwnPaces:
    """What a serving engine learned from its finished requests: their own times per token, without rollouts, and their lengths.

    The window is long on purpose: the median of a busy hour must not become the measure of that hour.

    Attributes:
        lone_s: Time per token of the fastest (1 %), that is, of a request alone in the batch. As all: 0 before enough were seen.
        usual_s: Time per token of a request a little faster than the median (35 %).
        slow_s: Time per token at the P99.
        short_tokens: Length that only 1 % of the answers do not reach.
        usual_tokens: Median length of an answer.
    """

    lone_s: float = 0.0
    usual_s: float = 0.0
    slow_s: float = 0.0
    short_tokens: float = 0.0
    usual_tokens: float = 0.0
    _paces_s: _Latest = attrs.field(factory=_Latest)
    _lengths: _Latest = attrs.field(factory=_Latest)

    def observe(self, *, own_s: float, elapsed_s: float, num_tokens: int) -> None:
        """Learn from a request that ended; answers below two tokens have no pace and are ignored.

        Args:
            own_s: Serving's own time from its first to its last token.
            elapsed_s: The time from its first to its last token.
            num_tokens: Of the answer.
        """
        if num_tokens < 2 or own_s <= 0:  # noqa: PLR2004 - a pace needs two tokens
            return
        pace_s = own_s / (num_tokens - 1)
        delay_s = max(0.0, elapsed_s - own_s) / (num_tokens - 1)
        if self.lone_s:
            # without its delay it would have met smaller batches and fewer prompts: x / (1 - x) = pace / lone - 1
            pace_s -= min(1.0, delay_s / self.lone_s) * max(0.0, pace_s - self.lone_s)
        self._paces_s.add(pace_s)
        self._lengths.add(num_tokens)
        if len(self._paces_s) >= _LEAST_SEEN:
            self.lone_s, self.usual_s, self.slow_s = map(self._paces_s.at, (0.01, _USUAL_QUANTILE, 0.99))
            self.short_tokens, self.usual_tokens = map(self._lengths.at, (0.01, 0.5))

    def credit_s(self, stretch: float) -> float:
        """Return what a request is trusted with before it has earned anything."""
        median_s = _CREDIT_SHARE * stretch * self.usual_s * self.usual_tokens
        shortest_s = ((1 + stretch) * self.slow_s - self.usual_s) * self.short_tokens
        return min(CREDIT_TOKENS * stretch * self.lone_s, median_s, shortest_s)


@attrs.frozen
class Allowance:
    """How long after its first token a request must be decoding again, see the module's text.

    Attributes:
        earned_s: What each token earns.
        usual_s: What each token of a fast request may take.
        step_s: Kept free of that for the next step.
        credit_s: What a request is trusted with before it has earned anything.
    """

    earned_s: float
    usual_s: float
    step_s: float
    credit_s: float

    @classmethod
    def of(cls, stretch: float, paces: OwnPaces) -> Allowance:
        """Return the allowance of requests whose time may grow by the share ``stretch``."""
        return cls(
            earned_s=stretch * paces.lone_s,
            usual_s=(1 + stretch) * paces.usual_s,
            step_s=paces.lone_s,
            credit_s=paces.credit_s(stretch),
        )

    def at_s(self, own_s: float, num_tokens: int) -> float:
        """Return it for a request by serving's own time since its first token and its tokens, that one included."""
        return max(own_s + self.earned_s * num_tokens, self.usual_s * num_tokens - self.step_s) + self.credit_s


def quiet_start_s(stretch: float, paces: OwnPaces, decoding: Iterable[Decoding]) -> float:
    """Return by when serving's next step must start; ``inf`` when nothing decodes.

    Args:
        stretch: Share by which the time of serving's requests may grow, at the median and above.
        paces: What serving learned so far.
        decoding: The decoding requests.
    """
    allowance = Allowance.of(stretch, paces)
    return min((r.first_token_s + allowance.at_s(r.own_s, r.num_tokens) for r in decoding), default=math.inf)
