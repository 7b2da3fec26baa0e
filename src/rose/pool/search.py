"""Which waiting turn goes next. Sync, without a walk over the queue: one look at the first turn of each line.

Invariants: a turn that came back to where it was expected goes before all others, once: what is kept there is nobody else's, and it is not kept on. Next
is the turn that an engine was kept free for. All others go in the order of the queue, each as soon as an engine has room that is not kept for others; the very
first also into what its own engine keeps.
"""

from __future__ import annotations

from collections import Counter, deque

from rose.policies.ordered import Sizes
from rose.policies.routing import Assign, RoutingIndex, Wait, WaitReason
from rose.pool.objections import Objections
from rose.pool.starvation import Starvation
from rose.pool.turns import TurnRecord
from rose.pool.waiting import WaitingQueue

Found = tuple[TurnRecord, Assign | Wait]
"""A turn and its decision, a ``Wait`` where it is to be given up."""


class Search:
    """Looks through the queue for turns that need not wait."""

    def __init__(
        self, waiting: WaitingQueue, index: RoutingIndex, objections: Objections, starvation: Starvation
    ) -> None:
        self._waiting = waiting
        self._index = index
        self._objections = objections
        self._starvation = starvation
        self._returned: deque[TurnRecord] = deque()

    def note_returned(self, record: TurnRecord) -> None:
        """Note that a turn's trajectory was expected where it now wants to go on."""
        self._returned.append(record)

    def next(self) -> Found | None:
        """Return the next turn that need not wait: one that has an engine, or one whose version is not to be had; ``None``: all have to wait."""
        found = self._first_returned() or self._starved()
        if found is None:
            found = self._first_in_queue()
        if found is None and (starved := self._starvation.record) is not None and not self._waiting.has(starved):
            self._starved()  # it found room elsewhere, so its engine is open again
            found = self._first_in_queue()
        return found

    def _first_returned(self) -> Found | None:
        while self._returned:
            record = self._returned.popleft()
            if self._index.keeps_seats and self._waiting.has(record):
                decision = self._index.choose(record.view())
                if isinstance(decision, Assign):
                    return record, decision
        return None

    def _starved(self) -> Found | None:
        """Return the turn that an engine was kept free for, once it has room."""
        starved = self._starvation.record
        if starved is None:
            return None
        record = self._starvation.relieve(is_waiting=self._waiting.has(starved))
        if record is None or not isinstance(decision := self._index.choose(record.view()), Assign):
            return None
        return record, decision

    def _first_in_queue(self) -> Found | None:
        if not (len(self._waiting) and self._index.has_open_engine()):
            return None
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
