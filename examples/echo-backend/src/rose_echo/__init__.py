"""A serving engine that says the prompt back. It shows what a ROSE backend has to do, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import attrs

from rose.clocks import MonotonicClock
from rose.errors import EngineLostError, RequestRefusedError, VersionConflictError
from rose.interfaces import ServingEngine
from rose.interfaces.serving import PauseMode
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


@attrs.define(eq=False)
class _Stream:
    request: EngineRequest
    num_tokens: int = 0
    is_aborted: bool = False


class EchoEngine(ServingEngine):
    """Token ``i`` of an answer is token ``i`` of the prompt, round and round."""

    def __init__(
        self, *, engine_id: str = "echo", vocab_size: int = 256, max_model_len: int = 512, token_s: float = 0.001
    ) -> None:
        self.engine_id = EngineId(engine_id)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._token_s = token_s
        self._clock = MonotonicClock()
        self._streams: dict[RequestId, _Stream] = {}
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._staged: WeightUpdate | None = None
        self._version: WeightVersion | None = None
        self._is_closed = False

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the prompt back, one token a chunk."""
        self._check(request)
        stream = self._streams[request.request_id] = _Stream(request)
        try:
            chunk = await self._next_chunk(stream)
            while chunk.finish_reason is None:
                yield chunk
                chunk = await self._next_chunk(stream)
            del self._streams[request.request_id]
            yield chunk
        finally:
            self._streams.pop(request.request_id, None)

    async def _next_chunk(self, stream: _Stream) -> TokenChunk:
        await self._clock.sleep(self._token_s)
        while not (self._may_run.is_set() or stream.is_aborted or self._is_closed):
            await self._clock.sleep(self._token_s)
        self._check_open()
        if stream.is_aborted:
            return TokenChunk(finish_reason=FinishReason.ABORTED)
        prompt, sampling = stream.request.prompt_ids, stream.request.sampling
        token = prompt[stream.num_tokens % len(prompt)]
        stream.num_tokens += 1
        is_full = stream.num_tokens == sampling.max_tokens or len(prompt) + stream.num_tokens == self._max_model_len
        finish = FinishReason.LENGTH if is_full else None
        return TokenChunk(
            token_ids=(token,),
            logprobs=(0.0,) if sampling.logprobs else (),
            version=self._version,
            finish_reason=FinishReason.STOP if token in sampling.stop_token_ids else finish,
        )

    def _check(self, request: EngineRequest) -> None:
        self._check_open()
        if len(request.prompt_ids) >= self._max_model_len:
            message = (
                f"{self.engine_id} takes prompts of less than {self._max_model_len}, got {len(request.prompt_ids)}"
            )
            raise RequestRefusedError(message)
        if not all(0 <= token < self._vocab_size for token in request.prompt_ids):
            message = f"{self.engine_id} knows token ids 0 to {self._vocab_size - 1} only"
            raise RequestRefusedError(message)
        if request.request_id in self._streams:
            message = f"{self.engine_id} runs a request {request.request_id!r} already; every attempt needs a fresh id"
            raise RequestRefusedError(message)

    def _check_open(self) -> None:
        if self._is_closed:
            message = f"{self.engine_id} was closed"
            raise EngineLostError(message)

    async def abort(self, request_id: RequestId) -> None:
        """Let the stream end at its next token."""
        if request_id in self._streams:
            self._streams[request_id].is_aborted = True

    async def snapshot(self) -> EngineSnapshot:
        """Read the load."""
        self._check_open()
        used = sum(len(stream.request.prompt_ids) + stream.num_tokens for stream in self._streams.values())
        return EngineSnapshot(
            num_running=len(self._streams),
            num_waiting=0,
            kv_used_tokens=used,
            kv_total_tokens=64 * self._max_model_len,
            weight_version=self._version,
            is_paused=not self._may_run.is_set(),
            read_at_s=self._clock.now(),
        )

    async def pause(self, mode: PauseMode) -> None:
        """Hold every stream; end them first if asked to."""
        self._may_run.clear()
        for stream in self._streams.values():
            stream.is_aborted = stream.is_aborted or mode is PauseMode.ABORT

    async def resume(self) -> None:
        """Let the streams go on."""
        self._may_run.set()

    async def stage(self, update: WeightUpdate) -> None:
        """Keep the update; a real engine fetches and checks its blobs here."""
        self._staged = update

    async def activate(self) -> Activation:
        """Take the staged version; a real engine writes its weights between pause and resume."""
        if self._staged is None:
            message = f"{self.engine_id}: nothing is staged"
            raise VersionConflictError(message)
        self._version, self._staged = self._staged.target, None
        self._may_run.set()
        return Activation(version=self._version, stage_s=0.0, pause_s=0.0, fetched_bytes=0, is_verified=False)

    async def close(self) -> None:
        """Give up every stream."""
        self._is_closed = True
