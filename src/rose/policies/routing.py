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

While seats are kept (``keep_seats``; ``rose.policies.returns`` says when), slots and KV room of trajectories that will soon be back on their engine are not
for other trajectories, whose turns wait instead; and one that begins needs room to grow, as much as a usual one has.

By the ``paper`` rule engines are not left for others, no seats are kept, new ones have all their slots at once, and the first has the fewest turns in flight.

A decision looks at a few engines, however many there are: the ready ones with an open slot are kept in that order, by kind
and version, with bounds of their KV room. A turn that comes or goes changes an engine's load alone, and moves it within its order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import attrs

from rose.policies.migration import gain_s, is_crowded
from rose.policies.ordered import Sizes
from rose.policies.route_groups import Group, Place, first_of, has_hope
from rose.policies.route_views import (
    Assign,
    Circuit,
    EngineLoad,
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
    "EngineLoad",
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


@attrs.define(eq=False)
class _Engine:
    """An engine, and where it was put.

    Attributes:
        view: What it was when it was put; its load then may be an old one.
        load: What it has to do now.
        cap: Turns in flight at most.
        group: Its group, of a ready one.
        place: Its place among the open ones of the group, if it has an open slot.
        is_shut: It has no open slot, and its circuit is the reason.
    """

    view: EngineView
    load: EngineLoad
    cap: int
    group: Group | None = None
    place: Place | None = None
    is_shut: bool = False


_Kinds = tuple[list[Group], list[Group]]
"""Dedicated groups and borrowed groups."""

_MOST_ASKED = 256


class RoutingIndex:
    """The engines as the policy knows them, kept up to date view by view and load by load.

    Invariants: each ready engine is counted in its group, which is not empty, and has its place there under the load that was heard of last; a view and its load
    agree in what chooses the group; the open engines of all groups are ``_num_open``; ``_versions`` counts the engines that may yet take turns at the version they
    have; ``_asked`` holds for the groups and the run as they are.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self._run: str | None = None
        self._config = config
        self._is_by_value = config.rule is RoutingRule.VALUE
        self._keeps_seats = False
        self._newcomer_tokens = 0.0
        self._engines: dict[EngineId, _Engine] = {}
        self._dedicated: dict[WeightVersion | None, Group] = {}
        self._borrowed: dict[WeightVersion | None, Group] = {}
        self._slow: dict[WeightVersion | None, Group] = {}
        self._versions: Counter[WeightVersion | None] = Counter()
        self._num_open = 0
        self._asked: dict[VersionConstraint, tuple[list[Group], ...]] = {}

    @property
    def run(self) -> str | None:
        """The training run that version constraints refer to, or ``None``."""
        return self._run

    @run.setter
    def run(self, run: str | None) -> None:
        self._run = run
        self._asked.clear()

    @property
    def keeps_seats(self) -> bool:
        """Whether slots and KV room are kept for trajectories that are expected back."""
        return self._keeps_seats

    @property
    def newcomer_tokens(self) -> float:
        """KV room that a trajectory is to find where it begins, in tokens; 0 while no seats are kept."""
        return self._newcomer_tokens

    def keep_seats(self, newcomer_tokens: float | None) -> None:
        """Keep slots and KV room for the trajectories that are expected back on their engines, or no longer do so.

        Args:
            newcomer_tokens: KV room that a trajectory is to find where it begins, since it will grow; ``None``: nothing is kept.
        """
        keeps = newcomer_tokens is not None and self._is_by_value
        self._newcomer_tokens = newcomer_tokens if keeps and newcomer_tokens is not None else 0.0
        if self._keeps_seats is not keeps:
            self._keeps_seats = keeps
            for engine in self._engines.values():
                if engine.group is not None:
                    self._take_out(engine, engine.group)
                    engine.cap = self._cap(engine.view)
                    self._settle(engine, engine.group, self._place(engine))

    def put(self, view: EngineView) -> None:
        """Add an engine or replace what is known of it."""
        engine, load, cap = self._engines.get(view.engine_id), view.load, self._cap(view)
        if engine is None:
            engine = self._engines[view.engine_id] = _Engine(view, load, cap)
        else:
            old, engine.view, engine.cap = engine.view, view, cap
            if _is_same_group(old, view):
                self.put_load(view.engine_id, load)
                return
            engine.load = load
            self._leave_group(engine)
            self._count(old, -1)
        self._count(view, 1)
        if view.state is EngineState.READY:
            self._join_group(engine)

    def put_load(self, engine_id: EngineId, load: EngineLoad) -> None:
        """Replace what an engine has to do, when nothing else of it changed: what nearly every change comes to.

        Raises:
            KeyError: No such engine was put.
        """
        engine = self._engines[engine_id]
        if load.is_slow is not engine.view.is_slow:
            self.put(engine.view.under(load))
            return
        engine.load, group, old = load, engine.group, engine.place
        if group is None:
            return
        new = self._place(engine)
        if old is None or new is None:
            self._take_out(engine, group)
            self._settle(engine, group, new)
            return
        room, to = group.room_of(old), group.room_of(new)
        if room is to:
            room.move(old, new, self._free_room(engine.view, load))
        else:
            room.remove(old)
            to.add(new, self._free_room(engine.view, load))
        engine.place = new

    def drop(self, engine_id: EngineId) -> None:
        """Forget an engine; unknown ids are ignored."""
        engine = self._engines.pop(engine_id, None)
        if engine is not None:
            self._leave_group(engine)
            self._count(engine.view, -1)

    def _count(self, view: EngineView, by: int) -> None:
        if view.state not in _OUT:
            self._versions[view.version] += by
            if not self._versions[view.version]:
                del self._versions[view.version]

    def _join_group(self, engine: _Engine) -> None:
        version, groups = engine.view.version, self._groups(engine.view)
        group = groups.get(version)
        if group is None:
            group = groups[version] = Group(groups, version)
            self._asked.clear()
        engine.group = group
        self._settle(engine, group, self._place(engine))

    def _leave_group(self, engine: _Engine) -> None:
        """Undo ``_join_group``, if it is in a group."""
        group = engine.group
        if group is None:
            return
        self._take_out(engine, group)
        engine.group = None
        if group.is_empty():
            del group.siblings[group.version]
            self._asked.clear()

    def _settle(self, engine: _Engine, group: Group, place: Place | None) -> None:
        """Put an engine of a group among those that are open, full or shut."""
        engine.place = place
        if place is not None:
            group.room_of(place).add(place, self._free_room(engine.view, engine.load))
            self._num_open += 1
            return
        engine.is_shut = engine.view.circuit is not Circuit.CLOSED
        if engine.is_shut:
            group.num_shut += 1
        else:
            group.num_full += 1

    def _take_out(self, engine: _Engine, group: Group) -> None:
        """Undo ``_settle``."""
        if engine.place is not None:
            group.room_of(engine.place).remove(engine.place)
            self._num_open -= 1
        elif engine.is_shut:
            group.num_shut -= 1
        else:
            group.num_full -= 1

    def _groups(self, view: EngineView) -> dict[WeightVersion | None, Group]:
        if view.kind is EngineKind.DEDICATED:
            return self._dedicated
        return self._slow if view.is_slow else self._borrowed

    def __iter__(self) -> Iterator[EngineView]:
        """Iterate over the views, in the order in which the engines joined."""
        return (engine.view.under(engine.load) for engine in self._engines.values())

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
            engine if and only if a turn's prompt and new tokens together are at most the first, or its prompt at most the second;
            while seats are kept, also where its trajectory is, in what is kept there.
        """
        dedicated, borrowed = self._admissible(versions, is_dedicated_only=is_dedicated_only, is_new=is_new)
        lists = [room for group in (*dedicated, *borrowed) for room in group.lists(is_seated_too=not self._keeps_seats)]
        largest = [room.largest() for room in lists]
        most = max((first for first, _ in largest), default=-math.inf)
        if is_new and most < self._newcomer_tokens:
            most = -math.inf
        return most, max((second for _, second in largest), default=-math.inf)

    def choose(self, turn: TurnView) -> Assign | Wait:
        """Decide where ``turn`` goes now."""
        affinity, num_prompt_tokens = turn.affinity, turn.num_prompt_tokens
        asked: Sizes = (num_prompt_tokens + turn.num_new_tokens, num_prompt_tokens)
        kinds = dedicated, borrowed = self._admissible(
            turn.versions, is_dedicated_only=turn.is_dedicated_only, is_new=affinity is None
        )
        if affinity is not None and affinity not in turn.avoid:
            here = self._engines.get(affinity)
            if here is not None and self._can_take(here, asked, kinds, is_at_home=True):
                return self._stay_or_go(here, turn, asked, kinds)
        elif affinity is None and asked[0] < self._newcomer_tokens:
            asked = (self._newcomer_tokens, num_prompt_tokens)
        for groups in kinds:
            place = first_of(groups, asked, turn.avoid, is_seated_too=not self._keeps_seats)
            if place is not None:
                return self._assign(self._engines[place[-1]], turn)
        avoided = [engine for engine_id in turn.avoid if (engine := self._engines.get(engine_id)) is not None]
        takers = [engine for engine in avoided if self._can_take(engine, asked, kinds)]
        if takers:
            return self._assign(min(takers, key=lambda engine: _rank_avoided(engine, turn)), turn)
        return Wait(self._obstacle(turn, (*dedicated, *borrowed)))

    def _stay_or_go(self, here: _Engine, turn: TurnView, asked: Sizes, kinds: _Kinds) -> Assign:
        """Decide for a turn that could go on where the trajectory is."""
        config = self._config
        if self._is_by_value and turn.moved_by is None:
            most_s, best = 0.0, None
            for groups in kinds:
                place = first_of(groups, asked, turn.avoid, is_seated_too=False)
                if place is None:
                    continue
                there = self._engines[place[-1]]
                if there.view.kind is here.view.kind and here.place is not None and here.place <= place:
                    continue  # it is the first of its kind itself
                if here.load.pace_s is None:
                    if here.view.kind is there.view.kind and is_crowded(config, here.load, there.load):
                        return Assign(place[-1], RouteReason.REBALANCED)
                elif (earlier_s := gain_s(config, turn, here.load, there.load)) > most_s:
                    best, most_s = place, earlier_s
            if best is not None:
                return Assign(best[-1], RouteReason.MIGRATED)
        return self._assign(here, turn)

    def _assign(self, engine: _Engine, turn: TurnView) -> Assign:
        view = engine.view
        if turn.moved_by is not None:
            return Assign(view.engine_id, _MOVED_REASON[turn.moved_by])
        if view.engine_id == turn.affinity:
            return Assign(view.engine_id, RouteReason.AFFINITY)
        is_own = view.kind is EngineKind.DEDICATED
        return Assign(view.engine_id, RouteReason.DEDICATED if is_own else RouteReason.BORROWED)

    def _obstacle(self, turn: TurnView, groups: tuple[Group, ...]) -> WaitReason:
        """Return what keeps a turn from all engines; ``groups``: those of admissible ones."""
        home = None if turn.affinity is None or turn.affinity in turn.avoid else self._engines.get(turn.affinity)
        has_home = home is not None and home.place is not None and home.group in groups
        if has_home or any(len(room) for group in groups for room in group.lists(is_seated_too=not self._keeps_seats)):
            return WaitReason.KV
        if any(group.num_full or len(group.seated) for group in groups):
            return WaitReason.SLOTS
        if groups:
            return WaitReason.CIRCUIT
        has_ready = self._dedicated or (not turn.is_dedicated_only and (self._borrowed or self._slow))
        return WaitReason.VERSION if has_ready else WaitReason.NO_READY_ENGINE

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
        if slow and not (is_new and has_hope(dedicated)):
            return dedicated, borrowed + slow
        return dedicated, borrowed

    def _with_version(self, groups: dict[WeightVersion | None, Group], versions: VersionConstraint) -> list[Group]:
        return [group for version, group in groups.items() if is_admissible(versions, version, self.run)]

    def _free_room(self, view: EngineView, load: EngineLoad) -> Sizes:
        """Return the room that an engine has for trajectories of others; see ``_kv_room``."""
        if not (self._keeps_seats and load.kv_seat_tokens):
            return _kv_room(view, load)
        total = view.kv_total_tokens
        return _ANY_SIZE if total is None else (total - load.kv_reserved_tokens - load.kv_seat_tokens, -math.inf)

    def _can_take(self, engine: _Engine, asked: Sizes, kinds: _Kinds, *, is_at_home: bool = False) -> bool:
        """Tell whether a single engine takes a turn for which these groups are admissible; where its trajectory is, of what is kept too."""
        place = engine.place
        if place is None or (engine.group not in kinds[0] and engine.group not in kinds[1]):
            return False
        if place[0] and self._keeps_seats and not is_at_home:
            return False
        room = (_kv_room if is_at_home else self._free_room)(engine.view, engine.load)
        return room[0] >= asked[0] or room[1] >= asked[1]

    def _cap(self, view: EngineView) -> int:
        """Return how many turns an engine may have in flight."""
        if view.circuit is Circuit.OPEN or (view.is_kept_free and not self._keeps_seats):
            return 0
        cap, slots = self._config.cap_per_engine, view.num_slots
        if view.num_shown is not None and self._is_by_value:
            cap = min(cap, self._config.untried_slots + view.num_shown)
        return cap if slots is None or slots > cap else slots

    def _place(self, engine: _Engine) -> Place | None:
        """Return where an engine stands among those of its kind, ``None`` without an open slot."""
        view, load, cap = engine.view, engine.load, engine.cap
        num_in_flight = load.num_in_flight
        if num_in_flight >= cap or (load.num_probing and view.circuit is Circuit.HALF_OPEN):
            return None
        if not self._is_by_value:
            return (False, 0.0, num_in_flight, view.kv_used_fraction, view.engine_id)
        pace_s, is_full = load.pace_s, num_in_flight + load.num_seats >= cap or view.is_kept_free
        ends_s = 0.0 if pace_s is None else pace_s * (load.most_left_tokens + 1)
        return (is_full, ends_s, num_in_flight, view.kv_used_fraction, view.engine_id)


def _is_same_group(one: EngineView, other: EngineView) -> bool:
    """Tell whether two views of an engine belong into the same group, or both into none, and count alike."""
    return (
        one.state is other.state
        and (one.version is other.version or one.version == other.version)
        and one.kind is other.kind
        and one.is_slow == other.is_slow
    )


def _rank_avoided(engine: _Engine, turn: TurnView) -> tuple[bool, bool, Place | None]:
    view = engine.view
    return view.engine_id != turn.affinity, view.kind is EngineKind.BORROWED, engine.place


def _kv_room(view: EngineView, load: EngineLoad) -> Sizes:
    """Return how large a turn may be, with all that it may generate, and how long a prompt is enough by itself.

    The turn must fit beside what is in flight. An idle engine is tried even when the whole turn would not fit (few turns
    use all their tokens), a borrowed one only if it holds the prompt: its budget may be zero for a while, and a dedicated
    engine refuses what never fits.
    """
    kv_total_tokens = view.kv_total_tokens
    if kv_total_tokens is None:
        return _ANY_SIZE
    if load.num_in_flight:
        return kv_total_tokens - load.kv_reserved_tokens, -math.inf
    return _ANY_SIZE if view.kind is EngineKind.DEDICATED else (-math.inf, kv_total_tokens - 1)
