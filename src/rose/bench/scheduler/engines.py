"""Engines of the benchmark inside this process: they answer at known times, fail at once, or never answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

import attrs

from rose.errors import EngineError
from rose.interfaces.serving import PauseMode, ServingEngine
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

KV_TOTAL_TOKENS = 1 << 20


def reading(kv_total_tokens: int = KV_TOTAL_TOKENS, version: WeightVersion | None = None) -> EngineSnapshot:
    """Return the reading of an engine whose KV memory is empty."""
    return EngineSnapshot(
        num_running=0,
        num_waiting=0,
        kv_used_tokens=0,
        kv_total_tokens=kv_total_tokens,
        weight_version=version,
        is_paused=False,
        read_at_s=0.0,
    )


@attrs.define(eq=False)
class Served:
    """When an engine got a request and when it gave the last token, on the monotonic clock."""

    began_s: float = math.nan
    ended_s: float = math.nan


class BenchEngine(ServingEngine):
    """Serves any number of requests, each ``num_chunks`` chunks of ``chunk_tokens`` tokens, ``chunk_s`` apart.

    Args:
        engine_id: Its name.
        num_chunks: Chunks of an answer.
        chunk_tokens: Tokens of a chunk.
        chunk_s: Time before each chunk on the event loop's clock; infinite for an engine that never answers.

    Attributes:
        num_requests: Requests so far.
        chunk_s: As given; may be changed.
        watched: By a prompt's first token: whose times are noted.
    """

    def __init__(self, engine_id: str, *, num_chunks: int = 4, chunk_tokens: int = 8, chunk_s: float = 0.0) -> None:
        self.engine_id = EngineId(engine_id)
        self.num_requests = 0
        self.chunk_s = chunk_s
        self.watched: dict[int, Served] = {}
        self._num_chunks = num_chunks
        self._chunk = TokenChunk(token_ids=(1,) * chunk_tokens, logprobs=(-1.0,) * chunk_tokens)
        self._last = attrs.evolve(self._chunk, finish_reason=FinishReason.LENGTH)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens an answer has."""
        return self._num_chunks * len(self._chunk.token_ids)

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the chunks."""
        self.num_requests += 1
        served = self.watched.get(request.prompt_ids[0])
        if served is not None:
            served.began_s = time.perf_counter()
        for number in range(self._num_chunks):
            if self.chunk_s == math.inf:
                await asyncio.Event().wait()
            await asyncio.sleep(self.chunk_s)
            is_last = number + 1 == self._num_chunks
            if is_last and served is not None:
                served.ended_s = time.perf_counter()
            yield self._last if is_last else self._chunk

    async def abort(self, request_id: RequestId) -> None:
        """Do nothing: closing the stream ends a request."""

    async def snapshot(self) -> EngineSnapshot:
        """Return an empty engine's reading."""
        return reading()

    async def pause(self, mode: PauseMode) -> None:
        """Refuse: no benchmark pauses."""
        raise NotImplementedError

    async def resume(self) -> None:
        """Refuse: no benchmark pauses."""
        raise NotImplementedError

    async def stage(self, update: WeightUpdate) -> None:
        """Refuse: no benchmark moves weights."""
        raise NotImplementedError

    async def activate(self) -> Activation:
        """Refuse: no benchmark moves weights."""
        raise NotImplementedError


class DeadEngine(BenchEngine):
    """Looks healthy to whoever reads it, and fails every request at once."""

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:  # noqa: ARG002
        """Fail.

        Raises:
            EngineError: Always.
        """
        self.num_requests += 1
        message = f"engine {self.engine_id} fails whatever it is asked"
        raise EngineError(message)
