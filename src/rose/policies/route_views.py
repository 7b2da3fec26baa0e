"""What the routing policy sees and says: engines, turns, decisions, its settings. Values only."""

from __future__ import annotations

import enum
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import NamedTuple

import attrs

from rose import checks
from rose.policies.pace import PaceConfig
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


class RoutingRule(enum.Enum):
    """How engines are compared.

    ``value``: by what is left of the trajectory, its pace here and elsewhere, and the prompt to compute anew. ``paper``: the
    published table: the engine of the last turn as long as it takes turns, dedicated before borrowed, fewest in flight.
    """

    VALUE = "value"
    PAPER = "paper"


@attrs.frozen(kw_only=True)
class RoutingConfig:
    """Limits and terms of the routing policy.

    Attributes:
        cap_per_engine: Turns in flight on one engine at most (paper: 16).
        untried_slots: Turns in flight on an engine that joined a pool at work and has shown no token yet; each turn that it shows one of
            opens one slot more. Of ``value`` only.
        rule: How engines are compared. All that follows is of ``value``.
        hysteresis_fraction: A trajectory moves if that ends what is left, of it and of the trajectories that it meets or leaves, earlier
            by more than this share,
        min_gain_s: and by more than this, and by more than its prompt holds up all the others there together.
        progress_factor: A trajectory is expected to make this many times the tokens that it has made. No length is predicted.
        max_context_tokens: Where the job cuts trajectories, if the pool is told: what is left never goes beyond.
        load_margin: Before paces are known: a turn leaves its engine for one of the same kind that has fewer turns, if it would
            have over this many fewer once the turn stayed.
        max_slowdown: On a borrowed engine where a token takes more than this many times what it takes on a dedicated one no trajectory
            begins, as long as there is a dedicated one for it, if need be later, whose circuit is not open.
        pace: How paces are learned.
    """

    cap_per_engine: int = attrs.field(default=16, validator=checks.integer(1))
    untried_slots: int = attrs.field(default=2, validator=checks.integer(1))
    rule: RoutingRule = attrs.field(default=RoutingRule.VALUE, validator=checks.instance(RoutingRule))
    min_gain_s: float = attrs.field(default=1.0, validator=checks.number(at_least=0))
    hysteresis_fraction: float = attrs.field(default=0.03, validator=checks.number(at_least=0, at_most=1))
    progress_factor: float = attrs.field(default=3.0, validator=checks.number(at_least=0))
    max_context_tokens: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(1)))
    load_margin: int = attrs.field(default=2, validator=checks.integer(1))
    max_slowdown: float = attrs.field(default=4.0, validator=checks.number(at_least=1))
    pace: PaceConfig = attrs.field(factory=PaceConfig, validator=checks.instance(PaceConfig))


class EngineLoad(NamedTuple):
    """What of an ``EngineView`` changes with every turn that an engine takes or ends; see there."""

    num_in_flight: int = 0
    num_probing: int = 0
    kv_reserved_tokens: int = 0
    num_waiting_prompt_tokens: int = 0
    most_left_tokens: float = 0.0
    num_seats: int = 0
    kv_seat_tokens: int = 0
    pace_s: float | None = None
    slope_s: float = 0.0
    idle_s: float = 0.0
    prefill_s: float = 0.0
    is_slow: bool = False


_of_load = attrgetter(*EngineLoad._fields)


@attrs.frozen(kw_only=True)
class EngineView:
    """What the policy sees of one engine.

    ``num_in_flight`` counts requests that are being stopped as well; ``num_probing`` those that made no token yet;
    ``kv_total_tokens`` is ``None`` until the engine was read; ``kv_reserved_tokens`` is what the turns in flight may
    grow to; ``kv_used_fraction`` is the last reading and only breaks ties.

    Attributes:
        is_kept_free: It takes no turns, or those alone that come back to it if seats are kept, until one that is too large for it now has room.
        num_slots: Bounds the turns in flight below the cap; ``None``: the cap alone does.
        pace_s: Seconds a token with the turns that it has; ``None`` as long as no pace is known.
        slope_s: By how much one more token of context adds to that.
        idle_s: Seconds a token without any turn.
        prefill_s: Seconds to compute one prompt token.
        num_waiting_prompt_tokens: Prompt tokens that are to be computed before a turn that comes now.
        most_left_tokens: The most that one of its trajectories is expected to make yet.
        num_seats: Trajectories that will soon be back with their next turn, as far as can be told.
        kv_seat_tokens: Their contexts together.
        is_slow: See ``RoutingConfig.max_slowdown``.
        num_shown: Turns of the pool that it has shown a token of since it joined; ``None``: enough of them.
    """

    engine_id: EngineId
    kind: EngineKind
    state: EngineState
    version: WeightVersion | None = None
    circuit: Circuit = Circuit.CLOSED
    num_in_flight: int = 0
    num_slots: int | None = None
    is_kept_free: bool = False
    num_probing: int = 0
    kv_total_tokens: int | None = None
    kv_reserved_tokens: int = 0
    kv_used_fraction: float = 0.0
    pace_s: float | None = None
    slope_s: float = 0.0
    idle_s: float = 0.0
    prefill_s: float = 0.0
    num_waiting_prompt_tokens: int = 0
    most_left_tokens: float = 0.0
    num_seats: int = 0
    kv_seat_tokens: int = 0
    is_slow: bool = False
    num_shown: int | None = None

    @property
    def load(self) -> EngineLoad:
        """Return what changes with every turn."""
        return EngineLoad._make(_of_load(self))

    def under(self, load: EngineLoad) -> EngineView:
        """Return the same engine under another load."""
        return attrs.evolve(self, **load._asdict())


@attrs.frozen(kw_only=True, slots=False)  # one is made for every decision; without slots that takes less time
class TurnView:
    """What the policy sees of one turn.

    ``num_prompt_tokens`` includes the tokens of earlier attempts; ``num_left_tokens`` is what the whole trajectory is expected to
    make yet, see ``rose.policies.migration``. A turn without ``affinity`` begins its trajectory. A turn ``is_dedicated_only`` once a borrowed engine, which may be smaller than the
    job's own, refused it.
    """

    versions: VersionConstraint
    num_prompt_tokens: int
    num_new_tokens: int
    num_left_tokens: float = 0.0
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
