"""Reading token streams in tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import cast

import attrs

from rose.interfaces.serving import ServingEngine
from rose.types import EngineRequest, FinishReason, TokenChunk, WeightVersion

_POLL_S = 0.005


@attrs.define(eq=False)
class Stream:
    """What a stream has given so far."""

    chunks: list[TokenChunk] = attrs.field(factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return every token so far."""
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Return every log-probability so far."""
        return tuple(logprob for chunk in self.chunks for logprob in chunk.logprobs)

    @property
    def versions(self) -> tuple[WeightVersion | None, ...]:
        """Return the weight version of every token so far."""
        return tuple(chunk.version for chunk in self.chunks for _ in chunk.token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return why the stream ended, or ``None`` while it goes on."""
        return self.chunks[-1].finish_reason if self.chunks else None

    async def read(self, chunks: AsyncIterator[TokenChunk]) -> None:
        """Read a stream to its end, and close it whatever happens."""
        async with aclosing(cast("AsyncGenerator[TokenChunk, None]", chunks)):
            async for chunk in chunks:
                self.chunks.append(chunk)


async def collect(engine: ServingEngine, request: EngineRequest) -> Stream:
    """Run a request to its end."""
    stream = Stream()
    await stream.read(engine.generate(request))
    return stream


@attrs.define(eq=False)
class Reading(Stream):
    """A stream that is being read in the background."""

    task: asyncio.Task[None] | None = None

    async def has_tokens(self, num_tokens: int) -> None:
        """Wait until the stream has given this many tokens or has ended."""
        await until(lambda: len(self.token_ids) >= num_tokens or self.task is None or self.task.done())

    async def finish(self) -> None:
        """Wait until the stream has ended; raises what it raised."""
        if self.task is not None:
            await asyncio.shield(self.task)


@asynccontextmanager
async def reading(engine: ServingEngine, request: EngineRequest) -> AsyncIterator[Reading]:
    """Read a request's stream in the background; leaving the block closes it."""
    stream = Reading()
    stream.task = asyncio.create_task(stream.read(engine.generate(request)))
    try:
        yield stream
    finally:
        stream.task.cancel()
        await asyncio.wait({stream.task})


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Poll a condition; the test's own timeout bounds it."""
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        await asyncio.sleep(_POLL_S)
