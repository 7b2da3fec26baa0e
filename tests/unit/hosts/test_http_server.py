"""The common HTTP server: ports, tokens, errors, health, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import attrs
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

import aiohttp
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from prometheus_client import CollectorRegistry, Counter

from rose import errors
from rose.backends.memory import MemoryTransport
from rose.backends.remote.client import HttpClient
from rose.backends.remote.wire import error_from_wire, error_name, error_to_wire, status_of
from rose.errors import ConfigError, EngineError, EngineLeaseError, EngineLostError, RoseError, TransportError
from rose.hosts.http import server
from rose.hosts.http.auth import Access, TokenConfig, _identify, caller, require
from rose.hosts.http.errors import answer_errors
from rose.hosts.http.server import Health, Place, bind, make_app, parse_place, read_json, served, url_of

NUM_SERVERS = 50


def token(name: str, access: Access = Access.JOB) -> TokenConfig:
    return TokenConfig(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), access=access)


@contextlib.asynccontextmanager
async def service(*routes: web.RouteDef, **options: Any) -> AsyncIterator[str]:
    listener = bind(parse_place("127.0.0.1:0"), options.get("tokens", ()))
    async with served(make_app(routes, **options), listener) as url:
        yield url


async def ask(url: str, method: str = "GET", path: str = "/x", body: object = None, token: str | None = None) -> Any:
    client = HttpClient(url, token=token)
    try:
        return await client.call(method, path, body)
    finally:
        await client.close()


# Ports (case O01).


def bind_at_once(place: Place, num: int) -> list[socket.socket]:
    with ThreadPoolExecutor(num) as threads:
        return list(threads.map(lambda _: bind(place, ()), range(num)))


def find_block(num: int) -> int:
    """Return the first of ``num`` ports in a row that are free just now."""
    for first in range(20_000, 32_000, num):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + num):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    pytest.skip("no free ports in a row")


@pytest.mark.parametrize("num_taken", [0, 20])
def test_fifty_servers_at_once_on_candidate_ports(num_taken: int):
    first = find_block(NUM_SERVERS + num_taken)
    with contextlib.ExitStack() as stack:
        for port in range(first, first + num_taken):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        place = parse_place(f"127.0.0.1:{first}-{first + NUM_SERVERS + num_taken - 1}")
        listeners = [stack.enter_context(listener) for listener in bind_at_once(place, NUM_SERVERS)]
        ports = {listener.getsockname()[1] for listener in listeners}
        assert ports == set(range(first + num_taken, first + num_taken + NUM_SERVERS))
        with pytest.raises(TransportError, match="cannot listen"):
            bind(place, ())


async def test_fifty_bound_sockets_are_served_as_they_are():
    async with contextlib.AsyncExitStack() as stack:
        listeners = await asyncio.to_thread(bind_at_once, parse_place("127.0.0.1:0"), NUM_SERVERS)
        urls = {url_of(listener) for listener in listeners}
        assert len(urls) == NUM_SERVERS
        for listener in listeners:
            assert await stack.enter_async_context(served(make_app([]), listener)) in urls
        answers = await asyncio.gather(*(ask(url, path="/health") for url in urls))
        assert all(answer["status"] == "ok" for answer in answers)


def test_fifty_relays_at_once():
    """The relay's own server binds once too."""
    stores = [MemoryTransport() for _ in range(NUM_SERVERS)]
    try:
        with ThreadPoolExecutor(NUM_SERVERS) as threads:
            addresses = list(threads.map(lambda store: store.serve(), stores))
        assert len({dict(address.options)["port"] for address in addresses}) == NUM_SERVERS
    finally:
        for store in stores:
            store.close()


@pytest.mark.parametrize("text", ["127.0.0.1", "127.0.0.1:99999", "127.0.0.1:9-8", ":1", "::1:5", "127.0.0.1:x"])
def test_what_is_no_place(text: str):
    with pytest.raises(ConfigError, match="no place to listen"):
        parse_place(text)


def test_other_machines_need_tokens():
    for host in ("0.0.0.0", "[::]", "example.org"):  # noqa: S104 - that it is refused is the point
        with pytest.raises(ConfigError, match="configure bearer tokens"):
            bind(parse_place(f"{host}:0"), ())
    bind(parse_place("0.0.0.0:0"), [token("a")]).close()


# Tokens.


async def who(_: web.Request) -> web.Response:
    return web.json_response([caller().name, caller().access.value])


async def use(_: web.Request) -> web.Response:
    return web.json_response(require(Access.JOB).name)


BOSS = attrs.evolve(token("boss", Access.CONTROL), sha256=token("boss").sha256.upper())
TOKENS: Sequence[TokenConfig] = (token("job"), token("eye", Access.READ), BOSS)


async def test_tokens_say_who_and_what():
    async with service(web.get("/x", who), web.get("/use", use), tokens=TOKENS) as url:
        assert await ask(url, token="job") == ["job", "job"]  # noqa: S106
        assert await ask(url, token="eye") == ["eye", "read"]  # noqa: S106
        assert await ask(url, path="/use", token="boss") == "boss"  # noqa: S106
        with pytest.raises(ConfigError, match="this needs one with access job or control"):
            await ask(url, path="/use", token="eye")  # noqa: S106
        for wrong in ("", "other", TOKENS[0].sha256, None):
            with pytest.raises(ConfigError, match="unknown token" if wrong else "bearer token"):
                await ask(url, token=wrong)
        assert (await ask(url, path="/health"))["status"] == "ok"


async def test_without_tokens_everything_is_open():
    async with service(web.get("/use", use)) as url:
        assert await ask(url, path="/use") == ""


def test_a_token_is_a_digest():
    with pytest.raises(ValueError, match="sha256"):
        TokenConfig(name="job", sha256="the token itself")
    assert token("job").sha256 not in repr(token("job"))
    assert _identify("Bearer \udcff", TOKENS) is None, "bytes that are no text are no token"
    assert _identify("Bearer job", TOKENS) is not None


# Errors.


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RoseError) and kind.__module__ == "rose.errors"
]


@pytest.mark.parametrize("kind", KINDS)
async def test_errors_keep_their_type_and_words(kind: type[RoseError]):
    words = "what and why"

    async def fail(_: web.Request) -> web.Response:
        raise kind(words)

    async with service(web.get("/x", fail)) as url:
        with pytest.raises(kind) as caught:
            await ask(url)
    assert type(caught.value) is kind
    assert str(caught.value) == words


def test_error_names_and_codes():
    assert error_name(EngineLeaseError) == "fenced"
    assert error_to_wire(EngineLostError("x")) == {"error": {"type": "engine_lost_error", "message": "x"}}
    assert {status_of(kind("")) for kind in KINDS} <= {400, 403, 409, 422, 500, 501, 502, 503, 504}
    assert (status_of(EngineLeaseError("")), status_of(errors.EngineBusyError(""))) == (403, 503)


@pytest.mark.parametrize("body", [None, [], "text", {"error": "text"}, {"error": {"type": "system_exit"}}])
def test_foreign_answers_are_told_by_their_status(body: object):
    assert type(error_from_wire(body, 429)) is errors.EngineBusyError
    assert type(error_from_wire(body, 418)) is EngineError


async def test_bugs_and_unknown_paths_are_answers_too(caplog: pytest.LogCaptureFixture):
    async def fail(_: web.Request) -> web.Response:
        raise ZeroDivisionError

    async with service(web.get("/bug", fail)) as url:
        with pytest.raises(EngineError, match=r"ZeroDivisionError.*see the server's log"):
            await ask(url, path="/bug")
        with pytest.raises(EngineError, match="Not Found"):
            await ask(url, path="/nowhere")
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_client_that_is_gone_is_no_news(caplog: pytest.LogCaptureFixture, *, is_gone: bool):
    async def write_to(_: web.Request) -> web.StreamResponse:
        raise ConnectionResetError

    transport = Mock()
    transport.is_closing.return_value = is_gone
    request = make_mocked_request("GET", "/x", transport=transport)
    answer = await answer_errors(request, write_to)
    assert answer.status == (499 if is_gone else 500)
    assert bool(caplog.records) is not is_gone


async def test_bodies_are_json_that_says_so():
    async def echo(request: web.Request) -> web.Response:
        return web.json_response(await read_json(request))

    async with service(web.post("/x", echo)) as url:
        assert await ask(url, "POST", body={"a": ["\U0001f339"]}) == {"a": ["\U0001f339"]}
        client = HttpClient(url)
        session = client._open_session()
        wrong = (b"{", b"[" * 100_000, b'"\\ud800"', b'"\xed\xa0\x80"', b'"\xff"', '"x"'.encode("utf-16"))
        for headers, data in [({"Content-Type": "text/plain"}, b"{}")] + [
            ({"Content-Type": "application/json"}, data) for data in wrong
        ]:
            async with session.post(url + "/x", data=data, headers=headers) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["type"] == "config_error"
        await client.close()


async def test_who_sends_no_request_or_no_body_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "_HEAD_S", 0.2)
    monkeypatch.setattr(server, "_BODY_S", 0.2)

    async def echo(request: web.Request) -> web.Response:
        return web.json_response(await read_json(request))

    async def wait(_: web.Request) -> web.Response:
        await asyncio.sleep(0.6)
        return web.json_response("waited")

    async with service(web.post("/x", echo), web.get("/wait", wait)) as url:
        host, port = url.removeprefix("http://").split(":")
        waiting = asyncio.create_task(ask(url, path="/wait"))
        head = "POST /x HTTP/1.1\r\nHost: x\r\n"
        typed = head + "Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        for sent, answer in (("", b""), (head, b""), (typed, b"HTTP/1.1 408")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent.encode())
            async with asyncio.timeout(10):
                assert (await reader.read(12)) == answer
            writer.close()
        assert await waiting == "waited", "a request under way is not silence"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"[" * 100_000, 400, "the body of POST /x is no JSON: maximum recursion depth"),
        (b'["\\uD83C"]', 400, "a text in the body of POST /x has half a character"),
        (b'["\\ud83c\\udf89 \\\\udead"]', 200, None),
        (b'"%s"' % (b"x" * 400_000), 413, "the body of POST /x is too long (Maximum request body size 300000 exceeded"),
    ],
)
async def test_bodies_that_cannot_be_used_are_the_sender_s_mistake(body: bytes, status: int, says: str | None):
    async def echo(request: web.Request) -> web.Response:
        return web.json_response(await read_json(request))

    async with (
        service(web.post("/x", echo), max_body_bytes=300_000) as url,
        aiohttp.ClientSession() as session,
        session.post(url + "/x", data=body, headers={"Content-Type": "application/json"}) as answer,
    ):
        assert answer.status == status
        assert says is None or (await answer.json())["error"]["message"].startswith(says)


# Clients.


async def test_nobody_there_is_the_callers_error():
    with bind(parse_place("127.0.0.1:0"), ()) as listener:
        url = url_of(listener)
    client = HttpClient(url, unreachable=TransportError)
    with pytest.raises(TransportError, match="is the process alive"):
        await client.call("GET", "/x")
    await client.close()


async def test_a_slow_answer_is_a_lost_server():
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    async with service(web.get("/x", hang)) as url:
        client = HttpClient(url, timeout_s=0.05)
        with pytest.raises(EngineLostError):
            await client.call("GET", "/x")
        await client.close()


# Health and metrics.


async def test_health_and_metrics():
    registry, reasons = CollectorRegistry(), ["it is late"]
    Counter("rose_test", "A counter", registry=registry).inc(3)
    health = lambda: Health(reasons=reasons, details={"n": 1})  # noqa: E731
    async with service(health=health, registry=registry) as url:
        client = HttpClient(url)
        session = client._open_session()
        async with session.get(url + "/health") as answer:
            assert answer.status == 503
            assert await answer.json() == {"status": "unhealthy", "reasons": ["it is late"], "n": 1}
        reasons.clear()
        assert (await client.call("GET", "/health"))["status"] == "ok"
        async with session.get(url + "/metrics") as answer:
            assert "rose_test_total 3.0" in await answer.text()
        await client.close()
