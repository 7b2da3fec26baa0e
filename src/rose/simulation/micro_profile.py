"""A small simulation inside a larger one: what serving's latency would be on a share of its GPU."""

from __future__ import annotations

import asyncio
import functools
import math

from rose.backends.paced.profiles import kv_pool_bytes
from rose.observe.latency import percentile
from rose.simulation.loop import new_loop
from rose.simulation.scenario import Scenario
from rose.simulation.world import World, alone, poker


@functools.lru_cache(maxsize=64)
def serving_p99_s(scenario: Scenario, seed: int, *, speed: float, duration_s: float) -> tuple[float, float]:
    """Return P99 of TTFT and TPOT of the first serving engine alone, on a GPU of ``speed`` times its own.

    Args:
        scenario: Serving and its load.
        seed: Of the load.
        speed: Above 0, at most 1.
        duration_s: Of the load.

    Returns:
        Both in seconds; 0 where no request came.
    """
    loop = new_loop()

    async def measure() -> tuple[float, float]:
        world = World(scenario, seed, loop)
        lane = world.serving_lane(
            "probe", kv_pool_bytes(scenario.cluster.kv_memory_fraction, world.serving), share=speed
        )
        feed = world.feed(0, lane, poker(alone(loop, lane)))
        feed.start()
        await asyncio.sleep(duration_s)
        answers = feed.answers + feed.unanswered(loop.time())
        ttft_s = percentile([answer.ttft_s for answer in answers], 99)
        tpot_s = percentile([a.tpot_s for a in answers if a.tpot_s is not None and not math.isnan(a.tpot_s)], 99)
        return ttft_s or 0.0, tpot_s or 0.0

    return loop.run(measure())
