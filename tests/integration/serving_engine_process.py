"""A production serving engine in a process of its own, for tests: vLLM with ROSE's scheduler, and a plain HTTP interface.

``python serving_engine_process.py PORT OPTIONS``, the options being ``VllmOptions`` fields as JSON. It ends with its engine, as vLLM's own server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from aiohttp import web

from rose.backends.vllm import VllmEngine, VllmOptions
from rose.errors import EngineLostError
from rose.hosts.http.server import bind, make_app, parse_place, read_json, served
from rose.types import EngineRequest, RequestId, Sampling


async def main(port: str, options: str) -> None:
    engine = await VllmEngine.create(VllmOptions(**json.loads(options)))
    numbers = iter(range(1_000_000_000))

    async def complete(request: web.Request) -> web.Response:
        body = await read_json(request)
        sampling = Sampling(max_tokens=body["max_tokens"], temperature=0.0, ignore_eos=True, logprobs=False)
        wanted = EngineRequest(
            request_id=RequestId(f"s{next(numbers)}"), prompt_ids=body["prompt_ids"], sampling=sampling
        )
        try:
            return web.json_response([token async for chunk in engine.generate(wanted) for token in chunk.token_ids])
        except EngineLostError:
            os._exit(1)

    app = make_app([web.post("/complete", complete)])
    async with served(app, bind(parse_place(f"127.0.0.1:{port}"), ())):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
