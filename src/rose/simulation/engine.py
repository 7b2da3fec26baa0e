"""A modelled engine behind the live ``ServingEngine`` role, so that the live pool cannot tell it from a real one.

A simulated prompt begins with a header of token ids (``PromptHeader``) that tells the engine what a real one would find by
itself: which prefixes are shared, and where the model would stop. Other prompts make all the tokens that they ask for. One
token id stands for ``resolution_tokens`` modelled ones.

Invariants: those of ``ServingEngine``. Tokens are handed out with the first one, when a request ends, and at least every ``flush_s``
in between, all that were made until then; nothing is handed out for a request that makes no progress, so that stalls are seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import NoReturn, Protocol

import attrs

from rose.errors import EngineLostError, RequestRefusedError, VersionConflictError
from rose.interfaces.serving import PauseMode, ServingEngine
from rose.simulation.batch import Job
from rose.simulation.device import Device, Lane
from rose.types import (
    Activation,
    EngineId,
    EngineRequest,
    EngineSnapshot,
    FinishReason,
    RequestId,
    TokenChunk,
    WeightUpdate,
    WeightVersion,
)

TOKEN = 1
"""Every generated token has this id: what is said does not matter here."""
LOGPROB = -1.0
"""And this log-prob, where one is asked for."""


@attrs.frozen
class PromptHeader:
    """The first ids of a simulated prompt: its trajectory and group, how long the group's prompt is, where this turn stops.

    ``stop_at`` counts ids from the prompt's beginning, so it holds for a turn that goes on elsewhere as well. Trajectories are
    numbered from 1; on the wire the number is negative, which no model's token id is.
    """

    trajectory: int
    group: int
    num_shared: int
    stop_at: int

    def ids(self) -> tuple[int, int, int, int]:
        """Return the header as token ids."""
        return (-self.trajectory, self.group, self.num_shared, self.stop_at)

    @classmethod
    def read(cls, ids: Sequence[int]) -> PromptHeader | None:
        """Return the header of a prompt, ``None`` when it has none."""
        if len(ids) < HEADER_IDS or ids[0] >= 0:
            return None
        return cls(-ids[0], *ids[1:HEADER_IDS])


HEADER_IDS = 4


class WeightRelay(Protocol):
    """Where a modelled engine's weights come from."""

    async def fetch(self, update: WeightUpdate, *, is_local: bool) -> int:
        """Take as long as fetching the update takes; returns its bytes."""

    def activation_s(self, update: WeightUpdate) -> float:
        """Return how long writing it in place takes."""


@attrs.frozen(kw_only=True)
class EngineConfig:
    """One modelled engine.

    Attributes:
        resolution_tokens: Modelled tokens of one token id.
        flush_s: Longest time that made tokens are kept back.
        is_local: The engine is in the trainer's cluster.
        refuses_above_tokens: Requests that may come to hold more are refused for good; ``None`` for the batch's own budget.
        hides_kv: Report memory without an end, as an engine behind a router that does not look.
        vocab_size: Token ids from here on are refused; ``None``: none is.
        max_context_tokens: Longer prompts are refused; ``None``: none is.
    """

    resolution_tokens: int = 16
    flush_s: float = 1.8
    is_local: bool = True
    refuses_above_tokens: int | None = None
    hides_kv: bool = False
    vocab_size: int | None = None
    max_context_tokens: int | None = None


@attrs.define(eq=False)
class _Stream:
    job: Job
    has_stop_token: bool = False
    unsent: list[tuple[int, WeightVersion | None]] = attrs.field(factory=list)
    num_made: int = 0
    finish: FinishReason | None = None
    waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class ModelledEngine(ServingEngine):
    """A rollout engine in virtual time.

    Attributes:
        started: Trajectory number -> when its first request reached an engine; shared by the engines of a world.
        num_tokens: Modelled tokens made here.
        asleep_s: How long an inactive model takes to come back; its next reading waits for that.
    """

    def __init__(
        self,
        engine_id: EngineId,
        lane: Lane,
        device: Device,
        config: EngineConfig,
        *,
        relay: WeightRelay | None = None,
        version: WeightVersion | None = None,
        started: dict[int, float] | None = None,
    ) -> None:
        """Serve requests on ``lane`` of ``device``."""
        self.engine_id = engine_id
        self.lane = lane
        self.started = {} if started is None else started
        self.num_tokens = 0
        self.asleep_s = 0.0
        self._device = device
        self._config = config
        self._relay = relay
        self._version = version
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._staged: tuple[WeightUpdate, int, float] | None = None
        self._lost_because: str | None = None
        lane.listener = self._hear

    # -- requests

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the request's tokens, many a chunk. See ``ServingEngine.generate``."""
        stream = self._accept(request)
        try:
            while True:
                if stream.unsent or stream.finish is not None:
                    num_new, version = stream.unsent.pop(0) if stream.unsent else (0, self._version)
                    is_last = stream.finish is not None and not stream.unsent
                    yield TokenChunk(
                        token_ids=(TOKEN,) * num_new,
                        logprobs=(LOGPROB,) * num_new if request.sampling.logprobs else (),
                        version=version,
                        finish_reason=stream.finish if is_last else None,
                    )
                    if is_last:
                        return
                    continue
                self._check_alive()
                stream.waiter = self._loop.create_future()
                await stream.waiter
        finally:
            if stream.finish is None:
                self._stop(stream, FinishReason.ABORTED)
            self._streams.pop(request.request_id, None)

    def _accept(self, request: EngineRequest) -> _Stream:
        self._check_alive()
        ids, scale = request.prompt_ids, self._config.resolution_tokens
        header = PromptHeader.read(ids)
        now_s = self._loop.time()
        num_output = 1 if TOKEN in request.sampling.stop_token_ids else request.sampling.max_tokens
        prefix_keys: tuple[tuple[Hashable, int], ...] = ()
        if header is not None:
            self.started.setdefault(header.trajectory, now_s)
            num_output = max(1, min(num_output, header.stop_at - len(ids)))
            prefix_keys = (("group", header.group), header.num_shared * scale), (header.trajectory, 1 << 40)
        job = Job(
            job_id=request.request_id,
            prompt_tokens=len(ids) * scale,
            output_tokens=num_output * scale,
            max_output_tokens=request.sampling.max_tokens * scale,
            arrived_s=now_s,
            prefix_keys=prefix_keys,
        )
        self._refuse_impossible(request, job, is_scripted=header is not None)
        stream = _Stream(job, has_stop_token=TOKEN in request.sampling.stop_token_ids)
        self._streams[request.request_id] = stream
        self.lane.batch.add(job)
        self._device.poke()
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(self._config.flush_s, self._flush)
        return stream

    def _refuse_impossible(self, request: EngineRequest, job: Job, *, is_scripted: bool) -> None:
        config, ids = self._config, request.prompt_ids
        if request.request_id in self._streams:
            self._refuse(f"a request {request.request_id!r} is in flight already; every attempt needs a fresh id")
        if config.max_context_tokens is not None and job.prompt_tokens >= config.max_context_tokens:
            self._refuse(
                f"the prompt has {job.prompt_tokens} tokens, the model takes less than {config.max_context_tokens}"
            )
        if config.vocab_size is not None and not is_scripted and not all(0 <= i < config.vocab_size for i in ids):
            self._refuse(f"the prompt has token ids outside 0 to {config.vocab_size - 1}")
        most = self._config.refuses_above_tokens
        limit = self.lane.batch.kv_tokens if most is None else most
        need = job.prompt_tokens + job.output_tokens if most is None else job.need_tokens
        if need > limit:
            self._refuse(f"the request may need {need} KV tokens, the engine can have {limit}")

    def _refuse(self, why: str) -> NoReturn:
        message = f"{self.engine_id}: {why}"
        raise RequestRefusedError(message)

    async def abort(self, request_id: RequestId) -> None:
        """End a request; see ``ServingEngine.abort``."""
        self._check_alive()
        stream = self._streams.get(request_id)
        if stream is not None and stream.finish is None:
            self._stop(stream, FinishReason.ABORTED)

    def evict(self, jobs: Sequence[Job]) -> None:
        """End requests for want of memory or of a lease."""
        for job in jobs:
            stream = self._streams.get(job.job_id)
            if stream is not None and stream.finish is None:
                self._stop(stream, FinishReason.EVICTED)
            else:
                self.lane.batch.drop(job)

    def _stop(self, stream: _Stream, reason: FinishReason) -> None:
        self._device.fold()
        self._count(stream)
        stream.finish = reason
        self.lane.batch.drop(stream.job)
        self._device.poke()
        stream.wake()

    def _hear(self, started: list[Job], ended: list[Job], _now_s: float) -> None:
        for job in started:
            stream = self._streams[job.job_id]
            self._count(stream)
            stream.wake()
        for job in ended:
            stream = self._streams[job.job_id]
            self._count(stream)
            is_cut = job.output_tokens >= job.max_output_tokens and not stream.has_stop_token
            stream.finish = FinishReason.LENGTH if is_cut else FinishReason.STOP
            stream.wake()

    def _count(self, stream: _Stream) -> None:
        # a token id counts as made with the first of its tokens, so that coarse ids do not look like a stall
        num_made = -(-self.lane.batch.made_tokens(stream.job) // self._config.resolution_tokens)
        num_new = num_made - stream.num_made
        if num_new:
            self.num_tokens += num_new * self._config.resolution_tokens
            stream.num_made = num_made
            if stream.unsent and stream.unsent[-1][1] == self._version:
                num_new += stream.unsent.pop()[0]
            stream.unsent.append((num_new, self._version))

    def _flush(self) -> None:
        """Hand out all that was made until now, and again after ``flush_s``."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if not self._streams:
            return
        self._flush_timer = self._loop.call_later(self._config.flush_s, self._flush)
        self._device.fold()
        for stream in self._streams.values():
            if stream.finish is None:
                self._count(stream)
                if stream.unsent:
                    stream.wake()

    # -- the rest of the role

    async def snapshot(self) -> EngineSnapshot:
        """Read the load at this moment, in token ids."""
        if self.asleep_s > 0:
            wake_s, self.asleep_s = self.asleep_s, 0.0
            await asyncio.sleep(wake_s)
        self._check_alive()
        self._device.fold()
        batch, scale = self.lane.batch, self._config.resolution_tokens
        total = (1 << 40) if self._config.hides_kv else batch.kv_tokens // scale
        return EngineSnapshot(
            num_running=batch.num_running,
            num_waiting=len(batch.waiting),
            kv_used_tokens=batch.kv_tokens_used // scale,
            kv_total_tokens=total,
            weight_version=self._version,
            is_paused=self.lane.is_paused,
            read_at_s=self._loop.time(),
        )

    async def pause(self, mode: PauseMode) -> None:
        """Make no token until ``resume``; returns when the step in progress is over."""
        self._check_alive()
        self.lane.is_paused = True
        await self._device.stop_at_boundary(self.lane)
        if mode is PauseMode.ABORT:
            for stream in list(self._streams.values()):
                if stream.finish is None:
                    self._stop(stream, FinishReason.ABORTED)

    async def resume(self) -> None:
        """Go on after ``pause``."""
        self._check_alive()
        self.lane.is_paused = False
        self._device.poke()

    async def stage(self, update: WeightUpdate) -> None:
        """Fetch an update, in the time that the links take."""
        self._check_alive()
        before_s = self._loop.time()
        num_bytes = 0 if self._relay is None else await self._relay.fetch(update, is_local=self._config.is_local)
        self._check_alive()
        self._staged = (update, num_bytes, self._loop.time() - before_s)

    async def activate(self) -> Activation:
        """Take the staged version after a pause; cached prefixes are dropped."""
        self._check_alive()
        if self._staged is None:
            message = f"{self.engine_id}: no update is staged; call stage() before activate()"
            raise VersionConflictError(message)
        update, num_bytes, stage_s = self._staged
        before_s = self._loop.time()
        try:
            await self.pause(PauseMode.KEEP)
            if self._relay is not None:
                await asyncio.sleep(self._relay.activation_s(update))
            self._check_alive()
            self._flush()  # what was made so far is of the old version
            self._staged, self._version = None, update.target
            self.lane.batch.cache.clear()
        finally:
            if self._lost_because is None:
                await self.resume()
        return Activation(
            version=update.target,
            stage_s=stage_s,
            pause_s=self._loop.time() - before_s,
            fetched_bytes=num_bytes,
            is_verified=True,
        )

    def die(self, because: str) -> None:
        """Be gone from now on, with everything in flight."""
        self._lost_because = self._lost_because or because
        self.lane.is_paused = True
        self._device.fold()
        for stream in self._streams.values():
            self.lane.batch.drop(stream.job)
            stream.wake()
        self._device.poke()

    def _check_alive(self) -> None:
        if self._lost_because is not None:
            message = f"engine {self.engine_id} is gone: {self._lost_because}"
            raise EngineLostError(message)
