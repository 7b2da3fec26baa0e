"""Turns over HTTP: straight to the engines, through ROSE, and through other projects' routers, at equal load in the same run.

Every round gives every way the same turns at the same times (an open loop, for latency), then as many as it can take (a closed loop, for
throughput). The order changes from round to round. *Added* is a percentile through something minus the same percentile of the same
round straight to the engines over the same interface; the figure of a run is the median over its rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from rose.bench.scheduler.arrivals import Arrivals, all_or_first_error, run_open_loop
from rose.bench.scheduler.decisions import P99, percentile
from rose.bench.scheduler.http_engine import Answer
from rose.bench.scheduler.peers import ROUTERS, find_router, http_engines, pool_host, router
from rose.bench.scheduler.routes import CompletionsRoute, GenerateRoute, PoolRoute, RemoteRoute, Route
from rose.bench.scheduler.settings import SchedulerSettings
from rose.errors import BackendUnavailableError, EngineError
from rose.pool import RolloutPool
from rose.pool.remote_pool import RemotePool

ANSWER = Answer()
PROCESSES = ((ANSWER, ANSWER), (ANSWER, ANSWER))
WARM_UP_S = 1.0
GATEWAY, ASKING = "rose-gateway", "rose asking"
SAME_POOL = (GATEWAY, ASKING)
"""Ways through the pool of another way, which has learned what that one met."""
_MS = 1e3


@attrs.define(kw_only=True)
class Way:
    """One way to the engines, and what it took.

    Attributes:
        name: Key of its figures.
        route: Runs a turn.
        baseline: The way straight to the engines over the same interface; itself for such a way.
        pid: The process in between, if there is one.
        rounds: A row of figures a round.
    """

    name: str
    route: Route
    baseline: str
    pid: int | None = None
    rounds: list[dict[str, float]] = attrs.field(factory=list)


def measure_gateway(settings: SchedulerSettings, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure every way that is there; returns ``gateway``, ``gateway_setting`` and what was ``skipped``.

    Raises:
        EngineError: An engine or a router failed a turn, or did not start.
    """
    with http_engines(PROCESSES) as urls:
        # Neighbours in different processes: whoever prefers one of two idle engines would otherwise fill one process first.
        return asyncio.run(_measure(settings, [*urls[::2], *urls[1::2]], tell))


async def _measure(settings: SchedulerSettings, urls: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        between, absent = await ways_between(stack, settings, urls)
        ways = [*await _straight(stack, urls), *between]
        gc.collect()
        gc.freeze()  # what is there stays: no pauses for it
        try:
            await _run_rounds(settings, ways, tell)
        finally:
            gc.unfreeze()
    return {
        "gateway": {way.name: _figures(way, ways) for way in ways},
        "gateway_setting": {
            "num_engines": len(urls),
            "offered_per_s": settings.rate_per_s,
            "prompt_tokens": Arrivals(rate_per_s=1.0, duration_s=0.1).prompt_tokens,
            "answer": attrs.asdict(ANSWER),
            "rounds": settings.num_rounds,
            "callers": settings.num_callers,
        },
        "skipped": absent,
    }


async def ways_between(
    stack: contextlib.AsyncExitStack, settings: SchedulerSettings, urls: Sequence[str]
) -> tuple[list[Way], dict[str, str]]:
    """Start everything that can stand between callers and engines; gives the ways, and why a router is absent."""
    ways, absent = await _through_pool(stack, urls), dict[str, str]()
    for name in ROUTERS:
        try:
            path = find_router(name, settings.peers)
        except BackendUnavailableError as error:
            absent[name] = str(error)
        else:
            ways += await _behind(stack, name, path, urls)
    return ways, absent


async def _straight(stack: contextlib.AsyncExitStack, urls: Sequence[str]) -> list[Way]:
    ways = [
        Way(name="direct", route=CompletionsRoute(*urls), baseline="direct"),
        Way(name="direct-generate", route=GenerateRoute(*urls), baseline="direct-generate"),
        Way(name="direct-rose", route=RemoteRoute(*urls), baseline="direct-rose"),
    ]
    for way in ways:
        stack.push_async_callback(way.route.close)
    return ways


async def _through_pool(stack: contextlib.AsyncExitStack, urls: Sequence[str]) -> list[Way]:
    """Start a pool; its clients stream from the engines, or send everything through it."""
    started = stack.enter_context(pool_host(urls))
    pool = await stack.enter_async_context(RolloutPool.connect(started.url))
    asking = await stack.enter_async_context(RemotePool(started.url, has_head_starts=False))
    gateway = CompletionsRoute(started.url)
    stack.push_async_callback(gateway.close)
    return [
        Way(name="rose", route=PoolRoute(pool), baseline="direct-rose", pid=started.pid),
        Way(name=ASKING, route=PoolRoute(asking), baseline="direct-rose", pid=started.pid),
        Way(name=GATEWAY, route=gateway, baseline="direct", pid=started.pid),
    ]


async def _behind(stack: contextlib.AsyncExitStack, name: str, path: str, urls: Sequence[str]) -> list[Way]:
    """Start a router for each of its policies; the first one has the router's plain name."""
    ways: list[Way] = []
    for policy in ROUTERS[name].policies:
        started = stack.enter_context(router(path, name, policy, urls))
        # smg takes token ids in SGLang's interface only.
        route, baseline = (GenerateRoute, "direct-generate") if name == "smg" else (CompletionsRoute, "direct")
        label = name if not ways else f"{name} {policy}"
        ways.append(Way(name=label, route=route(started.url), baseline=baseline, pid=started.pid))
        stack.push_async_callback(ways[-1].route.close)
    return ways


async def _run_rounds(settings: SchedulerSettings, ways: Sequence[Way], tell: Callable[[str], None]) -> None:
    warm_up = Arrivals(
        rate_per_s=settings.rate_per_s, duration_s=min(WARM_UP_S, settings.duration_s), seed=settings.seed
    )
    for way in ways:
        await _open_loop(way, warm_up)
    for number in range(settings.num_rounds):
        arrivals = Arrivals(
            rate_per_s=settings.rate_per_s, duration_s=settings.duration_s, seed=settings.seed + 1 + number
        )
        for way in [*ways[number % len(ways) :], *ways[: number % len(ways)]]:
            way.rounds.append(
                {
                    **await _open_loop(way, arrivals),
                    "turns_per_s": await _closed_loop(way, arrivals, settings.closed_s, settings.num_callers),
                }
            )
            row = way.rounds[-1]
            tell(f"round {number + 1}, {way.name}: P50 {row['p50_ms']:.2f} ms, P99 {row['p99_ms']:.2f} ms")


async def _open_loop(way: Way, arrivals: Arrivals) -> dict[str, float]:
    """Give a way its turns at their times; returns latencies and CPU times."""
    took_s: list[float] = []
    own_s, between_s = time.process_time(), _cpu_s(way.pid)

    async def run_turn(number: int) -> None:
        begun_s = time.perf_counter()
        await _run_turn(way, arrivals, number)
        took_s.append(time.perf_counter() - begun_s)

    late_s = await run_open_loop(arrivals, run_turn)
    return {
        "p50_ms": percentile(took_s, 0.5) * _MS,
        "p99_ms": percentile(took_s, P99) * _MS,
        "generator_late_p99_ms": percentile(late_s, P99) * _MS,
        "client_cpu_ms": (time.process_time() - own_s) / len(took_s) * _MS,
        "between_cpu_ms": (_cpu_s(way.pid) - between_s) / len(took_s) * _MS,
    }


async def _closed_loop(way: Way, arrivals: Arrivals, duration_s: float, num_callers: int) -> float:
    """Let callers run one turn after the other; returns turns a second."""
    begun_s = time.perf_counter()
    num_turns = 0

    async def call(number: int) -> None:
        nonlocal num_turns
        while time.perf_counter() < begun_s + duration_s:
            await _run_turn(way, arrivals, number)
            number += num_callers
            num_turns += 1

    async with all_or_first_error() as callers:
        for number in range(num_callers):
            callers.create_task(call(number))
    return num_turns / (time.perf_counter() - begun_s)


async def _run_turn(way: Way, arrivals: Arrivals, number: int) -> None:
    num_tokens = await way.route.run_turn(number, arrivals.prompt(number), ANSWER.num_tokens)
    if num_tokens != ANSWER.num_tokens:
        message = f"{way.name}: {num_tokens} of {ANSWER.num_tokens} tokens came with their log-probs"
        raise EngineError(message)


def _cpu_s(pid: int | None) -> float:
    """Return the CPU time that a process has had; 0 without one, or where the system does not tell."""
    if pid is None:
        return 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _figures(way: Way, ways: Sequence[Way]) -> dict[str, Any]:
    """Return a way's medians over rounds."""
    baseline = next(other for other in ways if other.name == way.baseline)
    figures = {key: statistics.median(row[key] for row in way.rounds) for key in way.rounds[0]}
    for key in ("p50_ms", "p99_ms"):
        added = [row[key] - base[key] for row, base in zip(way.rounds, baseline.rounds, strict=True)]
        figures[f"added_{key}"] = statistics.median(added)
        figures[f"added_{key}_spread"] = statistics.pstdev(added)
    return {"baseline": way.baseline, **figures}
