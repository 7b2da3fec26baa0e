"""Connections to an OpenAI-compatible server, and what its refusals mean. Nothing is sent twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp

from rose.backends.remote.wire import bearer
from rose.errors import EngineBusyError, EngineError, EngineLostError, RequestRefusedError
from rose.types import EngineId

OK = 200
_BUSY, _LOST, _REFUSED = (429, 503), (502, 504), (400, 404, 413, 422)
_IDLE_S = 3.0  # vLLM's server closes a connection that was idle for 5 s; one that it is closing must not be used
_READ_BYTES = 1 << 20
_MAX_WORDS_CHARS = 500
_JSON = {"Content-Type": "application/json"}


class OpenAiClient:
    """One server. Use it on one event loop; ``close`` it there.

    Args:
        url: ``http://host:port``.
        engine_id: Named in errors.
        token: The bearer token, where the server asks for one.
        timeout_s: How long connecting and short calls may take.
    """

    def __init__(self, url: str, *, engine_id: EngineId, token: str | None, timeout_s: float) -> None:
        self._url, self._engine_id, self._timeout_s = url, engine_id, timeout_s
        self._headers = bearer(token)
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def completions(self, body: bytes) -> aiohttp.ClientResponse:
        """Send a request for tokens; returns its answer once that begins. It is the caller's to release."""
        return await self.begin("/v1/completions", body)

    async def begin(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        """Post JSON; returns the answer once it begins, whatever its status. It is the caller's to release."""
        return await self._open().post(self._url + path, data=body, headers=_JSON)

    async def call(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        """Send a short request; returns the answer's status and body.

        Args:
            method: ``GET`` or ``POST``.
            path: Begins with a slash.
            body: JSON, or nothing.
            timeout_s: How long it may take, where that is not the client's own.

        Raises:
            EngineLostError: There is none in time.
        """
        session = self._open()
        sent = session.request(method, self._url + path, data=body, headers=None if body is None else _JSON)
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s), sent as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError among them
            raise self.lost(error) from error

    def refusal(self, status: int, body: bytes) -> EngineError:
        """Return what an answer of another status than 200 means."""
        message = f"engine {self._engine_id} answered {status}: {words(body)}"
        if status in _BUSY:
            return EngineBusyError(message)
        if status in _LOST:
            return EngineLostError(message)
        if status in _REFUSED:
            return RequestRefusedError(message)
        return EngineError(message)

    def lost(self, error: Exception) -> EngineError:
        """Return what a connection that cannot be made, or was reset, means."""
        if isinstance(error, EngineLostError):
            return error
        reason = str(error) or type(error).__name__
        return EngineLostError(
            f"engine {self._engine_id} at {self._url} cannot be reached ({reason}); is the server alive?"
        )

    async def close(self) -> None:
        """Close the connections, which ends what is under way. Idempotent; later calls find the engine lost."""
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            message = f"engine {self._engine_id} is gone: its client was closed"
            raise EngineLostError(message)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s),
                read_bufsize=_READ_BYTES,
            )
        return self._session


def words(body: bytes) -> str:
    """Return what an answer says went wrong, in its own words."""
    text = body.decode(errors="replace").strip()
    found: Any = None
    with contextlib.suppress(ValueError):
        found = json.loads(text)
    if isinstance(found, dict):
        told = found.get("error", found.get("detail", found.get("message", text)))
        text = str(told.get("message", told) if isinstance(told, dict) else told)
    return text[:_MAX_WORDS_CHARS] or "without a word"
