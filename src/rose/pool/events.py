"""What a pool tells its observer. Frozen and typed; ``at_s`` is on the pool's clock."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from rose.policies.routing import EngineState
from rose.types import Activation, EngineId, EngineKind, FinishReason, Hop, HopEnd, LeaseId, RouteReason, VersionSpan


@attrs.frozen(kw_only=True)
class TurnAssigned:
    """A turn was given to an engine after waiting ``waited_s`` since it arrived or was last moved."""

    at_s: float
    trajectory_id: str
    engine_id: EngineId
    reason: RouteReason
    waited_s: float


@attrs.frozen(kw_only=True)
class TurnRerouted:
    """An attempt ended before the turn did; ``num_tokens`` of it were kept. ``why`` is the engine's error, if it gave one."""

    at_s: float
    trajectory_id: str
    engine_id: EngineId
    ended: HopEnd
    num_tokens: int
    why: str = ""


@attrs.frozen(kw_only=True)
class TurnFinished:
    """A turn was delivered; ``engine_id`` is its last engine, ``None`` when no engine had room for its prompt."""

    at_s: float
    trajectory_id: str
    group_id: str
    engine_id: EngineId | None
    finish_reason: FinishReason
    num_tokens: int
    num_hops: int
    duration_s: float
    versions: tuple[VersionSpan, ...] = ()
    hops: tuple[Hop, ...] = ()


@attrs.frozen(kw_only=True)
class TurnFailed:
    """A turn ended with an error, or was cancelled by its caller (``error`` is then ``"cancelled"``); it had ``num_tokens`` by then."""

    at_s: float
    trajectory_id: str
    group_id: str
    error: str
    num_hops: int
    num_tokens: int = 0


@attrs.frozen(kw_only=True)
class EngineStateChanged:
    """An engine moved to another state; ``old`` is ``None`` when it joined, ``new`` is ``None`` when it left."""

    at_s: float
    engine_id: EngineId
    kind: EngineKind
    lease_id: LeaseId | None
    old: EngineState | None
    new: EngineState | None
    why: str


@attrs.frozen(kw_only=True)
class WeightsActivated:
    """An engine acknowledged new weights."""

    at_s: float
    engine_id: EngineId
    activation: Activation


PoolEvent = TurnAssigned | TurnRerouted | TurnFinished | TurnFailed | EngineStateChanged | WeightsActivated
Observer = Callable[[PoolEvent], None]
