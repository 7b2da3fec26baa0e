"""Rollouts that never run out: a fixed number of trajectories in flight in one modelled engine, and what they made.

A turn's prompt is the context so far and an observation; the next turn follows at once, a trajectory that ended is followed by a new
one. What the pool does with memory in production is done here for one engine: a trajectory comes in only when its context and what
each resident is expected to grow by fit into the budget; one whose next turn does not fit leaves. Those that left, and those that
were evicted, keep their tokens and come back first; their contexts are computed again.

The slots begin with trajectories in the middle of their lives whose contexts are there already.

*Net tokens* are what trajectories grew by: each token, prompt or answer, counts once, when it is in the KV memory of an engine, and not
any more while it would have to be computed again. So context that is thrown away is subtracted, and comes back when it is computed anew.

*Evicted* are requests that had to go while they ran, and trajectories that had to leave between two turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

import attrs

from rose.simulation.batch import Batch, Job, StepPlan
from rose.simulation.device import Lane
from rose.simulation.scenario import RolloutConfig
from rose.simulation.serving_site import ServingFeed
from rose.simulation.trajectories import TrajectorySource, TurnPlan

if TYPE_CHECKING:
    from rose.bench.coserve.world import DeviceSetup

_CONTEXT = 1 << 40
_NAME = "rollout"
_LOOK_EVERY_S = 0.25


@attrs.define(eq=False)
class _Trajectory:
    """One trajectory.

    Attributes:
        context_tokens, new_tokens, output_tokens: Before the present turn, and what that adds.
        expected_tokens: Of its context, in the cache if nothing was lost.
        given_tokens: Context that it came with.
        is_here: It has been admitted; before, nothing of it counts.
    """

    key: str
    turns: tuple[TurnPlan, ...]
    next_turn: int = 0
    context_tokens: int = 0
    expected_tokens: int = 0
    new_tokens: int = 0
    output_tokens: int = 0
    given_tokens: int = 0
    is_here: bool = False
    job: Job | None = None

    def take_turn(self) -> None:
        """Begin the next turn."""
        turn = self.turns[self.next_turn]
        self.next_turn += 1
        self.new_tokens, self.output_tokens = turn.num_new_tokens, turn.num_output_tokens

    def need_tokens(self, max_turn_tokens: int) -> int:
        """Return the KV that the present turn may come to hold."""
        return self.context_tokens + self.new_tokens + max(self.output_tokens, max_turn_tokens)


class Rollouts:
    """Keeps a rollout engine's slots full of trajectories."""

    def __init__(self, lane: Lane, setup: DeviceSetup, seed: int, on_change: Callable[[], None]) -> None:
        """Fill the slots with trajectories at random points of their lives."""
        config = RolloutConfig(
            profile=setup.rollout,
            workload=setup.workload,
            max_turn_tokens=setup.max_turn_tokens,
            num_trajectories=setup.num_slots,
            group_size=1,
        )
        self.lane = lane
        self._setup = setup
        self._source = TrajectorySource(config, seed=seed)
        self._rng = Random(f"slots {seed}")
        self._on_change = on_change
        self._by_job: dict[str, _Trajectory] = {}
        self._parked: deque[_Trajectory] = deque()
        self._num_drawn = self._num_jobs = 0
        self._num_evicted = self._thrown_tokens = self._decoded_tokens = self._ended_tokens = 0
        lane.listener = self.hear
        self._parked.extend(self._draw(is_running=True) for _ in range(setup.num_slots))
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._look)

    def counts(self) -> tuple[int, int, int, int]:
        """Return net, decoded and thrown-away tokens, and evictions, so far."""
        batch, running = self.lane.batch, list(self._by_job.values())
        jobs = [trajectory.job for trajectory in running if trajectory.job is not None]
        held = sum(batch.held_tokens(job) for job in jobs) + sum(batch.cache.length(t.key) for t in running)
        given = sum(trajectory.given_tokens for trajectory in (*running, *self._parked) if trajectory.is_here)
        decoded = self._decoded_tokens + sum(batch.made_tokens(job) for job in jobs)
        num_evicted = self._num_evicted + batch.num_preempted
        return self._ended_tokens + held - given, decoded, self._thrown_tokens, num_evicted

    def hear(self, started: list[Job], ended: list[Job], _now_s: float) -> None:
        """Note contexts that were lost between turns; send the next turns."""
        for job in started:
            trajectory = self._by_job[job.job_id]
            lost = trajectory.expected_tokens - job.cached_tokens
            if lost > 0:
                self._thrown_tokens += lost
                self._num_evicted += 1
            trajectory.expected_tokens = 0
        for job in ended:
            trajectory = self._by_job.pop(job.job_id)
            self._decoded_tokens += job.made_tokens
            trajectory.context_tokens = trajectory.expected_tokens = job.computed_tokens
            self._go_on(trajectory)
        if ended:
            self._fill()
            self._on_change()

    def _look(self) -> None:
        """Fill the slots now and then: budgets also grow while nothing ends."""
        self._fill()
        self._on_change()
        self._loop.call_later(_LOOK_EVERY_S, self._look)

    def _fill(self) -> None:
        """Bring trajectories in while there is a slot, and memory for them and for what all are expected to grow by."""
        batch, setup = self.lane.batch, self._setup
        while len(self._by_job) < setup.num_slots:
            if not self._parked:
                self._parked.append(self._draw(is_running=False))
            growth = setup.growth_tokens * (len(self._by_job) + 1)
            need = self._parked[0].need_tokens(setup.max_turn_tokens)
            if batch.kv_tokens_reserved + self._waiting_need + need + growth > batch.kv_tokens:
                return
            self._send(self._parked.popleft())

    @property
    def _waiting_need(self) -> int:
        return sum(job.need_tokens for job in self.lane.batch.waiting if _is_rollout(job))

    def evict(self, jobs: Sequence[Job]) -> None:
        """Take requests out at once; their tokens are kept, their contexts are not."""
        batch = self.lane.batch
        for job in jobs:
            trajectory = self._by_job.pop(job.job_id, None)
            if trajectory is None:
                continue
            batch.drop(job)
            thrown = max(job.computed_tokens, batch.cache.take(trajectory.key))
            self._thrown_tokens += thrown
            self._num_evicted += thrown > 0
            self._decoded_tokens += job.made_tokens
            trajectory.expected_tokens = 0
            if job.made_tokens:
                trajectory.context_tokens = job.computed_tokens + 1  # the last token's own KV is not there yet
                trajectory.new_tokens = 0
                trajectory.output_tokens = max(1, job.output_tokens - job.made_tokens)
            self._parked.append(trajectory)

    def _draw(self, *, is_running: bool) -> _Trajectory:
        turns = self._source.group(0, self._num_drawn).trajectories[0].turns
        first = attrs.evolve(turns[0], num_new_tokens=self._setup.first_prompt_tokens)
        self._num_drawn += 1
        trajectory = _Trajectory(f"t{self._num_drawn}", (first, *turns[1:]))
        if is_running:
            trajectory.next_turn = self._rng.randrange(len(turns))
            done = trajectory.turns[: trajectory.next_turn]
            trajectory.context_tokens = trajectory.given_tokens = sum(
                turn.num_new_tokens + turn.num_output_tokens for turn in done
            )
        trajectory.take_turn()
        return trajectory

    def _go_on(self, trajectory: _Trajectory) -> None:
        batch = self.lane.batch
        if trajectory.next_turn == len(trajectory.turns):
            batch.cache.take(trajectory.key)  # nobody needs it any more
            self._ended_tokens += trajectory.context_tokens - trajectory.given_tokens
            return
        trajectory.take_turn()
        need = trajectory.need_tokens(self._setup.max_turn_tokens)
        if batch.kv_tokens_reserved + self._waiting_need + need <= batch.kv_tokens:
            self._send(trajectory)
            return
        self._thrown_tokens += batch.cache.take(trajectory.key)
        self._num_evicted += 1
        trajectory.expected_tokens = 0
        self._parked.append(trajectory)

    def _send(self, trajectory: _Trajectory) -> None:
        self._num_jobs += 1
        job = Job(
            job_id=f"{_NAME}{self._num_jobs}",
            prompt_tokens=trajectory.context_tokens + trajectory.new_tokens,
            output_tokens=trajectory.output_tokens,
            max_output_tokens=max(trajectory.output_tokens, self._setup.max_turn_tokens),
            arrived_s=0.0,
            prefix_keys=((trajectory.key, _CONTEXT),),
            computed_tokens=0 if trajectory.is_here else trajectory.given_tokens,
        )
        trajectory.is_here = True
        trajectory.job = job
        self._by_job[job.job_id] = trajectory
        self.lane.batch.add(job)


def _is_rollout(job: Job) -> bool:
    return job.job_id.startswith(_NAME)


class PriorityBatch(Batch):
    """Serving's requests and rollouts of the same model in one batch: serving's come first for steps, slots and memory."""

    def __init__(self, *, max_seqs: int, kv_tokens: int) -> None:
        """Make an empty batch."""
        super().__init__(max_seqs=max_seqs, kv_tokens=kv_tokens)
        self._num_first = 0

    def add(self, job: Job) -> None:
        """Queue a request: serving's before all rollouts."""
        if _is_rollout(job):
            self.waiting.append(job)
        else:
            place = sum(not _is_rollout(other) for other in self.waiting)
            self.waiting.insert(place, job)

    def admit(self) -> None:
        """Let requests in; rollouts make room for serving's."""
        super().admit()
        while self.waiting and not _is_rollout(self.waiting[0]):
            running = [job for job in (*self._decoding.values(), *self._prefilling.values()) if _is_rollout(job)]
            if not running:
                return
            self._send_back(max(running, key=lambda job: job.number))
            super().admit()

    def _send_back(self, job: Job) -> None:
        self._preempt(job)
        self.waiting.remove(job)
        self.add(job)

    def plan_step(self, chunk_tokens: int) -> StepPlan:
        """Plan a step; serving's prompts first."""
        self._prefilling = dict(sorted(self._prefilling.items(), key=lambda item: _is_rollout(item[1])))
        return super().plan_step(chunk_tokens)

    def relieve(self) -> list[Job]:
        """Preempt the youngest rollouts before any request of serving."""
        preempted: list[Job] = []
        while self.num_running > 1 and self.kv_tokens_used + (self.num_decodes or 1) > self.kv_tokens:
            running = (*self._decoding.values(), *self._prefilling.values())
            job = max(running, key=lambda job: (_is_rollout(job), job.number))
            self._send_back(job)
            preempted.append(job)
        return preempted

    @property
    def num_first_decodes(self) -> int:
        """Return how many of serving's requests decode."""
        return sum(not _is_rollout(job) for job in self._decoding.values())


class PriorityLane(Lane):
    """A step loop whose gaps between tokens are those of serving's requests."""

    def note_steps(self, num_steps: int, first_end_s: float, last_end_s: float, num_tokens: int) -> None:
        """Count steps."""
        if isinstance(self.batch, PriorityBatch) and self.keeps_gaps:
            num_tokens = self.batch.num_first_decodes
        super().note_steps(num_steps, first_end_s, last_end_s, num_tokens)


def share_out(lane: Lane, feed: ServingFeed, rollouts: Rollouts) -> None:
    """Let serving's feed and the rollouts of one engine each hear of their own requests."""

    def hear(started: list[Job], ended: list[Job], now_s: float) -> None:
        feed.hear([j for j in started if not _is_rollout(j)], [j for j in ended if not _is_rollout(j)], now_s)
        rollouts.hear([j for j in started if _is_rollout(j)], [j for j in ended if _is_rollout(j)], now_s)

    lane.listener = hear
