"""What both vLLM drivers share: everything that is a question to the engine rather than a stream of tokens.

Invariants:

* A stage and an activation never overlap: one lock serialises weight updates.
* Activation pauses (keep), asks the engine to write, and resumes, unless the engine was paused before.
* ``is_fenced`` is set when a write failed half-way; the requests in flight end as aborted and ``generate`` refuses until
  an activation succeeds.
* Asleep, the engine takes no request and no update (``EngineBusyError``), so that nobody waits on it.
* After the engine's loss or ``close`` every call raises ``EngineLostError``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Self

import attrs

from rose.backends.completion import to_the_end
from rose.backends.vllm.options import VllmOptions
from rose.backends.vllm.streams import RequestLimits, parse_label
from rose.backends.wire import activation_from_wire, unwrap, update_to_wire
from rose.clocks import MonotonicClock
from rose.config import load
from rose.errors import (
    CorruptUpdateError,
    EngineBusyError,
    EngineFencedError,
    EngineLostError,
    RequestRefusedError,
    RoseError,
)
from rose.interfaces import Clock, ServingEngine
from rose.interfaces.serving import PauseMode, Slept, Woken
from rose.interfaces.trainer import ShardSpec
from rose.transfer.kernels import Sum
from rose.transfer.layout import TargetLayout
from rose.transfer.sums import engine_sums
from rose.types import Activation, EngineRequest, EngineSnapshot, RequestId, TokenChunk, WeightUpdate, WeightVersion

_STAGE_POLL_S = 0.005


class VllmDriver(ServingEngine):
    """A started engine answers; see the subclasses for where it runs.

    Args:
        options: The engine to run.
        clock: For the time stamps of snapshots; the machine's monotonic clock when left out.
    """

    def __init__(self, options: VllmOptions, *, clock: Clock | None = None) -> None:
        self.engine_id = options.engine_id
        self.options = options
        self._clock = clock or MonotonicClock()
        self._limits: RequestLimits | None = None
        self._active: set[RequestId] = set()
        self._update_lock = asyncio.Lock()
        self._is_paused = False
        self._is_fenced = False
        self._is_asleep = False
        self._lost: str | None = "it was not started"
        self._version = options.initial_version

    @classmethod
    async def create(cls, options: VllmOptions, *, clock: Clock | None = None) -> Self:
        """Make an engine and start it.

        Raises:
            BackendUnavailableError: vLLM is not installed.
            EngineLostError: The engine did not start; the message says why.
        """
        engine = cls(options, clock=clock)
        await engine.start()
        return engine

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, clock: Clock) -> Self:
        """Make an engine, not started yet, from fields of ``VllmOptions`` as plain data.

        Raises:
            ConfigError: One line a wrong field.
        """
        return cls(load(VllmOptions, options), clock=clock)

    @abstractmethod
    async def start(self) -> None:
        """Load the model; returns when the engine serves."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Return the id of the process that computes."""

    @property
    def weight_version(self) -> WeightVersion | None:
        """Return the version of the weights, ``None`` when they are no published version."""
        return self._version

    @abstractmethod
    def _stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream a request that was checked."""

    @abstractmethod
    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of ``EngineCore`` between two steps."""

    @abstractmethod
    async def _abort(self, request_ids: list[RequestId]) -> None:
        """End requests; their streams end as aborted."""

    @abstractmethod
    async def _halt(self, mode: PauseMode) -> None:
        """Stop making tokens."""

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the request's tokens. See ``ServingEngine.generate``."""
        return self._generate(request)

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        self._refuse(request)
        self._active.add(request.request_id)
        try:
            async with contextlib.aclosing(self._stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._active.discard(request.request_id)

    def _refuse(self, request: EngineRequest) -> None:
        self._check_awake()
        if self._is_fenced:
            message = f"engine {self.engine_id} is fenced: its weights are of no known version; send it an anchor"
            raise EngineFencedError(message)
        if request.request_id in self._active:
            message = f"request id {request.request_id} is in use on engine {self.engine_id}; ids must be fresh"
            raise RequestRefusedError(message)
        if self._limits is not None:
            self._limits.refuse(request)

    def _check_alive(self) -> None:
        if self._lost is not None:
            message = f"engine {self.engine_id} is gone: {self._lost}"
            raise EngineLostError(message)

    def _check_awake(self) -> None:
        self._check_alive()
        if self._is_asleep:
            message = f"engine {self.engine_id} is asleep; wake it, or try another engine"
            raise EngineBusyError(message)

    async def _ask(self, method: str, *args: Any) -> Any:
        self._check_alive()
        return unwrap(await self._call(method, *args))

    async def _begin(self) -> None:
        """Finish a start: hand the version over and learn the limits."""
        self._lost = None
        version = self.options.initial_version
        self._limits = RequestLimits(**await self._ask("rose_init", None if version is None else str(version)))

    async def abort(self, request_id: RequestId) -> None:
        """End a request; a no-op when it is unknown or over."""
        self._check_alive()
        if request_id in self._active:
            await self._abort([request_id])

    async def snapshot(self) -> EngineSnapshot:
        """Read the load: one round trip to the engine's thread, answered between two steps (under 1 ms when idle)."""
        load = await self._ask("rose_snapshot")
        self._version = None if self._is_fenced else parse_label(load["version"])
        return EngineSnapshot(
            num_running=load["num_running"],
            num_waiting=load["num_waiting"],
            kv_used_tokens=load["kv_used_tokens"],
            kv_total_tokens=load["kv_total_tokens"],
            weight_version=self._version,
            is_paused=bool(load["is_paused"]) or self._is_asleep,
            read_at_s=self._clock.now(),
            max_context_tokens=None if self._limits is None else self._limits.max_model_len,
        )

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens; returns when none is being made."""
        self._check_alive()
        await self._halt(mode)
        self._is_paused = True

    async def resume(self) -> None:
        """Go on after ``pause``; a no-op when not paused."""
        self._check_alive()
        await self._call("resume_scheduler")
        self._is_paused = False

    async def stage(self, update: WeightUpdate) -> None:
        """Fetch, verify and decode an update on a thread of the engine while it serves.

        Raises:
            CorruptUpdateError: Also when an audit of the live weights, due every so many updates, finds them damaged; the engine is then
                fenced.
        """
        async with self._update_lock:
            self._check_awake()
            try:
                await self._ask("rose_stage", update_to_wire(update))
                while not await self._ask("rose_poll_stage"):  # noqa: ASYNC110 - what is waited for is in another process
                    await asyncio.sleep(_STAGE_POLL_S)
            except CorruptUpdateError:
                if not self._is_fenced and await self._ask("rose_is_fenced"):
                    await self._fence()
                raise

    async def activate(self, *, is_verified: bool = False) -> Activation:
        """Make the staged update current; requests in flight are recomputed under the new weights and go on.

        A cancelled caller waits until the engine is at one version again.

        Args:
            is_verified: Sum the whole state anew in the pause, not what changed only.
        """
        async with self._update_lock:
            self._check_awake()
            return await to_the_end(self._activate(is_verified=is_verified))

    async def _activate(self, *, is_verified: bool) -> Activation:
        was_paused = self._is_paused
        paused_at_s = time.perf_counter()
        try:
            await self.pause(PauseMode.KEEP)
            answer = await self._ask("rose_activate", is_verified)
        except RoseError:
            if self._lost is None and await self._ask("rose_is_fenced"):
                await self._fence()
            raise
        else:
            activation = activation_from_wire(answer)
            self._version = activation.version
            self._is_fenced = False
        finally:
            if not was_paused and self._lost is None:
                await self.resume()
        return attrs.evolve(activation, pause_s=time.perf_counter() - paused_at_s)

    async def _fence(self) -> None:
        self._is_fenced = True
        self._version = None
        await self._abort(list(self._active))

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps. See ``SupportsSleep``."""
        return self._is_asleep

    async def sleep(self, *, keeps_weights: bool = True) -> Slept:
        """Deactivate the engine: its requests end as evicted, its KV memory and weights leave the device. See ``SupportsSleep``."""
        async with self._update_lock:
            self._check_alive()
            return await to_the_end(self._sleep(keeps_weights=keeps_weights))

    async def _sleep(self, *, keeps_weights: bool) -> Slept:
        start_s = time.perf_counter()
        if self._is_asleep:
            return Slept(num_evicted=0, released_bytes=0, sleep_s=0.0)
        self._is_asleep = True
        try:
            answer = await self._ask("rose_sleep", keeps_weights, self.options.park_directory)
        except RoseError:
            self._is_asleep = False
            raise
        return Slept(**answer, sleep_s=time.perf_counter() - start_s)

    async def wake(self) -> Woken:
        """Activate the engine again. See ``SupportsSleep``."""
        async with self._update_lock:
            self._check_alive()
            return await to_the_end(self._wake())

    async def _wake(self) -> Woken:
        start_s = time.perf_counter()
        answer: dict[str, Any] = {"restored_bytes": 0, "is_stale": self._is_fenced}
        if self._is_asleep:
            answer = await self._ask("rose_wake")
            self._is_asleep = False
            if answer["is_stale"]:
                await self._fence()
        return Woken(**answer, version=self._version, wake_s=time.perf_counter() - start_s)

    async def set_kv_budget(self, num_tokens: int) -> int:
        """Set the KV budget in engine tokens; returns the one in force. See ``SupportsKvBudget``."""
        return int(await self._ask("rose_set_kv_budget", num_tokens))

    async def set_gate(self, *, is_open: bool) -> None:
        """Open or close the step gate. See ``SupportsStepGate``."""
        await self._ask("rose_set_gate", is_open)

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix that no running request uses. See ``SupportsPrefixReset``."""
        await self._ask("rose_reset_prefix_cache")

    async def weight_checksums(self) -> Mapping[str, str]:
        """Return checkpoint tensor name -> xxh3_128. See ``SupportsWeightChecksums``."""
        self._check_awake()
        return dict(await self._ask("rose_weight_checksums"))

    async def target_layout(self) -> TargetLayout:
        """Return what each worker holds, for a publisher that should cut its cells along these boxes."""
        return TargetLayout.from_json(await self._ask("rose_target_layout"))

    async def weight_sums(self) -> Mapping[str, Sum]:
        """Return the sum of every checkpoint tensor over all workers, as the live weights are now (``rose.transfer.sums``).

        Generation waits meanwhile: it reads all weights.

        Raises:
            LayoutMismatchError: The workers do not hold one copy of the weights together.
        """
        self._check_awake()
        layout = TargetLayout.from_json(await self._ask("rose_target_layout"))
        ranks = [
            [(name, ShardSpec(offset=tuple(o), shape=tuple(s)), (a, b)) for name, o, s, (a, b) in rows]
            for rows in await self._ask("rose_weight_sums")
        ]
        return engine_sums(ranks, {spec.name: spec for spec in layout.tensors})

    async def vllm_checksums(self) -> Mapping[str, str]:
        """Return vLLM's own digests of the live parameters, fused and padded as they are."""
        self._check_awake()
        merged: dict[str, str] = {}
        for digests in await self._call("compute_weight_checksums"):
            merged |= digests
        return merged

    async def pacing_report(self, since_s: float = float("-inf")) -> dict[str, Any]:
        """Return how well the engine's steps since then kept to the paced device's times; empty without a device."""
        return dict(await self._ask("rose_pacing_report", since_s))

    async def step_log(self, since_s: float = float("-inf")) -> list[list[float]]:
        """Return the turns of the device since then, as ``RoseScheduler.step_log`` lists them."""
        return list(await self._ask("rose_step_log", since_s))
