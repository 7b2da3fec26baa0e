"""The black hole: a server that fails at once always looks the least loaded. In virtual time, beside a balancer that falls for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import attrs

from rose.bench.scheduler.engines import BenchEngine, DeadEngine
from rose.errors import RoseError
from rose.interfaces import Clock
from rose.pool import RolloutPool
from rose.simulation.loop import LoopClock, new_loop
from rose.types import EngineRequest, RequestId, Sampling, Turn

NUM_REQUESTS = 400
NUM_ENGINES = 4
CHUNKS, CHUNK_S = 8, 0.5
INTERVAL_S = 0.01

Run = Callable[[Turn], Awaitable[object]]


@attrs.define
class BlackHole:
    """What became of the requests: all of them, those without an answer, and attempts that the dead server got."""

    requests: int = 0
    lost: int = 0
    sent_to_dead: int = 0


def measure_dead_server() -> dict[str, Any]:
    """Count for the pool; ``burst`` is the same with all requests in one moment, ``verl_like`` the balancer."""
    return {
        **attrs.asdict(_run(_through_pool, INTERVAL_S)),
        "burst": attrs.asdict(_run(_through_pool, 0.0)),
        "verl_like": attrs.asdict(_run(_through_balancer, INTERVAL_S)),
    }


def _run(
    through: Callable[[list[BenchEngine], float, Clock], Coroutine[Any, Any, int]], interval_s: float
) -> BlackHole:
    engines = [BenchEngine(f"e{i}", num_chunks=CHUNKS, chunk_s=CHUNK_S) for i in range(NUM_ENGINES - 1)]
    dead = DeadEngine(f"e{NUM_ENGINES - 1}")

    loop = new_loop()
    lost = loop.run(through([*engines, dead], interval_s, LoopClock(loop)))
    return BlackHole(requests=NUM_REQUESTS, lost=lost, sent_to_dead=dead.num_requests)


async def _through_pool(engines: list[BenchEngine], interval_s: float, clock: Clock) -> int:
    async with RolloutPool(engines, clock=clock) as pool:
        return await _send(pool.generate, interval_s)


async def _through_balancer(engines: list[BenchEngine], interval_s: float, _: Clock) -> int:
    """Send each request to the server with the fewest in flight, once, as verl's balancer does for requests of new conversations."""
    in_flight = dict.fromkeys(engines, 0)

    async def run(turn: Turn) -> None:
        engine = min(engines, key=in_flight.__getitem__)
        in_flight[engine] += 1
        request = EngineRequest(
            request_id=RequestId(turn.trajectory_id), prompt_ids=turn.prompt_ids, sampling=turn.sampling
        )
        try:
            async for _ in engine.generate(request):
                pass
        finally:
            in_flight[engine] -= 1

    return await _send(run, interval_s)


async def _send(run: Run, interval_s: float) -> int:
    """Send all requests, one an interval; returns how many got no answer."""

    async def one(number: int) -> bool:
        await asyncio.sleep(number * interval_s)
        sampling = Sampling(max_tokens=CHUNKS * 8)
        try:
            await run(Turn(trajectory_id=f"t{number}", group_id=f"g{number}", prompt_ids=(1, 2, 3), sampling=sampling))
        except RoseError:
            return False
        return True

    return NUM_REQUESTS - sum(await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS))))
