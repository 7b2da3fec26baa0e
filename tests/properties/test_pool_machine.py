"""The pool's sync core against a model of its shell, its engines and a slow trainer: any order of events keeps its invariants.

Time is virtual. Engines join, leave, die, stall, evict, are lent until their lease ends and activate new versions; callers cancel and abort;
a trainer that takes samples slowly holds new turns back. The normal run plays 100 histories of up to 80 events; for thousands, set
``ROSE_HISTORIES``:

    ROSE_HISTORIES=5000 pytest tests/properties/test_pool_machine.py
"""

from __future__ import annotations

import math
import os

import attrs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from rose.errors import (
    EngineBusyError,
    EngineError,
    EngineFencedError,
    EngineLostError,
    RequestRefusedError,
)
from rose.policies.concurrency import ConcurrencyConfig
from rose.policies.pace import PaceConfig
from rose.policies.routing import Assign, EngineState, EngineView, RoutingConfig
from rose.policies.staleness import is_admissible, staleness
from rose.pool.actions import SettleTurn, StartAttempt, StopAttempt
from rose.pool.config import PoolConfig, ResumePolicy
from rose.pool.samples import SampleQueue
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
    TurnResult,
    WeightVersion,
)

CAP = 3
NUM_HISTORIES = int(os.environ.get("ROSE_HISTORIES", "100"))
MAX_SAMPLES = 4
ERRORS = [EngineBusyError, RequestRefusedError, EngineLostError, EngineFencedError, EngineError, OSError]
NONSENSE = [
    None,
    TokenChunk(token_ids=(None,), logprobs=(-1.0,)),
    TokenChunk(token_ids=(1,), logprobs=(-1.0,), finish_reason="stop"),
    TokenChunk(token_ids=(1,), logprobs=(-1.0,), version="r:1"),
]
CONSTRAINTS = st.one_of(
    st.just(AnyVersion()), st.builds(AtLeast, st.integers(0, 3)), st.builds(Exactly, st.integers(0, 3))
)


@attrs.frozen(eq=False)
class Stub:
    """An engine of which only the name matters: the sync core does no I/O."""

    engine_id: EngineId


@attrs.define(eq=False)
class Flight:
    """What the engine side knows of one attempt."""

    attempt: object
    has_begun: bool = False
    has_ended: bool = False
    num_stops: int = 0
    is_released: bool = False


def timeless(view: EngineView) -> EngineView:
    """Return a view without what time and other engines' turns change: its pace, and who is expected back."""
    return attrs.evolve(
        view,
        pace_s=None,
        slope_s=0.0,
        idle_s=0.0,
        prefill_s=0.0,
        most_left_tokens=0.0,
        num_seats=0,
        kv_seat_tokens=0,
        is_slow=False,
    )


class PoolMachine(RuleBasedStateMachine):
    members = Bundle("members")

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.begin_with(PaceConfig().prefill_share)
        self.flights: list[Flight] = []
        self.records, self.outcomes, self.cancelled = [], {}, set()
        self.request_ids: set[str] = set()
        self.num_joined = 0
        self.newest = 0
        self.is_eager = True
        self.samples: SampleQueue[int] = SampleQueue(MAX_SAMPLES, 1)
        self.unread: list = []

    def begin_with(self, prefill_share):
        """Make the pool. Where prompts cost much to compute, seats are kept soon."""
        self.config = PoolConfig(
            routing=RoutingConfig(cap_per_engine=CAP, pace=PaceConfig(prefill_share=prefill_share)),
            max_hops=4,
            max_busy=3,
            resume_after_abort=ResumePolicy.SAME_VERSION,
            concurrency=ConcurrencyConfig(cut_fraction=0.5, settle_s=0.1, forget_s=20.0),
            starve_s=1.0,
            no_engine_timeout_s=5.0,
            group_drop_s=5.0,
        )
        self.state = PoolState(self.config, name="p", seed=0)

    # The shell.

    def apply(self):
        actions, _ = self.state.plan(self.now_s)
        for action in actions:
            match action:
                case StartAttempt(attempt):
                    self.check_start(attempt)
                    self.flights.append(Flight(attempt, has_begun=self.is_eager))
                    if self.is_eager:
                        self.state.started(attempt)
                case StopAttempt(attempt):
                    flight = next(flight for flight in self.flights if flight.attempt is attempt)
                    assert not flight.has_ended, "an attempt that ended by itself is not aborted"
                    flight.num_stops += 1
                    assert flight.num_stops == 1, "one abort an attempt"
                    flight.is_released = not flight.has_begun
                case SettleTurn(record, outcome):
                    assert record.number not in self.outcomes, "one outcome a turn"
                    assert record.number not in self.cancelled, "no outcome for a cancelled turn"
                    self.outcomes[record.number] = outcome
                    if isinstance(outcome, TurnResult):
                        self.unread.append(record)
        self.hand_over()

    def hand_over(self):
        """What producers do: each finished turn goes to the trainer as soon as there is room."""
        while self.unread and self.samples.has_room:
            record = self.unread.pop(0)
            self.samples.put(record.number, record.oldest_so_far)

    def check_start(self, attempt):
        record, request = attempt.record, attempt.request
        assert request.request_id not in self.request_ids
        self.request_ids.add(request.request_id)
        assert request.prompt_ids == (*record.turn.prompt_ids, *record.token_ids)
        left = record.turn.sampling.max_tokens - len(record.token_ids)
        context = record.max_context_tokens
        room = math.inf if context is None else context - len(request.prompt_ids)
        assert request.sampling.max_tokens == min(left, room) >= 1
        assert attempt.member.state is EngineState.READY
        assert is_admissible(record.turn.versions, attempt.member.version, self.state.engines.index.run)
        bound = record.turn.max_staleness
        assert bound is None or staleness(record.oldest_so_far, self.state.engines.version) <= bound

    def pick(self, index, condition):
        found = [flight for flight in self.flights if condition(flight)]
        return found[index % len(found)] if found else None

    # Engines.

    @initialize(
        target=members,
        kinds=st.lists(st.sampled_from(EngineKind), min_size=1, max_size=3),
        is_eager=st.sampled_from([True, True, True, False]),
        prefill_share=st.sampled_from([PaceConfig().prefill_share, 1.0]),
    )
    def begin_with_engines(self, kinds, is_eager, prefill_share):
        """Most histories begin with engines that hold version 0 and shells that send requests at once."""
        self.begin_with(prefill_share)
        self.is_eager = is_eager
        self.submit(name=0, max_tokens=6, versions=AnyVersion())
        self.submit(name=1, max_tokens=6, versions=AnyVersion())
        members = [self.join(kind=kind, version=0, context=None) for kind in kinds]
        if prefill_share == 1.0:
            self.converse(names=[2, 3], pause_s=0.01)
        return multiple(*members)

    @rule(
        target=members,
        kind=st.sampled_from(EngineKind),
        version=st.sampled_from([None, 0, 1, 2, 3]),
        context=st.sampled_from([None, None, 6, 64]),
    )
    def join(self, kind, version, context):
        self.num_joined += 1
        member = self.state.lifecycle.join(Stub(EngineId(f"e{self.num_joined}")), kind, None, self.now_s)
        version = None if version is None else WeightVersion("r", min(version, self.newest))
        self.state.lifecycle.joined(member, reading(version, 60, at_s=self.now_s, context=context), self.now_s)
        self.apply()
        return member

    @rule(member=members, tokens=st.sampled_from([0, 12, 60]), used=st.sampled_from([0.0, 0.5, 1.0]))
    def read(self, member, tokens, used):
        context = member.reading.max_context_tokens
        taken = reading(member.version, tokens, at_s=self.now_s, context=context, used=int(used * tokens))
        self.state.lifecycle.note_reading(member, taken, self.now_s)
        self.apply()

    @rule(member=members)
    def end_lease(self, member):
        """What a borrower does: no more turns, then away with those that are left."""
        if member.kind is EngineKind.BORROWED and self.state.engines.members.get(member.engine_id) is member:
            self.state.lifecycle.drain(member, "its lease ends", self.now_s)
            self.apply()
            self.state.lifecycle.remove(member, "its lease is over", self.now_s)
            self.apply()

    @rule(member=members)
    def remove(self, member):
        if self.state.engines.members.get(member.engine_id) is member:
            self.state.lifecycle.remove(member, "test", self.now_s)
            self.apply()

    @rule(member=members)
    def drain(self, member):
        self.state.lifecycle.drain(member, "test", self.now_s)
        self.apply()

    @rule(member=members, state=st.sampled_from([EngineState.LOST, EngineState.FENCED]))
    def fall_out(self, member, state):
        self.state.lifecycle.fall_out(member, state, "test", self.now_s)
        self.apply()

    @rule(member=members)
    def begin_update(self, member):
        self.state.lifecycle.begin_update(member, WeightVersion("r", self.newest), self.now_s)
        self.apply()

    @rule(member=members)
    def sync(self, member):
        """An engine takes the newest version in one go."""
        self.begin_update(member)
        self.end_update(member, works=True)

    @rule(member=members, works=st.booleans())
    def end_update(self, member, works):
        if member.state is not EngineState.UPDATING:
            return
        if works:
            self.state.lifecycle.end_update(member, activation(self.newest), self.now_s)
        else:
            self.state.lifecycle.fall_out(member, EngineState.FENCED, "test", self.now_s)
        self.apply()

    @rule()
    def publish(self):
        if not any(member.state is EngineState.UPDATING for member in self.state.engines.members.values()):
            self.newest += 1
            self.samples.note_version(WeightVersion("r", self.newest))
            self.hand_over()

    @rule()
    def train(self):
        """The trainer takes one sample, if there is one."""
        if len(self.samples):
            number = self.samples.take()
            record = next(record for record in self.records if record.number == number)
            assert staleness(record.oldest_so_far, self.samples.latest) <= 1
            self.hand_over()

    # Turns.

    @rule(
        name=st.integers(0, 5),
        max_tokens=st.integers(1, 6),
        versions=CONSTRAINTS,
        num_prompt=st.sampled_from([4, 4, 4, 30]),
        deadline_s=st.sampled_from([None, None, 1.0, 10.0]),
        waits=st.sampled_from([True, True, False]),
        max_staleness=st.sampled_from([None, None, 0, 1]),
    )
    def submit(self, name, max_tokens, versions, *, num_prompt=4, deadline_s=None, waits=True, max_staleness=None):
        if len(self.unread) >= MAX_SAMPLES:
            return  # the producers wait for the trainer
        turn = Turn(
            trajectory_id=f"t{name}",
            group_id=f"g{name % 2}",
            prompt_ids=(1,) * num_prompt,
            sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(9,)),
            versions=versions,
            deadline_s=deadline_s,
            waits_for_version=waits,
            max_staleness=max_staleness,
        )
        self.records.append(self.state.submit(turn, None, self.now_s))
        self.apply()

    @rule(names=st.lists(st.integers(0, 5), min_size=2, max_size=5), num_prompt=st.sampled_from([4, 4, 40]))
    def submit_some(self, names, num_prompt):
        """Turns that any engine may take, so that most of a history is not about turns that wait for good."""
        for name in names:
            self.submit(name=name, max_tokens=6, versions=AnyVersion(), num_prompt=num_prompt, max_staleness=1)

    @rule(
        names=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
        pause_s=st.sampled_from([0.01, 0.3, 2.0]),
    )
    def converse(self, names, pause_s):
        """Trajectories whose environments answer, soon or late: what seats are kept for."""
        for _ in range(3):
            for name in names:
                self.submit(name=name, max_tokens=6, versions=AnyVersion())
            self.advance(0.5)
            for flight in list(self.flights):
                is_theirs = flight.attempt.record.turn.trajectory_id in {f"t{name}" for name in names}
                if is_theirs and flight.has_begun and flight.attempt.is_open:
                    self.chunk_of(flight, [1], FinishReason.STOP)
            while len(self.samples):
                self.train()
            self.advance(pause_s)

    @rule(index=st.integers(0, 99))
    def cancel(self, index):
        live = [record for record in self.records if record.number in self.state.live]
        if live:
            record = live[index % len(live)]
            self.cancelled.add(record.number)
            self.state.cancel(record, self.now_s)
            self.apply()

    @rule(name=st.integers(0, 5))
    def abort_trajectory(self, name):
        live = [record for record in self.state.live.values() if record.turn.trajectory_id == f"t{name}"]
        assert self.state.abort_trajectory(f"t{name}", self.now_s) == len(live)
        self.apply()
        for record in live:
            assert self.outcomes[record.number].finish_reason is FinishReason.ABORTED

    # Streams.

    @rule(index=st.integers(0, 99))
    def begin(self, index):
        flight = self.pick(index, lambda flight: not flight.has_begun and not flight.num_stops)
        if flight:
            flight.has_begun = True
            self.state.started(flight.attempt)

    @rule(
        index=st.integers(0, 99), num_tokens=st.integers(1, 2), finish=st.sampled_from([None, None, FinishReason.STOP])
    )
    def make_tokens(self, index, num_tokens, finish):
        """What engines do most of the time."""
        self.chunk(index, [1] * num_tokens, finish, has_label=True, has_logprobs=True)

    @rule(indices=st.lists(st.integers(0, 99), min_size=1, max_size=4))
    def finish_some(self, indices):
        for index in indices:
            self.chunk(index, [1], FinishReason.STOP, has_label=True, has_logprobs=True)

    @rule(index=st.integers(0, 99))
    def evict(self, index):
        self.chunk(index, [], FinishReason.EVICTED, has_label=False, has_logprobs=True)

    @rule(
        index=st.integers(0, 99),
        token_ids=st.lists(st.integers(1, 9), max_size=4),
        finish=st.sampled_from([None, None, None, *FinishReason]),
        has_label=st.booleans(),
        has_logprobs=st.sampled_from([True, True, True, False]),
    )
    def chunk(self, index, token_ids, finish, has_label, has_logprobs):
        """Chunks of attempts that were given up come too: they are late."""
        flight = self.pick(index, lambda flight: flight.has_begun and not flight.has_ended and not flight.is_released)
        if flight is not None:
            self.chunk_of(flight, token_ids, finish, has_label=has_label, has_logprobs=has_logprobs)

    def chunk_of(self, flight, token_ids, finish, *, has_label=True, has_logprobs=True):
        flight.has_ended = finish is not None and flight.attempt.is_open
        chunk = TokenChunk(
            token_ids=tuple(token_ids),
            logprobs=(-1.0,) * (len(token_ids) if has_logprobs else 0),
            version=flight.attempt.member.version if has_label else None,
            finish_reason=finish,
        )
        before = (list(flight.attempt.record.token_ids), flight.attempt.is_open)
        if self.state.take(flight.attempt, chunk, self.now_s):
            self.apply()
        assert before[1] or flight.attempt.record.token_ids == before[0], "a late chunk was taken"

    @rule(index=st.integers(0, 99), nonsense=st.sampled_from(NONSENSE))
    def gives_no_chunk(self, index, nonsense):
        flight = self.pick(index, lambda flight: flight.has_begun and not flight.has_ended and not flight.is_released)
        if flight is None:
            return
        before = list(flight.attempt.record.token_ids)
        if self.state.take(flight.attempt, nonsense, self.now_s):
            self.apply()
        assert not flight.attempt.is_open
        assert flight.attempt.record.token_ids == before

    @rule(index=st.integers(0, 99), error=st.sampled_from(ERRORS))
    def fail(self, index, error):
        flight = self.pick(index, lambda flight: flight.has_begun and not flight.has_ended and not flight.is_released)
        if flight:
            flight.has_ended = flight.attempt.is_open
            self.state.fail(flight.attempt, error("test"), self.now_s)
            self.apply()

    @rule(index=st.integers(0, 99))
    def release(self, index):
        flight = self.pick(index, lambda flight: flight.num_stops and not flight.is_released)
        if flight:
            flight.is_released = True
            self.state.released(flight.attempt, self.now_s)
            self.apply()

    @rule(duration_s=st.sampled_from([0.01, 0.5, 2.0, 9.0]))
    def advance(self, duration_s):
        end_s = self.now_s + duration_s
        while (due_s := self.state.next_due_s()) is not None and due_s <= end_s:
            self.now_s = max(self.now_s, due_s)
            self.state.tick(self.now_s)
            self.apply()
        self.now_s = end_s

    # What always holds.

    @invariant()
    def every_turn_is_in_one_place(self):
        waiting = {record.number for record in self.state._waiting}
        running = {flight.attempt.record.number for flight in self.flights if flight.attempt.is_open}
        assert not waiting & running
        resting = set(self.state.live) - waiting - running
        assert waiting | running <= set(self.state.live)
        due_s = self.state.next_due_s()
        for number in resting:
            record = self.state.live[number]
            assert record.num_fruitless_in_a_row >= 2
            assert due_s is not None
            assert due_s <= record.queued_s + 60.0 or record.attempt is None
        assert {record.number for record in self.records} == set(self.state.live) | set(self.outcomes) | self.cancelled
        assert len(self.records) == len(self.state.live) + len(self.outcomes) + len(self.cancelled)

    @invariant()
    def reservations_are_what_engines_work_on(self):
        for member in self.state.engines.members.values():
            held = [
                flight.attempt
                for flight in self.flights
                if flight.attempt.member is member and not flight.has_ended and not flight.is_released
            ]
            assert set(member.held) == {attempt.number for attempt in held}
            assert len(held) <= CAP
            assert 1 <= member.slots.num_slots <= CAP
            assert member.kv_reserved_tokens == sum(attempt.kv_tokens for attempt in held)
            seats = member.seats.values()
            assert member.seat_tokens == sum(seat.num_context_tokens for seat in seats)
            left = [attempt.record.progress.left_tokens for attempt in held]
            assert list(member.left_tokens) == sorted([*left, *(seat.left_tokens for seat in seats)])
            shown = [timeless(view) for view in self.state.engines.index]
            assert timeless(self.state.engines.view(member)) in shown, "the index shows the member as it is"

    @invariant()
    def no_turn_waits_that_could_run(self):
        """Of what its own engine keeps for others, a turn takes nothing unless it is the first in the queue."""
        index = self.state.engines.index
        for place, record in enumerate(self.state._waiting):
            if isinstance(decision := index.choose(record.view()), Assign):
                room, prompt_room = self.state._search._room_for(record)
                need = record.num_prompt_tokens + record.num_left_tokens
                assert index.keeps_seats
                assert place > 0
                assert decision.engine_id == record.affinity
                assert need > room
                assert record.num_prompt_tokens > prompt_room

    @invariant()
    def one_engine_at_most_is_kept_free_and_for_a_waiting_turn(self):
        members = self.state.engines.members.values()
        kept = [member for member in members if member.is_kept_free]
        starved = self.state._starvation.record
        assert len(kept) <= 1
        assert not kept or self.state._waiting.has(starved)
        assert all(member.is_kept_free for member in members if member.is_emptied)

    @invariant()
    def no_sample_is_lost_on_the_way_to_the_trainer(self):
        queue = self.samples
        num_results = sum(isinstance(outcome, TurnResult) for outcome in self.outcomes.values())
        assert num_results == queue.num_put + len(self.unread)
        assert queue.num_put == queue.num_taken + queue.num_dropped + len(queue)
        assert len(queue) <= MAX_SAMPLES
        assert len(self.unread) <= MAX_SAMPLES + len(self.records)

    @invariant()
    def budgets_and_spans_hold(self):
        for record in self.records:
            num_tokens = len(record.token_ids)
            assert num_tokens <= record.turn.sampling.max_tokens
            assert len(record.logprobs) == num_tokens
            assert (
                sum(hop.num_tokens for hop in record.hops) + (record.attempt.num_tokens if record.attempt else 0)
                == num_tokens
            )
            end = 0
            for span in record.spans:
                assert end <= span.start < span.end <= num_tokens
                assert is_admissible(record.turn.versions, span.version, "r")
                end = span.end

    @invariant()
    def results_are_complete(self):
        for record in self.records:
            outcome = self.outcomes.get(record.number)
            if isinstance(outcome, TurnResult) and outcome.finish_reason is FinishReason.EVICTED:
                message = "an eviction is never a result"
                raise AssertionError(message)
            assert (outcome is None) == (record.number in self.state.live or record.number in self.cancelled)
            if isinstance(outcome, TurnResult):
                assert outcome.token_ids == tuple(record.token_ids)
                assert outcome.hops or outcome.finish_reason is not FinishReason.STOP
            elif outcome is not None:
                assert outcome.partial is not None
                assert outcome.partial.token_ids == tuple(record.token_ids), "what was made is not lost"

    def drain_time(self):
        """Let everything that time can bring happen: a turn that is still live then waits for an engine that answers."""
        for _ in range(1000):
            due_s = self.state.next_due_s()
            if due_s is None:
                return
            self.now_s = max(self.now_s, due_s)
            self.state.tick(self.now_s)
            self.apply()

    def read_all(self):
        """Read each engine once more, as a pool does all the time."""
        for member in list(self.state.engines.members.values()):
            if member.reading is not None and self.state.engines.is_present(member):
                self.state.lifecycle.note_reading(
                    member, attrs.evolve(member.reading, read_at_s=self.now_s), self.now_s
                )
        self.apply()

    def let_all_end(self):
        """Let an engine and some trajectories more come in, every request end, and time pass."""
        self.sync(self.join(kind=EngineKind.DEDICATED, version=None, context=None))
        self.converse(names=[6, 7, 8], pause_s=0.01)
        for name in range(9, 13):
            self.submit(name=name, max_tokens=6, versions=AnyVersion())
        for _ in range(200):
            open_flights = [flight for flight in self.flights if flight.attempt.is_open]
            for flight in open_flights:
                if not flight.has_begun:
                    flight.has_begun = True
                    self.state.started(flight.attempt)
                if flight.attempt.is_open:
                    self.chunk_of(flight, [1], FinishReason.STOP)
            for flight in self.flights:
                if flight.num_stops and not flight.is_released:
                    flight.is_released = True
                    self.state.released(flight.attempt, self.now_s)
            self.advance(9.0)
            self.read_all()
            engines = self.state.engines  # turns may wait for seats to expire
            is_kept = engines.index.keeps_seats and any(m.seats for m in engines.members.values() if m.is_serving)
            if not open_flights and not is_kept and not any(flight.attempt.is_open for flight in self.flights):
                return
        message = "turns never come to an end"
        raise AssertionError(message)

    def teardown(self):
        self.let_all_end()
        for record in self.state._waiting:
            idle = [m for m in self.state.engines.members.values() if self.state._starvation._can_serve(m, record)]
            assert not idle, "a turn waits although an engine that could take it has nothing to do"
        self.state.close(self.now_s)
        self.apply()
        assert not self.state.live
        assert not self.state._open
        assert not len(self.state._waiting)
        for flight in self.flights:
            if flight.num_stops and not flight.is_released:
                self.state.released(flight.attempt, self.now_s)
        assert all(not flight.attempt.is_open and not flight.attempt.member.held for flight in self.flights)
        assert all(flight.has_ended or flight.num_stops == 1 for flight in self.flights)
        for member in self.state.engines.members.values():
            assert (member.held, member.kv_reserved_tokens) == ({}, 0)
        self.drain_time()
        assert self.state.next_due_s() is None, "nothing is left to wait for"


def reading(version, tokens, *, at_s=0.0, context=None, used=0):
    return EngineSnapshot(
        num_running=0,
        num_waiting=0,
        kv_used_tokens=used,
        kv_total_tokens=tokens,
        weight_version=version,
        is_paused=False,
        read_at_s=at_s,
        max_context_tokens=context,
    )


def activation(n):
    return Activation(version=WeightVersion("r", n), stage_s=0.0, pause_s=0.0, fetched_bytes=0, is_verified=True)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=NUM_HISTORIES, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
