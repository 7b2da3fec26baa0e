"""What a client of an OpenAI-compatible server makes of servers that misbehave: raw sockets on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose import registry
from rose.backends.openai import OpenAiEngine
from rose.errors import (
    EngineBusyError,
    EngineError,
    EngineLostError,
    EngineUnsupportedError,
    RequestRefusedError,
)
from rose.interfaces.serving import PauseMode, SupportsAddress
from rose.testing import FakeEngine, fake_update
from rose.testing.contracts.streams import collect, reading, until
from rose.testing.openai_server import completion_event, serve_openai
from rose.types import EngineRequest, FinishReason, RequestId, Sampling, TokenChunk, WeightVersion

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def request(max_tokens=10, request_id="r"):
    return EngineRequest(request_id=RequestId(request_id), prompt_ids=(1, 2), sampling=Sampling(max_tokens=max_tokens))


def events(first, last, finish=None):
    return [
        completion_event(
            TokenChunk(token_ids=(token,), logprobs=(-0.5,), finish_reason=finish if token == last else None), token
        )
        for token in range(first, last + 1)
    ]


def http_chunk(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@contextlib.asynccontextmanager
async def raw_server(answer):
    """Serve ``answer(path, reader, writer)`` for each request; gives an engine, and the paths that were asked for."""
    paths = []

    async def handle(reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                length = next(
                    (int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length")), 0
                )
                await reader.readexactly(length)
                paths.append(lines[0].split()[1])
                if not await answer(paths[-1], reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    engine = OpenAiEngine(f"http://{host}:{port}", timeout_s=5.0)
    try:
        async with asyncio.timeout(20):
            yield engine, paths
    finally:
        await engine.close()
        server.close()
        await server.wait_closed()


def answering(*parts, is_whole=False, is_reset=False):
    async def answer(_path, _reader, writer):
        writer.write(HEAD)
        for part in parts:
            writer.write(http_chunk(part))
            await writer.drain()
        if is_whole:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True
        if is_reset:
            writer.transport.abort()
        return False

    return answer


def plain(status, body, headers=""):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n{headers}\r\n".encode()

    async def answer(_path, _reader, writer):
        writer.write(head + text)
        await writer.drain()
        return True

    return answer


async def interrupted(*parts, **options):
    """Return what was kept of a stream that broke off, and what was raised."""
    async with raw_server(answering(*parts, **options)) as (engine, _):
        stream = reading(engine, request())
        async with stream as found:
            with pytest.raises(EngineError) as raised:
                await found.finish()
        return found, raised.value


@pytest.mark.parametrize("is_whole", [False, True], ids=["cut", "closed in order"])
async def test_a_stream_that_ends_without_a_reason_is_interrupted(is_whole):
    """E09: seven events, then nothing. The tokens are kept and the stream is not taken for finished."""
    found, error = await interrupted(*events(1, 7), is_whole=is_whole)
    assert found.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert len(found.logprobs) == 7
    assert found.finish_reason is None
    assert "after 7 tokens" in str(error)
    assert not isinstance(error, EngineLostError | RequestRefusedError | EngineBusyError)


async def test_a_cut_within_an_event_keeps_the_events_before_it():
    whole = events(1, 7)
    found, _ = await interrupted(*whole[:6], whole[6][: len(whole[6]) // 2])
    assert found.token_ids == (1, 2, 3, 4, 5, 6)


async def test_a_repeated_event_is_given_once():
    whole = events(1, 10, FinishReason.LENGTH)
    parts = [*whole[:7], whole[6], *whole[7:], DONE]
    async with raw_server(answering(*parts, is_whole=True)) as (engine, _):
        stream = await collect(engine, request())
    assert stream.token_ids == tuple(range(1, 11))
    assert stream.finish_reason is FinishReason.LENGTH


async def test_an_event_that_is_wrong_ends_the_stream_after_the_tokens_before_it():
    found, error = await interrupted(
        *events(1, 3), b'data: {"error": {"message": "a worker died"}}\n\n', DONE, is_whole=True
    )
    assert found.token_ids == (1, 2, 3)
    assert "a worker died" in str(error)


async def test_a_reset_connection_is_a_lost_engine():
    found, error = await interrupted(*events(1, 3), is_reset=True)
    assert isinstance(error, EngineError)
    assert found.finish_reason is None
    assert found.token_ids == (1, 2, 3)[: len(found.token_ids)]


async def test_nobody_listens():
    async with raw_server(plain(200, {})) as (engine, _):
        pass
    gone = OpenAiEngine(engine.url, engine_id="e1")
    for call in (collect(gone, request()), gone.snapshot(), gone.pause(PauseMode.KEEP)):
        with pytest.raises(EngineLostError, match=r"engine e1 at http://127.* cannot be reached"):
            await call
    await gone.close()


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (429, {"error": {"message": "slow down"}}, EngineBusyError, "slow down"),
        (503, b"", EngineBusyError, "without a word"),
        (400, {"error": {"message": "16 tokens at most", "code": 400}}, RequestRefusedError, "16 tokens at most"),
        (400, {"object": "error", "message": "old form"}, RequestRefusedError, "old form"),
        (404, {"detail": "Not Found"}, RequestRefusedError, "Not Found"),
        (422, {"detail": [{"loc": ["prompt"]}]}, RequestRefusedError, "prompt"),
        (502, b"bad gateway", EngineLostError, "bad gateway"),
        (401, {"error": "Unauthorized"}, EngineError, "Unauthorized"),
        (500, b"\xff", EngineError, "500"),
    ],
)
async def test_a_refusal_is_told_in_the_servers_words(status, body, kind, words):
    async with raw_server(plain(status, body)) as (engine, paths):
        for number in range(2):
            with pytest.raises(EngineError, match=str(status)) as raised:
                await collect(engine, request(request_id=str(number)))
            assert type(raised.value) is kind
            assert words in str(raised.value)
    assert paths == ["/v1/completions"] * 2, "nothing is sent twice"


@pytest.mark.parametrize(("vocab_size", "token"), [(100, 100), (100, -1), (None, -1)])
async def test_unknown_token_ids_never_reach_the_server(vocab_size, token):
    async with serve_openai(FakeEngine()) as (url, server):
        engine = OpenAiEngine(url, vocab_size=vocab_size)
        wanted = EngineRequest(request_id=RequestId("r"), prompt_ids=(1, token), sampling=Sampling(max_tokens=1))
        with pytest.raises(RequestRefusedError, match=f"token id {token} is outside the vocabulary"):
            await collect(engine, wanted)
        await engine.close()
        assert server.bodies == []


async def test_a_connection_is_used_again():
    """Also where the end of the answer comes after its last token."""
    connections = set()

    async def answer(_path, _reader, writer):
        connections.add(writer.get_extra_info("peername"))
        writer.write(HEAD + http_chunk(b"".join(events(1, 4, FinishReason.STOP))))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(http_chunk(DONE) + b"0\r\n\r\n")
        return True

    async with raw_server(answer) as (engine, _):
        for number in range(5):
            assert (await collect(engine, request(request_id=str(number)))).token_ids == (1, 2, 3, 4)
    assert len(connections) == 1


async def test_an_abort_before_the_answer_begins_ends_the_stream():
    hung, arrived = asyncio.Event(), asyncio.Event()

    async def answer(_path, reader, _writer):
        arrived.set()
        await reader.read()  # the client goes away
        hung.set()

    async with raw_server(answer) as (engine, _):
        async with reading(engine, request()) as stream:
            await arrived.wait()
            await engine.abort(RequestId("r"))
            await stream.finish()
        assert (stream.finish_reason, stream.token_ids) == (FinishReason.ABORTED, ())
        await hung.wait()


async def test_what_had_come_before_an_abort_is_handed_out():
    async def answer(_path, reader, writer):
        writer.write(HEAD + http_chunk(events(1, 1)[0]))
        await asyncio.sleep(0.01)
        writer.write(http_chunk(b"".join(events(2, 5))))
        await reader.read()

    async with raw_server(answer) as (engine, _):
        chunks = engine.generate(request())
        first = await anext(chunks)
        stream = engine._streams[RequestId("r")]
        await until(lambda: stream.answer.content.total_bytes > len(events(1, 2)[0]) * 4)
        await engine.abort(RequestId("r"))
        rest = [chunk async for chunk in chunks]
    assert first.token_ids == (1,)
    assert [token for chunk in rest for token in chunk.token_ids] == [2, 3, 4, 5]
    assert rest[-1].finish_reason is FinishReason.ABORTED


async def test_a_snapshot_reads_the_servers_metrics():
    fake = FakeEngine(token_s=0.001, kv_total_tokens=1000)
    async with serve_openai(fake, max_model_len=4096) as (url, _):
        engine = OpenAiEngine(url, version="run:7")
        async with reading(engine, request(500)) as stream:
            await stream.has_tokens(1)
            reading_ = await engine.snapshot()
        assert (reading_.num_running, reading_.kv_total_tokens) == (1, 1000)
        assert reading_.weight_version == WeightVersion("run", 7)
        assert reading_.kv_used_tokens > 2
        assert reading_.max_context_tokens == 4096
        assert await engine.max_model_len() == 4096
        await engine.close()


async def test_without_metrics_health_and_the_clients_own_requests_must_do():
    async def answer(path, reader, writer):
        status = 200 if path == "/health" else 404
        return await plain(status, b"")(path, reader, writer)

    async with raw_server(answer) as (engine, _):
        reading_ = await engine.snapshot()
        assert (reading_.num_running, reading_.kv_total_tokens) == (0, 0)
        assert reading_.max_context_tokens is None


async def test_the_models_length_is_asked_for_until_the_server_says():
    asked = []

    async def answer(path, reader, writer):
        asked.append(path)
        statuses = {"/health": 200, "/v1/models": 503 if asked.count("/v1/models") < 2 else 200}
        body = {"data": [{"id": "a", "max_model_len": 64}]}
        return await plain(statuses.get(path, 404), body)(path, reader, writer)

    async with raw_server(answer) as (engine, _):
        lengths = [(await engine.snapshot()).max_context_tokens for _ in range(3)]
    assert lengths == [None, 64, 64]
    assert asked.count("/v1/models") == 2


async def test_another_process_reaches_the_same_server_by_its_address():
    async with serve_openai(FakeEngine()) as (url, _):
        engine = OpenAiEngine(url, engine_id="e", version="run:7", vocab_size=900)
        address = engine.address()
        assert isinstance(engine, SupportsAddress)
        again = registry.serving_engine(address.name, **dict(address.options))
        assert isinstance(again, OpenAiEngine)
        assert address.name == "openai"
        assert again.address() == address
        assert (again.engine_id, again.weight_version) == ("e", WeightVersion("run", 7))
        assert len((await collect(again, request())).token_ids) == 10
        await engine.close()
        await again.close()


async def test_an_unhealthy_server_is_lost():
    async with raw_server(plain(503, b"engine dead")) as (engine, _):
        with pytest.raises(EngineLostError, match="engine dead"):
            await engine.snapshot()


async def test_weights_are_not_taken_and_pauses_only_where_the_server_has_them():
    async with serve_openai(FakeEngine()) as (url, _):
        engine = OpenAiEngine(url)
        with pytest.raises(EngineUnsupportedError, match="takes no weights"):
            await engine.stage(fake_update(WeightVersion("run", 1)))
        with pytest.raises(EngineUnsupportedError, match="takes no weights"):
            await engine.activate()
        with pytest.raises(EngineUnsupportedError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.pause(PauseMode.KEEP)
        await engine.resume()
        await engine.close()


async def test_the_bearer_token_and_the_models_name_are_sent():
    heads = []

    async def answer(_path, _reader, writer):
        return await answering(*events(1, 1, FinishReason.STOP), DONE, is_whole=True)(_path, _reader, writer)

    async def handle(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await answer("", reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    engine = OpenAiEngine(f"http://{host}:{port}/v1/", token="secret", model="m")  # noqa: S106
    await collect(engine, request())
    await engine.close()
    server.close()
    assert b"Authorization: Bearer secret" in heads[0]
    assert heads[0].startswith(b"POST /v1/completions ")


@pytest.mark.parametrize(("models", "expected"), [([{"id": "a", "max_model_len": 5}], 5), ([{"id": "a"}], None)])
async def test_the_models_length(models, expected):
    async with raw_server(plain(200, {"data": models})) as (engine, _):
        assert await engine.max_model_len() == expected


@pytest.mark.parametrize("answer", [plain(200, {"data": []}), plain(200, b"<html>"), plain(404, b"")])
async def test_what_is_no_openai_server_says_so(answer):
    async with raw_server(answer) as (engine, _):
        with pytest.raises(EngineError):
            await engine.max_model_len()
