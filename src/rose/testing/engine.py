"""A scripted serving engine: real protocol, invented tokens.

Invariants, beyond those of ``rose.interfaces.serving``:

* A token is a function of the engine's seed, all tokens before it and, unless greedy, the request's seed plus the number
  of new tokens before it. A pool continues a moved turn with its seed moved on by the tokens made, so a turn that moves
  to another ``FakeEngine`` of the same seed goes on exactly as it would have on the first.
* A token is made when the reader asks for it and ``token_s`` have passed on the clock; nothing runs in the background.
* ``kv_used_tokens`` is the sum of prompt and new tokens over running requests, and never above the budget.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn

import attrs
import numpy as np
import xxhash

from rose.clocks import MonotonicClock
from rose.errors import (
    CorruptUpdateError,
    EngineBusyError,
    EngineFencedError,
    EngineLostError,
    RequestRefusedError,
    VersionConflictError,
)
from rose.interfaces.clock import Clock
from rose.interfaces.serving import PauseMode, ServingEngine, Slept, Woken
from rose.testing.faults import Fault, FaultKind
from rose.types import (
    Activation,
    EngineId,
    EngineRequest,
    EngineSnapshot,
    FinishReason,
    RequestId,
    Sampling,
    TokenChunk,
    WeightUpdate,
    WeightVersion,
)

NextToken = Callable[[Sequence[int], Sampling, WeightVersion | None], int]


@attrs.define(eq=False)
class _Stream:
    """One request in flight."""

    request: EngineRequest
    index: int
    started_s: float
    digest: xxhash.xxh3_64
    token_ids: list[int]
    is_running: bool = False
    ended: FinishReason | None = None
    stalled_until_s: dict[Fault, float] = attrs.field(factory=dict)

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)


@attrs.define(eq=False, kw_only=True, slots=False)
class FakeEngine(ServingEngine):
    """A ``ServingEngine`` for tests: no model, no process, no torch.

    Attributes:
        engine_id: The engine's name.
        clock: What latencies and faults are measured on; a ``ManualClock`` makes every run the same.
        seed: Engines of one seed are replicas of one model.
        vocab_size: Tokens are 0 to this, exclusive.
        max_model_len: Longest prompt and answer together, in tokens.
        max_running: Requests that make tokens at a time; more wait.
        kv_total_tokens: Tokens that fit into the KV memory.
        token_s: Time a token takes.
        first_token_s: Time a first token takes on top.
        stage_s: Time that ``stage`` takes.
        activate_s: Time that ``activate`` pauses.
        weight_version: What the engine holds; ``None`` is weights of no published version.
        eos_token_id: A token that ends a stream unless the request ignores it.
        next_token: Your own rule: sequence so far, sampling and weight version in, token id out.
        faults: What goes wrong, and when.
        requests: Every request that came, in order, refused ones included.
        aborted: The ids of the requests that an ``abort`` or a closed stream ended.
        updates: Every update that was activated, in order.
        num_prefix_resets: How often the prefix cache was dropped.
    """

    engine_id: EngineId = attrs.field(default=EngineId("fake"))
    clock: Clock = attrs.field(factory=MonotonicClock)
    seed: int = 0
    vocab_size: int = 1000
    max_model_len: int = 4096
    max_running: int = 8
    kv_total_tokens: int = 65536
    token_s: float = 0.0
    first_token_s: float = 0.0
    stage_s: float = 0.0
    activate_s: float = 0.0
    weight_version: WeightVersion | None = None
    eos_token_id: int | None = None
    next_token: NextToken | None = None
    faults: Sequence[Fault] = ()

    requests: list[EngineRequest] = attrs.field(factory=list, init=False)
    aborted: list[RequestId] = attrs.field(factory=list, init=False)
    updates: list[WeightUpdate] = attrs.field(factory=list, init=False)
    num_prefix_resets: int = attrs.field(default=0, init=False)
    _streams: dict[RequestId, _Stream] = attrs.field(factory=dict, init=False)
    _staged: WeightUpdate | None = attrs.field(default=None, init=False)
    _num_stages: int = attrs.field(default=0, init=False)
    _num_activations: int = attrs.field(default=0, init=False)
    _kv_budget_tokens: int = attrs.field(default=0, init=False)
    _is_paused: bool = attrs.field(default=False, init=False)
    _is_gate_open: bool = attrs.field(default=True, init=False)
    _is_stalled: bool = attrs.field(default=False, init=False)
    _is_busy: bool = attrs.field(default=False, init=False)
    _is_fenced: bool = attrs.field(default=False, init=False)
    _is_asleep: bool = attrs.field(default=False, init=False)
    _has_weights: bool = attrs.field(default=True, init=False)
    _lost_because: str | None = attrs.field(default=None, init=False)
    _changed: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._kv_budget_tokens = self.kv_total_tokens

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream tokens, one a chunk. See ``ServingEngine.generate``."""
        stream = self._accept(request)
        try:
            while (chunk := await self._next_chunk(stream)).finish_reason is None:
                yield chunk
            self._forget(stream)
            yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            if self._streams.get(request.request_id) is stream and not stream.ended:
                self.aborted.append(request.request_id)
            raise
        finally:
            self._forget(stream)

    async def abort(self, request_id: RequestId) -> None:
        """End a request; see ``ServingEngine.abort``."""
        self._check_alive()
        stream = self._streams.get(request_id)
        if stream and not stream.ended:
            self.aborted.append(request_id)
            self._end(stream, FinishReason.ABORTED)

    async def snapshot(self) -> EngineSnapshot:
        """Read the load at this moment."""
        self._check_alive()
        num_running = sum(stream.is_running for stream in self._streams.values())
        return EngineSnapshot(
            num_running=num_running,
            num_waiting=self.num_in_flight - num_running,
            kv_used_tokens=self._kv_used_tokens(),
            kv_total_tokens=self._kv_budget_tokens,
            weight_version=self.weight_version,
            is_paused=self._is_paused or self._is_asleep,
            read_at_s=self.clock.now(),
            max_context_tokens=self.max_model_len,
        )

    async def pause(self, mode: PauseMode) -> None:
        """Make no token until ``resume``."""
        self._check_alive()
        self._is_paused = True
        if mode is PauseMode.ABORT:
            for stream in list(self._streams.values()):
                self._end(stream, FinishReason.ABORTED)
        self._notify()

    async def resume(self) -> None:
        """Go on after ``pause``."""
        self._check_alive()
        self._is_paused = False
        self._notify()

    async def stage(self, update: WeightUpdate) -> None:
        """Keep the update's version for ``activate``; no blob is read."""
        self._check_alive()
        self._check_awake()
        index = self._num_stages
        self._num_stages += 1
        await self.clock.sleep(self.stage_s)
        self._check_alive()
        if self._fault(FaultKind.CORRUPT_UPDATE, index):
            message = f"{self.engine_id}: the update to {update.target} arrived corrupt (scripted fault)"
            raise CorruptUpdateError(message)
        current = self.weight_version
        if current is not None and current.run == update.target.run and current.n > update.target.n:
            message = f"{self.engine_id} is at {current}, so an update to {update.target} comes too late; drop it"
            raise VersionConflictError(message)
        self._staged = update

    async def activate(self) -> Activation:
        """Take the staged version after a pause of ``activate_s``."""
        self._check_alive()
        self._check_awake()
        update = self._staged
        if update is None:
            message = f"{self.engine_id}: no update is staged; call stage() before activate()"
            raise VersionConflictError(message)
        index = self._num_activations
        self._num_activations += 1
        await self.pause(PauseMode.KEEP)
        try:
            await self.clock.sleep(self.activate_s)
            self._check_alive()
            if self._fault(FaultKind.FENCE, index):
                self.fence()
                self._check_fenced()
            self._staged, self.weight_version = None, update.target
            self._is_fenced = False
            self.updates.append(update)
            await self.reset_prefix_cache()
        finally:
            self._is_paused = False
            self._notify()
        return Activation(
            version=update.target, stage_s=self.stage_s, pause_s=self.activate_s, fetched_bytes=0, is_verified=True
        )

    async def set_kv_budget(self, num_tokens: int) -> int:
        """Set the KV budget and evict the youngest requests beyond it; see ``SupportsKvBudget``."""
        self._check_alive()
        self._kv_budget_tokens = min(max(0, num_tokens), self.kv_total_tokens)
        self._make_room(0)
        self._notify()
        return self._kv_budget_tokens

    async def set_gate(self, *, is_open: bool) -> None:
        """Open or close the step gate; see ``SupportsStepGate``."""
        self._check_alive()
        self._is_gate_open = is_open
        self._notify()

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps; see ``SupportsSleep``."""
        return self._is_asleep

    async def sleep(self, *, keeps_weights: bool = True) -> Slept:
        """End every request as evicted and take none until ``wake``; see ``SupportsSleep``."""
        self._check_alive()
        num_evicted, start_s = self.num_in_flight, self.clock.now()
        self._is_asleep, self._has_weights = True, self._has_weights and keeps_weights
        for stream in list(self._streams.values()):
            self._end(stream, FinishReason.EVICTED)
        return Slept(num_evicted=num_evicted, released_bytes=0, sleep_s=self.clock.now() - start_s)

    async def wake(self) -> Woken:
        """Serve again; stale if the weights were dropped; see ``SupportsSleep``."""
        self._check_alive()
        if self._is_asleep and not self._has_weights:
            self.weight_version = None
            self.fence()
        self._is_asleep, self._has_weights = False, True
        return Woken(version=self.weight_version, is_stale=self._is_fenced, restored_bytes=0, wake_s=0.0)

    async def reset_prefix_cache(self) -> None:
        """Count the reset; see ``SupportsPrefixReset``."""
        self._check_alive()
        self.num_prefix_resets += 1

    async def close(self) -> None:
        """Lose every request that is still in flight."""
        self.die("it was closed")

    def die(self, because: str = "it was killed") -> None:
        """Be gone from now on, as after a killed process."""
        self._lost_because = self._lost_because or because
        self._notify()

    def fence(self) -> None:
        """Refuse every request until an update is activated, as after a half-written update."""
        self._is_fenced = True
        self._notify()

    def stall(self) -> None:
        """Make no token until ``unstall``, and look alive."""
        self._is_stalled = True
        self._notify()

    def unstall(self) -> None:
        """Go on after ``stall``."""
        self._is_stalled = False
        self._notify()

    def set_busy(self, *, is_busy: bool) -> None:
        """Refuse new requests with ``EngineBusyError``, or take them again."""
        self._is_busy = is_busy

    def evict(self, request_id: RequestId) -> None:
        """End a request as evicted; unknown ids are ignored."""
        if stream := self._streams.get(request_id):
            self._end(stream, FinishReason.EVICTED)

    @property
    def num_in_flight(self) -> int:
        """Return how many requests run or wait."""
        return sum(stream.ended is None for stream in self._streams.values())

    def _accept(self, request: EngineRequest) -> _Stream:
        self._check_alive()
        index = len(self.requests)
        self.requests.append(request)
        self._check_fenced()
        self._check_awake()
        self._refuse_impossible(request)
        if self._fault(FaultKind.REFUSE, index):
            self._refuse("the request was refused (scripted fault)")
        if self._is_busy or self._fault(FaultKind.BUSY, index):
            message = f"{self.engine_id} takes no more work now (scripted fault); try another engine or later"
            raise EngineBusyError(message)
        stream = _Stream(
            request=request,
            index=index,
            started_s=self.clock.now(),
            digest=xxhash.xxh3_64(np.array(request.prompt_ids, np.int64).tobytes(), seed=self.seed),
            token_ids=list(request.prompt_ids),
        )
        self._streams[request.request_id] = stream
        return stream

    def _refuse_impossible(self, request: EngineRequest) -> None:
        num_prompt = len(request.prompt_ids)
        most = min(num_prompt + request.sampling.max_tokens, self.max_model_len)
        if num_prompt >= self.max_model_len:
            self._refuse(f"the prompt has {num_prompt} tokens, the model takes less than {self.max_model_len}")
        if most > self.kv_total_tokens:
            self._refuse(f"the request may need {most} KV tokens, the engine has {self.kv_total_tokens}")
        if not all(0 <= token < self.vocab_size for token in request.prompt_ids):
            self._refuse(f"the prompt has token ids outside 0 to {self.vocab_size - 1}")
        if request.request_id in self._streams:
            self._refuse(f"a request {request.request_id!r} is in flight already; every attempt needs a fresh id")

    def _refuse(self, why: str) -> NoReturn:
        message = f"{self.engine_id}: {why}"
        raise RequestRefusedError(message)

    async def _next_chunk(self, stream: _Stream) -> TokenChunk:
        await asyncio.sleep(0)
        due_s = self.clock.now() + self.token_s
        while True:
            self._apply_faults(stream)
            if stream.ended:
                return TokenChunk(finish_reason=stream.ended)
            if not stream.is_running and self._has_room_for(stream):
                stream.is_running = True
                due_s = self.clock.now() + self.token_s + self._first_token_delay_s(stream)
            wake_s = self._blocked_until_s(stream, due_s)
            if wake_s <= self.clock.now():
                return self._make_token(stream)
            await self._wait(wake_s)

    def _apply_faults(self, stream: _Stream) -> None:
        self._check_alive()
        if self._fault(FaultKind.DIE, stream.index, stream.num_new_tokens):
            self.die("a scripted fault killed it")
        self._check_alive()
        self._check_fenced()
        for fault in self.faults:
            if not fault.applies(stream.index, stream.num_new_tokens, self.clock.now()):
                continue
            if fault.kind is FaultKind.EVICT and (fault.at_s is None or stream.started_s < fault.at_s):
                self._end(stream, FinishReason.EVICTED)
            if fault.kind is FaultKind.STALL:
                start_s = self.clock.now() if fault.at_s is None else fault.at_s
                stream.stalled_until_s.setdefault(fault, start_s + fault.duration_s)

    def _blocked_until_s(self, stream: _Stream, due_s: float) -> float:
        is_held = self._is_paused or self._is_stalled or not self._is_gate_open or not stream.is_running
        return math.inf if is_held else max(due_s, *stream.stalled_until_s.values(), 0.0)

    def _first_token_delay_s(self, stream: _Stream) -> float:
        slow = self._fault(FaultKind.SLOW_START, stream.index)
        return self.first_token_s + (slow.duration_s if slow else 0.0)

    async def _wait(self, until_s: float) -> None:
        """Wait until a time on the clock or until something about the engine changes."""
        now_s = self.clock.now()
        coming = [fault.at_s for fault in self.faults if fault.at_s is not None and fault.at_s > now_s]
        until_s = min(until_s, *coming, math.inf)
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._changed.wait())}
        if until_s < math.inf:
            waits.add(asyncio.ensure_future(self.clock.sleep(until_s - now_s)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _make_token(self, stream: _Stream) -> TokenChunk:
        self._make_room(1)
        if stream.ended:
            return TokenChunk(finish_reason=stream.ended)
        sampling = stream.request.sampling
        seed = sampling.seed + stream.num_new_tokens if sampling.seed is not None and sampling.temperature > 0 else 0
        draw = xxhash.xxh3_64_intdigest(stream.digest.digest(), seed=seed % 2**64)
        token = draw % self.vocab_size
        if self.next_token:
            token = self.next_token(stream.token_ids, sampling, self.weight_version)
        stream.token_ids.append(token)
        stream.digest.update(np.array([token], np.int64).tobytes())
        return TokenChunk(
            token_ids=(token,),
            logprobs=(-(draw >> 40) / 2.0**23,) if sampling.logprobs else (),
            version=self.weight_version,
            finish_reason=self._finish_reason(stream, token),
        )

    def _finish_reason(self, stream: _Stream, token: int) -> FinishReason | None:
        sampling = stream.request.sampling
        if token in sampling.stop_token_ids or (token == self.eos_token_id and not sampling.ignore_eos):
            return FinishReason.STOP
        is_full = stream.num_new_tokens >= sampling.max_tokens or len(stream.token_ids) >= self.max_model_len
        return FinishReason.LENGTH if is_full else None

    def _has_room_for(self, stream: _Stream) -> bool:
        waiting = (other for other in self._streams.values() if not other.is_running and not other.ended)
        is_next = min(waiting, key=lambda other: (other.request.priority, other.index)) is stream
        has_slot = sum(other.is_running for other in self._streams.values()) < self.max_running
        return is_next and has_slot and self._kv_used_tokens() + len(stream.token_ids) < self._kv_budget_tokens

    def _make_room(self, num_tokens: int) -> None:
        running = [stream for stream in self._streams.values() if stream.is_running]
        while running and self._kv_used_tokens() + num_tokens > self._kv_budget_tokens:
            self._end(running.pop(), FinishReason.EVICTED)

    def _kv_used_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self._streams.values() if stream.is_running)

    def _end(self, stream: _Stream, reason: FinishReason) -> None:
        stream.ended = stream.ended or reason
        stream.is_running = False
        self._notify()

    def _forget(self, stream: _Stream) -> None:
        if self._streams.get(stream.request.request_id) is stream:
            del self._streams[stream.request.request_id]
            self._notify()

    def _fault(self, kind: FaultKind, index: int, num_tokens: int = 0) -> Fault | None:
        now_s = self.clock.now()
        meant = (fault for fault in self.faults if fault.kind is kind and fault.applies(index, num_tokens, now_s))
        return next(meant, None)

    def _check_alive(self) -> None:
        deaths = [fault.at_s for fault in self.faults if fault.kind is FaultKind.DIE and fault.at_s is not None]
        if deaths and min(deaths) <= self.clock.now():
            self.die("a scripted fault killed it")
        if self._lost_because:
            message = f"engine {self.engine_id} is gone: {self._lost_because}"
            raise EngineLostError(message)

    def _check_fenced(self) -> None:
        if self._is_fenced:
            message = f"engine {self.engine_id} is fenced: its weights are of no known version; activate an update"
            raise EngineFencedError(message)

    def _check_awake(self) -> None:
        if self._is_asleep:
            message = f"engine {self.engine_id} is asleep; wake it, or try another engine"
            raise EngineBusyError(message)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
