"""Which engine takes the next turn. Pure: frozen views in, a typed decision out.

An engine is admissible for a turn when it is ready, holds an admissible version, its circuit lets a request through, it
has an open slot under the cap and KV room for the prompt and every token that the turn may still make. Among the
admissible ones the order is: engines that did not just evict or stall this turn; the engine of the trajectory's last
turn; dedicated before borrowed; fewest turns in flight; lowest KV use; id. An engine that is avoided is taken when it
is the only one, so that no turn is stranded.

A decision looks at a few engines, however many there are: the ready ones with an open slot are kept in that order, by kind
and version, with bounds of their KV room.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import attrs

from rose import checks
from rose.policies.pace import PaceConfig
from rose.policies.ordered import OrderedRoom, Sizes
from rose.policies.staleness import is_admissible, is_out_of_reach
from rose.types import EngineId, EngineKind, HopEnd, RouteReason, VersionConstraint, WeightVersion


class EngineState(enum.Enum):
    """Where an engine stands in the pool. Only a ready one is given turns."""

    JOINING = "joining"
    STALE = "stale"
    READY = "ready"
    UPDATING = "updating"
    DRAINING = "draining"
    FENCED = "fenced"
    LOST = "lost"


class Circuit(enum.Enum):
    """Whether an engine that failed requests may be tried: yes, not now, or with one request to see."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Rule(enum.Enum):
    """How turns find their engines."""

    VALUE = "value"
    PAPER = "paper"


class WaitReason(enum.IntEnum):
    """Why a turn waits: the last test that the engine which came furthest did not pass. Closed list, in test order."""

    NO_READY_ENGINE = 0
    VERSION = 1
    CIRCUIT = 2
    SLOTS = 3
    KV = 4


@attrs.frozen(kw_only=True)
class RoutingConfig:
    """Limits of the routing policy. ``cap_per_engine`` bounds the turns in flight on one engine (paper: 16)."""

    cap_per_engine: int = attrs.field(default=16, validator=checks.integer(1))
    rule: Rule = attrs.field(default=Rule.VALUE, validator=checks.instance(Rule))
    hysteresis_fraction: float = attrs.field(default=0.1, validator=checks.number(at_least=0, at_most=1))
    progress_factor: float = attrs.field(default=1.0, validator=checks.number(at_least=0))
    max_context_tokens: int | None = None
    load_margin: int = attrs.field(default=4, validator=checks.integer(1))
    pace: PaceConfig = attrs.field(factory=PaceConfig, validator=checks.instance(PaceConfig))


@attrs.frozen(kw_only=True)
class EngineView:
    """What the policy sees of one engine.

    ``num_in_flight`` counts requests that are being stopped as well; ``num_probing`` those that made no token yet;
    ``kv_total_tokens`` is ``None`` until the engine was read; ``kv_reserved_tokens`` is what the turns in flight may
    grow to; ``kv_used_fraction`` is the last reading and only breaks ties.
    """

    engine_id: EngineId
    kind: EngineKind
    state: EngineState
    version: WeightVersion | None = None
    circuit: Circuit = Circuit.CLOSED
    num_in_flight: int = 0
    num_probing: int = 0
    kv_total_tokens: int | None = None
    kv_reserved_tokens: int = 0
    kv_used_fraction: float = 0.0
    pace_s: float | None = None
    slope_s: float = 0.0
    prefill_s: float = 0.0
    most_left_tokens: float = 0.0


@attrs.frozen(kw_only=True)
class TurnView:
    """What the policy sees of one turn.

    ``num_prompt_tokens`` includes the tokens of earlier attempts. A turn ``is_dedicated_only`` once a borrowed engine, which
    may be smaller than the job's own, refused it.
    """

    versions: VersionConstraint
    num_prompt_tokens: int
    num_new_tokens: int
    affinity: EngineId | None = None
    num_made_tokens: int = 0
    avoid: AbstractSet[EngineId] = frozenset()
    moved_by: HopEnd | None = None
    is_dedicated_only: bool = False


@attrs.frozen
class Assign:
    """Send the turn to ``engine_id``."""

    engine_id: EngineId
    reason: RouteReason


@attrs.frozen
class Wait:
    """Keep the turn in the queue."""

    reason: WaitReason


_MOVED_REASON = {
    HopEnd.EVICTED: RouteReason.REROUTED_EVICTED,
    HopEnd.STALLED: RouteReason.REROUTED_STALLED,
    HopEnd.LOST: RouteReason.REROUTED_LOST,
    HopEnd.BUSY: RouteReason.REROUTED_BUSY,
    HopEnd.ABORTED: RouteReason.REROUTED_ABORTED,
    HopEnd.REFUSED: RouteReason.REROUTED_REFUSED,
}


_KINDS = (EngineKind.DEDICATED, EngineKind.BORROWED)  # in the order in which they are preferred
_ANY_SIZE: Sizes = (math.inf, math.inf)

Place = tuple[float, int, float, EngineId]
"""An open engine's place among those of its kind: turns in flight, KV use, id."""


@attrs.define(eq=False)
class _Group:
    """The ready engines of one kind at one weight version: those with an open slot, and why the others have none."""

    open: OrderedRoom[Place] = attrs.field(factory=OrderedRoom)
    num_full: int = 0
    num_shut: int = 0

    def is_empty(self) -> bool:
        return not (len(self.open) or self.num_full or self.num_shut)

    def first(self, asked: Sizes, avoid: AbstractSet[EngineId]) -> Place | None:
        """Return the first engine with room that is not avoided."""
        return next((place for place in self.open.fitting(asked) if place[-1] not in avoid), None)


class RoutingIndex:
    """The engines as the policy knows them, kept up to date view by view.

    Invariants: each ready engine is counted in one group; the open engines of all groups are ``_num_open``; ``_versions``
    counts the engines that are not lost.

    Attributes:
        run: The training run that version constraints refer to, or ``None``.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self.run: str | None = None
        self._config = config
        self._views: dict[EngineId, EngineView] = {}
        self._dedicated: dict[WeightVersion | None, _Group] = {}
        self._borrowed: dict[WeightVersion | None, _Group] = {}
        self._versions: Counter[WeightVersion | None] = Counter()
        self._num_open = 0

    def put(self, view: EngineView) -> None:
        """Add an engine or replace what is known of it."""
        old = self._views.get(view.engine_id)
        if old is not None:
            self._leave_group(old)
        if old is None or old.version != view.version or old.state is not view.state:
            self._count(old, -1)
            self._count(view, 1)
        self._views[view.engine_id] = view
        self._join_group(view)

    def drop(self, engine_id: EngineId) -> None:
        """Forget an engine; unknown ids are ignored."""
        view = self._views.pop(engine_id, None)
        if view is not None:
            self._leave_group(view)
            self._count(view, -1)

    def _count(self, view: EngineView | None, by: int) -> None:
        if view is not None and view.state is not EngineState.LOST:
            self._versions[view.version] += by
            if not self._versions[view.version]:
                del self._versions[view.version]

    def _join_group(self, view: EngineView) -> None:
        if view.state is not EngineState.READY:
            return
        groups = self._groups(view.kind)
        group = groups.get(view.version)
        if group is None:
            group = groups[view.version] = _Group()
        if self._has_slot(view):
            group.open.add(_place(view), _kv_room(view))
            self._num_open += 1
        elif view.circuit is Circuit.CLOSED:
            group.num_full += 1
        else:
            group.num_shut += 1

    def _leave_group(self, view: EngineView) -> None:
        """Undo ``_join_group``."""
        if view.state is not EngineState.READY:
            return
        groups = self._groups(view.kind)
        group = groups[view.version]
        if self._has_slot(view):
            group.open.remove(_place(view))
            self._num_open -= 1
        elif view.circuit is Circuit.CLOSED:
            group.num_full -= 1
        else:
            group.num_shut -= 1
        if group.is_empty():
            del groups[view.version]

    def _groups(self, kind: EngineKind) -> dict[WeightVersion | None, _Group]:
        return self._dedicated if kind is EngineKind.DEDICATED else self._borrowed

    def __iter__(self) -> Iterator[EngineView]:
        """Iterate over the views, in the order in which the engines joined."""
        return iter(self._views.values())

    def has_open_engine(self) -> bool:
        """Tell whether any engine would take some turn now; a cheap test before a long queue is searched."""
        return self._num_open > 0

    def is_out_of_reach(self, versions: VersionConstraint) -> bool:
        """Tell whether the engines that are not lost have all moved past what ``versions`` asks for."""
        return is_out_of_reach(versions, self._versions, self.run)

    def room(self, versions: VersionConstraint, *, is_dedicated_only: bool) -> Sizes:
        """Return the room that engines with an open slot have for a turn of these versions.

        Returns:
            Two numbers of tokens, infinite when there is no limit, minus infinite when no engine is open. ``choose`` finds an
            engine if and only if a turn's prompt and new tokens together are at most the first, or its prompt at most the second.
        """
        groups = self._admissible(_kinds(is_dedicated_only=is_dedicated_only), versions)
        largest = [group.open.largest() for group in groups]
        return (
            max((first for first, _ in largest), default=-math.inf),
            max((second for _, second in largest), default=-math.inf),
        )

    def choose(self, turn: TurnView) -> Assign | Wait:
        """Decide where ``turn`` goes now."""
        view = self._best(turn)
        return Wait(self._furthest_obstacle(turn)) if view is None else Assign(view.engine_id, _reason(view, turn))

    def _best(self, turn: TurnView) -> EngineView | None:
        """Return the admissible engine that comes first."""
        if turn.affinity is not None and turn.affinity not in turn.avoid:
            view = self._views.get(turn.affinity)
            if view is not None and self._can_take(view, turn):
                if self._config.rule is Rule.PAPER or view.pace_s is None:
                    return view
                return self._worthier(view, turn) or view
        asked = _asked(turn)
        for kind in _kinds(is_dedicated_only=turn.is_dedicated_only):
            groups = self._admissible((kind,), turn.versions)
            firsts = [place for group in groups if (place := group.first(asked, turn.avoid)) is not None]
            if firsts:
                return self._views[min(firsts)[-1]]
        avoided = [self._views[engine_id] for engine_id in turn.avoid if engine_id in self._views]
        takers = [view for view in avoided if self._can_take(view, turn)]
        return min(takers, key=lambda view: _rank_avoided(view, turn), default=None)

    def _worthier(self, here: EngineView, turn: TurnView) -> EngineView | None:
        """Return an engine where the turn's trajectory is done clearly earlier, its prompt computed anew."""
        left = remaining_tokens(self._config, turn.num_made_tokens, turn.num_prompt_tokens)
        asked = _asked(turn)
        prompt = turn.num_prompt_tokens
        best, best_s = None, 0.0
        mine_s = (here.pace_s + here.slope_s * prompt) * max(left, here.most_left_tokens)
        h = self._config.hysteresis_fraction
        for kind in _kinds(is_dedicated_only=turn.is_dedicated_only):
            for group in self._admissible((kind,), turn.versions):
                place = group.first(asked, turn.avoid)
                if place is None or place[-1] == here.engine_id:
                    continue
                view = self._views[place[-1]]
                if view.pace_s is None:
                    continue
                before_s = max(mine_s, view.pace_s * view.most_left_tokens)
                pace_s = view.pace_s + view.slope_s * prompt
                after_s = max(pace_s * max(left, view.most_left_tokens) + view.prefill_s * prompt, here.pace_s * here.most_left_tokens)
                gain_s = before_s - after_s
                if gain_s > h * before_s and gain_s > best_s:
                    best, best_s = view, gain_s
        return best

    def _furthest_obstacle(self, turn: TurnView) -> WaitReason:
        """Return the last test that the engine which came furthest did not pass, given that none passed all."""
        kinds = _kinds(is_dedicated_only=turn.is_dedicated_only)
        groups = self._admissible(kinds, turn.versions)
        if any(len(group.open) for group in groups):
            return WaitReason.KV
        if any(group.num_full for group in groups):
            return WaitReason.SLOTS
        if groups:
            return WaitReason.CIRCUIT
        return WaitReason.VERSION if any(self._groups(kind) for kind in kinds) else WaitReason.NO_READY_ENGINE

    def _admissible(self, kinds: tuple[EngineKind, ...], versions: VersionConstraint) -> list[_Group]:
        return [
            group
            for kind in kinds
            for version, group in self._groups(kind).items()
            if is_admissible(versions, version, self.run)
        ]

    def _can_take(self, view: EngineView, turn: TurnView) -> bool:
        """Test a single engine."""
        if view.state is not EngineState.READY or not self._has_slot(view):
            return False
        if turn.is_dedicated_only and view.kind is EngineKind.BORROWED:
            return False
        (need, prompt), (room, prompt_room) = _asked(turn), _kv_room(view)
        return (need <= room or prompt <= prompt_room) and is_admissible(turn.versions, view.version, self.run)

    def _has_slot(self, view: EngineView) -> bool:
        if view.circuit is Circuit.OPEN or (view.circuit is Circuit.HALF_OPEN and view.num_probing > 0):
            return False
        return view.num_in_flight < self._config.cap_per_engine


def remaining_tokens(config: RoutingConfig, made: int, context: int) -> float:
    """Return how many tokens a trajectory is expected to make yet, by its progress alone."""
    left = config.progress_factor * made
    if config.max_context_tokens is None:
        return left
    return min(left, max(0.0, config.max_context_tokens / max(1, context) - 1) * made)


def _kinds(*, is_dedicated_only: bool) -> tuple[EngineKind, ...]:
    return _KINDS[:1] if is_dedicated_only else _KINDS


def _place(view: EngineView) -> Place:
    return ((view.pace_s or 0.0) * view.most_left_tokens, view.num_in_flight, view.kv_used_fraction, view.engine_id)


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


def _rank_avoided(view: EngineView, turn: TurnView) -> tuple[bool, bool, Place]:
    return view.engine_id != turn.affinity, view.kind is EngineKind.BORROWED, _place(view)


def _reason(view: EngineView, turn: TurnView) -> RouteReason:
    if turn.moved_by is not None:
        return _MOVED_REASON[turn.moved_by]
    if view.engine_id == turn.affinity:
        return RouteReason.AFFINITY
    if turn.affinity is not None:
        return RouteReason.MIGRATED
    return RouteReason.DEDICATED if view.kind is EngineKind.DEDICATED else RouteReason.BORROWED
