"""The pool's sync core against a model of its shell: any order of events keeps its invariants."""

from __future__ import annotations

import attrs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rose.errors import (
    EngineBusyError,
    EngineError,
    EngineFencedError,
    EngineLostError,
    RequestRefusedError,
)
from rose.policies.routing import Assign, EngineState, EngineView, RoutingConfig
from rose.policies.staleness import is_admissible
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
    TurnResult,
    WeightVersion,
)

CAP = 2
ERRORS = [EngineBusyError, RequestRefusedError, EngineLostError, EngineFencedError, EngineError, OSError]
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
    return attrs.evolve(view, pace_s=None, slope_s=0.0, prefill_s=0.0, num_seats=0, is_slow=False)


class PoolMachine(RuleBasedStateMachine):
    members = Bundle("members")

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.config = PoolConfig(
            routing=RoutingConfig(cap_per_engine=CAP),
            max_hops=4,
            max_busy=3,
            resume_after_abort=ResumePolicy.SAME_VERSION,
        )
        self.state = PoolState(self.config, name="p", seed=0)
        self.flights: list[Flight] = []
        self.records, self.outcomes, self.cancelled = [], {}, set()
        self.request_ids: set[str] = set()
        self.num_joined = 0
        self.newest = 0

    # The shell.

    def apply(self):
        actions, _ = self.state.plan(self.now_s)
        for action in actions:
            match action:
                case StartAttempt(attempt):
                    self.check_start(attempt)
                    self.flights.append(Flight(attempt))
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

    def check_start(self, attempt):
        record, request = attempt.record, attempt.request
        assert request.request_id not in self.request_ids
        self.request_ids.add(request.request_id)
        assert request.prompt_ids == (*record.turn.prompt_ids, *record.token_ids)
        assert request.sampling.max_tokens == record.turn.sampling.max_tokens - len(record.token_ids) >= 1
        assert attempt.member.state is EngineState.READY
        assert is_admissible(record.turn.versions, attempt.member.version, self.state.engines.index.run)

    def pick(self, index, condition):
        found = [flight for flight in self.flights if condition(flight)]
        return found[index % len(found)] if found else None

    # Engines.

    @rule(target=members, kind=st.sampled_from(EngineKind), version=st.sampled_from([None, 0, 1, 2, 3]))
    def join(self, kind, version):
        self.num_joined += 1
        member = self.state.lifecycle.join(Stub(EngineId(f"e{self.num_joined}")), kind, None, self.now_s)
        version = None if version is None else WeightVersion("r", min(version, self.newest))
        self.state.lifecycle.joined(member, reading(version, 60), self.now_s)
        self.apply()
        return member

    @rule(member=members, tokens=st.sampled_from([0, 12, 60]))
    def read(self, member, tokens):
        self.state.lifecycle.note_reading(member, reading(member.version, tokens))
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

    # Turns.

    @rule(
        name=st.integers(0, 5),
        max_tokens=st.integers(1, 6),
        versions=CONSTRAINTS,
        deadline_s=st.sampled_from([None, None, 1.0, 10.0]),
    )
    def submit(self, name, max_tokens, versions, deadline_s):
        turn = Turn(
            trajectory_id=f"t{name}",
            group_id=f"g{name % 2}",
            prompt_ids=(1,) * 4,
            sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(9,)),
            versions=versions,
            deadline_s=deadline_s,
        )
        self.records.append(self.state.submit(turn, None, self.now_s))
        self.apply()

    @rule(index=st.integers(0, 99))
    def cancel(self, index):
        live = [record for record in self.records if record.number in self.state.live]
        if live:
            record = live[index % len(live)]
            self.cancelled.add(record.number)
            self.state.cancel(record, self.now_s)
            self.apply()

    # Streams.

    @rule(index=st.integers(0, 99))
    def begin(self, index):
        flight = self.pick(index, lambda flight: not flight.has_begun and not flight.num_stops)
        if flight:
            flight.has_begun = True
            self.state.started(flight.attempt)

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
        if flight is None:
            return
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
        assert waiting | running == set(self.state.live)
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
            assert member.kv_reserved_tokens == sum(attempt.max_kv_tokens for attempt in held)
            shown = [timeless(view) for view in self.state.engines.index]
            assert timeless(self.state.engines.view(member)) in shown, "the index shows the member as it is"

    @invariant()
    def no_turn_waits_that_could_run(self):
        for record in self.state._waiting:
            assert not isinstance(self.state.engines.index.choose(record.view()), Assign)

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

    def teardown(self):
        self.state.close(self.now_s)
        self.apply()
        assert not self.state.live
        for flight in self.flights:
            if flight.num_stops and not flight.is_released:
                self.state.released(flight.attempt, self.now_s)
        assert all(not flight.attempt.is_open and not flight.attempt.member.held for flight in self.flights)
        assert all(flight.has_ended or flight.num_stops == 1 for flight in self.flights)


def reading(version, tokens):
    return EngineSnapshot(
        num_running=0,
        num_waiting=0,
        kv_used_tokens=0,
        kv_total_tokens=tokens,
        weight_version=version,
        is_paused=False,
        read_at_s=0.0,
    )


def activation(n):
    return Activation(version=WeightVersion("r", n), stage_s=0.0, pause_s=0.0, fetched_bytes=0, is_verified=True)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
