"""A real SGLang server for tests of what runs inside it: its routes, without the engine that guards them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp

from rose.backends.sglang import LaunchedSglang
from rose.errors import EngineError, EngineLostError
from sglang_real import make_options

_TIMEOUT_S = 240.0


class SglangServer:
    """One server and a client of it. Use ``started``."""

    def __init__(self, engine: LaunchedSglang) -> None:
        self.engine = engine
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls, model: Path, folder: Path, *, tp_size: int = 1, flags: Sequence[str] = ()
    ) -> AsyncIterator[Self]:
        """Give a server that answers; it is ended afterwards."""
        folder.mkdir(exist_ok=True)
        options = make_options(
            folder,
            model,
            tensor_parallel_size=tp_size,
            max_total_tokens=8192,
            max_running_requests=8,
            server_args=tuple(flags),
        )
        engine = LaunchedSglang(options)
        await engine.start()
        server = cls(engine)
        try:
            yield server
        finally:
            await server._session.close()
            await engine.close()

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self.engine._lost is None

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a body, return the answer's."""
        return await self._request("POST", path, json=dict(body))

    async def get(self, path: str) -> Mapping[str, Any]:
        """Return the answer's body."""
        return await self._request("GET", path)

    async def _request(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            async with self._session.request(method, self.engine.url + path, **kwargs) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError) as error:
            message = f"{path}: {error!r}"
            raise EngineLostError(message) from error
        if answer.status != 200:
            message = f"{path} answered {answer.status}: {text}"
            raise EngineError(message)
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text

    async def generate(self, prompt: Sequence[int], max_tokens: int = 16, **more: Any) -> Mapping[str, Any]:
        """Return a greedy answer."""
        sampling = {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        return await self.post("/generate", {"input_ids": list(prompt), "sampling_params": sampling, **more})
