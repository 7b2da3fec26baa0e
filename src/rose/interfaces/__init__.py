"""The roles: serving engine, trainer, transport, device, clock. Decisions live in ``rose.policies``, I/O in backends."""

from rose.interfaces.clock import Clock
from rose.interfaces.device import Device, StepWork
from rose.interfaces.serving import (
    ServingEngine,
    Slept,
    SupportsAddress,
    SupportsKvBudget,
    SupportsPrefixReset,
    SupportsSleep,
    SupportsStart,
    SupportsStepGate,
    SupportsStepLog,
    SupportsWeightChecksums,
    Woken,
)
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec, Trainer
from rose.interfaces.transport import Payload, SupportsInvalidate, SupportsWait, Transport

__all__ = [
    "Clock",
    "Device",
    "Payload",
    "ServingEngine",
    "ShardBits",
    "ShardSpec",
    "Slept",
    "StepWork",
    "SupportsAddress",
    "SupportsInvalidate",
    "SupportsKvBudget",
    "SupportsPrefixReset",
    "SupportsSleep",
    "SupportsStart",
    "SupportsStepGate",
    "SupportsStepLog",
    "SupportsWait",
    "SupportsWeightChecksums",
    "TensorSpec",
    "Trainer",
    "Transport",
    "Woken",
]
