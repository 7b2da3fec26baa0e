"""Which engine takes the next turn. Pure: frozen views in, a typed decision out.

An engine is admissible for a turn when it is ready, holds an admissible version, its circuit lets a request through, it
has an open slot under the cap and KV room for the prompt and every token that the turn may still make; for a trajectory that
begins, also when it is not slow, unless no dedicated engine is there for it whose circuit lets requests through. An engine that joined a pool at work has ``untried_slots`` slots and
one more for each turn that it shows a token of: one that is dead fails no more than those, and the first of several takes no whole queue. Engines that just evicted or stalled this turn are
avoided: one is taken when it is the only one, so that no turn is stranded. Among the others:

* A later turn goes to the engine of the turn before, unless ``rose.policies.migration`` finds the first dedicated or the first borrowed
  engine clearly better and that one has a slot that none of its trajectories will soon be back for.
* Any other turn goes to the first dedicated engine, or else the first borrowed one. The first has such a slot, then it is the one whose trajectories are
  expected to end soonest (of idle ones, the fastest), then the one with the fewest turns in flight, the lowest KV use, the lowest id.

By the ``paper`` rule engines are not left for others, new ones have all their slots at once, and the first has the fewest turns in flight.

A decision looks at a few engines, however many there are: the ready ones with an open slot are kept in that order, by kind
and version, with bounds of their KV room.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import attrs

from rose.policies.migration import gain_s, is_crowded
from rose.policies.ordered import OrderedRoom, Sizes
from rose.policies.route_views import (
    Assign,
    Circuit,
    EngineState,
    EngineView,
    RoutingConfig,
    RoutingRule,
    TurnView,
    Wait,
    WaitReason,
)
from rose.policies.staleness import is_admissible, is_out_of_reach
from rose.types import EngineId, EngineKind, HopEnd, RouteReason, VersionConstraint, WeightVersion

__all__ = [
    "Assign",
    "Circuit",
    "EngineState",
    "EngineView",
    "RoutingConfig",
    "RoutingIndex",
    "RoutingRule",
    "TurnView",
    "Wait",
    "WaitReason",
]

_MOVED_REASON = {
    HopEnd.EVICTED: RouteReason.REROUTED_EVICTED,
    HopEnd.STALLED: RouteReason.REROUTED_STALLED,
    HopEnd.LOST: RouteReason.REROUTED_LOST,
    HopEnd.BUSY: RouteReason.REROUTED_BUSY,
    HopEnd.ABORTED: RouteReason.REROUTED_ABORTED,
    HopEnd.REFUSED: RouteReason.REROUTED_REFUSED,
}


_OUT = frozenset({EngineState.DRAINING, EngineState.FENCED, EngineState.LOST})
"""States from which no engine comes back to the version that it had."""

_ANY_SIZE: Sizes = (math.inf, math.inf)

Place = tuple[bool, float, int, float, EngineId]
"""An open engine's place among those of its kind: no slot that is not expected to be asked for, seconds until its trajectories would have made one token more than they are expected
to, turns in flight, KV use, id."""


@attrs.define(eq=False)
class _Group:
    """The ready engines of one kind at one weight version: those with an open slot, and why the others have none."""

    siblings: dict[WeightVersion | None, _Group]
    version: WeightVersion | None
    open: OrderedRoom[Place] = attrs.field(factory=OrderedRoom)
    num_full: int = 0
    num_shut: int = 0

    def is_empty(self) -> bool:
        return not (len(self.open) or self.num_full or self.num_shut)

    def first(self, asked: Sizes, avoid: AbstractSet[EngineId]) -> Place | None:
        """Return the first engine with room that is not avoided."""
        for place in self.open.fitting(asked):
            if not avoid or place[-1] not in avoid:
                return place
        return None


class _Home(NamedTuple):
    """Where an engine was put: its place and room among the open ones, or none, and its circuit then."""

    group: _Group
    place: Place | None
    room: Sizes
    circuit: Circuit


_Kinds = tuple[list[_Group], list[_Group]]
"""Dedicated groups and borrowed groups."""

_MOST_ASKED = 256


class RoutingIndex:
    """The engines as the policy knows them, kept up to date view by view.

    Invariants: each ready engine has a home and is counted in its group, which is not empty; the open engines of all groups are ``_num_open``; ``_versions``
    counts the engines that may yet take turns at the version they have; ``_asked`` holds for the groups and the run as they are.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self._run: str | None = None
        self._config = config
        self._most_turns = config.cap_per_engine
        self._is_by_value = config.rule is RoutingRule.VALUE
        self._views: dict[EngineId, EngineView] = {}
        self._dedicated: dict[WeightVersion | None, _Group] = {}
        self._borrowed: dict[WeightVersion | None, _Group] = {}
        self._slow: dict[WeightVersion | None, _Group] = {}
        self._versions: Counter[WeightVersion | None] = Counter()
        self._homes: dict[EngineId, _Home] = {}
        self._num_open = 0
        self._asked: dict[VersionConstraint, tuple[list[_Group], ...]] = {}

    @property
    def run(self) -> str | None:
        """The training run that version constraints refer to, or ``None``."""
        return self._run

    @run.setter
    def run(self, run: str | None) -> None:
        self._run = run
        self._asked.clear()

    def put(self, view: EngineView) -> None:
        """Add an engine or replace what is known of it."""
        engine_id = view.engine_id
        old = self._views.get(engine_id)
        self._views[engine_id] = view
        if old is not None and _is_same_group(old, view):
            if view.state is EngineState.READY:
                self._replace(view)
            return
        if old is not None:
            self._leave_group(engine_id)
        self._count(old, -1)
        self._count(view, 1)
        if view.state is EngineState.READY:
            self._join_group(view)

    def _replace(self, view: EngineView) -> None:
        """Bring a ready engine that stays in its group to its new place: what nearly every change comes to."""
        group, place, room, circuit = self._homes[view.engine_id]
        if place is None or not self._has_slot(view):
            self._take_out(group, place, circuit)
            self._settle(view, group)
            return
        new_place, new_room = self._place(view), _kv_room(view)
        if new_place != place or new_room != room or view.circuit is not circuit:
            group.open.remove(place)
            group.open.add(new_place, new_room)
            self._homes[view.engine_id] = _Home(group, new_place, new_room, view.circuit)

    def drop(self, engine_id: EngineId) -> None:
        """Forget an engine; unknown ids are ignored."""
        view = self._views.pop(engine_id, None)
        if view is not None:
            self._leave_group(engine_id)
            self._count(view, -1)

    def _count(self, view: EngineView | None, by: int) -> None:
        if view is not None and view.state not in _OUT:
            self._versions[view.version] += by
            if not self._versions[view.version]:
                del self._versions[view.version]

    def _join_group(self, view: EngineView) -> None:
        groups = self._groups(view)
        group = groups.get(view.version)
        if group is None:
            group = groups[view.version] = _Group(groups, view.version)
            self._asked.clear()
        self._settle(view, group)

    def _settle(self, view: EngineView, group: _Group) -> None:
        """Give an engine its home in a group."""
        place, room = None, _ANY_SIZE
        if self._has_slot(view):
            place, room = self._place(view), _kv_room(view)
            group.open.add(place, room)
            self._num_open += 1
        elif view.circuit is Circuit.CLOSED:
            group.num_full += 1
        else:
            group.num_shut += 1
        self._homes[view.engine_id] = _Home(group, place, room, view.circuit)

    def _leave_group(self, engine_id: EngineId) -> None:
        """Undo ``_join_group``, if it is in a group."""
        home = self._homes.pop(engine_id, None)
        if home is None:
            return
        group, place, _, circuit = home
        self._take_out(group, place, circuit)
        if group.is_empty():
            del group.siblings[group.version]
            self._asked.clear()

    def _take_out(self, group: _Group, place: Place | None, circuit: Circuit) -> None:
        if place is not None:
            group.open.remove(place)
            self._num_open -= 1
        elif circuit is Circuit.CLOSED:
            group.num_full -= 1
        else:
            group.num_shut -= 1

    def _groups(self, view: EngineView) -> dict[WeightVersion | None, _Group]:
        if view.kind is EngineKind.DEDICATED:
            return self._dedicated
        return self._slow if view.is_slow else self._borrowed

    def __iter__(self) -> Iterator[EngineView]:
        """Iterate over the views, in the order in which the engines joined."""
        return iter(self._views.values())

    def has_open_engine(self) -> bool:
        """Tell whether any engine would take some turn now; a cheap test before a long queue is searched."""
        return self._num_open > 0

    def is_out_of_reach(self, versions: VersionConstraint) -> bool:
        """Tell whether the engines have all moved past what ``versions`` asks for."""
        return is_out_of_reach(versions, self._versions, self.run)

    def is_held(self, versions: VersionConstraint) -> bool:
        """Tell whether an engine holds what ``versions`` asks for, ready or not."""
        return any(is_admissible(versions, version, self.run) for version in self._versions)

    def room(self, versions: VersionConstraint, *, is_dedicated_only: bool, is_new: bool = False) -> Sizes:
        """Return the room that engines with an open slot have for a turn of these versions; ``is_new``: it begins a trajectory.

        Returns:
            Two numbers of tokens, infinite when there is no limit, minus infinite when no engine is open. ``choose`` finds an
            engine if and only if a turn's prompt and new tokens together are at most the first, or its prompt at most the second.
        """
        dedicated, borrowed = self._admissible(versions, is_dedicated_only=is_dedicated_only, is_new=is_new)
        largest = [group.open.largest() for group in (*dedicated, *borrowed)]
        return (
            max((first for first, _ in largest), default=-math.inf),
            max((second for _, second in largest), default=-math.inf),
        )

    def choose(self, turn: TurnView) -> Assign | Wait:
        """Decide where ``turn`` goes now."""
        dedicated, borrowed = self._admissible(
            turn.versions, is_dedicated_only=turn.is_dedicated_only, is_new=turn.affinity is None
        )
        if turn.affinity is not None and turn.affinity not in turn.avoid:
            here = self._views.get(turn.affinity)
            if here is not None and self._can_take(here, turn):
                return self._stay_or_go(here, turn, (dedicated, borrowed))
        asked = _asked(turn)
        for groups in (dedicated, borrowed):
            place = _first(groups, asked, turn.avoid)
            if place is not None:
                view = self._views[place[-1]]
                return Assign(view.engine_id, _reason(view, turn))
        return self._return_or_wait(turn, (*dedicated, *borrowed))

    def _stay_or_go(self, here: EngineView, turn: TurnView, kinds: _Kinds) -> Assign:
        """Decide for a turn that could go on where the trajectory is."""
        config = self._config
        if self._is_by_value and turn.moved_by is None:
            asked, most_s, best = _asked(turn), 0.0, None
            for groups in kinds:
                place = _first(groups, asked, turn.avoid)
                if place is None or place[-1] == here.engine_id:
                    continue
                there = self._views[place[-1]]
                if not self._has_seat(there):
                    continue
                if here.pace_s is None:
                    if is_crowded(config, here, there):
                        return Assign(there.engine_id, RouteReason.REBALANCED)
                elif (earlier_s := gain_s(config, turn, here, there)) > most_s:
                    best, most_s = there, earlier_s
            if best is not None:
                return Assign(best.engine_id, RouteReason.MIGRATED)
        return Assign(here.engine_id, _reason(here, turn))

    def _return_or_wait(self, turn: TurnView, groups: tuple[_Group, ...]) -> Assign | Wait:
        """Decide for a turn that only engines could take which it avoids, if any."""
        avoided = [self._views[engine_id] for engine_id in turn.avoid if engine_id in self._views]
        takers = [view for view in avoided if self._can_take(view, turn)]
        if takers:
            view = min(takers, key=lambda view: self._rank_avoided(view, turn))
            return Assign(view.engine_id, _reason(view, turn))
        if any(len(group.open) for group in groups):
            return Wait(WaitReason.KV)
        if any(group.num_full for group in groups):
            return Wait(WaitReason.SLOTS)
        if groups:
            return Wait(WaitReason.CIRCUIT)
        has_ready = self._dedicated or (not turn.is_dedicated_only and (self._borrowed or self._slow))
        return Wait(WaitReason.VERSION if has_ready else WaitReason.NO_READY_ENGINE)

    def _admissible(self, versions: VersionConstraint, *, is_dedicated_only: bool, is_new: bool) -> _Kinds:
        """Return the dedicated groups and the borrowed groups that a turn may go to."""
        found = self._asked.get(versions)
        if found is None:
            if len(self._asked) >= _MOST_ASKED:
                self._asked.clear()
            every = (self._with_version(groups, versions) for groups in (self._dedicated, self._borrowed, self._slow))
            found = self._asked[versions] = tuple(every)
        dedicated, borrowed, slow = found
        if is_dedicated_only:
            return dedicated, []
        if slow and not (is_new and _has_hope(dedicated)):
            return dedicated, borrowed + slow
        return dedicated, borrowed

    def _with_version(self, groups: dict[WeightVersion | None, _Group], versions: VersionConstraint) -> list[_Group]:
        return [group for version, group in groups.items() if is_admissible(versions, version, self.run)]

    def _can_take(self, view: EngineView, turn: TurnView) -> bool:
        """Test a single engine."""
        if view.state is not EngineState.READY or not self._has_slot(view):
            return False
        if view.kind is EngineKind.BORROWED and (turn.is_dedicated_only or self._is_barred(view, turn)):
            return False
        (need, prompt), (room, prompt_room) = _asked(turn), _kv_room(view)
        return (need <= room or prompt <= prompt_room) and is_admissible(turn.versions, view.version, self.run)

    def _is_barred(self, view: EngineView, turn: TurnView) -> bool:
        """Tell whether no trajectory may begin on a slow engine."""
        return view.is_slow and turn.affinity is None and _has_hope(self._with_version(self._dedicated, turn.versions))

    def _has_slot(self, view: EngineView) -> bool:
        circuit = view.circuit
        if circuit is not Circuit.CLOSED and (circuit is Circuit.OPEN or view.num_probing > 0):
            return False
        return view.num_in_flight < self._cap(view)

    def _cap(self, view: EngineView) -> int:
        cap, slots = self._most_turns, view.num_slots
        if view.num_shown is not None and self._is_by_value:
            cap = min(cap, self._config.untried_slots + view.num_shown)
        return cap if slots is None or slots > cap else slots

    def _has_seat(self, view: EngineView) -> bool:
        """Tell whether there is a slot that no trajectory will soon be back for."""
        return view.num_in_flight + view.num_seats < self._cap(view)

    def _place(self, view: EngineView) -> Place:
        if not self._is_by_value:
            return (False, 0.0, view.num_in_flight, view.kv_used_fraction, view.engine_id)
        pace_s, num_in_flight = view.pace_s, view.num_in_flight
        ends_s = 0.0 if pace_s is None else pace_s * (view.most_left_tokens + 1)
        is_full = num_in_flight + view.num_seats >= self._cap(view)
        return (is_full, ends_s, num_in_flight, view.kv_used_fraction, view.engine_id)

    def _rank_avoided(self, view: EngineView, turn: TurnView) -> tuple[bool, bool, Place]:
        return view.engine_id != turn.affinity, view.kind is EngineKind.BORROWED, self._place(view)


def _is_same_group(one: EngineView, other: EngineView) -> bool:
    """Tell whether two views of an engine belong into the same group, or both into none, and count alike."""
    return (
        one.state is other.state
        and (one.version is other.version or one.version == other.version)
        and one.kind is other.kind
        and one.is_slow == other.is_slow
    )


def _first(groups: list[_Group], asked: Sizes, avoid: AbstractSet[EngineId]) -> Place | None:
    """Return the place of the first engine of several groups with room for a turn."""
    best = None
    for group in groups:
        place = group.first(asked, avoid)
        if place is not None and (best is None or place < best):
            best = place
    return best


def _has_hope(groups: list[_Group]) -> bool:
    """Tell whether an engine of these takes turns, or will once those end that it has: not all have failed."""
    return any(len(group.open) or group.num_full for group in groups)


def _asked(turn: TurnView) -> Sizes:
    """Return what a turn needs of the two sizes of ``_kv_room``."""
    return turn.num_prompt_tokens + turn.num_new_tokens, turn.num_prompt_tokens


def _kv_room(view: EngineView) -> Sizes:
    """Return how large a turn may be, with all that it may generate, and how long a prompt is enough by itself.

    The turn must fit beside what is in flight. An idle engine is tried even when the whole turn would not fit (few turns
    use all their tokens), a borrowed one only if it holds the prompt: its budget may be zero for a while, and a dedicated
    engine refuses what never fits.
    """
    if view.kv_total_tokens is None:
        return _ANY_SIZE
    if view.num_in_flight:
        return view.kv_total_tokens - view.kv_reserved_tokens, -math.inf
    return _ANY_SIZE if view.kind is EngineKind.DEDICATED else (-math.inf, view.kv_total_tokens - 1)


def _reason(view: EngineView, turn: TurnView) -> RouteReason:
    if turn.moved_by is not None:
        return _MOVED_REASON[turn.moved_by]
    if view.engine_id == turn.affinity:
        return RouteReason.AFFINITY
    return RouteReason.DEDICATED if view.kind is EngineKind.DEDICATED else RouteReason.BORROWED
