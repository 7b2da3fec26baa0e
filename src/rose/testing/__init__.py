"""What users test their own loops and backends with: fakes, fault injectors and contract suites.

The fakes need neither torch nor pytest, nor does ``PoolSite``, which runs real engines in another environment. The contract suites need pytest and are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rose.testing.clock import ManualClock
from rose.testing.engine import FakeEngine
from rose.testing.faults import Fault, FaultKind
from rose.testing.pool_site import PoolSite
from rose.testing.trainer import FakeTrainer, TrainerRecord
from rose.testing.transport import FaultyTransport, TransportFault, TransportFaultKind
from rose.testing.updates import FakeUpdateSource, fake_update

if TYPE_CHECKING:
    from rose.backends.memory import MemoryTransport as InMemoryTransport
    from rose.testing.contracts.clock import ClockContract
    from rose.testing.contracts.device import DeviceContract
    from rose.testing.contracts.engine import EngineContract
    from rose.testing.contracts.trainer import TrainerContract
    from rose.testing.contracts.transport import TransportContract

_LAZY = {
    "ClockContract": ("rose.testing.contracts.clock", "ClockContract"),
    "DeviceContract": ("rose.testing.contracts.device", "DeviceContract"),
    "EngineContract": ("rose.testing.contracts.engine", "EngineContract"),
    "InMemoryTransport": ("rose.backends.memory", "MemoryTransport"),
    "TrainerContract": ("rose.testing.contracts.trainer", "TrainerContract"),
    "TransportContract": ("rose.testing.contracts.transport", "TransportContract"),
}

__all__ = [
    "ClockContract",
    "DeviceContract",
    "EngineContract",
    "FakeEngine",
    "FakeTrainer",
    "FakeUpdateSource",
    "Fault",
    "FaultKind",
    "FaultyTransport",
    "InMemoryTransport",
    "ManualClock",
    "PoolSite",
    "TrainerContract",
    "TrainerRecord",
    "TransportContract",
    "TransportFault",
    "TransportFaultKind",
    "fake_update",
]


def __getattr__(name: str) -> Any:
    """Import the contract suites, which need pytest, only when one is asked for."""
    if name not in _LAZY:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
