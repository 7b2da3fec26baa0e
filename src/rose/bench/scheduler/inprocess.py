"""What ``pool.generate`` adds to an engine's own time, in the trainer's process, on the real clock.

Added to a turn: the time from the call until the engine is asked, and from the engine's last token until the result is there.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rose.bench.scheduler.arrivals import Arrivals, run_open_loop
from rose.bench.scheduler.decisions import P99, percentile
from rose.bench.scheduler.engines import BenchEngine, Served
from rose.pool import RolloutPool
from rose.types import Sampling, Turn

NUM_ENGINES = 16
CHUNKS, CHUNK_TOKENS, CHUNK_S = 8, 8, 0.01
_MS = 1e3


def measure_inprocess(arrivals: Arrivals) -> dict[str, Any]:
    """Run turns of an open loop through a pool of engines that answer at known times; milliseconds."""
    return asyncio.run(_measure(arrivals))


async def _measure(arrivals: Arrivals) -> dict[str, Any]:
    engines = [
        BenchEngine(f"e{i}", num_chunks=CHUNKS, chunk_tokens=CHUNK_TOKENS, chunk_s=CHUNK_S) for i in range(NUM_ENGINES)
    ]
    added_s: list[float] = []
    half = NUM_ENGINES // 2
    async with RolloutPool(engines[:half], borrowed=engines[half:]) as pool:

        async def run_turn(number: int) -> None:
            turn = Turn(
                trajectory_id=f"t{number}",
                group_id=f"g{number // 16}",
                prompt_ids=(number, *arrivals.prompt(number)[1:]),
                sampling=Sampling(max_tokens=CHUNKS * CHUNK_TOKENS),
            )
            served = Served()
            for engine in engines:
                engine.watched[number] = served
            called_s = time.perf_counter()
            await pool.generate(turn)
            done_s = time.perf_counter()
            added_s.append(served.began_s - called_s + done_s - served.ended_s)
            for engine in engines:
                del engine.watched[number]

        late_s = await run_open_loop(arrivals, run_turn)
    return {
        "turns": len(added_s),
        "turns_per_s": arrivals.rate_per_s,
        "added_p50_ms": percentile(added_s, 0.5) * _MS,
        "added_p99_ms": percentile(added_s, P99) * _MS,
        "generator_late_p99_ms": percentile(late_s, P99) * _MS,
    }
