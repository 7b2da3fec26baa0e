"""Calls of a ROSE service over HTTP: JSON in, JSON out, errors in their own types.

Invariants: what cannot be reached, breaks off or answers nonsense is one error class, which the caller chooses; an error that the
service names is raised as that error. Nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import aiohttp

from rose.backends.remote.wire import bearer, error_from_wire
from rose.errors import EngineLostError, RoseError

_MAX_LINE_BYTES = 16 << 20
_IDLE_S = 10.0
_HTTP_OK = 200


class HttpClient:
    """One service. Use it on one event loop; ``close`` it there.

    Args:
        url: ``http://host:port``.
        token: The bearer token, if the service asks for one.
        timeout_s: How long an answer may take, unless a call says otherwise.
        unreachable: What is raised when the service cannot be reached.

    Raises:
        ConfigError: The token can be none.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        unreachable: type[RoseError] = EngineLostError,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = bearer(token)
        self._timeout_s = timeout_s
        self._unreachable = unreachable
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Send one request and return the decoded answer. Arguments and errors as of ``exchange``."""
        return (await self.exchange(method, path, body, headers=headers, timeout_s=timeout_s))[0]

    async def exchange(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Any, Mapping[str, str]]:
        """Send one request and return the decoded answer and its headers.

        Args:
            method: ``GET``, ``POST`` and so on.
            path: Begins with a slash.
            body: Plain data, sent as JSON; nothing for ``None``. Bytes are JSON already.
            headers: Further headers.
            timeout_s: How long the answer may take; ``inf`` waits for ever.

        Raises:
            RoseError: What the service answered, or ``unreachable``.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        async with self._sent(method, path, body, headers, limit_s) as answer:
            return await _decoded(answer), answer.headers

    async def lines(
        self, path: str, body: object, *, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Any, None]:
        """Send one request and give the answer's lines, decoded, as they come. Closing it ends the request at the service.

        Raises:
            RoseError: What the service answered, or ``unreachable``.
        """
        async with self._sent("POST", path, body, headers, math.inf) as answer:
            if answer.status != _HTTP_OK:
                await _decoded(answer)
            async for line in answer.content:
                yield json.loads(line)

    @contextlib.asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: object, headers: Mapping[str, str] | None, limit_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        options: dict[str, Any] = {"headers": headers}
        if isinstance(body, bytes):
            options |= {"data": body, "headers": {**(headers or {}), "Content-Type": "application/json"}}
        elif body is not None:
            options["json"] = body
        try:
            async with (
                contextlib.nullcontext() if limit_s == math.inf else asyncio.timeout(limit_s),
                self._open_session().request(method, self.url + path, **options) as answer,
            ):
                yield answer
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if isinstance(error, RoseError):
                raise
            reason = str(error) or type(error).__name__
            message = f"{method} {self.url}{path} failed ({reason}); is the process alive?"
            raise self._unreachable(message) from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=_MAX_LINE_BYTES,
            )
        return self._session

    async def close(self) -> None:
        """Close the connections, which ends what is under way; a later call would open new ones. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


async def _decoded(answer: aiohttp.ClientResponse) -> Any:
    try:
        data = json.loads(await answer.read())
    except ValueError:
        if answer.status == _HTTP_OK:
            raise
        data = None
    if answer.status != _HTTP_OK:
        raise error_from_wire(data, answer.status)
    return data
