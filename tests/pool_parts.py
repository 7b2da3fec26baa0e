"""What tests of a pool's service share: engines behind HTTP, as executors serve them, and a pool behind its service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs
from aiohttp import web

from rose.backends.remote import RemoteEngine, wire
from rose.backends.wire import activation_to_wire, update_from_wire
from rose.errors import RoseError
from rose.hosts.http.auth import TokenConfig
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.hosts.http.server import bind, make_app, parse_place, served
from rose.interfaces import ServingEngine
from rose.pool import PoolConfig, RolloutPool
from rose.testing import FakeEngine
from rose.types import EngineId, RequestId, Sampling, Turn


def turn(trajectory_id: str = "t0", num_prompt: int = 8, max_tokens: int = 5, **options: Any) -> Turn:
    group_id = options.pop("group_id", trajectory_id)
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, **options.pop("sampling", {}))
    prompt_ids = tuple(range(1, num_prompt + 1))
    return Turn(trajectory_id=trajectory_id, group_id=group_id, prompt_ids=prompt_ids, sampling=sampling, **options)


def fakes(num: int, **options: Any) -> list[FakeEngine]:
    return [FakeEngine(engine_id=EngineId(f"e{i}"), seed=7, **options) for i in range(num)]


@attrs.define(eq=False)
class EngineServer:
    """A fake engine as an executor serves it; each of ``cuts`` ends one stream after so many lines."""

    engine: FakeEngine
    url: str = ""
    num_asked: int = 0
    aborts: list[str] = attrs.field(factory=list)
    cuts: list[int] = attrs.field(factory=list)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.num_asked += 1
        wanted = wire.request_from_wire(await request.json())
        response: web.StreamResponse | None = None
        num_lines, most = 0, self.cuts.pop() if self.cuts else math.inf
        async with contextlib.aclosing(self.engine.generate(wanted)) as chunks:  # type: ignore[type-var] # a generator
            async for chunk in chunks:
                if response is None:
                    response = web.StreamResponse()
                    await response.prepare(request)
                if num_lines >= most:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await response.write(json.dumps(wire.chunk_to_wire(chunk)).encode() + b"\n")
                num_lines += 1
        assert response is not None
        await response.write_eof()
        return response

    async def abort(self, request: web.Request) -> web.Response:
        request_id = (await request.json())["request_id"]
        self.aborts.append(request_id)
        await self.engine.abort(RequestId(request_id))
        return web.json_response(None)

    async def stage(self, request: web.Request) -> web.Response:
        await self.engine.stage(update_from_wire(await request.json()))
        return web.json_response(None)

    async def activate(self, _: web.Request) -> web.Response:
        return web.json_response(activation_to_wire(await self.engine.activate()))

    async def snapshot(self, _: web.Request) -> web.Response:
        return web.json_response(
            wire.snapshot_to_wire(await self.engine.snapshot()), headers={wire.ENGINE_HEADER: "one"}
        )


@contextlib.asynccontextmanager
async def engine_servers(engines: Sequence[FakeEngine]) -> AsyncIterator[list[EngineServer]]:
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for engine in engines:
            server = EngineServer(engine)
            routes = [
                web.post("/v1/generate", server.generate),
                web.post("/v1/abort", server.abort),
                web.post("/v1/stage", server.stage),
                web.post("/v1/activate", server.activate),
                web.get("/v1/snapshot", server.snapshot),
            ]
            listener = bind(parse_place("127.0.0.1:0"), ())
            server.url = await stack.enter_async_context(served(make_app(routes), listener))
            servers.append(server)
        yield servers


@contextlib.asynccontextmanager
async def pool_of(
    engines: Sequence[ServingEngine],
    *,
    tokens: Sequence[TokenConfig] = (),
    config: PoolConfig | None = None,
    **options: Any,
) -> AsyncIterator[tuple[RolloutPool, str]]:
    """Give an open pool and the URL of its service."""
    async with RolloutPool(engines, config=config) as pool:
        service = PoolService(pool, name="toy", tokens=tokens, **options)
        async with serve_pool(service) as url:
            yield pool, url


@contextlib.asynccontextmanager
async def direct_pool(num: int = 2, **options: Any) -> AsyncIterator[tuple[RolloutPool, str, list[EngineServer]]]:
    """Give a pool over engines behind HTTP, its URL, and their servers."""
    service = {name: options.pop(name) for name in ("tokens", "config", "linger_s", "silent_s") if name in options}
    async with engine_servers(fakes(num, **options)) as servers:
        engines = [RemoteEngine(server.url, engine_id=server.engine.engine_id) for server in servers]
        async with pool_of(engines, **service) as (pool, url):
            yield pool, url, servers
        for engine in engines:
            await engine.close()


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait until something is so."""
    with contextlib.suppress(RoseError):
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)
