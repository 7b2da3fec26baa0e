"""When an engine that failed a request may be tried again. Sync, on times that the caller brings.

Invariants: closed until a failure; open until ``retry_at_s``, which comes later each time in a row; then half open until
a request shows its first token (closed again, counts forgotten) or fails (open again). Requests that fail together while
it is open count once. A busy answer and a failure count apart, because their pauses differ by orders of magnitude.
"""

from __future__ import annotations

from random import Random

import attrs

from rose.policies.routing import Circuit
from rose.pool.actions import TIME_EPSILON_S
from rose.pool.config import PoolConfig

_MAX_DOUBLINGS = 30


@attrs.define(eq=False)
class CircuitBreaker:
    """The circuit of one engine."""

    config: PoolConfig
    rng: Random
    state: Circuit = Circuit.CLOSED
    retry_at_s: float = 0.0
    num_failures: int = 0
    num_busy: int = 0

    def fail(self, now_s: float) -> float:
        """Note a failed request; returns when one may be tried again."""
        pause_s = min(self.config.circuit_s * 2.0**self.num_failures, self.config.circuit_max_s)
        if self.state is not Circuit.OPEN:
            self.num_failures = min(self.num_failures + 1, _MAX_DOUBLINGS)
        return self._open(now_s + self._jittered(pause_s))

    def busy(self, now_s: float) -> float:
        """Note that the engine lives but is short of room; returns when it may be tried again."""
        pause_s = min(self.config.busy_s * 2.0**self.num_busy, self.config.busy_max_s)
        if self.state is not Circuit.OPEN:
            self.num_busy = min(self.num_busy + 1, _MAX_DOUBLINGS)
        return self._open(now_s + self._jittered(pause_s))

    def succeed(self) -> bool:
        """Note a request's first token; returns whether this closed the circuit."""
        if self.state is Circuit.OPEN:
            return False
        self.num_failures = self.num_busy = 0
        was_half_open = self.state is Circuit.HALF_OPEN
        self.state = Circuit.CLOSED
        return was_half_open

    def tick(self, now_s: float) -> bool:
        """Let time pass; returns whether the circuit became half open."""
        if self.state is not Circuit.OPEN or now_s < self.retry_at_s - TIME_EPSILON_S:
            return False
        self.state = Circuit.HALF_OPEN
        return True

    def _open(self, retry_at_s: float) -> float:
        self.state = Circuit.OPEN
        self.retry_at_s = max(self.retry_at_s, retry_at_s)
        return self.retry_at_s

    def _jittered(self, pause_s: float) -> float:
        return pause_s * (1.0 + self.config.jitter_fraction * self.rng.random())
