"""How much of a device its engines used lately: exponential means and a sliding maximum, read by the lender and by people.

Invariants: fractions are within 0 and 1; a restart of the rollout engine (its counter goes back) is no negative use.
"""

from __future__ import annotations

import math
from collections import deque

from rose.coserving.ledger import UsageState
from rose.coserving.processes import process_start
from rose.coserving.serving_accounts import ServiceCounters


class UsageMeter:
    """Fed by serving's step loop (``note_...``), read by its heartbeat thread (``read``)."""

    def __init__(self, window_s: float, pid: int) -> None:
        """Begin with a device that was idle; ``pid`` is serving's process."""
        self._window_s = window_s
        self._pid, self._pid_start = pid, process_start(pid)
        self._busy_s = self._delay_s = self._kv_fraction = self._kv_top_fraction = 0.0
        self._seen: tuple[float, float] | None = None
        self._rollout_seen_s: float | None = None
        self._means = [0.0, 0.0, 0.0]
        self._peaks: deque[tuple[float, float]] = deque()

    def note_step(self, duration_s: float) -> None:
        """Note device time of serving."""
        self._busy_s += duration_s

    def note_wait(self, wait_s: float) -> None:
        """Note how long serving waited for its turn."""
        self._delay_s += max(0.0, wait_s)

    def note_kv(self, fraction: float) -> None:
        """Note the share of the KV pool in use."""
        self._kv_fraction = min(1.0, fraction)
        self._kv_top_fraction = max(self._kv_top_fraction, self._kv_fraction)

    def read(self, now_s: float, rollout_busy_s: float | None, counters: ServiceCounters) -> UsageState:
        """Return the state at ``now_s``; ``rollout_busy_s`` is the rollout engine's counter where it can be read."""
        busy_s, kv = self._busy_s, self._kv_fraction
        lent_s = 0.0
        if rollout_busy_s is not None:  # else it is made up for with the next reading
            lent_s = 0.0 if self._rollout_seen_s is None else rollout_busy_s - self._rollout_seen_s
            self._rollout_seen_s = rollout_busy_s
        if self._seen is not None and now_s > self._seen[0]:
            before_s, busy_before_s = self._seen
            elapsed_s = now_s - before_s
            weight = 1 - math.exp(-elapsed_s / self._window_s)
            values = (_share(busy_s - busy_before_s, elapsed_s), _share(lent_s, elapsed_s), kv)
            self._means = [mean + weight * (value - mean) for mean, value in zip(self._means, values, strict=True)]
        self._seen = (now_s, busy_s)
        return UsageState(
            window_s=self._window_s,
            busy_fraction=self._means[0],
            rollout_fraction=self._means[1],
            kv_mean_fraction=self._means[2],
            kv_peak_fraction=self._peak(now_s),
            updated_s=now_s,
            num_requests=counters.num_requests,
            num_broken=counters.num_broken,
            num_tokens=counters.num_tokens,
            num_gaps_broken=counters.num_gaps_broken,
            debt_s=counters.debt_s,
            delay_s=self._delay_s,
            pid=self._pid,
            pid_start=self._pid_start,
        )

    def _peak(self, now_s: float) -> float:
        kv, self._kv_top_fraction = self._kv_top_fraction, self._kv_fraction
        while self._peaks and (self._peaks[0][0] <= now_s - self._window_s):
            self._peaks.popleft()
        while self._peaks and self._peaks[-1][1] <= kv:
            self._peaks.pop()
        self._peaks.append((now_s, kv))
        return self._peaks[0][1]


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s / whole_s))
