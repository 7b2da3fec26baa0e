"""What a turn and a routing decision cost the pool's event loop, by number of engines, beside a scan over all engines.

Run with ``python benchmarks/pool.py [--out FILE]``; a few minutes on one core. ``benchmarks/README.md`` says what the
figures mean. The engines are immediate: one chunk a turn, in virtual time, so that only Python's own time is left. Both
indexes must give the same decisions before they are timed.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import json
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import attrs

from rose.bench.machine import commit, machine
from rose.interfaces.serving import PauseMode, ServingEngine
from rose.policies.routing import (
    Assign,
    Circuit,
    EngineState,
    EngineView,
    RoutingConfig,
    RoutingIndex,
    TurnView,
    Wait,
    WaitReason,
)
from rose.policies.staleness import is_admissible
from rose.pool import RolloutPool
from rose.simulation.loop import LoopClock, VirtualLoop
from rose.types import (
    Activation,
    AnyVersion,
    EngineId,
    EngineKind,
    EngineRequest,
    EngineSnapshot,
    FinishReason,
    RequestId,
    RouteReason,
    Sampling,
    TokenChunk,
    Turn,
    VersionConstraint,
    WeightUpdate,
)

SEED = 1
CAP = 16
PROMPT_TOKENS, ANSWER_TOKENS = 600, 8
TURNS_PER_TRAJECTORY = 4
TRAJECTORIES_PER_SLOT = 1.5  # a third of the turns waits
NUM_ENGINES = (16, 64, 256, 1024, 4096)
MAX_SCANNED_ENGINES = 256  # of whole pools; beyond, a scan takes minutes
NUM_PROMPTS = 512
MIN_DECISION_TIME_S = 0.2


class ImmediateEngine(ServingEngine):
    """Answers every request with one chunk after half a virtual second to one and a half."""

    def __init__(self, engine_id: str, rng: Random) -> None:
        self.engine_id = EngineId(engine_id)
        self._rng = rng
        self._chunk = TokenChunk(
            token_ids=(1,) * ANSWER_TOKENS, logprobs=(-1.0,) * ANSWER_TOKENS, finish_reason=FinishReason.LENGTH
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:  # noqa: ARG002
        await asyncio.sleep(0.5 + self._rng.random())
        yield self._chunk

    async def abort(self, request_id: RequestId) -> None:
        raise NotImplementedError

    async def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            num_running=0,
            num_waiting=0,
            kv_used_tokens=0,
            kv_total_tokens=2 * CAP * (PROMPT_TOKENS + ANSWER_TOKENS),
            weight_version=None,
            is_paused=False,
            read_at_s=0.0,
        )

    async def pause(self, mode: PauseMode) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def stage(self, update: WeightUpdate) -> None:
        raise NotImplementedError

    async def activate(self) -> Activation:
        raise NotImplementedError


class ScanIndex(RoutingIndex):
    """The peer: the same rule by a look at every engine for every question."""

    def put(self, view: EngineView) -> None:
        self._views[view.engine_id] = view

    def drop(self, engine_id: EngineId) -> None:
        self._views.pop(engine_id, None)

    def has_open_engine(self) -> bool:
        return any(view.state is EngineState.READY and self._has_slot(view) for view in self._views.values())

    def room(self, versions: VersionConstraint, *, is_dedicated_only: bool) -> tuple[float, float]:  # noqa: ARG002
        """Let ``choose`` find out; every turn of this benchmark fits where a slot is open."""
        return (float("inf"), float("inf")) if self.has_open_engine() else (float("-inf"), float("-inf"))

    def choose(self, turn: TurnView) -> Assign | Wait:
        best: EngineView | None = None
        best_rank: tuple[Any, ...] = ()
        furthest = WaitReason.NO_READY_ENGINE
        for view in self._views.values():
            obstacle = self._obstacle(view, turn)
            if obstacle is not None:
                furthest = max(furthest, obstacle)
                continue
            rank = (
                *(view.engine_id in turn.avoid, view.engine_id != turn.affinity, view.kind is EngineKind.BORROWED),
                *(view.num_in_flight, view.kv_used_fraction, view.engine_id),
            )
            if best is None or rank < best_rank:
                best, best_rank = view, rank
        if best is None:
            return Wait(furthest)
        if best.engine_id == turn.affinity:
            return Assign(best.engine_id, RouteReason.AFFINITY)
        is_dedicated = best.kind is EngineKind.DEDICATED
        return Assign(best.engine_id, RouteReason.DEDICATED if is_dedicated else RouteReason.BORROWED)

    def _obstacle(self, view: EngineView, turn: TurnView) -> WaitReason | None:
        if view.state is not EngineState.READY or (turn.is_dedicated_only and view.kind is EngineKind.BORROWED):
            return WaitReason.NO_READY_ENGINE
        if not is_admissible(turn.versions, view.version, self.run):
            return WaitReason.VERSION
        if not self._has_slot(view):
            return WaitReason.SLOTS if view.circuit is Circuit.CLOSED else WaitReason.CIRCUIT
        return None if _has_kv_room(view, turn) else WaitReason.KV


def _has_kv_room(view: EngineView, turn: TurnView) -> bool:
    if view.kv_total_tokens is None:
        return True
    if view.num_in_flight == 0:
        return view.kind is EngineKind.DEDICATED or turn.num_prompt_tokens < view.kv_total_tokens
    return view.kv_reserved_tokens + turn.num_prompt_tokens + turn.num_new_tokens <= view.kv_total_tokens


INDEXES: dict[str, type[RoutingIndex]] = {"rose": RoutingIndex, "scan": ScanIndex}


# Turns through a whole pool.


@attrs.frozen(kw_only=True)
class Load:
    """Trajectories for ``num_engines``, half of them borrowed."""

    num_engines: int
    prompts: list[tuple[int, ...]]

    @property
    def num_trajectories(self) -> int:
        return int(self.num_engines * CAP * TRAJECTORIES_PER_SLOT)

    @property
    def num_turns(self) -> int:
        return self.num_trajectories * TURNS_PER_TRAJECTORY

    def engines(self, rng: Random) -> tuple[list[ImmediateEngine], list[ImmediateEngine]]:
        half = self.num_engines // 2
        engines = [ImmediateEngine(f"e{i}", rng) for i in range(self.num_engines)]
        return engines[:half], engines[half:]

    def turn(self, trajectory: int, number: int) -> Turn:
        return Turn(
            trajectory_id=f"t{trajectory}",
            group_id=f"g{trajectory // 16}",
            prompt_ids=self.prompts[(7 * trajectory + number) % len(self.prompts)],
            sampling=Sampling(max_tokens=ANSWER_TOKENS),
        )

    async def run(self, do: Callable[[int, int], Any]) -> float:
        """Run every trajectory; returns CPU seconds."""
        start = time.process_time()
        async with asyncio.TaskGroup() as group:
            for trajectory in range(self.num_trajectories):
                group.create_task(_trajectory(do, trajectory))
        return time.process_time() - start


async def _trajectory(do: Callable[[int, int], Any], trajectory: int) -> None:
    for number in range(TURNS_PER_TRAJECTORY):
        await do(trajectory, number)


async def with_pool(load: Load, loop: VirtualLoop) -> float:
    dedicated, borrowed = load.engines(Random(SEED))
    async with RolloutPool(dedicated, borrowed=borrowed, clock=LoopClock(loop)) as pool:
        return await load.run(lambda trajectory, number: pool.generate(load.turn(trajectory, number)))


async def without_pool(load: Load, _: VirtualLoop) -> float:
    dedicated, borrowed = load.engines(Random(SEED))
    engines = dedicated + borrowed

    async def do(trajectory: int, number: int) -> None:
        turn = load.turn(trajectory, number)
        request = EngineRequest(
            request_id=RequestId(turn.trajectory_id), prompt_ids=turn.prompt_ids, sampling=turn.sampling
        )
        async for _ in engines[trajectory % len(engines)].generate(request):
            pass

    return await load.run(do)


def us_per_turn(load: Load, work: Callable[[Load, VirtualLoop], Any]) -> float:
    """Return the least CPU time of a turn in a few runs, in microseconds; small pools are run more often."""
    times = []
    for _ in range(max(1, 256 // load.num_engines)):
        gc.collect()
        loop = VirtualLoop()
        times.append(loop.run(work(load, loop)))
    return min(times) / load.num_turns * 1e6


def turns() -> Iterator[dict[str, Any]]:
    """Measure whole pools."""
    rng = Random(SEED)
    prompts = [tuple(rng.randrange(32_000) for _ in range(PROMPT_TOKENS)) for _ in range(NUM_PROMPTS)]
    for num_engines in NUM_ENGINES:
        load = Load(num_engines=num_engines, prompts=prompts)
        found = {"without_pool": us_per_turn(load, without_pool)}
        for name, index in INDEXES.items():
            if name == "rose" or num_engines <= MAX_SCANNED_ENGINES:
                with patch("rose.pool.membership.RoutingIndex", index):
                    found[name] = us_per_turn(load, with_pool)
        yield {"num_engines": num_engines, "num_turns": load.num_turns, "cpu_us_per_turn": found}


# Decisions alone.


def open_views(num_engines: int, rng: Random) -> list[EngineView]:
    """Return engines with three quarters of their slots taken, at random."""
    return [_view(i, num_engines, rng.randrange(CAP // 2, CAP), 10**6) for i in range(num_engines)]


def full_views(num_engines: int, _: Random) -> list[EngineView]:
    """Return engines without an open slot."""
    return [_view(i, num_engines, CAP, 10**6) for i in range(num_engines)]


def tight_views(num_engines: int, rng: Random) -> list[EngineView]:
    """Return engines with open slots, of which every sixteenth has KV room for a turn."""
    needed = PROMPT_TOKENS + ANSWER_TOKENS
    return [
        _view(i, num_engines, rng.randrange(1, 8), needed if i % CAP == 0 else needed - 1) for i in range(num_engines)
    ]


def _view(number: int, num_engines: int, num_in_flight: int, kv_room: int) -> EngineView:
    return EngineView(
        engine_id=EngineId(f"e{number}"),
        kind=EngineKind.DEDICATED if number < num_engines // 2 else EngineKind.BORROWED,
        state=EngineState.READY,
        num_in_flight=num_in_flight,
        kv_total_tokens=kv_room,
    )


STATES: dict[str, Callable[[int, Random], list[EngineView]]] = {
    "open": open_views,
    "full": full_views,
    "kv_tight": tight_views,
}


def decide(index: RoutingIndex, turns: list[TurnView]) -> list[Assign | Wait]:
    """Decide on each turn; the engine of each is replaced by one that is as loaded, as a pool does all the time."""
    decisions = []
    for turn in turns:
        decision = index.choose(turn)
        decisions.append(decision)
        engine_id = decision.engine_id if isinstance(decision, Assign) else EngineId("e0")
        index.put(index._views[engine_id])  # noqa: SLF001 - cheaper than to keep a second table while the clock runs
    return decisions


def decisions() -> Iterator[dict[str, Any]]:
    """Measure indexes without a pool."""
    for state, make in STATES.items():
        for num_engines in NUM_ENGINES:
            yield {"engines": state, "num_engines": num_engines, **compare(make(num_engines, Random(SEED)))}


def compare(views: list[EngineView]) -> dict[str, Any]:
    rng = Random(SEED)
    asked = [
        TurnView(
            versions=AnyVersion(),
            num_prompt_tokens=PROMPT_TOKENS,
            num_new_tokens=ANSWER_TOKENS,
            affinity=rng.choice((rng.choice(views).engine_id, None)),
        )
        for _ in range(64)
    ]
    found: dict[str, float] = {}
    made: list[list[Assign | Wait]] = []
    for name, cls in INDEXES.items():
        index = cls(RoutingConfig(cap_per_engine=CAP))
        for view in views:
            index.put(view)
        made.append(decide(index, asked))
        found[name] = _seconds(lambda index=index: decide(index, asked)) / len(asked) * 1e6  # type: ignore[misc]
    if made[0] != made[1]:
        message = "the index and the scan decided differently"
        raise SystemExit(message)
    return {"cpu_us_per_decision": found, "scan_over_rose": found["scan"] / found["rose"]}


def _seconds(work: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < 3 or sum(times) < MIN_DECISION_TIME_S:  # noqa: PLR2004
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def growth(found: list[dict[str, Any]], least: int, most: int) -> float:
    """Return the cost of a turn with ``most`` engines over that with ``least``."""
    by_number = {entry["num_engines"]: entry["cpu_us_per_turn"]["rose"] for entry in found}
    return float(by_number[most] / by_number[least])


def main() -> None:
    """Run everything and print one JSON object."""
    parser = argparse.ArgumentParser(description="Cost of a turn and of a decision by number of engines, as JSON.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there too")
    arguments = parser.parse_args()
    start = time.perf_counter()
    report: dict[str, Any] = {
        "benchmark": "pool",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), "rose-rl": version("rose-rl"), "attrs": version("attrs")},
        "num_threads": 1,
        "setting": {
            "cap_per_engine": CAP,
            "prompt_tokens": PROMPT_TOKENS,
            "trajectories_per_slot": TRAJECTORIES_PER_SLOT,
            "turns_per_trajectory": TURNS_PER_TRAJECTORY,
        },
        "decisions": list(decisions()),
        "turns": list(turns()),
    }
    report["growth_16_to_1024"] = growth(report["turns"], 16, 1024)
    report["wall_s"] = round(time.perf_counter() - start, 1)
    text = json.dumps(_rounded(report), indent=2)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
