"""A door before an executor's HTTP interface: all passes through it as it is, unless a fault is on.

A borrowed engine has an address that clients of the pool stream from by themselves, so its faults must be where every caller meets them:
the pool and its clients know this door's address as the engine's.

Invariants: requests and answers pass unchanged; a stream that one side gives up is given up at the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from rose.errors import EngineLostError
from rose.hosts.http.server import bind, make_app, parse_place, served
from rose.testing.pool_site.faults import Switches

_PASSED = ("Content-Type", "Authorization")
_PREFIX = "X-Rose-"


class FaultFront:
    """Handlers before one executor.

    Args:
        upstream: The executor's URL.
        switches: The engine's faults.
        session: For requests to the executor.
    """

    def __init__(self, upstream: str, switches: Switches, session: aiohttp.ClientSession) -> None:
        self._upstream = upstream.rstrip("/")
        self._switches = switches
        self._session = session

    def app(self) -> web.Application:
        """Return the application."""
        return make_app([web.route("*", "/v1/{name:.*}", self.pass_on)])

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Ask the executor and give its answer piece by piece."""
        name = request.match_info["name"]
        if name == "generate":
            self._switches.check_request()
        elif name == "activate":
            self._switches.check_activation()
        body = await request.read()
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method, self._upstream + request.path_qs, data=body or None, headers=_passed(request.headers)
            ) as answer:
                response = web.StreamResponse(status=answer.status, headers=_passed(answer.headers))
                async for piece in answer.content.iter_any():
                    if name == "generate":
                        await self._switches.token_may_pass()
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(piece)
                if not response.prepared:
                    await response.prepare(request)
                await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            if response is None or not response.prepared:
                message = f"the executor at {self._upstream} does not answer: {error!r}"
                raise EngineLostError(message) from error
            if request.transport is not None:
                request.transport.abort()  # as if its own connection had broken
            return response


def _passed(headers: object) -> dict[str, str]:
    items = headers.items()  # type: ignore[attr-defined]
    return {name: value for name, value in items if name in _PASSED or name.lower().startswith(_PREFIX.lower())}


@contextlib.asynccontextmanager
async def fronted(upstream: str, switches: Switches) -> AsyncIterator[str]:
    """Serve a door before an executor at a free port of this machine; gives its URL."""
    listener = bind(parse_place("127.0.0.1:0"), ())
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    with contextlib.closing(listener):
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            served(FaultFront(upstream, switches, session).app(), listener) as url,
        ):
            yield url
