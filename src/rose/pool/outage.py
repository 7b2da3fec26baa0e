"""Since when no engine takes turns. Sync, on times that the caller brings.

Invariant: ``since_s`` is the begin of the present outage, ``None`` while there is none; an engine in an activation is no outage, since that
is bounded by a time-out of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rose.pool.membership import Membership
from rose.pool.turns import TurnRecord
from rose.types import EngineKind


class Outage:
    """Watches engines of both kinds; turns for dedicated engines only have outages of their own."""

    def __init__(self, engines: Membership, timeout_s: float | None) -> None:
        """Watch ``engines``; ``timeout_s`` is how long a turn waits through an outage, ``None``: for ever."""
        self._engines = engines
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._since_s: dict[bool, float | None] = {False: None, True: None}

    def look(self, now_s: float) -> bool:
        """Note whether engines take turns now; returns whether an outage has just begun."""
        serving = self._engines.num_serving
        own = serving[EngineKind.DEDICATED]
        has_begun = False
        for is_dedicated_only, count in ((True, own), (False, own + serving[EngineKind.BORROWED])):
            if count:
                self._since_s[is_dedicated_only] = None
            elif self._since_s[is_dedicated_only] is None:
                self._since_s[is_dedicated_only] = now_s
                has_begun = True
        return has_begun

    def earliest_due_s(self, records: Iterable[TurnRecord]) -> float:
        """Return when the first of the waiting turns is to be given up; infinite for none."""
        return min(map(self.due_s, records), default=math.inf)

    def due_s(self, record: TurnRecord) -> float:
        """Return when a waiting turn is to be given up; infinite while engines take turns."""
        since_s = self._since_s[record.is_dedicated_only]
        return math.inf if since_s is None else max(since_s, record.queued_s) + self._timeout_s
