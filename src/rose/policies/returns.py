"""Whether and when trajectories whose turns ended come back with their next ones, and what it is worth to wait for them. Pure.

While a trajectory's environment is at work, its engine has a slot and KV memory to spare. Whoever takes them displaces the trajectory, whose context
is then computed anew, on its engine or elsewhere. To keep them for it costs the pause. So they are kept while most trajectories come back, and a usual
pause is shorter than the time that a usual context takes to compute.

Invariants: the share that comes back is between 0 and 1; the usual pause is at least ``_LEAST_PAUSE_S``; the context is not negative.
"""

from __future__ import annotations

import attrs

_FIRST_PAUSE_S = 0.5
_LEAST_PAUSE_S = 0.01
_WEIGHT = 0.02
_PAUSES = 3.0
_USUAL, _USUAL_TO_BEGIN = 0.5, 0.67  # of two turns each, half come back: no reason to begin again
_HYSTERESIS = 1.5
_MOST_PAUSES = 10.0


@attrs.define
class ReturnModel:
    """What an engine may expect of the trajectories that it has just had.

    Attributes:
        is_worth_it: Whether slots and KV memory are kept.
        context_tokens: The usual context of a trajectory that comes back.
    """

    is_worth_it: bool = False
    context_tokens: float = 0.0
    _pause_s: float = _FIRST_PAUSE_S
    _share: float = 1.0
    _num_seen: int = 0

    @property
    def seat_s(self) -> float:
        """Seconds for which a trajectory is expected back: a few times the usual pause."""
        return _PAUSES * self._pause_s

    def observe(self, pause_s: float, num_context_tokens: int, prefill_s: float, *, is_expected: bool = True) -> None:
        """Take a trajectory that came back.

        Args:
            pause_s: How long after its last turn had ended; one that is much longer than usual counts as ten usual ones.
            num_context_tokens: Its context then.
            prefill_s: Seconds to compute a prompt token.
            is_expected: It came in time.
        """
        self._num_seen += 1
        weight = max(_WEIGHT, 1 / (self._num_seen + 1))
        pause_s = min(pause_s, _MOST_PAUSES * self._pause_s)
        self._pause_s = max(_LEAST_PAUSE_S, self._pause_s + weight * (pause_s - self._pause_s))
        self._share += _WEIGHT * (1.0 - self._share) * is_expected
        self.context_tokens += (weight if self._num_seen > 1 else 1.0) * (num_context_tokens - self.context_tokens)
        usual, cost_s = _USUAL_TO_BEGIN, prefill_s * self.context_tokens
        if self.is_worth_it:
            usual, cost_s = _USUAL, _HYSTERESIS * cost_s
        self.is_worth_it = self._share >= usual and self._pause_s < cost_s

    def observe_absence(self) -> None:
        """Note that a trajectory did not come back in time."""
        self._share -= _WEIGHT * self._share
        self.is_worth_it = self.is_worth_it and self._share >= _USUAL
