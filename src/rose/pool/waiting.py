"""The queue of turns that wait for an engine, and what the pool remembers of trajectories to order it.

Invariants:

* The queue is sorted by (start of the group, turns that the trajectory has behind it, arrival), so that groups stay together
  and old trajectories move first.
* Turns that ask for the same engines (versions, kind) form a line. Of a line, only the size of its turns decides who can go,
  so the first that can is found without a walk over the queue.
* Both memories hold at most ``max_entries``, the least recently used go.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

import attrs

from rose.policies.ordered import OrderedRoom, Sizes
from rose.policies.staleness import older
from rose.pool.turns import Demand, TurnRecord
from rose.types import EngineId, WeightVersion

Order = tuple[int, int, int]


class WaitingQueue:
    """Waiting turns in their order."""

    def __init__(self) -> None:
        self._records: dict[Order, TurnRecord] = {}
        self._lines: dict[Demand, OrderedRoom[Order]] = {}

    def __len__(self) -> int:
        """Return how many turns wait."""
        return len(self._records)

    def __iter__(self) -> Iterator[TurnRecord]:
        """Iterate over a copy, in order, so that turns may leave on the way."""
        return iter([self._records[order] for order in heapq.merge(*self._lines.values())])

    def add(self, record: TurnRecord) -> None:
        """Put a turn at its place."""
        # Less is more here: the turns to find are those that need at most what there is.
        num_prompt_tokens = record.num_prompt_tokens
        sizes = (-num_prompt_tokens - record.num_left_tokens, -num_prompt_tokens)
        line = self._lines.get(record.demand)
        if line is None:
            line = self._lines[record.demand] = OrderedRoom()
        line.add(record.order, sizes)
        self._records[record.order] = record

    def remove(self, record: TurnRecord) -> bool:
        """Take a turn out; returns whether it was in. What it asks for must not have changed since it was added."""
        if not self.has(record):
            return False
        del self._records[record.order]
        line = self._lines[record.demand]
        line.remove(record.order)
        if not len(line):
            del self._lines[record.demand]
        return True

    def has(self, record: TurnRecord) -> bool:
        """Tell whether this very turn waits."""
        return self._records.get(record.order) is record

    def heads(self) -> list[TurnRecord]:
        """Return the first turn of each line."""
        return [self._records[next(iter(line))] for line in self._lines.values()]

    def first_fitting(self, head: TurnRecord, room: Sizes) -> TurnRecord | None:
        """Return the first turn in the line of ``head`` for which ``room`` (see ``RoutingIndex.room``) is enough."""
        order = next(self._fitting(head, room), None)
        return None if order is None else self._records[order]

    def num_unfit(self, head: TurnRecord, room: Sizes) -> int:
        """Return how many turns in the line of ``head`` need more than ``room``."""
        return len(self._lines[head.demand]) - sum(1 for _ in self._fitting(head, room))

    def _fitting(self, head: TurnRecord, room: Sizes) -> Iterator[Order]:
        return self._lines[head.demand].fitting((-room[0], -room[1]))


@attrs.define
class Known:
    """What is remembered of one trajectory.

    Attributes:
        last_engine: The engine of its last finished turn.
        num_turns: How many turns of it finished.
        num_made_tokens: Tokens that those made.
        num_context_tokens: Prompt and answer of the last one, which its engine may have cached.
        oldest: The oldest version that made a token of it.
        ended_s: When its last turn finished.
        stalls: Engines that stalled it and when; who finds one well again deletes it.
    """

    last_engine: EngineId | None = None
    num_turns: int = 0
    num_made_tokens: int = 0
    num_context_tokens: int = 0
    oldest: WeightVersion | None = None
    ended_s: float = 0.0
    stalls: dict[EngineId, float] = attrs.field(factory=dict)


_UNKNOWN = Known()


class TrajectoryMemory:
    """Where each trajectory ran last and when each group began."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._trajectories: OrderedDict[str, Known] = OrderedDict()
        self._groups: OrderedDict[str, int] = OrderedDict()

    def order(self, trajectory_id: str, group_id: str, number: int) -> tuple[int, int, int]:
        """Return a new turn's place in the queue; ``number`` is the order in which turns arrive."""
        group_start = self._groups.setdefault(group_id, number)
        self._groups.move_to_end(group_id)
        if len(self._groups) > self._max_entries:
            self._groups.popitem(last=False)
        known = self._trajectories.get(trajectory_id)
        return (group_start, -known.num_turns if known else 0, number)

    def known(self, trajectory_id: str) -> Known:
        """Return what is known of a trajectory; nothing but ``stalls`` is to be changed."""
        return self._trajectories.get(trajectory_id, _UNKNOWN)

    def note_stalled(self, trajectory_id: str, engine_id: EngineId, now_s: float) -> None:
        """Remember that a turn of the trajectory stalled on ``engine_id``."""
        self._remember(trajectory_id).stalls[engine_id] = now_s

    def note_finished(
        self,
        trajectory_id: str,
        engine_id: EngineId,
        *,
        num_made_tokens: int = 0,
        num_context_tokens: int = 0,
        oldest: WeightVersion | None = None,
        ended_s: float = 0.0,
    ) -> None:
        """Remember that a turn of the trajectory finished on ``engine_id``; see ``Known`` for the rest."""
        known = self._remember(trajectory_id)
        known.num_turns += 1
        known.num_made_tokens += num_made_tokens
        known.num_context_tokens = num_context_tokens
        known.last_engine = engine_id
        known.ended_s = ended_s
        known.oldest = older(known.oldest, oldest)

    def _remember(self, trajectory_id: str) -> Known:
        known = self._trajectories.setdefault(trajectory_id, Known())
        self._trajectories.move_to_end(trajectory_id)
        if len(self._trajectories) > self._max_entries:
            self._trajectories.popitem(last=False)
        return known
