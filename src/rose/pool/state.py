"""The pool's decisions: sync, without I/O, clock or event loop. The shell tells it what happened and does what it returns.

Invariants:

* A live turn is in exactly one place: in the queue, at rest until a timer queues it, or in one open attempt.
* An attempt that was started and did not end by itself is stopped exactly once (``StopAttempt``); its reservation is
  held until the shell reports ``released``. One that ended by itself is never stopped.
* After a turn is settled nothing of it is left but the release of its last request.
* Every change is followed by ``plan``, which routes what can be routed and hands out the I/O to do.

Life cycle of a turn: submit -> queued -> [attempt: start -> tokens ... -> end] -> queued again (evicted, stalled, lost,
busy, aborted; after a rest when attempts fail in a row) -> ... -> settled with a result or an error, or cancelled by its caller at
any point. A turn that must not or cannot run (no room in any context, a dropped group, weights too far on, a version that is not
there and not waited for) is settled when it would be queued; no engine hears of it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any

from rose.errors import (
    EngineBusyError,
    EngineError,
    EngineFencedError,
    EngineLostError,
    RequestRefusedError,
    RoseError,
    TurnFailedError,
)
from rose.policies.migration import remaining_tokens
from rose.policies.routing import Assign, EngineState, WaitReason
from rose.policies.staleness import is_admissible
from rose.pool import failures, retries
from rose.pool.actions import TIME_EPSILON_S, Action, SettleTurn, StartAttempt, StopAttempt, TimerKind, Timers
from rose.pool.config import PoolConfig, ResumePolicy
from rose.pool.events import PoolEvent
from rose.pool.groups import GroupBreaker
from rose.pool.journal import Journal
from rose.pool.lifecycle import Lifecycle
from rose.pool.membership import Member, Membership
from rose.pool.objections import Objections
from rose.pool.outage import Outage
from rose.pool.search import Search
from rose.pool.sources import TokenSource
from rose.pool.starvation import Starvation
from rose.pool.statistics import Recorder
from rose.pool.turns import Attempt, Progress, TurnRecord, check_chunk
from rose.pool.waiting import Known, TrajectoryMemory, WaitingQueue
from rose.types import (
    EngineKind,
    FinishReason,
    Hop,
    HopEnd,
    RequestId,
    TokenChunk,
    Turn,
    TurnResult,
)


class PoolState:
    """Turns, engines and reservations of one pool.

    Attributes:
        engines: The membership, its routing index and accounts.
        lifecycle: What happens to engines.
        live: Turns that are not settled, by number.
        recorder: Counts what became of turns and tokens.
    """

    def __init__(self, config: PoolConfig, *, name: str, seed: int) -> None:
        self.engines = Membership(config, Random(seed))
        self.live: dict[int, TurnRecord] = {}
        self.recorder = Recorder()
        self._config = config
        self._name = name
        self._rng = Random(seed)
        self._open: dict[int, Attempt] = {}
        self._waiting = WaitingQueue()
        self._memory = TrajectoryMemory(config.max_trajectories)
        self._groups = GroupBreaker(config)
        self._objections = Objections(self.engines, self._groups)
        self._outage = Outage(self.engines, config.no_engine_timeout_s)
        self._starvation = Starvation(self.engines, config.starve_s)
        self._search = Search(self._waiting, self.engines.index, self._objections, self._starvation)
        self._numbers = itertools.count()
        self._timers = Timers(self._is_timer_needed)
        self._actions: list[Action] = []
        self._journal = Journal()
        self.lifecycle = Lifecycle(self.engines, self._journal, self._move_on)

    # What the caller of a turn does.

    def submit(self, turn: Turn, waiter: Any, now_s: float, *, source: TokenSource | None = None) -> TurnRecord:
        """Take a turn in. ``source`` gives its tokens, in place of the engines' own streams."""
        number = next(self._numbers)
        known = self._memory.known(turn.trajectory_id)
        record = TurnRecord(
            turn=turn,
            number=number,
            order=self._memory.order(turn.trajectory_id, turn.group_id, number),
            arrived_s=now_s,
            queued_s=now_s,
            affinity=known.last_engine,
            avoid=self.engines.still_stalled(known.stalls),
            progress=Progress(
                left_tokens=self._left_tokens(known, len(turn.prompt_ids)),
                num_context_tokens=known.num_context_tokens,
            ),
            oldest=known.oldest,
            waiter=waiter,
            source=source,
        )
        if self.engines.take_seat(turn.trajectory_id, known, now_s):
            self._search.note_returned(record)
        self.live[number] = record
        if turn.deadline_s is not None:
            self._timers.set(now_s + turn.deadline_s, TimerKind.DEADLINE, number)
        try:
            self._enqueue(record, now_s)
        except BaseException:
            self._withdraw(record, now_s)  # nobody would wait for it
            raise
        return record

    def cancel(self, record: TurnRecord, now_s: float) -> None:
        """Drop a turn that its caller no longer wants; a no-op once it is settled."""
        if self._withdraw(record, now_s):
            self._journal.failed(record, "cancelled", now_s)
            self.recorder.failed("cancelled", len(record.token_ids))

    def abort_trajectory(self, trajectory_id: str, now_s: float) -> int:
        """End the live turns of a trajectory as aborted, with the tokens that they have; returns how many there were."""
        records = [record for record in self.live.values() if record.turn.trajectory_id == trajectory_id]
        for record in records:
            self._withdraw(record, now_s)
            self._settle(record, record.result(FinishReason.ABORTED), now_s)
        return len(records)

    # What a stream brings.

    def started(self, attempt: Attempt) -> None:
        """Note that the request is being sent: from now on, giving up means aborting."""
        attempt.is_started = True

    def take(self, attempt: Attempt, chunk: TokenChunk, now_s: float) -> bool:
        """Take a chunk of an attempt's stream; returns whether a plan is due. Late chunks are discarded."""
        if not attempt.is_open:
            return False
        record, member = attempt.record, attempt.member
        is_over = False
        try:
            check_chunk(chunk)
            is_over = chunk.finish_reason is not None
            version = member.version if chunk.version is None else chunk.version
            if chunk.token_ids and not is_admissible(record.versions, version, self.engines.index.run):
                self._move_on(attempt, HopEnd.ABORTED, now_s, is_over=is_over)
                return True
            taken = record.take(chunk, version)
        except EngineError as error:
            self._break_off(attempt, str(error), now_s, is_over=is_over)
            return True
        has_news = taken > 0 and self.engines.note_tokens(attempt, taken, now_s)
        if chunk.finish_reason is not None:
            self._finish(attempt, chunk.finish_reason, now_s)
        elif taken < len(chunk.token_ids):
            self._end(attempt, HopEnd.FINISHED, now_s, is_over=False)
            self._settle(record, record.result(FinishReason.LENGTH), now_s)
        else:
            return has_news
        return True

    def fail(self, attempt: Attempt, error: Exception, now_s: float) -> None:
        """Note that the attempt's stream raised, or broke off without a finish reason."""
        if not attempt.is_open:
            return
        member = attempt.member
        match error:
            case EngineBusyError():
                self._pause_member(member, member.circuit.busy(now_s))
                self._move_on(attempt, HopEnd.BUSY, now_s, is_over=True, why=str(error))
            case RequestRefusedError():
                self._take_refusal(attempt, error, now_s)
            case EngineFencedError():
                self._move_on(attempt, HopEnd.LOST, now_s, is_over=True, why=str(error))
                self.lifecycle.fall_out(member, EngineState.FENCED, str(error), now_s)
            case EngineLostError():
                self._move_on(attempt, HopEnd.LOST, now_s, is_over=True, why=str(error))
                self.lifecycle.fall_out(member, EngineState.LOST, str(error), now_s)
            case EngineError():
                self._break_off(attempt, str(error) or type(error).__name__, now_s, is_over=True)
            case TypeError() | ValueError() if attempt.record.is_suspect:
                # One turn must not close every engine: it may be the turn that no engine can digest.
                self._move_on(attempt, HopEnd.LOST, now_s, is_over=True, why=_name_error(error))
            case _:
                attempt.record.is_suspect = True
                self._break_off(attempt, _name_error(error), now_s, is_over=True)

    def released(self, attempt: Attempt, now_s: float) -> None:
        """Note that the engine no longer works on a stopped attempt."""
        self.engines.let_go(attempt.member, attempt, now_s)

    # Time, planning, the end.

    def next_due_s(self) -> float | None:
        """Return when ``tick`` should be called next, if time alone can change anything."""
        return self._timers.next_due_s()

    def tick(self, now_s: float) -> None:
        """Let time pass: stalled turns move, deadlines end turns, circuits become half open."""
        while (due := self._timers.pop_due(now_s)) is not None:
            kind, subject = due
            if kind is TimerKind.STALL:
                self._check_stall(self._open[subject], now_s)
            elif kind is TimerKind.DEADLINE:
                self._miss_deadline(self.live[subject], now_s)
            elif kind is TimerKind.REST:
                self._enqueue(self.live[subject], now_s)
            elif kind is TimerKind.OUTAGE:
                self._give_up_on_engines(now_s)
            elif subject.circuit.tick(now_s):
                self.engines.refresh(subject)

    def plan(self, now_s: float) -> tuple[list[Action], list[PoolEvent]]:
        """Route every turn that can go now; returns the I/O to do, in order, and what there is to tell."""
        self.engines.pace.now_s = now_s
        if self._outage.look(now_s):
            self._set_outage_timer(self._waiting)
        while (found := self._search.next()) is not None:
            record, decision = found
            if isinstance(decision, Assign):
                self._assign(record, decision, now_s)
            else:
                self._give_up_version(record, now_s)
        if len(self._waiting):
            self._starvation.look(self._waiting.heads(), now_s)
        actions, self._actions = self._actions, []
        return actions, self._journal.take()

    def close(self, now_s: float) -> None:
        """End every turn with an error."""
        for record in list(self.live.values()):
            if self._withdraw(record, now_s):  # one that failed may have taken its group along
                self._fail_turn(record, TurnFailedError("the pool was closed", tuple(record.hops)), now_s)

    def waiting_reasons(self) -> Counter[WaitReason]:
        """Count the waiting turns by what they wait for."""
        return self._search.reasons()

    # Below: one small step each.

    def _left_tokens(self, known: Known, num_context_tokens: int) -> float:
        return remaining_tokens(self._config.routing, num_made=known.num_made_tokens, num_context=num_context_tokens)

    def _enqueue(self, record: TurnRecord, now_s: float) -> None:
        """Put a turn into the queue, or settle it if it is not to run."""
        record.queued_s = now_s
        record.max_context_tokens = self.engines.max_context_tokens
        done = record.finish_reason_so_far()
        error = None if done is not None else self._objections.find(record, now_s)
        if done is not None:
            self._settle(record, record.result(done), now_s)
        elif error is not None:
            self._fail_turn(record, error, now_s)
        else:
            self._waiting.add(record)
            self._set_outage_timer([record])

    def _set_outage_timer(self, records: Iterable[TurnRecord]) -> None:
        if (due_s := self._outage.earliest_due_s(records)) < math.inf:
            self._timers.set(due_s, TimerKind.OUTAGE, None)

    def _give_up_on_engines(self, now_s: float) -> None:
        """Fail the turns that waited through an outage for too long."""
        for record in self._waiting:
            # One that failed may have taken its group along.
            if self._outage.due_s(record) <= now_s + TIME_EPSILON_S and self._waiting.remove(record):
                error = failures.no_engine(record, self.engines.members.values(), self._config.no_engine_timeout_s)
                self._fail_turn(record, error, now_s)
        self._set_outage_timer(self._waiting)

    def _assign(self, record: TurnRecord, decision: Assign, now_s: float) -> None:
        self._waiting.remove(record)
        if (error := self._objections.find_stale(record)) is not None:
            self._fail_turn(record, error, now_s)
            return
        number, member, source = next(self._numbers), self.engines.members[decision.engine_id], record.source
        asked = member.engine_id, member.version, record.num_left_tokens
        begun = None if source is None else source.begun_at(*asked)
        attempt = Attempt(
            record=record,
            member=member,
            request=record.next_request(begun or RequestId(f"{self._name}-{number}")),
            reason=decision.reason,
            number=number,
            last_progress_s=now_s,
            assigned_s=now_s,
            version=member.version,
        )
        record.attempt = self._open[number] = attempt
        self.engines.hold(member, attempt, now_s)
        self._timers.set(now_s + self._config.stall_s, TimerKind.STALL, number)
        self._actions.append(StartAttempt(attempt))
        self._journal.assigned(attempt, now_s)
        self.recorder.assigned(attempt)

    def _finish(self, attempt: Attempt, reason: FinishReason, now_s: float) -> None:
        """Act on the finish reason that the engine gave."""
        record = attempt.record
        if reason is FinishReason.EVICTED:
            attempt.member.slots.evicted(len(attempt.member.held), now_s)
            self._pause_member(attempt.member, attempt.member.circuit.busy(now_s))
            self._move_on(attempt, HopEnd.EVICTED, now_s, is_over=True)
        elif reason is not FinishReason.ABORTED:
            self._end(attempt, HopEnd.FINISHED, now_s, is_over=True)
            self._settle(record, record.result(reason), now_s)
        elif self._config.resume_after_abort is ResumePolicy.OFF:
            self._end(attempt, HopEnd.ABORTED, now_s, is_over=True)
            self._settle(record, record.result(record.finish_reason_so_far() or reason), now_s)
        else:
            if self._config.resume_after_abort is ResumePolicy.SAME_VERSION and record.spans:
                record.pinned = record.spans[-1].version
            self._move_on(attempt, HopEnd.ABORTED, now_s, is_over=True)

    def _break_off(self, attempt: Attempt, why: str, now_s: float, *, is_over: bool) -> None:
        """End an attempt whose engine misbehaved, and leave the engine alone for a while."""
        self._pause_member(attempt.member, attempt.member.circuit.fail(now_s))
        self._move_on(attempt, HopEnd.LOST, now_s, is_over=is_over, why=why)

    def _take_refusal(self, attempt: Attempt, error: RequestRefusedError, now_s: float) -> None:
        """Fail the turn, unless a borrowed engine refused what one of the job's own may take."""
        if attempt.member.kind is EngineKind.BORROWED and self.engines.has_dedicated():
            attempt.record.is_dedicated_only = True
            self._move_on(attempt, HopEnd.REFUSED, now_s, is_over=True, why=str(error))
        else:
            self._end(attempt, HopEnd.REFUSED, now_s, is_over=True)
            self._fail_turn(attempt.record, error, now_s)

    def _check_stall(self, attempt: Attempt, now_s: float) -> None:
        member = attempt.member
        due_s = retries.stall_due_s(attempt, self._config, now_s, prefill_s=self.engines.pace.prefill_s)
        if due_s > now_s + TIME_EPSILON_S:
            self._timers.set(due_s, TimerKind.STALL, attempt.number)
            return
        if member.last_token_s <= attempt.last_progress_s:
            self._pause_member(member, member.circuit.fail(now_s))
        self._memory.note_stalled(attempt.record.turn.trajectory_id, attempt.engine_id, now_s)
        self._move_on(attempt, HopEnd.STALLED, now_s)

    def _miss_deadline(self, record: TurnRecord, now_s: float) -> None:
        doing = self._objections.describe(record, is_waiting=self._waiting.has(record))
        self._withdraw(record, now_s)
        self._fail_turn(record, failures.too_late(record, doing), now_s)

    def _move_on(self, attempt: Attempt, ended: HopEnd, now_s: float, *, is_over: bool = False, why: str = "") -> None:
        """End an attempt before its turn is done: the turn is queued again, unless it turns out to be complete."""
        record = attempt.record
        self._end(attempt, ended, now_s, is_over=is_over)
        attempt.member.account.num_rerouted += 1
        self._journal.rerouted(attempt, ended, why, now_s)
        record.moved_by = ended
        record.last_error = why or record.last_error
        record.avoid.add(attempt.engine_id)
        self.recorder.moved(ended)
        has_used_up = record.num_busy > self._config.max_busy or record.num_fruitless >= self._config.max_hops
        if has_used_up and record.finish_reason_so_far() is None:
            self._fail_turn(record, failures.too_many_hops(record), now_s)
        elif (rest_s := retries.rest_s(record, self._config, self._rng)) > 0:
            self._timers.set(now_s + rest_s, TimerKind.REST, record.number)
        else:
            self._enqueue(record, now_s)

    def _end(self, attempt: Attempt, ended: HopEnd, now_s: float, *, is_over: bool) -> None:
        """Close an attempt. ``is_over``: the stream ended by itself, so there is nothing to stop."""
        attempt.is_open = False
        attempt.record.attempt = None
        if ended is HopEnd.FINISHED:
            self.engines.learn(attempt, now_s)
        del self._open[attempt.number]
        hop = Hop(engine_id=attempt.engine_id, reason=attempt.reason, num_tokens=attempt.num_tokens, ended=ended)
        attempt.record.hops.append(hop)
        attempt.member.account.num_ended[ended] += 1
        if is_over or not attempt.is_started:
            self.engines.let_go(attempt.member, attempt, now_s)
        else:
            self.engines.refresh(attempt.member)
        if not is_over:
            self._actions.append(StopAttempt(attempt))

    def _withdraw(self, record: TurnRecord, now_s: float) -> bool:
        """Take a live turn out of queue and engine; returns whether it was live."""
        if self.live.pop(record.number, None) is None:
            return False
        if record.attempt is None:
            self._waiting.remove(record)
        else:
            self._end(record.attempt, HopEnd.ABORTED, now_s, is_over=False)
        return True

    def _settle(self, record: TurnRecord, result: TurnResult, now_s: float) -> None:
        self.live.pop(record.number, None)
        if result.hops:
            self._memory.note_finished(
                record.turn.trajectory_id,
                result.hops[-1].engine_id,
                num_made_tokens=len(result.token_ids),
                num_context_tokens=record.num_prompt_tokens,
                oldest=record.oldest_so_far,
                ended_s=now_s,
            )
        if result.finish_reason is not FinishReason.ABORTED:
            self._keep_seat(record, result, now_s)
            self._groups.succeed(record.turn.group_id)
        self.recorder.finished(result, self.engines.version)
        self._actions.append(SettleTurn(record, result))
        self._journal.finished(record, result, now_s)

    def _keep_seat(self, record: TurnRecord, result: TurnResult, now_s: float) -> None:
        """Expect the trajectory of a finished turn back on its engine."""
        if result.hops:
            known = self._memory.known(record.turn.trajectory_id)
            self.engines.keep_seat(
                result.hops[-1].engine_id,
                record.turn.trajectory_id,
                now_s,
                num_context_tokens=known.num_context_tokens,
                left_tokens=self._left_tokens(known, known.num_context_tokens),
            )

    def _fail_turn(self, record: TurnRecord, error: RoseError, now_s: float) -> None:
        self.live.pop(record.number, None)
        error.partial = record.result(FinishReason.ABORTED)
        self._actions.append(SettleTurn(record, error))
        self._journal.failed(record, str(error), now_s)
        self.recorder.failed(type(error).__name__, len(record.token_ids))
        is_its_own = isinstance(error, RequestRefusedError) or record.is_suspect
        if is_its_own and self._groups.fail(record.turn.group_id, str(error), now_s):
            self._drop_waiting(record.turn.group_id, now_s)

    def _drop_waiting(self, group_id: str, now_s: float) -> None:
        """Fail the turns of a group that are not on an engine; the others may yet finish."""
        for record in [each for each in self.live.values() if each.turn.group_id == group_id and each.attempt is None]:
            self._withdraw(record, now_s)
            self._fail_turn(record, self._objections.find(record, now_s) or failures.too_many_hops(record), now_s)

    def _give_up_version(self, record: TurnRecord, now_s: float) -> None:
        self._waiting.remove(record)
        if record.pinned is not None:
            self._settle(record, record.result(FinishReason.ABORTED), now_s)
            return
        error = self._objections.find_version(record) or failures.version_gone(record, self.engines.version)
        self._fail_turn(record, error, now_s)

    def _pause_member(self, member: Member, retry_at_s: float) -> None:
        self._timers.set(retry_at_s, TimerKind.CIRCUIT, member)
        self.engines.refresh(member)

    def _is_timer_needed(self, kind: TimerKind, subject: Any) -> bool:
        if kind is TimerKind.STALL:
            return subject in self._open
        if kind is TimerKind.DEADLINE:
            return subject in self.live
        if kind is TimerKind.REST:
            return subject in self.live and self.live[subject].attempt is None
        if kind is TimerKind.OUTAGE:
            return len(self._waiting) > 0
        return self.engines.members.get(subject.engine_id) is subject


def _name_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
