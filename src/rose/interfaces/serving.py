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

import attrs

from rose.types import (
    Activation,
    EngineAddress,
    EngineId,
    EngineRequest,
    EngineSnapshot,
    RequestId,
    TokenChunk,
    WeightUpdate,
    WeightVersion,
)


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
class SupportsStart(Protocol):
    """The engine is made first and started later; until then it is lost. ``close`` ends it."""

    async def start(self) -> None:
        """Load the model; returns when the engine serves.

        Raises:
            EngineLostError: It did not start; the message says why.
        """


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


@attrs.frozen(kw_only=True)
class Slept:
    """An engine has been put to sleep. Times in wall seconds.

    Attributes:
        num_evicted: Requests that ended for it, with the tokens they had.
        released_bytes: Memory of the device that went back to its owner: weights and KV pages.
        sleep_s: How long it took.
    """

    num_evicted: int
    released_bytes: int
    sleep_s: float


@attrs.frozen(kw_only=True)
class Woken:
    """An engine serves again after a sleep. Times in wall seconds.

    Attributes:
        version: What its weights are; ``None`` when they are no published version, which they were not before either, or when
            they are stale.
        is_stale: The weights could not be brought back: the engine is fenced until an anchor is activated.
        restored_bytes: Weights that were brought back, and compared with what they were.
        wake_s: How long it took.
    """

    version: WeightVersion | None
    is_stale: bool
    restored_bytes: int
    wake_s: float


@runtime_checkable
class SupportsSleep(Protocol):
    """A pre-deployed engine can be deactivated: its process stays, its memory leaves the device.

    While it sleeps nobody waits on it: ``generate``, ``stage``, ``activate`` and checksums raise ``EngineBusyError``;
    ``snapshot`` answers and says that the engine is paused.
    """

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps."""

    async def sleep(self, *, keeps_weights: bool = True) -> Slept:
        """End all requests as evicted, with their tokens, and give KV memory and weights back. A no-op when asleep.

        Args:
            keeps_weights: Park the weights off the device; otherwise they are dropped, and the engine wakes stale.

        Raises:
            EngineError: The weights could not be parked; the engine serves on.
            BackendUnavailableError: The engine was not started with what it needs to sleep; the message names it.
        """

    async def wake(self) -> Woken:
        """Bring weights and KV memory back; returns when the engine serves. A no-op when awake."""


@runtime_checkable
class SupportsAddress(Protocol):
    """Other processes can stream from the engine themselves, once a pool has sent them there."""

    def address(self) -> EngineAddress:
        """Return how, as of now: what it asks of its callers (a lease, a start of it) may change."""


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


@runtime_checkable
class SupportsStepLog(Protocol):
    """The engine keeps a log of its turns on a device that it shares, or that is paced."""

    async def step_log(self, since_s: float = float("-inf")) -> list[list[float]]:
        """Return the turns that started then or later, each as the values of ``rose.coserving.step_log.StepRecord`` in order."""
