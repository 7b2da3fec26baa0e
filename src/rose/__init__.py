"""ROSE: rollouts of agentic RL on serving GPUs that are idle for the moment.

The names of this module are the public surface. Importing it loads neither torch nor any serving engine; parts with more
behind them are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rose.errors import (
    BackendUnavailableError,
    BlobNotFoundError,
    ConfigError,
    CorruptUpdateError,
    DeadlineExceededError,
    EngineBusyError,
    EngineError,
    EngineFencedError,
    EngineLeaseError,
    EngineLostError,
    EnvironmentFailedError,
    GroupDroppedError,
    LayoutMismatchError,
    LeaseError,
    LedgerError,
    NoEngineError,
    RequestRefusedError,
    RoseError,
    SimulationError,
    StaleTrajectoryError,
    TrainerError,
    TransferError,
    TransportError,
    TurnFailedError,
    VersionConflictError,
    VersionUnavailableError,
)
from rose.types import (
    AnyVersion,
    AtLeast,
    EngineKind,
    Exactly,
    FinishReason,
    Hop,
    HopEnd,
    RouteReason,
    Sampling,
    TransportAddress,
    Turn,
    TurnResult,
    VersionSpan,
    WeightVersion,
)

if TYPE_CHECKING:
    from rose.config import load as load_config
    from rose.pool import PoolConfig, RolloutPool
    from rose.registry import device, open_transport, serving_engine, trainer, transport
    from rose.transfer.publisher import Publisher

_LAZY = {
    "PoolConfig": ("rose.pool", "PoolConfig"),
    "Publisher": ("rose.transfer.publisher", "Publisher"),
    "RolloutPool": ("rose.pool", "RolloutPool"),
    "device": ("rose.registry", "device"),
    "load_config": ("rose.config", "load"),
    "open_transport": ("rose.registry", "open_transport"),
    "serving_engine": ("rose.registry", "serving_engine"),
    "trainer": ("rose.registry", "trainer"),
    "transport": ("rose.registry", "transport"),
}

__version__ = "0.1.0"

__all__ = [
    "AnyVersion",
    "AtLeast",
    "BackendUnavailableError",
    "BlobNotFoundError",
    "ConfigError",
    "CorruptUpdateError",
    "DeadlineExceededError",
    "EngineBusyError",
    "EngineError",
    "EngineFencedError",
    "EngineKind",
    "EngineLeaseError",
    "EngineLostError",
    "EnvironmentFailedError",
    "Exactly",
    "FinishReason",
    "GroupDroppedError",
    "Hop",
    "HopEnd",
    "LayoutMismatchError",
    "LeaseError",
    "LedgerError",
    "NoEngineError",
    "PoolConfig",
    "Publisher",
    "RequestRefusedError",
    "RolloutPool",
    "RoseError",
    "RouteReason",
    "Sampling",
    "SimulationError",
    "StaleTrajectoryError",
    "TrainerError",
    "TransferError",
    "TransportAddress",
    "TransportError",
    "Turn",
    "TurnFailedError",
    "TurnResult",
    "VersionConflictError",
    "VersionSpan",
    "VersionUnavailableError",
    "WeightVersion",
    "__version__",
    "device",
    "load_config",
    "open_transport",
    "serving_engine",
    "trainer",
    "transport",
]


def __getattr__(name: str) -> Any:
    """Import a public name that has more behind it when it is first used."""
    if name not in _LAZY:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    module, attribute = _LAZY[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value
