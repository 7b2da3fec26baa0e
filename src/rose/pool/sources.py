"""Where the tokens of a turn come from once the pool has chosen an engine: its own stream, or what somebody else makes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Protocol, cast

from rose.types import EngineId, RequestId, TokenChunk, Turn, TurnResult, VersionSpan, WeightVersion

if TYPE_CHECKING:
    from rose.pool.turns import Attempt, TurnRecord


class TokenSource(Protocol):
    """Gives the chunks of each attempt of one turn."""

    def begun_at(self, engine_id: EngineId, version: WeightVersion | None, max_tokens: int) -> RequestId | None:
        """Return the id of a request that the source has begun by itself; asked when an attempt is made, which takes it over.

        Args:
            engine_id: Where the attempt is made.
            version: Of the engine's weights; a request that it may have begun with others does not count.
            max_tokens: Most tokens that the attempt is to give, as a request must that counts.
        """

    def open(self, attempt: Attempt) -> AsyncIterator[TokenChunk]:
        """Stream an attempt's tokens, with the errors of ``ServingEngine.generate``. Cancelled once the pool gives the attempt up."""


class Generates(Protocol):
    """What runs turns: a pool."""

    async def generate(self, turn: Turn, *, source: TokenSource | None = None) -> TurnResult:
        """See ``RolloutPool.generate``."""


def open_stream(attempt: Attempt) -> AsyncIterator[TokenChunk]:
    """Begin an attempt."""
    source = attempt.record.source
    return attempt.member.engine.generate(attempt.request) if source is None else source.open(attempt)


async def stream(pool: Generates, turn: Turn) -> AsyncGenerator[TokenChunk | TurnResult, None]:
    """Run a turn and give its tokens as the pool takes them, across all moves of the turn; the result comes last.

    Closing the generator cancels the turn. What is given never has to be taken back: a token that the pool did not take is not in it.

    Raises:
        RoseError: As ``RolloutPool.generate`` raises them.
    """
    tee = _Tee()
    task = asyncio.ensure_future(pool.generate(turn, source=tee))
    task.add_done_callback(lambda _: tee.news.set())
    num_given = 0
    try:
        while not task.done():
            await tee.news.wait()
            tee.news.clear()
            if tee.record is not None and not task.done():
                for chunk in chunks_from(tee.record.token_ids, tee.record.logprobs, tee.record.spans, num_given):
                    num_given += len(chunk.token_ids)
                    yield chunk
        result = task.result()
        for chunk in chunks_from(result.token_ids, result.logprobs, result.versions, num_given):
            yield chunk
        yield result
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


class _Tee:
    """The engines' own streams, with a sign whenever the pool has taken a chunk."""

    def __init__(self) -> None:
        self.record: TurnRecord | None = None
        self.news = asyncio.Event()

    def begun_at(self, *_: object) -> RequestId | None:
        return None  # it begins nothing by itself

    async def open(self, attempt: Attempt) -> AsyncGenerator[TokenChunk, None]:
        self.record = attempt.record
        chunks = cast("AsyncGenerator[TokenChunk, None]", attempt.member.engine.generate(attempt.request))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk
                self.news.set()


def chunks_from(
    token_ids: tuple[int, ...] | list[int],
    logprobs: tuple[float, ...] | list[float],
    spans: tuple[VersionSpan, ...] | list[VersionSpan],
    start: int,
) -> list[TokenChunk]:
    """Return the tokens from ``start`` on as chunks of one version each."""
    chunks: list[TokenChunk] = []

    def cut(end: int, version: WeightVersion | None) -> None:
        nonlocal start
        if start < end:
            given = tuple(logprobs[start:end]) if logprobs else ()
            chunks.append(TokenChunk(token_ids=tuple(token_ids[start:end]), logprobs=given, version=version))
            start = end

    for span in spans:
        cut(span.start, None)
        cut(span.end, span.version)
    cut(len(token_ids), None)
    return chunks
