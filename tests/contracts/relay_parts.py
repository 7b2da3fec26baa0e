"""A trainer's side for contract tests of real engines."""

from __future__ import annotations

from pathlib import Path

from rose.backends.memory import MemoryTransport
from rose.testing.checkpoint import CheckpointTrainer
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.types import WeightUpdate, WeightVersion


class Relay:
    """Publishes one more version whenever an update is asked for."""

    def __init__(self, model: Path) -> None:
        self.transport = MemoryTransport()
        self.transport.serve()
        self.trainer = CheckpointTrainer(model)
        self.publisher = Publisher(self.trainer, self.transport, run="contract")
        self.publisher.publish_sync()

    def next_update(self, known: WeightVersion | None) -> WeightUpdate:
        self.trainer.step(0.01)
        self.publisher.publish_sync()
        update = plan_update(self.transport, known)
        assert update is not None
        return update
