"""The black hole over HTTP: one of four engines fails every request at once, behind ROSE and behind other projects' routers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import aiohttp
import attrs

from rose.bench.scheduler.arrivals import Arrivals, run_open_loop
from rose.bench.scheduler.dead_server import BlackHole
from rose.bench.scheduler.gateway import SAME_POOL, Way, ways_between
from rose.bench.scheduler.http_engine import COUNT_PATH, Answer
from rose.bench.scheduler.peers import http_engines
from rose.bench.scheduler.settings import SchedulerSettings
from rose.errors import RoseError

ANSWER = Answer(chunk_s=0.1)
PROCESSES = ((attrs.evolve(ANSWER, is_dead=True), ANSWER), (ANSWER, ANSWER))  # the first ones are dedicated
RATE_PER_S = 100.0
PROMPT_TOKENS = (64, 256)


def measure_dead_http(settings: SchedulerSettings, tell: Callable[[str], None]) -> dict[str, BlackHole]:
    """Send the same turns through everything that is there, one after the other; counts by name.

    Raises:
        EngineLostError: An engine or a router did not start.
    """
    with http_engines(PROCESSES) as urls:
        return asyncio.run(_measure(settings, urls, tell))


async def _measure(
    settings: SchedulerSettings, urls: Sequence[str], tell: Callable[[str], None]
) -> dict[str, BlackHole]:
    arrivals = Arrivals(
        rate_per_s=RATE_PER_S,
        duration_s=settings.num_dead_requests / RATE_PER_S,
        prompt_tokens=PROMPT_TOKENS,
        seed=settings.seed,
    )
    found = {}
    async with contextlib.AsyncExitStack() as stack:
        ways, _ = await ways_between(stack, settings, urls)
        for way in (way for way in ways if way.name not in SAME_POOL):
            before = await _num_requests(urls[0])
            lost = await _num_lost(way, arrivals)
            sent = await _num_requests(urls[0]) - before
            found[way.name] = BlackHole(requests=len(arrivals.times_s), lost=lost, sent_to_dead=sent)
            tell(f"dead server, {way.name}: {lost} lost, {sent} sent to it")
    return found


async def _num_lost(way: Way, arrivals: Arrivals) -> int:
    num_lost = 0

    async def run_turn(number: int) -> None:
        nonlocal num_lost
        try:
            num_lost += (
                await way.route.run_turn(number, arrivals.prompt(number), ANSWER.num_tokens) != ANSWER.num_tokens
            )
        except RoseError:
            num_lost += 1

    await run_open_loop(arrivals, run_turn)
    return num_lost


async def _num_requests(url: str) -> int:
    """Ask an engine how many turns it was sent."""
    async with aiohttp.ClientSession() as session, session.get(url + COUNT_PATH) as answer:
        return int(await answer.text())
