"""The serving-engine role: one model on one or more devices, token ids in, token ids out.

Invariants that every backend keeps (``rose.testing.EngineContract`` checks them):

* A stream's last chunk, and only it, carries a finish reason; tokens are never repeated or dropped.
* ``abort`` ends the stream with ``FinishReason.ABORTED`` and the tokens made so far stay delivered; aborting an unknown
  or finished request is a no-op. Closing the stream early aborts the request.
* While paused no token is made; ``keep`` leaves requests to go on after ``resume``, ``abort`` ends them.
* ``activate`` is all or nothing: afterwards the engine is at exactly the target version, or it raises and either the
  version is unchanged or the engine is fenced (``EngineFencedError`` from then on).
* A stage never disturbs generation and may be dropped without effect.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Protocol, runtime_checkable

from rose.types import Activation, EngineId, EngineRequest, EngineSnapshot, RequestId, TokenChunk, WeightUpdate


class PauseMode(enum.Enum):
    """What happens to the requests in flight while an engine is paused."""

    KEEP = "keep"
    ABORT = "abort"


class ServingEngine(ABC):
    """One engine. All methods are called from one event loop; none blocks it."""

    engine_id: EngineId

    @abstractmethod
    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the request's tokens.

        Raises:
            RequestRefusedError: It can never be served (too long for the model or its KV, token ids out of range).
            EngineBusyError: Not now; the engine lives.
            EngineLostError: The engine is gone.
            EngineFencedError: The engine's weights are unknown.
        """

    @abstractmethod
    async def abort(self, request_id: RequestId) -> None:
        """End a request; its stream ends with ``FinishReason.ABORTED``."""

    @abstractmethod
    async def snapshot(self) -> EngineSnapshot:
        """Read the engine's load. Cheap; raises ``EngineLostError`` when the engine is gone, so it is the health check."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens; returns when none is being made."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on after ``pause``; a no-op when not paused."""

    @abstractmethod
    async def stage(self, update: WeightUpdate) -> None:
        """Fetch, verify and decode an update while generation goes on. Replaces an earlier staged update.

        Raises:
            LayoutMismatchError, CorruptUpdateError, VersionConflictError, BlobNotFoundError: Nothing has changed.
        """

    @abstractmethod
    async def activate(self) -> Activation:
        """Make the staged update current: pause (keep), write in place, check, set the version, drop the prefix cache, resume."""

    async def close(self) -> None:
        """Free what the engine holds. Idempotent."""


@runtime_checkable
class SupportsKvBudget(Protocol):
    """The engine's share of its device's KV memory can be changed while it runs."""

    async def set_kv_budget(self, num_tokens: int) -> int:
        """Set the budget (engine tokens); returns the budget in force. Requests over it end as evicted, youngest first."""


@runtime_checkable
class SupportsStepGate(Protocol):
    """The engine can be kept from starting steps without a pause (used for revocation)."""

    async def set_gate(self, *, is_open: bool) -> None:
        """Open or close the gate; a closed gate never stops a step that runs already."""


@runtime_checkable
class SupportsPrefixReset(Protocol):
    """The engine can drop its prefix cache."""

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix that no running request uses."""


@runtime_checkable
class SupportsWeightChecksums(Protocol):
    """The engine can prove its weights."""

    async def weight_checksums(self) -> Mapping[str, str]:
        """Return checkpoint tensor name -> xxh3_128 hex digest of the tensor's bytes, row-major, in its wire dtype."""
