"""SGLang servers with ROSE's co-serving inside, for tests: processes of their own, in an environment of their own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import attrs

from rose.backends.sglang import LaunchedSglang
from sglang_real import make_options


@attrs.define
class Http:
    """A server's address."""

    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        async with self.session.post(self.url + path, json=dict(body)) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


@attrs.frozen(kw_only=True)
class Event:
    """What one message of a stream brought, and when by ``time.monotonic``."""

    tokens: tuple[int, ...]
    finish: Mapping[str, Any] | None
    at_s: float
    meta: Mapping[str, Any]


@attrs.define
class Server:
    """A running server."""

    http: Http
    engine: LaunchedSglang
    log: Path

    async def stream(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, **sampling: Any
    ) -> AsyncIterator[Event]:
        """Answer greedily; an end of the stream without a finish reason is a lost engine."""
        body = {
            "rid": request_id,
            "input_ids": list(prompt),
            "stream": True,
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling},
        }
        async with self.http.session.post(self.http.url + "/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for raw in answer.content:
                line = raw.decode().strip()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                message = json.loads(line[6:])
                assert "error" not in message, message
                meta = message["meta_info"]
                tokens = tuple(message["output_ids"])
                yield Event(tokens=tokens, finish=meta["finish_reason"], at_s=time.monotonic(), meta=meta)

    async def tokens(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return [token async for event in self.stream(request_id, prompt, max_tokens) for token in event.tokens]

    async def abort(self, request_id: str) -> None:
        async with self.http.session.post(self.http.url + "/abort_request", json={"rid": request_id}) as answer:
            assert answer.status == 200

    async def control(self, path: str, **body: Any) -> None:
        """Post to a route whose answer is no JSON."""
        async with self.http.session.post(f"{self.http.url}/{path}", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def refused(self, path: str, why: str, **body: Any) -> None:
        """Post what the server is to refuse."""
        async with self.http.session.post(f"{self.http.url}/{path}", json=body) as answer:
            assert answer.status == 400
            assert why in await answer.text()

    def is_alive(self) -> bool:
        return self.engine._lost is None


@contextlib.asynccontextmanager
async def sglang_server(
    root: Path, model: Path, settings: Mapping[str, Any] | None, *flags: str, name: str = "sglang", ranks: int = 1
) -> AsyncIterator[Server]:
    """Start a server, wait until it answers, and end it."""
    folder = root / name
    folder.mkdir(exist_ok=True)
    options = make_options(
        folder,
        model,
        engine_id=name,
        tensor_parallel_size=ranks,
        max_total_tokens=None,
        server_args=("--dtype", "float32", "--random-seed", "0", *flags),
        environment={} if settings is None else {"ROSE_SGLANG_SETTINGS": json.dumps(settings)},
        has_warm_up=False,
    )
    engine = LaunchedSglang(options)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        try:
            await engine.start()
            yield Server(Http(engine.url, session), engine, folder / "server.log")
        finally:
            await engine.close()
