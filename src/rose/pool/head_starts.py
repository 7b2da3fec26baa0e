"""Which turns of a client begin before the pool has answered, and where. Sync, without I/O.

The next turn of a trajectory nearly always runs where its last one did, since its prefix is there. So a client may ask that engine and
the pool at the same time: one round trip less. ``rose.pool.direct`` has what becomes of it.

Invariants:

* A turn has a head start only at an engine with an address, whose last known weights it may have; what an engine has is known from
  whichever turn the pool sent there last.
* Where most guesses were wrong lately, few are made.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

from rose.policies.staleness import is_admissible
from rose.pool import direct
from rose.types import Turn

_WEIGHT = 0.1  # of one more guess
_LEAST_HITS = 0.5
_PROBE_EVERY = 16
_MAX_ENGINES = 1024


class HeadStarts:
    """What a client remembers of its trajectories.

    Args:
        max_trajectories: Those that ended a turn last are remembered, so many; 0 for no head starts.
    """

    def __init__(self, *, max_trajectories: int) -> None:
        self.prefix: str | None = None
        self._max_trajectories = max_trajectories
        self._last: OrderedDict[str, str] = OrderedDict()
        self._engines: OrderedDict[str, direct.Start] = OrderedDict()
        self._hits = 1.0
        self._num_held_back = 0

    def hear(self, start: direct.Start) -> None:
        """Note what the pool says of an engine, with any attempt there."""
        self._engines[start.engine_id] = start
        self._engines.move_to_end(start.engine_id)
        if len(self._engines) > _MAX_ENGINES:
            self._engines.popitem(last=False)

    def note(self, trajectory_id: str, engine_id: str) -> None:
        """Remember where a trajectory's turn ended well."""
        self._last[trajectory_id] = engine_id
        self._last.move_to_end(trajectory_id)
        if len(self._last) > self._max_trajectories:
            self._last.popitem(last=False)

    def judge(self, *, is_hit: bool) -> None:
        """Note whether the pool took a head start over."""
        self._hits += _WEIGHT * (is_hit - self._hits)

    def guess(self, turn_id: str, turn: Turn) -> direct.Start | None:
        """Return the attempt to make before the pool says so, or ``None`` to wait for its word."""
        last = self._engines.get(self._last.pop(turn.trajectory_id, ""))
        if last is None or self.prefix is None or last.address is None:
            return None
        if not is_admissible(turn.versions, last.version, last.run):
            return None
        if self._hits < _LEAST_HITS:
            self._num_held_back += 1
            if self._num_held_back % _PROBE_EVERY:
                return None
        return attrs.evolve(
            last,
            turn_id=turn_id,
            attempt=direct.AHEAD,
            request_id=direct.ahead_id(self.prefix, turn_id),
            max_tokens=turn.sampling.max_tokens,
            num_kept=0,
            hops=(),
            versions=turn.versions,
        )
