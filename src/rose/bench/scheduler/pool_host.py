"""A pool over engines of the benchmark, as a service in a process of its own: ``python -m rose.bench.scheduler.pool_host URL ...``.

It prints its URL and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

from rose.backends.remote import RemoteEngine
from rose.bench.scheduler.http_engine import MODEL
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.pool import RolloutPool


async def serve(urls: Sequence[str]) -> None:
    """Serve a pool whose engines are at ``urls``, all alike, as they are to a router."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [RemoteEngine(url, engine_id=f"engine-{number}") for number, url in enumerate(urls)]
        for engine in engines:
            stack.push_async_callback(engine.close)
        pool = await stack.enter_async_context(RolloutPool(engines))
        url = await stack.enter_async_context(serve_pool(PoolService(pool, name=MODEL)))
        print(url, flush=True)  # noqa: T201 - for the process that started it
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
