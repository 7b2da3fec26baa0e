"""Which engine takes the next turn. Pure: frozen views in, a typed decision out.

An engine is admissible for a turn when it is ready, holds an admissible version, its circuit lets a request through, it
has an open slot under the cap and KV room for the prompt and every token that the turn may still make. Among the
admissible ones the order is: engines that did not just evict or stall this turn; the engine of the trajectory's last
turn; dedicated before borrowed; fewest turns in flight; lowest KV use; id. An engine that is avoided is taken when it
is the only one, so that no turn is stranded.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import attrs

from rose import checks
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


class RoutingIndex:
    """The engines as the policy knows them, kept up to date view by view.

    A decision scans the views today; callers only ever put, drop and choose, so that the scan can become an
    incremental structure without a change for them.

    Attributes:
        run: The training run that version constraints refer to, or ``None``.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self.run: str | None = None
        self._config = config
        self._views: dict[EngineId, EngineView] = {}

    def put(self, view: EngineView) -> None:
        """Add an engine or replace what is known of it."""
        self._views[view.engine_id] = view

    def drop(self, engine_id: EngineId) -> None:
        """Forget an engine; unknown ids are ignored."""
        self._views.pop(engine_id, None)

    def __iter__(self) -> Iterator[EngineView]:
        """Iterate over the views, in the order in which the engines joined."""
        return iter(self._views.values())

    def has_open_engine(self) -> bool:
        """Tell whether any engine would take some turn now; a cheap test before a long queue is walked."""
        return any(view.state is EngineState.READY and self._has_slot(view) for view in self._views.values())

    def is_out_of_reach(self, versions: VersionConstraint) -> bool:
        """Tell whether the engines that are not lost have all moved past what ``versions`` asks for."""
        held = [view.version for view in self._views.values() if view.state is not EngineState.LOST]
        return is_out_of_reach(versions, held, self.run)

    def choose(self, turn: TurnView) -> Assign | Wait:
        """Decide where ``turn`` goes now."""
        best: EngineView | None = None
        best_rank: tuple[bool, bool, bool, int, float, str] | None = None
        furthest = WaitReason.NO_READY_ENGINE
        for view in self._views.values():
            obstacle = self._obstacle(view, turn)
            if obstacle is not None:
                furthest = max(furthest, obstacle)
                continue
            rank = _rank(view, turn)
            if best_rank is None or rank < best_rank:
                best, best_rank = view, rank
        if best is None:
            return Wait(furthest)
        return Assign(best.engine_id, _reason(best, turn))

    def _obstacle(self, view: EngineView, turn: TurnView) -> WaitReason | None:
        is_barred = turn.is_dedicated_only and view.kind is EngineKind.BORROWED
        if view.state is not EngineState.READY or is_barred:
            return WaitReason.NO_READY_ENGINE
        if not is_admissible(turn.versions, view.version, self.run):
            return WaitReason.VERSION
        if not self._has_slot(view):
            return WaitReason.SLOTS if view.circuit is Circuit.CLOSED else WaitReason.CIRCUIT
        if not _has_kv_room(view, turn):
            return WaitReason.KV
        return None

    def _has_slot(self, view: EngineView) -> bool:
        if view.circuit is Circuit.OPEN or (view.circuit is Circuit.HALF_OPEN and view.num_probing > 0):
            return False
        return view.num_in_flight < self._config.cap_per_engine


def _has_kv_room(view: EngineView, turn: TurnView) -> bool:
    """Tell whether the turn fits beside what is in flight.

    An idle engine is tried even when the whole turn would not fit (few turns use all their tokens), a borrowed one
    only if it holds the prompt: its budget may be zero for a while, and a dedicated engine refuses what never fits.
    """
    if view.kv_total_tokens is None:
        return True
    if view.num_in_flight == 0:
        return view.kind is EngineKind.DEDICATED or turn.num_prompt_tokens < view.kv_total_tokens
    return view.kv_reserved_tokens + turn.num_prompt_tokens + turn.num_new_tokens <= view.kv_total_tokens


def _rank(view: EngineView, turn: TurnView) -> tuple[bool, bool, bool, int, float, str]:
    return (
        view.engine_id in turn.avoid,
        view.engine_id != turn.affinity,
        view.kind is EngineKind.BORROWED,
        view.num_in_flight,
        view.kv_used_fraction,
        view.engine_id,
    )


def _reason(view: EngineView, turn: TurnView) -> RouteReason:
    if turn.moved_by is not None:
        return _MOVED_REASON[turn.moved_by]
    if view.engine_id == turn.affinity:
        return RouteReason.AFFINITY
    return RouteReason.DEDICATED if view.kind is EngineKind.DEDICATED else RouteReason.BORROWED
