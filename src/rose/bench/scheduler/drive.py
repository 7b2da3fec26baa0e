"""A live pool core under steady load, without event loop or engines: each turn is submitted, routed, fed and settled.

The load is what a busy pool meets: half of the engines are borrowed, a quarter is a weight version behind, turns ask for versions,
KV memory is short enough to refuse some places, loads are read again and again, trajectories go on and want their last engine.
Time is virtual and moves with the turns, so that timers fire as they would.

Invariant: each live trajectory has its one turn in the pool, or waits for its environment.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

import attrs

from rose.bench.scheduler.engines import BenchEngine, reading
from rose.policies.routing import Assign, RoutingIndex
from rose.pool import PoolConfig
from rose.pool.actions import Action, SettleTurn, StartAttempt
from rose.pool.membership import Member, Membership
from rose.pool.state import PoolState
from rose.pool.turns import Attempt, TurnRecord
from rose.types import (
    Activation,
    AnyVersion,
    AtLeast,
    EngineKind,
    Exactly,
    FinishReason,
    RouteReason,
    Sampling,
    TokenChunk,
    Turn,
    VersionConstraint,
    WeightVersion,
)

RUN = "bench"
CAP = 16
PROMPT_TOKENS = (1024, 4096)
ANSWER_TOKENS = 256
CHUNKS = 4
MEAN_TURN_S = 1.0
BORROWED_SLOWNESS = 1.5
GROUP = 16
_CONFIG = PoolConfig()
_KV_TOKENS = 44_000  # fifteen mean turns with all they may make, of sixteen slots
_CONSTRAINTS: tuple[tuple[VersionConstraint, int], ...] = ((AnyVersion(), 5), (AtLeast(4), 3), (Exactly(5), 2))
_NUM_PROMPTS = 256


@attrs.frozen(kw_only=True)
class DriveLoad:
    """How much of it.

    Attributes:
        num_engines: Half of them are borrowed.
        num_trajectories: Live ones.
        turns_per_trajectory: After so many a new trajectory takes the place.
        environment_s: Mean time between two turns of a trajectory, in which others may take its place; 0 for none.
        seed: Of everything.
    """

    num_engines: int
    num_trajectories: int
    turns_per_trajectory: int = 8
    environment_s: float = 0.0
    seed: int = 1


@attrs.define
class Clockwork:
    """CPU time of the pool's own work: a sample for each visit to the core, and the turns that were routed meanwhile."""

    samples_s: list[float] = attrs.field(factory=list)
    num_assigned: int = 0
    _begun_s: float = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._begun_s = time.thread_time()

    def end(self, num_assigned: int = 1) -> None:
        """Stop it."""
        self.samples_s.append(time.thread_time() - self._begun_s)
        self.num_assigned += num_assigned

    def reset(self) -> None:
        """Forget what was measured."""
        self.samples_s.clear()
        self.num_assigned = 0


class Drive:
    """One pool core and its load.

    Attributes:
        state: The core.
        clockwork: What the core's visits took.
        now_s: Virtual time.
        num_settled: Turns that ended.
        could_keep: Later turns of a trajectory whose last engine had a place for them when they were routed, by why they were sent
            where they were sent.
        num_kept: Those of them that were sent to that engine.
    """

    def __init__(self, load: DriveLoad) -> None:
        self.now_s = 0.0
        self.num_settled = self.num_kept = 0
        self.could_keep: Counter[RouteReason] = Counter()
        self.state = PoolState(_CONFIG, name=RUN, seed=load.seed)
        self.clockwork = Clockwork()
        self.rng = Random(load.seed)
        self._load = load
        self._due: list[tuple[float, int, Attempt | TurnRecord]] = []
        self._numbers = itertools.count()
        self._members = [self._join(i) for i in range(load.num_engines)]
        self._prompts = [
            tuple(range(self.rng.randint(*PROMPT_TOKENS))) for _ in range(min(_NUM_PROMPTS, load.num_trajectories))
        ]
        self.state.plan(0.0)

    def _join(self, number: int) -> Member:
        """Take an engine in: the second half is borrowed, every fourth stays a version behind."""
        kind = EngineKind.DEDICATED if number < self._load.num_engines / 2 else EngineKind.BORROWED
        old, new = WeightVersion(RUN, 4), WeightVersion(RUN, 5)
        lifecycle = self.state.lifecycle
        member = lifecycle.join(BenchEngine(f"e{number}"), kind, None, 0.0)
        lifecycle.joined(member, reading(_KV_TOKENS, old), 0.0)
        version = old if number % 4 == 3 else new  # noqa: PLR2004 - every fourth
        lifecycle.begin_update(member, version, 0.0)
        activation = Activation(version=version, stage_s=0.0, pause_s=0.0, fetched_bytes=0, is_verified=True)
        lifecycle.end_update(member, activation, 0.0)
        return member

    def fill(self) -> None:
        """Bring every trajectory in with its first turn."""
        for _ in range(self._load.num_trajectories):
            self._submit(self._new_turn(), 0)

    def run(self, num_turns: int) -> None:
        """Let so many turns end, each followed by the next turn of its trajectory."""
        goal = self.num_settled + num_turns
        while self.num_settled < goal and self._due:
            self.now_s, _, due = heapq.heappop(self._due)
            if isinstance(due, TurnRecord):
                self._go_on(due)
            elif due.is_open:
                self._feed(due)

    def open_attempts(self) -> list[Attempt]:
        """Return all attempts in flight."""
        return [due for _, _, due in self._due if isinstance(due, Attempt) and due.is_open]

    def _feed(self, attempt: Attempt) -> None:
        """Bring a turn's next chunk."""
        self._pass_time()
        left = ANSWER_TOKENS - attempt.num_tokens
        count = min(left, ANSWER_TOKENS // CHUNKS)
        reason = FinishReason.LENGTH if count == left else None
        chunk = TokenChunk(token_ids=(7,) * count, logprobs=(-0.5,) * count, finish_reason=reason)
        if reason is None:
            if self.state.take(attempt, chunk, self.now_s):
                self._carry_out(self.state.plan(self.now_s)[0])
            self._expect(attempt)
            return
        self.clockwork.begin()
        self.state.take(attempt, chunk, self.now_s)
        self._plan()

    def _plan(self) -> None:
        """Plan, stop the clock, and do what is to be done."""
        actions, _ = self.state.plan(self.now_s)
        self.clockwork.end(sum(isinstance(action, StartAttempt) for action in actions))
        self._carry_out(actions)

    def _pass_time(self) -> None:
        """Let due timers fire, and read one engine's load."""
        due_s = self.state.next_due_s()
        if due_s is not None and due_s <= self.now_s:
            self.state.tick(self.now_s)
            self._carry_out(self.state.plan(self.now_s)[0])
        member = self.rng.choice(self._members)
        used = min(_KV_TOKENS, member.kv_reserved_tokens)
        self.state.lifecycle.note_reading(
            member, attrs.evolve(reading(_KV_TOKENS), kv_used_tokens=used, read_at_s=self.now_s), self.now_s
        )

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, StartAttempt):
                self._start(action.attempt)
            elif isinstance(action, SettleTurn):
                self.num_settled += 1
                self._end_turn(action.record)
            else:
                self.state.released(action.attempt, self.now_s)

    def _start(self, attempt: Attempt) -> None:
        self.state.started(attempt)
        self._expect(attempt)
        record = attempt.record
        last = None if record.affinity is None else self.state.engines.members.get(record.affinity)
        if last is not None and not record.hops:
            is_kept = attempt.member is last
            self.num_kept += is_kept
            self.could_keep[attempt.reason] += is_kept or can_take(self.state.engines, last, record)

    def _expect(self, attempt: Attempt) -> None:
        """Set the time of an attempt's next chunk."""
        slowness = BORROWED_SLOWNESS if attempt.member.kind is EngineKind.BORROWED else 1.0
        self._set(MEAN_TURN_S / CHUNKS * slowness, attempt)

    def _set(self, mean_s: float, due: Attempt | TurnRecord) -> None:
        due_s = self.now_s + mean_s * self.rng.uniform(0.5, 1.5)
        heapq.heappush(self._due, (due_s, next(self._numbers), due))

    def _end_turn(self, record: TurnRecord) -> None:
        if self._load.environment_s:
            self._set(self._load.environment_s, record)
        else:
            self._go_on(record)

    def _go_on(self, record: TurnRecord) -> None:
        """Submit the next turn of the trajectory, or the first of a new one."""
        num_done = record.waiter + 1
        if num_done == self._load.turns_per_trajectory:
            self._submit(self._new_turn(), 0)
        else:
            self._submit(record.turn, num_done)

    def _new_turn(self) -> Turn:
        number = next(self._numbers)
        constraints, weights = zip(*_CONSTRAINTS, strict=True)
        return Turn(
            trajectory_id=f"t{number}",
            group_id=f"g{number // GROUP}",
            prompt_ids=self.rng.choice(self._prompts),
            sampling=Sampling(max_tokens=ANSWER_TOKENS),
            versions=self.rng.choices(constraints, weights)[0],
        )

    def _submit(self, turn: Turn, num_done: int) -> None:
        self.clockwork.begin()
        self.state.submit(turn, num_done, self.now_s)
        self._plan()


def can_take(engines: Membership, member: Member, record: TurnRecord) -> bool:
    """Tell whether an engine has a place for a turn now: whether the policy would choose it if there were no other."""
    alone = RoutingIndex(_CONFIG.routing)
    alone.run = engines.index.run
    alone.put(next(view for view in engines.index if view.engine_id == member.engine_id))
    return isinstance(alone.choose(record.view()), Assign)
