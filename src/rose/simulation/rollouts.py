"""Trajectories through the live pool: one task a trajectory, one ``pool.generate`` a turn, the environment's delay between."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping

import attrs

from rose.pool import EngineState, EngineStateChanged, PoolEvent
from rose.simulation.engine import HEADER_IDS, TOKEN, PromptHeader
from rose.simulation.trajectories import TrajectoryPlan
from rose.types import EngineId, EngineKind, Sampling, Turn, TurnResult

Generate = Callable[[Turn], Awaitable[TurnResult]]


@attrs.frozen(kw_only=True)
class TrajectoryRecord:
    """What became of a trajectory. ``started_s``: when its first request reached an engine; tokens are modelled ones.

    ``needed_tokens``: prompt tokens that had to be computed if every prefix had been found.
    """

    started_s: float
    ended_s: float
    num_turns: int
    num_tokens: int
    num_hops: int
    needed_tokens: int


@attrs.define(eq=False)
class TrajectorySlots:
    """How many trajectories may be under way: as many as the ready engines take turns. First come, first served.

    A framework has this limit by its number of environments. Without it every slot that a turn leaves for an environment's
    delay would go to a new trajectory, and the old one would find its prefix gone.

    Attributes:
        per_engine: Slots of one engine; ``None``: no limit at all.
        borrowed_share: What a borrowed engine counts for beside one of the job's own.
    """

    per_engine: int | None
    borrowed_share: float = 1.0
    _ready: dict[EngineId, float] = attrs.field(factory=dict)
    _num_taken: int = 0
    _queue: deque[asyncio.Future[None]] = attrs.field(factory=deque)

    def hear(self, event: PoolEvent) -> None:
        """Follow the engines of a pool, as its observer."""
        if isinstance(event, EngineStateChanged) and (event.new is EngineState.READY) != (
            event.engine_id in self._ready
        ):
            if self._ready.pop(event.engine_id, None) is None:
                self._ready[event.engine_id] = 1.0 if event.kind is EngineKind.DEDICATED else self.borrowed_share
            self._let_in()

    async def acquire(self) -> None:
        """Return when a trajectory may begin."""
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Note that a trajectory is over."""
        self._num_taken -= 1
        self._let_in()

    def _num_slots(self) -> float:
        return math.inf if self.per_engine is None else int(self.per_engine * sum(self._ready.values()))

    def _let_in(self) -> None:
        num_slots = self._num_slots()
        while self._queue and self._num_taken < num_slots:
            turn = self._queue.popleft()
            if not turn.done():
                self._num_taken += 1
                turn.set_result(None)


@attrs.define(kw_only=True)
class TrajectoryRunner:
    """Runs trajectories of one job.

    Attributes:
        generate: The pool's.
        started: Trajectory number -> when its first request reached an engine, filled by the engines.
        slots: How many may be under way.
        asks_exactly: A turn asks for just the tokens that it will make, not for ``max_turn_tokens``.
    """

    generate: Generate
    started: Mapping[int, float]
    resolution_tokens: int
    max_turn_tokens: int
    slots: TrajectorySlots
    asks_exactly: bool = False
    _num_trajectories: int = 0
    _groups: dict[str, int] = attrs.field(factory=dict)

    async def run(self, plan: TrajectoryPlan) -> TrajectoryRecord:
        """Run one trajectory to its end, once there is a slot for it."""
        await self.slots.acquire()
        try:
            return await self._run(plan)
        finally:
            self.slots.release()

    async def _run(self, plan: TrajectoryPlan) -> TrajectoryRecord:
        self._num_trajectories += 1
        number = self._num_trajectories
        group = self._groups.setdefault(plan.group_id, len(self._groups))
        loop = asyncio.get_running_loop()
        num_shared = length = num_tokens = num_hops = num_new = 0
        for i, turn in enumerate(plan.turns):
            new_ids = max(HEADER_IDS if i == 0 else 0, self._ids(turn.num_new_tokens))
            length += new_ids
            num_new += new_ids
            num_shared = num_shared or length
            num_output = self._ids(turn.num_output_tokens)
            header = PromptHeader(number, group, num_shared, length + num_output)
            most = num_output if self.asks_exactly else self._ids(self.max_turn_tokens)
            result = await self.generate(
                Turn(
                    trajectory_id=plan.trajectory_id,
                    group_id=plan.group_id,
                    prompt_ids=header.ids() + (TOKEN,) * (length - HEADER_IDS),
                    sampling=Sampling(max_tokens=most, logprobs=False),
                )
            )
            length += len(result.token_ids)
            num_tokens += len(result.token_ids)
            num_hops += len(result.hops) - 1
            if turn.env_s > 0 and i + 1 < len(plan.turns):
                await asyncio.sleep(turn.env_s)
        scale = self.resolution_tokens
        return TrajectoryRecord(
            started_s=self.started[number],
            ended_s=loop.time(),
            num_turns=len(plan.turns),
            num_tokens=num_tokens * scale,
            num_hops=num_hops,
            needed_tokens=num_new * scale,
        )

    def _ids(self, num_tokens: int) -> int:
        return max(1, round(num_tokens / self.resolution_tokens))

    async def run_all(self, plans: Iterable[TrajectoryPlan]) -> list[TrajectoryRecord]:
        """Run trajectories side by side, started in order."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.run(plan)) for plan in plans]
        return [task.result() for task in tasks]


def floor_s(plan: TrajectoryPlan, *, step_s: Callable[[int], float], prefill_s: Callable[[int, int], float]) -> float:
    """Return how long a trajectory takes alone on an idle engine that keeps its prefix.

    Args:
        plan: The trajectory.
        step_s: Time of one decode step at a context of so many tokens, the host's gap included.
        prefill_s: Time to compute so many new tokens at the end of a context of so many.
    """
    total_s, context = 0.0, 0
    for i, turn in enumerate(plan.turns):
        total_s += prefill_s(turn.num_new_tokens, context + turn.num_new_tokens)
        context += turn.num_new_tokens
        middle = context + turn.num_output_tokens // 2
        total_s += turn.num_output_tokens * step_s(middle)
        context += turn.num_output_tokens
        if i + 1 < len(plan.turns):
            total_s += turn.env_s
    return total_s
