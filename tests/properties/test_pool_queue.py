"""The queue's search gives the same history as a walk over every waiting turn."""

from __future__ import annotations

import attrs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.errors import EngineBusyError, EngineError, EngineLostError, RequestRefusedError
from rose.policies.routing import Assign, RoutingConfig, Wait, WaitReason
from rose.pool.actions import SettleTurn, StartAttempt, StopAttempt
from rose.pool.config import PoolConfig, ResumePolicy
from rose.pool.state import PoolState
from rose.types import (
    Activation,
    AnyVersion,
    AtLeast,
    EngineId,
    EngineKind,
    EngineSnapshot,
    Exactly,
    FinishReason,
    Sampling,
    TokenChunk,
    Turn,
    WeightVersion,
)

ERRORS = [EngineBusyError, RequestRefusedError, EngineLostError, EngineError]
CONFIG = PoolConfig(
    routing=RoutingConfig(cap_per_engine=3), max_hops=4, resume_after_abort=ResumePolicy.SAME_VERSION, circuit_s=1.0
)


class WalkingState(PoolState):
    """Tests every waiting turn in order, as long as any engine is open."""

    def plan(self, now_s):
        index = self.engines.index
        for record in list(self._waiting):
            if not index.has_open_engine():
                break
            decision = index.choose(record.view())
            if isinstance(decision, Assign):
                self._assign(record, decision, now_s)
            elif decision == Wait(WaitReason.VERSION) and self.is_gone(record):
                self._give_up_version(record, now_s)
        num_waiting = len(self._waiting)
        planned = super().plan(now_s)
        assert len(self._waiting) == num_waiting, "the search moved a turn that the walk left"
        return planned

    def is_gone(self, record):
        index = self.engines.index
        is_of_another_run = record.pinned is not None and record.pinned.run != index.run
        return is_of_another_run or index.is_out_of_reach(record.versions)


@attrs.frozen(eq=False)
class Stub:
    engine_id: EngineId


@attrs.define(eq=False)
class Shell:
    """Drives one state core; two shells that are told the same do the same as long as their cores do."""

    state: PoolState
    now_s: float = 0.0
    members: list = attrs.field(factory=list)
    running: list = attrs.field(factory=list)
    history: list = attrs.field(factory=list)
    num_synced: int = 0

    def apply(self):
        actions, events = self.state.plan(self.now_s)
        self.history += events
        for action in actions:
            match action:
                case StartAttempt(attempt):
                    self.history.append(("start", attempt.record.number, attempt.engine_id, attempt.request.request_id))
                    self.state.started(attempt)
                    self.running.append(attempt)
                case StopAttempt(attempt):
                    self.state.released(attempt, self.now_s)
                case SettleTurn(record, outcome):
                    self.history.append(("settle", record.number, str(outcome)))
        self.running = [attempt for attempt in self.running if attempt.is_open]
        waiting = self.state.waiting_reasons()
        self.history.append((len(self.state._waiting), sorted(waiting.items())))

    def do(self, step):
        getattr(self, step[0])(*step[1:])
        self.apply()

    def join(self, kind, n, kv):
        member = self.state.lifecycle.join(Stub(EngineId(f"e{len(self.members)}")), kind, None, self.now_s)
        self.state.lifecycle.joined(member, reading(n, kv), self.now_s)
        self.members.append(member)

    def read(self, i, kv):
        if self.members:
            member = self.members[i % len(self.members)]
            self.state.lifecycle.note_reading(member, reading(0, kv), self.now_s)

    def remove(self, i):
        members = list(self.state.engines.members.values())
        if members:
            self.state.lifecycle.remove(members[i % len(members)], "test", self.now_s)

    def sync(self, i, run):
        """Bring one engine to the next version, of this run or another."""
        members = list(self.state.engines.members.values())
        if members and self.state.lifecycle.begin_update(
            members[i % len(members)], WeightVersion(run, self.num_synced), self.now_s
        ):
            self.num_synced += 1
            version = WeightVersion(run, self.num_synced)
            activation = Activation(version=version, stage_s=0.0, pause_s=0.0, fetched_bytes=0, is_verified=True)
            self.state.lifecycle.end_update(members[i % len(members)], activation, self.now_s)

    def submit(self, name, prompt, new, versions):
        turn = Turn(
            trajectory_id=f"t{name}",
            group_id=f"g{name % 3}",
            prompt_ids=(1,) * prompt,
            sampling=Sampling(max_tokens=new),
            versions=versions,
        )
        self.state.submit(turn, None, self.now_s)

    def end(self, i, num_tokens, reason):
        if self.running:
            chunk = TokenChunk(token_ids=(1,) * num_tokens, logprobs=(-1.0,) * num_tokens, finish_reason=reason)
            self.state.take(self.running[i % len(self.running)], chunk, self.now_s)

    def fail(self, i, error):
        if self.running:
            self.state.fail(self.running[i % len(self.running)], error("test"), self.now_s)

    def wait(self, duration_s):
        self.now_s += duration_s
        self.state.tick(self.now_s)


def reading(n, kv):
    return EngineSnapshot(
        num_running=0,
        num_waiting=0,
        kv_used_tokens=0,
        kv_total_tokens=kv,
        weight_version=None if n is None else WeightVersion("r", n),
        is_paused=False,
        read_at_s=0.0,
    )


NUMBERS = st.integers(0, 99)
CONSTRAINTS = st.one_of(
    st.just(AnyVersion()), st.builds(AtLeast, st.integers(0, 3)), st.builds(Exactly, st.integers(0, 3))
)
SUBMIT = st.tuples(st.just("submit"), st.integers(0, 9), st.integers(1, 30), st.integers(1, 15), CONSTRAINTS)
STEPS = st.one_of(
    st.tuples(
        st.just("join"), st.sampled_from(EngineKind), st.sampled_from([None, 0, 1]), st.sampled_from([0, 30, 60])
    ),
    SUBMIT,
    SUBMIT,
    SUBMIT,
    st.tuples(st.just("read"), NUMBERS, st.sampled_from([0, 20, 60, 200])),
    st.tuples(st.just("remove"), NUMBERS),
    st.tuples(st.just("sync"), NUMBERS, st.sampled_from(["r", "r", "r", "q"])),
    st.tuples(st.just("end"), NUMBERS, st.integers(0, 3), st.sampled_from(FinishReason)),
    st.tuples(st.just("fail"), NUMBERS, st.sampled_from(ERRORS)),
    st.tuples(st.just("wait"), st.sampled_from([0.05, 1.0, 2.5])),
)


@given(st.lists(STEPS, min_size=30, max_size=80))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_search_gives_the_history_of_a_walk(steps):
    walking = Shell(WalkingState(CONFIG, name="p", seed=0))
    searching = Shell(PoolState(CONFIG, name="p", seed=0))
    for step in steps:
        walking.do(step)
        searching.do(step)
        assert searching.history == walking.history


def test_a_turn_of_an_older_run_ends_although_one_before_it_may_yet_hope():
    """Both ask for version 2, the second one for that of the run of its tokens, which the pool has left."""
    shell = Shell(PoolState(CONFIG, name="p", seed=0))
    shell.do(("join", EngineKind.DEDICATED, 2, 60))
    shell.do(("submit", 0, 1, 1, Exactly(2)))
    shell.do(("submit", 3, 2, 9, AnyVersion()))
    shell.do(("end", 1, 2, None))
    shell.do(("end", 1, 0, FinishReason.ABORTED))
    [hopeful, pinned] = [attempt.record for attempt in shell.running]
    shell.do(("sync", 0, "q"))
    assert set(shell.state.live) == {hopeful.number}
    assert shell.history[-1] == (1, [(WaitReason.VERSION, 1)])
    assert pinned.order > hopeful.order
