"""RolloutPool: each turn of each trajectory to the right engine, nothing lost when engines come and go."""

from rose.policies.concurrency import ConcurrencyConfig
from rose.policies.routing import Circuit, EngineState, EngineView, RoutingConfig, WaitReason
from rose.pool.borrowing import Borrower
from rose.pool.config import PoolConfig, ResumePolicy, WeightPull
from rose.pool.events import (
    EngineStateChanged,
    Observer,
    PoolEvent,
    TurnAssigned,
    TurnFailed,
    TurnFinished,
    TurnRerouted,
    WeightsActivated,
)
from rose.pool.membership import EngineAccount
from rose.pool.pool import PoolSnapshot, RolloutPool
from rose.pool.pulls import PullCost, SupportsPullCost
from rose.pool.samples import SampleBuffer
from rose.pool.statistics import PoolStatistics
from rose.pool.weights import SyncReport, TransportSource, UpdateSource

__all__ = [
    "Borrower",
    "Circuit",
    "ConcurrencyConfig",
    "EngineAccount",
    "EngineState",
    "EngineStateChanged",
    "EngineView",
    "Observer",
    "PoolConfig",
    "PoolEvent",
    "PoolSnapshot",
    "PoolStatistics",
    "PullCost",
    "ResumePolicy",
    "RolloutPool",
    "RoutingConfig",
    "SampleBuffer",
    "SupportsPullCost",
    "SyncReport",
    "TransportSource",
    "TurnAssigned",
    "TurnFailed",
    "TurnFinished",
    "TurnRerouted",
    "UpdateSource",
    "WaitReason",
    "WeightPull",
    "WeightsActivated",
]
