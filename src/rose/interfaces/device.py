"""The device role: one GPU that two engines share, as seen from an engine's own step loop.

Blocking and cheap: called between an engine's ``schedule`` and ``update`` on the engine's thread. A turn of compute is
held by at most one engine at a time and is given back by the kernel when its holder dies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import attrs

from rose.interfaces.clock import Clock


@attrs.frozen
class StepWork:
    """What one step computes: new prompt tokens, sequences that decode one token, and the context both attend to.

    ``prefill_positions`` is the sum over prefill tokens of the positions they attend to (tokens x tokens).
    """

    num_prefill_tokens: int = 0
    num_decodes: int = 0
    context_tokens: int = 0
    prefill_positions: float = 0.0


class Device(ABC):
    """Turns of compute and pages of KV memory of one device."""

    device_id: str
    clock: Clock

    @abstractmethod
    def acquire(self, *, is_blocking: bool) -> bool:
        """Take the turn; returns whether it is held now. Re-entrant for its holder."""

    @abstractmethod
    def release(self) -> None:
        """Give the turn back; a no-op when not held."""

    @abstractmethod
    def predict_s(self, work: StepWork) -> float:
        """Return how long the step would take on this device, in seconds of ``clock``."""

    @abstractmethod
    def begin_step(self, work: StepWork, ready_at_s: float) -> float:
        """Note a step that may start at ``ready_at_s`` and return when it ends on ``clock``. The turn must be held."""

    @abstractmethod
    def finish_step(self, end_s: float) -> float:
        """Return when the step is over on ``clock``; the result is how late, in seconds."""

    @abstractmethod
    def give_pages(self, address: int, num_bytes: int) -> int:
        """Return host or device memory to its owner; the range's content is lost. Returns bytes really given."""
