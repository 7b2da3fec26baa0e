"""Which waiting turn goes next. Sync, without a walk over the queue: one look at the first turn of each line."""

from __future__ import annotations

from collections import Counter

from rose.policies.ordered import Sizes
from rose.policies.routing import Assign, RoutingIndex, Wait, WaitReason
from rose.pool.objections import Objections
from rose.pool.turns import TurnRecord
from rose.pool.waiting import WaitingQueue


class Search:
    """Looks through the queue for turns that need not wait."""

    def __init__(self, waiting: WaitingQueue, index: RoutingIndex, objections: Objections) -> None:
        self._waiting = waiting
        self._index = index
        self._objections = objections

    def next(self) -> tuple[TurnRecord, Assign | Wait] | None:
        """Return the first turn in the queue that need not wait: one that has an engine, or one whose version is not to be had.

        Returns:
            The turn and its decision, a ``Wait`` where it is to be given up; ``None`` when all have to wait.
        """
        record = min(self._waiting.heads(), key=_order)
        decision = self._index.choose(record.view())
        if isinstance(decision, Wait):
            movable = [first for head in self._waiting.heads() if (first := self._first_movable(head)) is not None]
            if not movable:
                return None
            record = min(movable, key=_order)
            decision = self._index.choose(record.view())
        return record, decision

    def reasons(self) -> Counter[WaitReason]:
        """Count the waiting turns by what they wait for."""
        reasons: Counter[WaitReason] = Counter()
        for head in self._waiting.heads():
            decision = self._index.choose(head.view())
            # An engine that takes the first but not the others has no KV room for these.
            reason = decision.reason if isinstance(decision, Wait) else WaitReason.KV
            reasons[reason] += self._waiting.num_unfit(head, self._room_for(head))
        return +reasons

    def _first_movable(self, head: TurnRecord) -> TurnRecord | None:
        """Return the first turn in the line of ``head`` that an engine has room for; any, once their version is not to be had."""
        if self._objections.is_version_gone(head) or self._objections.find_version(head) is not None:
            return head
        return self._waiting.first_fitting(head, self._room_for(head))

    def _room_for(self, record: TurnRecord) -> Sizes:
        return self._index.room(
            record.versions, is_dedicated_only=record.is_dedicated_only, is_new=record.affinity is None
        )


def _order(record: TurnRecord) -> tuple[int, int, int]:
    return record.order
