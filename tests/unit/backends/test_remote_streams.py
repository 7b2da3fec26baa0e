"""Case E09 at the wire: streams of an executor that are cut, repeat themselves or leave something out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from aiohttp import web

from rose.backends.remote import RemoteEngine, wire
from rose.errors import EngineLostError
from rose.types import EngineRequest, EngineSnapshot, FinishReason, RequestId, Sampling, TokenChunk

SEVEN = [
    json.dumps(wire.chunk_to_wire(TokenChunk(token_ids=(11 + n,), logprobs=(-0.5,)), n)).encode() + b"\n"
    for n in range(7)
]
END = json.dumps(wire.chunk_to_wire(TokenChunk(finish_reason=FinishReason.STOP), 7)).encode() + b"\n"


@contextlib.asynccontextmanager
async def executor(*pieces: bytes) -> AsyncIterator[RemoteEngine]:
    """An executor that answers every request with ``pieces``, then closes the socket."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if END not in pieces and request.transport is not None:
            request.transport.close()
        return response

    app = web.Application()
    app.router.add_post("/v1/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine = RemoteEngine(f"http://127.0.0.1:{runner.addresses[0][1]}")
    engine._incarnation = "1"
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


async def read(engine: RemoteEngine) -> tuple[list[int], list[float], str]:
    """Return tokens, log-probs and how the stream ended."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    request = EngineRequest(request_id=RequestId("r"), prompt_ids=(1,), sampling=Sampling(max_tokens=10))
    try:
        async for chunk in engine.generate(request):
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs
            if chunk.finish_reason is not None:
                return token_ids, logprobs, chunk.finish_reason.value
    except EngineLostError:
        return token_ids, logprobs, "interrupted"
    return token_ids, logprobs, "nothing"


async def test_a_closed_socket_is_an_interruption_with_seven_tokens():
    async with executor(*SEVEN) as engine:
        assert await read(engine) == ([*range(11, 18)], [-0.5] * 7, "interrupted")


async def test_half_an_event_is_no_crash_and_no_token():
    async with executor(*SEVEN[:6], SEVEN[6][:20]) as engine:
        assert await read(engine) == ([*range(11, 17)], [-0.5] * 6, "interrupted")


async def test_an_event_that_comes_twice_counts_once():
    async with executor(*SEVEN, SEVEN[6], END) as engine:
        assert await read(engine) == ([*range(11, 18)], [-0.5] * 7, "stop")


async def test_an_event_that_is_missing_is_an_interruption_not_a_gap():
    async with executor(*SEVEN[:3], *SEVEN[4:], END) as engine:
        assert await read(engine) == ([11, 12, 13], [-0.5] * 3, "interrupted")


def test_a_chunk_that_overlaps_gives_what_is_new():
    chunk = TokenChunk(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0, -3.0))
    assert wire.chunk_after(wire.chunk_to_wire(chunk, 4), 6) == TokenChunk(token_ids=(3,), logprobs=(-3.0,))
    assert wire.chunk_after(wire.chunk_to_wire(chunk, 4), 4) == chunk
    assert wire.chunk_after({"token_ids": [1]}, 4) == TokenChunk(token_ids=(1,)), "an executor that does not count"


@pytest.mark.parametrize("context", [None, 32768])
def test_a_reading_says_how_long_a_context_the_engine_takes(context: int | None):
    reading = EngineSnapshot(
        num_running=1,
        num_waiting=0,
        kv_used_tokens=5,
        kv_total_tokens=9,
        weight_version=None,
        is_paused=False,
        read_at_s=2.0,
        max_context_tokens=context,
    )
    assert wire.snapshot_from_wire(wire.snapshot_to_wire(reading), 2.0) == reading
    older = {name: value for name, value in wire.snapshot_to_wire(reading).items() if name != "max_context_tokens"}
    assert wire.snapshot_from_wire(older, 2.0).max_context_tokens is None
