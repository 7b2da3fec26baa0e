"""A small HTTP server: a socket that is bound once, an application on it, ``/health`` and ``/metrics``.

Invariants:

* The listening socket is bound once and kept until the server closes: no port is looked at first and bound later.
* An address that other machines can reach is refused unless bearer tokens are configured.
* A connection on which no request comes within ``_HEAD_S`` is closed, and a body has ``_BODY_S``: nobody without a token can keep all
  others out, a kill switch for instance, by holding connections.
* ``/health`` needs no token and says no more than "ok" or why not; everything else needs one where tokens are configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from rose.errors import ConfigError, TransportError
from rose.hosts.http.auth import Handler, TokenConfig, guard
from rose.hosts.http.errors import answer_errors

_PLACE = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?")
_BACKLOG = 512
_MAX_PORT = (1 << 16) - 1
_CLOSE_S = 2.0
_HEAD_S = 10.0
_BODY_S = 30.0
_KEEP_ALIVE_S = 75.0  # longer than clients and proxies keep a connection, so that none is closed under a request
MAX_BODY_BYTES = 16 << 20
_SURROGATES = (b"\\ud", b"\\uD")
"""How half a character begins in JSON; two of them may make a whole one."""


@attrs.frozen
class Place:
    """Where to listen: a host and the ports that may be tried, in order; 0 is any free one."""

    host: str
    ports: Sequence[int]

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_place(text: str) -> Place:
    """Read ``HOST:PORT`` or ``HOST:FIRST-LAST``; an IPv6 address stands in brackets.

    Raises:
        ConfigError: It is neither.
    """
    found = _PLACE.fullmatch(text)
    first = int(found["first"]) if found else -1
    last = int(found["last"] or first) if found else -1
    if found is None or not 0 <= first <= last <= _MAX_PORT:
        message = f"{text!r} is no place to listen; give HOST:PORT, HOST:FIRST-LAST, or port 0 for any free one"
        raise ConfigError(message)
    return Place(found["host"].strip("[]"), range(first, last + 1))


def bind(place: Place, tokens: Sequence[TokenConfig]) -> socket.socket:
    """Bind and listen, once: the first of the place's ports that nobody holds.

    Args:
        place: Where.
        tokens: The bearer tokens that will be asked for.

    Raises:
        ConfigError: Other machines can reach the place, and nothing is asked of them.
        TransportError: All ports are taken, or the host is none of this machine's.
    """
    if not place.is_loopback and not tokens:
        message = f"{place.host} can be reached from other machines: configure bearer tokens, or listen on 127.0.0.1"
        raise ConfigError(message)
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    for port in place.ports:
        try:
            return socket.create_server((place.host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port != place.ports[-1]:
                continue
            message = (
                f"cannot listen on {place.host}:{port}: {error.strerror}; choose another port, or 0 for a free one"
            )
            raise TransportError(message) from error
    message = f"there is no port to listen on at {place.host}"
    raise ConfigError(message)


def url_of(listener: socket.socket) -> str:
    """Return the address of a bound socket as clients write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@attrs.frozen(kw_only=True)
class Health:
    """What ``/health`` answers: 200, or 503 with the reasons.

    Attributes:
        reasons: What is wrong; nothing when all is well.
        details: Further plain data.
    """

    reasons: Sequence[str] = ()
    details: Mapping[str, Any] = attrs.field(factory=dict)


def make_app(
    routes: Iterable[web.RouteDef],
    *,
    tokens: Sequence[TokenConfig] = (),
    health: Callable[[], Health] = Health,
    registry: CollectorRegistry | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> web.Application:
    """Return an application with ``routes``, ``GET /health`` and ``GET /metrics``.

    Args:
        routes: Handlers; they raise ROSE's errors and call ``rose.hosts.http.auth.require`` for more than reading.
        tokens: Who may call; without any, everybody who can reach it may do everything.
        health: What ``/health`` says now.
        registry: What ``/metrics`` shows.
        max_body_bytes: Larger bodies are refused.
    """
    shown = registry or CollectorRegistry()

    async def tell_health(_: web.Request) -> web.Response:
        state = health()
        body = {"status": "unhealthy" if state.reasons else "ok", "reasons": list(state.reasons), **state.details}
        return web.json_response(body, status=503 if state.reasons else 200)

    async def tell_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(shown), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(middlewares=[answer_errors, guard(tokens)], client_max_size=max_body_bytes)
    app.add_routes([web.get("/health", tell_health), web.get("/metrics", tell_metrics), *routes])
    return app


async def read_json(request: web.Request) -> Any:
    """Return a request's body.

    Raises:
        ConfigError: It is no JSON in UTF-8, or does not say that it is (which keeps web pages from sending it).
        HTTPRequestEntityTooLarge: It is longer than the application takes.
        HTTPRequestTimeout: It does not come.
    """
    if request.content_type != "application/json":
        message = f"{request.method} {request.path} takes application/json, not {request.content_type}"
        raise ConfigError(message)
    body = await _read_body(request)
    try:
        data = json.loads(body.decode())
        if any(half in body for half in _SURROGATES):  # it could be neither kept nor sent on
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = (
            f"a text in the body of {request.method} {request.path} has half a character: {error}; send whole ones"
        )
        raise ConfigError(message) from error
    except (ValueError, RecursionError) as error:
        message = f"the body of {request.method} {request.path} is no JSON: {error}"
        raise ConfigError(message) from error
    return data


async def _read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(reason=f"the body did not come within {_BODY_S:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        error.set_status(
            error.status, f"the body of {request.method} {request.path} is too long ({error.text}); send less at once"
        )
        raise


@contextlib.asynccontextmanager
async def served(app: web.Application, listener: socket.socket) -> AsyncIterator[str]:
    """Serve an application on a bound socket; gives its URL. A handler whose client is gone is cancelled."""
    heard: set[object] = set()

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        heard.add(request.protocol)
        return await handler(request)

    app.middlewares.insert(0, note)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_CLOSE_S,
        keepalive_timeout=_KEEP_ALIVE_S,
    )
    closing: asyncio.Task[None] | None = None
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        closing = asyncio.create_task(_close_silent(runner, heard))
        yield url_of(listener)
    finally:
        if closing is not None:
            closing.cancel()
        await runner.cleanup()
        listener.close()


async def _close_silent(runner: web.AppRunner, heard: set[object]) -> None:
    """Close connections on which no request comes; ``heard`` are those on which one came. Those wait for the next one under keep-alive."""
    now_s = asyncio.get_running_loop().time
    since_s: dict[web.RequestHandler, float] = {}
    while runner.server is not None:
        await asyncio.sleep(_HEAD_S / 4)
        connections = runner.server.connections
        heard.intersection_update(connections)
        since_s = {each: since_s.get(each, now_s()) for each in connections if each not in heard}
        for silent in [each for each, at_s in since_s.items() if now_s() - at_s >= _HEAD_S]:
            silent.force_close()
