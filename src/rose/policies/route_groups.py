"""The engines that a decision chooses among, by kind and weight version, in the order in which they are preferred. Pure.

Invariant: an open engine is in the list of its group that its place says, under that place and the room that it has for trajectories of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import attrs

from rose.policies.ordered import OrderedRoom, Sizes
from rose.types import EngineId, WeightVersion

Place = tuple[bool, float, int, float, EngineId]
"""An open engine's place among those of its kind: no slot that is not expected to be asked for, seconds until its trajectories would have made one token more than they are expected
to, turns in flight, KV use, id."""


@attrs.define(eq=False)
class Group:
    """The ready engines of one kind at one weight version: those with an open slot, and why the others have none.

    Attributes:
        open: Those with a slot that none of their trajectories is expected back for.
        seated: Those whose open slots are all expected to be asked for.
    """

    siblings: dict[WeightVersion | None, Group]
    version: WeightVersion | None
    open: OrderedRoom[Place] = attrs.field(factory=OrderedRoom)
    seated: OrderedRoom[Place] = attrs.field(factory=OrderedRoom)
    num_full: int = 0
    num_shut: int = 0

    def is_empty(self) -> bool:
        """Tell whether no engine is counted."""
        return not (len(self.open) or len(self.seated) or self.num_full or self.num_shut)

    def room_of(self, place: Place) -> OrderedRoom[Place]:
        """Return the list that a place is in."""
        return self.seated if place[0] else self.open

    def lists(self, *, is_seated_too: bool) -> tuple[OrderedRoom[Place], ...]:
        """Return the lists to choose from, the better one first."""
        return (self.open, self.seated) if is_seated_too else (self.open,)

    def first(self, asked: Sizes, avoid: AbstractSet[EngineId], *, is_seated_too: bool) -> Place | None:
        """Return the first engine with room that is not avoided."""
        place = _first(self.open, asked, avoid)
        if place is None and is_seated_too and len(self.seated):
            place = _first(self.seated, asked, avoid)
        return place


def _first(room: OrderedRoom[Place], asked: Sizes, avoid: AbstractSet[EngineId]) -> Place | None:
    if avoid:
        return next((place for place in room.fitting(asked) if place[-1] not in avoid), None)
    return room.first(asked)


def first_of(
    groups: Iterable[Group], asked: Sizes, avoid: AbstractSet[EngineId], *, is_seated_too: bool
) -> Place | None:
    """Return the place of the first engine of several groups with room for a turn."""
    best = None
    for group in groups:
        place = group.first(asked, avoid, is_seated_too=is_seated_too)
        if place is not None and (best is None or place < best):
            best = place
    return best


def has_hope(groups: Iterable[Group]) -> bool:
    """Tell whether an engine of these takes turns, or will once those end that it has: not all have failed."""
    return any(len(group.open) or len(group.seated) or group.num_full for group in groups)
