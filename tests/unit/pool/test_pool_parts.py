"""The small sync parts of the pool: turns, queue, memory, circuit, timers, config."""

from __future__ import annotations

import math
from random import Random

import pytest

from rose.errors import EngineError
from rose.policies.routing import Circuit, RoutingConfig
from rose.pool.actions import SettleTurn, TimerKind, Timers
from rose.pool.circuit import CircuitBreaker
from rose.pool.config import PoolConfig
from rose.pool.state import PoolState
from rose.pool.turns import TurnRecord
from rose.pool.waiting import TrajectoryMemory, WaitingQueue
from rose.types import (
    EngineId,
    FinishReason,
    RequestId,
    Sampling,
    TokenChunk,
    Turn,
    VersionSpan,
    WeightVersion,
)

V1, V2 = WeightVersion("r", 1), WeightVersion("r", 2)


def record(*, order=(0, 0, 0), **sampling) -> TurnRecord:
    turn = Turn(trajectory_id="t", group_id="g", prompt_ids=(7, 8), sampling=Sampling(**{"max_tokens": 5, **sampling}))
    return TurnRecord(turn=turn, number=0, order=order, arrived_s=0.0, queued_s=0.0)


def chunk(*token_ids: int) -> TokenChunk:
    return TokenChunk(token_ids=token_ids, logprobs=tuple(-0.5 * i for i in token_ids))


class TestTurnRecord:
    def test_the_first_request_is_the_turn_itself(self):
        turn = record(seed=3)
        request = turn.next_request(RequestId("a"))
        assert (request.prompt_ids, request.sampling) == ((7, 8), turn.turn.sampling)

    def test_a_continuation_has_the_tokens_as_prompt_the_rest_as_budget_and_a_seed_of_its_own(self):
        turn = record(seed=3)
        turn.take(chunk(1, 2), V1)
        request = turn.next_request(RequestId("a"))
        assert request.prompt_ids == (7, 8, 1, 2)
        assert (request.sampling.max_tokens, request.sampling.seed) == (3, 5)

    def test_pieces_are_joined_and_spans_of_one_version_merged(self):
        turn = record()
        for piece, version in ((chunk(1), V1), (chunk(2), V1), (chunk(3, 4), V2), (chunk(5), V2)):
            turn.take(piece, version)
        result = turn.result(FinishReason.LENGTH)
        assert result.token_ids == (1, 2, 3, 4, 5)
        assert result.logprobs == (-0.5, -1.0, -1.5, -2.0, -2.5)
        assert result.versions == (VersionSpan(version=V1, start=0, end=2), VersionSpan(version=V2, start=2, end=5))

    def test_tokens_without_a_version_leave_a_gap_between_spans(self):
        turn = record()
        for piece, version in ((chunk(1), V1), (chunk(2), None), (chunk(3), V1)):
            turn.take(piece, version)
        assert turn.spans == [VersionSpan(version=V1, start=0, end=1), VersionSpan(version=V1, start=2, end=3)]

    def test_no_token_beyond_the_budget_is_taken(self):
        turn = record()
        assert turn.take(chunk(1, 2, 3), V1) == 3
        assert turn.take(chunk(4, 5, 6), V1) == 2
        assert turn.take(chunk(7), V1) == 0
        assert (turn.token_ids, len(turn.logprobs)) == ([1, 2, 3, 4, 5], 5)
        assert turn.spans == [VersionSpan(version=V1, start=0, end=5)]

    def test_missing_logprobs_are_an_error_and_nothing_is_taken(self):
        turn = record()
        with pytest.raises(EngineError, match="2 tokens came with 1 log-probs"):
            turn.take(TokenChunk(token_ids=(1, 2), logprobs=(-1.0,)), V1)
        assert turn.token_ids == []

    def test_logprobs_that_nobody_asked_for_are_dropped(self):
        turn = record(logprobs=False)
        turn.take(chunk(1, 2), V1)
        assert turn.logprobs == []

    def test_a_turn_is_complete_at_its_budget_or_at_a_stop_token(self):
        turn = record(stop_token_ids=(9,))
        turn.take(chunk(1), V1)
        assert turn.finish_reason_so_far() is None
        turn.take(chunk(9), V1)
        assert turn.finish_reason_so_far() is FinishReason.STOP
        full = record()
        full.take(chunk(1, 2, 3, 4, 5), V1)
        assert full.finish_reason_so_far() is FinishReason.LENGTH


class TestWaitingQueue:
    def test_turns_leave_in_the_order_of_group_progress_arrival(self):
        queue = WaitingQueue()
        orders = [(1, 0, 1), (0, 0, 4), (0, -2, 5), (0, 0, 3)]
        for order in orders:
            queue.add(record(order=order))
        assert [waiting.order for waiting in queue] == [(0, -2, 5), (0, 0, 3), (0, 0, 4), (1, 0, 1)]

    def test_removing_takes_this_very_turn(self):
        queue, inside, outside = WaitingQueue(), record(order=(0, 0, 1)), record(order=(0, 0, 1))
        queue.add(inside)
        assert not queue.remove(outside)
        assert queue.remove(inside)
        assert not queue.remove(inside)
        assert len(queue) == 0

    def test_the_first_turn_that_fits_is_found_in_its_line_alone(self):
        """Room is for prompt and answer together, or for a prompt alone; the answers here are of 5 tokens."""
        queue = WaitingQueue()
        turns = [record(order=(0, 0, number)) for number in range(4)]
        turns[0].token_ids = [1] * 3  # prompt of 5, 2 left to make
        turns[1].is_dedicated_only = turns[2].is_dedicated_only = True
        turns[2].turn = record(max_tokens=1).turn
        for turn in turns:
            queue.add(turn)
        open_line, dedicated_line = queue.heads()
        assert (open_line, dedicated_line) == (turns[0], turns[1])
        assert queue.first_fitting(open_line, (7, -math.inf)) is turns[0]
        assert queue.first_fitting(open_line, (6, 2)) is turns[3]
        assert queue.first_fitting(open_line, (6, 1)) is None
        assert queue.first_fitting(dedicated_line, (6, -math.inf)) is turns[2]
        assert (queue.num_unfit(open_line, (6, 2)), queue.num_unfit(dedicated_line, (2, -math.inf))) == (1, 2)
        queue.remove(turns[1])
        assert queue.heads() == [turns[0], turns[2]]
        queue.remove(turns[2])
        assert queue.heads() == [turns[0]]


class TestTrajectoryMemory:
    def test_old_groups_come_first_and_in_a_group_the_trajectory_that_is_furthest(self):
        memory = TrajectoryMemory(10)
        memory.order("a", "g1", 0)
        memory.order("b", "g2", 1)
        memory.note_finished("c", EngineId("e"))
        memory.note_finished("c", EngineId("f"))
        assert memory.order("c", "g1", 2) == (0, -2, 2)
        assert memory.order("d", "g2", 3) == (1, 0, 3)
        assert memory.known("c").last_engine == "f"
        assert memory.known("d").last_engine is None

    def test_it_forgets_the_least_recently_used(self):
        memory = TrajectoryMemory(2)
        for number, name in enumerate("abac"):
            memory.order(name, name, number)
            memory.note_finished(name, EngineId(name))
        assert memory.known("b").last_engine is None
        assert memory.known("a").last_engine == "a"
        assert memory.order("b", "b", 9) == (9, 0, 9)
        assert memory.order("c", "c", 10) == (3, -1, 10)


class TestCircuitBreaker:
    def breaker(self) -> CircuitBreaker:
        config = PoolConfig(jitter_fraction=0.0, busy_s=0.1, busy_max_s=0.4, circuit_s=5.0, circuit_max_s=20.0)
        return CircuitBreaker(config, Random(0))

    def test_it_opens_at_the_first_failure_and_lets_one_try_after_the_pause(self):
        breaker = self.breaker()
        assert breaker.fail(1.0) == 6.0
        assert not breaker.tick(5.9)
        assert breaker.state is Circuit.OPEN
        assert breaker.tick(6.0)
        assert breaker.state is Circuit.HALF_OPEN
        assert breaker.succeed()
        assert breaker.state is Circuit.CLOSED
        assert not breaker.succeed()

    def test_a_clock_that_rounds_down_does_not_miss_the_moment(self):
        """Timers are due a hair early; a circuit that then says 'not yet' would never be asked again."""
        breaker = self.breaker()
        retry_at_s = breaker.fail(1.0)
        timers = Timers(lambda _kind, _subject: True)
        timers.set(retry_at_s, TimerKind.CIRCUIT, breaker)
        early_s = retry_at_s - 1e-10
        assert timers.pop_due(early_s) is not None
        assert breaker.tick(early_s)

    def test_pauses_double_while_it_fails_and_start_anew_after_a_success(self):
        breaker, now_s, pauses = self.breaker(), 0.0, []
        for _ in range(4):
            pauses.append(breaker.fail(now_s) - now_s)
            now_s = breaker.retry_at_s
            breaker.tick(now_s)
        assert pauses == [5.0, 10.0, 20.0, 20.0]
        breaker.succeed()
        assert breaker.fail(100.0) == 105.0

    def test_requests_that_fail_together_count_once(self):
        breaker = self.breaker()
        for _ in range(5):
            breaker.fail(0.0)
        breaker.tick(breaker.retry_at_s)
        assert breaker.num_failures == 1

    def test_a_token_of_an_older_request_does_not_close_an_open_circuit(self):
        breaker = self.breaker()
        breaker.busy(0.0)
        assert not breaker.succeed()
        assert breaker.state is Circuit.OPEN

    def test_busy_pauses_are_short_and_do_not_shorten_a_failure_pause(self):
        breaker = self.breaker()
        assert breaker.busy(0.0) == pytest.approx(0.1)
        assert breaker.fail(0.0) == 5.0
        assert breaker.busy(0.0) == 5.0

    def test_jitter_stretches_within_its_share(self):
        config = PoolConfig(jitter_fraction=0.5, circuit_s=10.0)
        pauses = [CircuitBreaker(config, Random(seed)).fail(0.0) for seed in range(20)]
        assert all(10.0 <= pause <= 15.0 for pause in pauses)
        assert len(set(pauses)) > 1


class TestTimers:
    def test_entries_come_in_order_and_only_those_that_are_needed(self):
        needed = {"a", "c"}
        timers = Timers(lambda _kind, subject: subject in needed)
        for due_s, subject in ((3.0, "a"), (1.0, "b"), (2.0, "c")):
            timers.set(due_s, TimerKind.STALL, subject)
        assert timers.next_due_s() == 2.0
        assert timers.pop_due(1.9) is None
        assert timers.pop_due(2.0) == (TimerKind.STALL, "c")
        assert timers.pop_due(9.0) == (TimerKind.STALL, "a")
        assert timers.next_due_s() is None


class TestConfig:
    @pytest.mark.parametrize(
        "bad",
        [
            {"stall_s": 0.0},
            {"max_hops": 0},
            {"max_busy": 1.5},
            {"busy_s": -1.0},
            {"jitter_fraction": 1.1},
            {"resume_after_abort": "on"},
            {"routing": None},
            {"stall_s": float("nan")},
            {"max_hops": True},
            {"busy_max_s": 0.01},
            {"circuit_max_s": 4.0},
        ],
    )
    def test_a_setting_that_makes_no_sense_is_refused_by_name(self, bad):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))} must be .*, got .*$") as caught:
            PoolConfig(**bad)
        assert len(caught.value.args) == 1

    def test_the_defaults_are_those_of_the_paper(self):
        assert (PoolConfig().routing.cap_per_engine, PoolConfig().stall_s) == (16, 2.0)
        assert RoutingConfig() == PoolConfig().routing


@pytest.mark.parametrize("end", ["closed", "no engine"])
def test_a_failed_turn_that_takes_its_group_along_settles_each_once(end):
    state = PoolState(PoolConfig(max_group_failures=1, no_engine_timeout_s=5.0), name="p", seed=0)
    turns = [
        Turn(trajectory_id=f"t{i}", group_id="g", prompt_ids=(1,), sampling=Sampling(max_tokens=4)) for i in range(3)
    ]
    records = [state.submit(turn, None, 0.0) for turn in turns]
    records[0].is_suspect = True
    state.plan(0.0)
    if end == "closed":
        state.close(1.0)
    else:
        state.tick(6.0)
    actions, _ = state.plan(6.0)
    assert [action.record for action in actions if isinstance(action, SettleTurn)] == records
    assert sum(state.recorder.read().failed.values()) == 3
