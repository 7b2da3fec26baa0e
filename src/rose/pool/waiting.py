"""The queue of turns that wait for an engine, and what the pool remembers of trajectories to order it.

Invariants: the queue is sorted by (start of the group, turns that the trajectory has behind it, arrival), so that groups
stay together and old trajectories move first; both memories hold at most ``max_entries``, the least recently used go.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

import attrs

from rose.pool.turns import TurnRecord
from rose.types import EngineId


def _sort_key(record: TurnRecord) -> tuple[int, int, int]:
    return record.order


class WaitingQueue:
    """Waiting turns in their order."""

    def __init__(self) -> None:
        self._records: list[TurnRecord] = []

    def __len__(self) -> int:
        """Return how many turns wait."""
        return len(self._records)

    def __iter__(self) -> Iterator[TurnRecord]:
        """Iterate over a copy, so that turns may leave on the way."""
        return iter(tuple(self._records))

    def add(self, record: TurnRecord) -> None:
        """Put a turn at its place."""
        insort(self._records, record, key=_sort_key)

    def remove(self, record: TurnRecord) -> bool:
        """Take a turn out; returns whether it was in."""
        place = bisect_left(self._records, record.order, key=_sort_key)
        if place == len(self._records) or self._records[place] is not record:
            return False
        del self._records[place]
        return True


@attrs.define
class _Trajectory:
    last_engine: EngineId | None = None
    num_turns: int = 0


class TrajectoryMemory:
    """Where each trajectory ran last and when each group began."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._trajectories: OrderedDict[str, _Trajectory] = OrderedDict()
        self._groups: OrderedDict[str, int] = OrderedDict()

    def order(self, trajectory_id: str, group_id: str, number: int) -> tuple[int, int, int]:
        """Return a new turn's place in the queue; ``number`` is the order in which turns arrive."""
        group_start = self._groups.setdefault(group_id, number)
        self._groups.move_to_end(group_id)
        if len(self._groups) > self._max_entries:
            self._groups.popitem(last=False)
        known = self._trajectories.get(trajectory_id)
        return (group_start, -known.num_turns if known else 0, number)

    def last_engine(self, trajectory_id: str) -> EngineId | None:
        """Return the engine of the trajectory's last finished turn."""
        known = self._trajectories.get(trajectory_id)
        return known.last_engine if known else None

    def note_finished(self, trajectory_id: str, engine_id: EngineId) -> None:
        """Remember that a turn of the trajectory finished on ``engine_id``."""
        known = self._trajectories.setdefault(trajectory_id, _Trajectory())
        self._trajectories.move_to_end(trajectory_id)
        known.num_turns += 1
        known.last_engine = engine_id
        if len(self._trajectories) > self._max_entries:
            self._trajectories.popitem(last=False)
