"""Connections to an SGLang server. Nothing is sent twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from rose.backends.openai.client import OpenAiClient
from rose.backends.sglang.answers import plain


class SglangClient:
    """One server. Use it on one event loop; ``close`` it there. Arguments as of ``OpenAiClient``."""

    def __init__(self, connections: OpenAiClient) -> None:
        self._connections = connections

    async def stream(self, body: bytes) -> aiohttp.ClientResponse:
        """Post to ``/generate``; returns the answer once it begins, whatever its status. It is the caller's to release."""
        return await self._connections.begin("/generate", body)

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> Mapping[str, Any]:
        """Send a command; returns what the server answers, under ``answer`` where that is no JSON object.

        Args:
            path: Begins with a slash.
            body: Plain data.
            timeout_s: How long it may take; a command that waits for a step of the model may need longer than a reading.

        Raises:
            EngineLostError: The server, or the engine behind it, does not answer in time.
            EngineUnsupportedError: It has no such route.
            EngineError: It refuses.
        """
        data = json.dumps(body, separators=(",", ":")).encode()
        return plain(path, *await self._connections.call("POST", path, data, timeout_s=timeout_s))

    async def get(self, path: str, *, timeout_s: float | None = None) -> Mapping[str, Any]:
        """Read something. Arguments and errors as of ``post``."""
        return plain(path, *await self._connections.call("GET", path, timeout_s=timeout_s))

    async def refused(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Send what the server is to refuse; returns its words."""
        return (await self._connections.call("POST", path, json.dumps(body).encode()))[1]

    def lost(self, error: Exception) -> Exception:
        """Return what a connection that cannot be made, or was reset, means."""
        return self._connections.lost(error)

    async def close(self) -> None:
        """Close the connections, which ends what is under way. Idempotent; later calls find the engine lost."""
        await self._connections.close()


class PatientHttp:
    """The server's routes for updates, which may wait for the model.

    Args:
        client: The connections.
        timeout_s: How long one call may take.
    """

    def __init__(self, client: SglangClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a command; see ``SglangClient.post``."""
        return await self._client.post(path, body, timeout_s=self._timeout_s)

    async def get(self, path: str) -> Mapping[str, Any]:
        """Read something; see ``SglangClient.post``."""
        return await self._client.get(path, timeout_s=self._timeout_s)
