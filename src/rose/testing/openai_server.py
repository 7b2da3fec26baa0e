"""A server with the part of vLLM's OpenAI interface that ROSE uses, over any engine; for tests on loopback. Needs the extra ``http``."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

from aiohttp import web

from rose.errors import EngineBusyError, RequestRefusedError, RoseError
from rose.hosts.http.server import Place, bind, served
from rose.interfaces.serving import PauseMode, ServingEngine
from rose.types import EngineRequest, RequestId, Sampling, TokenChunk

_METRICS = """\
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:kv_cache_usage_perc{{engine="0"}} {use}
vllm:cache_config_info{{block_size="1",num_gpu_blocks="{total}"}} 1.0
"""


class OpenAiServer:
    """The routes over one engine.

    Args:
        engine: Makes the tokens.
        model: The name under which it is listed.
        max_model_len: What ``/v1/models`` says of it; ``None``: nothing.
        can_pause: Whether there are the routes that vLLM has with ``VLLM_SERVER_DEV_MODE=1``.

    Attributes:
        bodies: The decoded bodies of the completions that were asked for, in order.
    """

    def __init__(
        self, engine: ServingEngine, *, model: str = "fake", max_model_len: int | None = None, can_pause: bool = False
    ) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self._engine = engine
        self._model = {"id": model, "object": "model", "max_model_len": max_model_len}
        self._can_pause = can_pause

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/v1/completions", self._complete),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/health", self._health),
            ]
        )
        if self._can_pause:
            app.add_routes([web.post("/pause", self._pause), web.post("/resume", self._resume)])
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model]})

    async def _health(self, _: web.Request) -> web.Response:
        await self._engine.snapshot()
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        reading = await self._engine.snapshot()
        use, total = reading.kv_used_tokens / max(1, reading.kv_total_tokens), reading.kv_total_tokens
        text = _METRICS.format(running=reading.num_running, waiting=reading.num_waiting, use=use, total=total)
        return web.Response(text=text)

    async def _pause(self, request: web.Request) -> web.Response:
        await self._engine.pause(PauseMode(request.query["mode"]))
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        await self._engine.resume()
        return web.json_response({"status": "resumed"})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        num_made = 0
        try:
            chunks = cast("AsyncGenerator[TokenChunk, None]", self._engine.generate(_request(body)))
            async with aclosing(chunks):
                async for chunk in chunks:
                    if not response.prepared:
                        await response.prepare(request)
                    num_made += len(chunk.token_ids)
                    await response.write(completion_event(chunk, num_made))
        except RoseError as error:
            if not response.prepared:
                return _refusal(error)
            await response.write(_encoded({"error": {"message": str(error), "code": 500}}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


@contextlib.asynccontextmanager
async def serve_openai(engine: ServingEngine, **options: Any) -> AsyncIterator[tuple[str, OpenAiServer]]:
    """Serve an engine on a free loopback port; gives the URL and the server. ``options`` are those of ``OpenAiServer``."""
    server = OpenAiServer(engine, **options)
    async with served(server.app(), bind(Place("127.0.0.1", (0,)), ())) as url:
        yield url, server


def completion_event(chunk: TokenChunk, num_made: int) -> bytes:
    """Return the event that vLLM writes for some tokens.

    Args:
        chunk: The tokens.
        num_made: How many there are with those before.
    """
    ids = list(chunk.token_ids)
    names = [f"token_id:{token}" for token in ids]
    logprobs = {"tokens": names, "token_logprobs": list(chunk.logprobs)} if chunk.logprobs else None
    finish = (
        {"aborted": "abort"}.get(chunk.finish_reason.value, chunk.finish_reason.value) if chunk.finish_reason else None
    )
    choice = {"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
    return _encoded({"choices": [choice], "usage": {"completion_tokens": num_made}})


def _encoded(event: object) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _request(body: Mapping[str, Any]) -> EngineRequest:
    same = ("max_tokens", "temperature", "top_p", "ignore_eos", "seed")
    options = {name: body[name] for name in same if name in body}
    sampling = Sampling(
        **options, stop_token_ids=body.get("stop_token_ids", ()), logprobs=body.get("logprobs") is not None
    )
    return EngineRequest(request_id=RequestId(uuid.uuid4().hex), prompt_ids=body["prompt"], sampling=sampling)


def _refusal(error: RoseError) -> web.Response:
    status = 503 if isinstance(error, EngineBusyError) else 400 if isinstance(error, RequestRefusedError) else 500
    return web.json_response({"error": {"message": str(error), "code": status}}, status=status)
