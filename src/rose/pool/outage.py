"""Since when no engine takes turns. Sync, on times that the caller brings.

Invariant: ``_any_since_s`` is the begin of the present outage, ``None`` while there is none, ``_own_since_s`` that of one of the job's own
engines; an engine in an activation is no outage, since that
is bounded by a time-out of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rose.pool.membership import Membership
from rose.pool.turns import TurnRecord


class Outage:
    """Watches engines of both kinds; turns for dedicated engines only have outages of their own."""

    def __init__(self, engines: Membership, timeout_s: float | None) -> None:
        """Watch ``engines``; ``timeout_s`` is how long a turn waits through an outage, ``None``: for ever."""
        self._engines = engines
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._any_since_s: float | None = None
        self._own_since_s: float | None = None

    def look(self, now_s: float) -> bool:
        """Note whether engines take turns now; returns whether an outage has just begun or ended."""
        before = (self._own_since_s, self._any_since_s)
        num_own = self._engines.num_own_serving
        self._own_since_s = _since(self._own_since_s, num_own, now_s)
        self._any_since_s = _since(self._any_since_s, num_own + self._engines.num_lent_serving, now_s)
        return before != (self._own_since_s, self._any_since_s)

    def earliest_due_s(self, records: Iterable[TurnRecord]) -> float:
        """Return when the first of the waiting turns is to be given up; infinite for none."""
        return min(map(self.due_s, records), default=math.inf)

    def due_s(self, record: TurnRecord) -> float:
        """Return when a waiting turn is to be given up; infinite while engines take turns."""
        since_s = self._own_since_s if record.is_dedicated_only else self._any_since_s
        return math.inf if since_s is None else max(since_s, record.queued_s) + self._timeout_s


def _since(since_s: float | None, num_serving: int, now_s: float) -> float | None:
    if num_serving:
        return None
    return now_s if since_s is None else since_s
