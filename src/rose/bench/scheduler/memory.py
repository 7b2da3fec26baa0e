"""Memory of a live trajectory in a whole pool, token payloads excluded."""

from __future__ import annotations

import asyncio
import gc
import math
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rose.bench.scheduler.drive import CAP
from rose.bench.scheduler.engines import BenchEngine
from rose.pool import PoolConfig, RolloutPool
from rose.types import Sampling, Turn

_NEVER_S = 1e6
_BATCH = 4096


def bytes_per_trajectory(num_trajectories: int) -> float:
    """Return what one more live trajectory takes, its caller's task and its turn included.

    Each has a finished turn behind it, so that the pool remembers it, and a second one in the pool: two thirds of them on an engine,
    the others in the queue. All prompts are one tuple. Counted are Python's own allocations.
    """
    return asyncio.run(_measure(num_trajectories))


async def _measure(num_trajectories: int) -> float:
    num_engines = max(1, num_trajectories * 2 // 3 // CAP)
    engines = [BenchEngine(f"e{i}") for i in range(num_engines)]
    config = PoolConfig(
        stall_s=_NEVER_S, first_token_s=_NEVER_S, reading_interval_s=_NEVER_S, reading_timeout_s=_NEVER_S
    )
    async with RolloutPool(engines, config=config) as pool:
        await pool.generate(_turn(-1))
        async with _traced():
            before = _traced_bytes()
            turns = [_turn(i) for i in range(num_trajectories)]
            for first in range(0, num_trajectories, _BATCH):
                await asyncio.gather(*(pool.generate(turn) for turn in turns[first : first + _BATCH]))
            for engine in engines:
                engine.chunk_s = math.inf
            tasks = [asyncio.create_task(pool.generate(turn)) for turn in turns]
            await asyncio.sleep(0.1)
            taken = _traced_bytes() - before
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return taken / num_trajectories


@asynccontextmanager
async def _traced() -> AsyncIterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def _traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


_PROMPT = tuple(range(8))
_SAMPLING = Sampling(max_tokens=32)


def _turn(number: int) -> Turn:
    return Turn(trajectory_id=f"t{number}", group_id=f"g{number // 16}", prompt_ids=_PROMPT, sampling=_SAMPLING)
