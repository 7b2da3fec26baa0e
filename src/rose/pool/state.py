"""The pool's decisions: sync, without I/O, clock or event loop. The shell tells it what happened and does what it returns.

Invariants:

* A live turn is in exactly one place: in the queue, or in one open attempt.
* An attempt that was started and did not end by itself is stopped exactly once (``StopAttempt``); its reservation is
  held until the shell reports ``released``. One that ended by itself is never stopped.
* After a turn is settled nothing of it is left but the release of its last request.
* Every change is followed by ``plan``, which routes what can be routed and hands out the I/O to do.

Life cycle of a turn: submit -> queued -> [attempt: start -> tokens ... -> end] -> queued again (evicted, stalled, lost,
busy, aborted) -> ... -> settled with a result or an error, or cancelled by its caller at any point.
"""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random
from typing import Any

from rose.errors import (
    DeadlineExceededError,
    EngineBusyError,
    EngineError,
    EngineFencedError,
    EngineLostError,
    RequestRefusedError,
    RoseError,
    TurnFailedError,
)
from rose.policies.migration import remaining_tokens
from rose.policies.ordered import Sizes
from rose.policies.routing import Assign, EngineState, Wait, WaitReason
from rose.policies.staleness import is_admissible
from rose.pool.actions import TIME_EPSILON_S, Action, SettleTurn, StartAttempt, StopAttempt, TimerKind, Timers
from rose.pool.config import PoolConfig, ResumePolicy
from rose.pool.events import PoolEvent
from rose.pool.journal import Journal
from rose.pool.lifecycle import Lifecycle
from rose.pool.membership import Member, Membership
from rose.pool.turns import Attempt, Progress, TurnRecord
from rose.pool.waiting import TrajectoryMemory, WaitingQueue
from rose.types import (
    EngineId,
    EngineKind,
    FinishReason,
    Hop,
    HopEnd,
    RequestId,
    TokenChunk,
    Turn,
    TurnResult,
)

_PREFILL_SLACK = 2.0
_WAITED_FOR = {
    WaitReason.NO_READY_ENGINE: "a ready engine",
    WaitReason.VERSION: "an engine with the weight version that it asks for",
    WaitReason.CIRCUIT: "an engine that was left alone after it failed or was busy",
    WaitReason.SLOTS: "a free slot on an engine (cap_per_engine)",
    WaitReason.KV: "room in an engine's KV memory",
}


class PoolState:
    """Turns, engines and reservations of one pool.

    Attributes:
        engines: The membership, its routing index and accounts.
        lifecycle: What happens to engines.
        live: Turns that are not settled, by number.
    """

    def __init__(self, config: PoolConfig, *, name: str, seed: int) -> None:
        self.engines = Membership(config, Random(seed))
        self.live: dict[int, TurnRecord] = {}
        self._config = config
        self._name = name
        self._open: dict[int, Attempt] = {}
        self._waiting = WaitingQueue()
        self._memory = TrajectoryMemory(config.max_trajectories)
        self._numbers = itertools.count()
        self._timers = Timers(self._is_timer_needed)
        self._actions: list[Action] = []
        self._journal = Journal()
        self.lifecycle = Lifecycle(self.engines, self._journal, self._move_on)

    # What the caller of a turn does.

    def submit(self, turn: Turn, waiter: Any, now_s: float) -> TurnRecord:
        """Take a turn in."""
        number = next(self._numbers)
        record = TurnRecord(
            turn=turn,
            number=number,
            order=self._memory.order(turn.trajectory_id, turn.group_id, number),
            arrived_s=now_s,
            queued_s=now_s,
            affinity=self._memory.last_engine(turn.trajectory_id),
            avoid=self._stalled_on(turn.trajectory_id),
            progress=self._progress(turn),
            waiter=waiter,
        )
        self.engines.take_seat(record.affinity, turn.trajectory_id, now_s)
        self._waiting.add(record)
        self.live[number] = record
        if turn.deadline_s is not None:
            self._timers.set(now_s + turn.deadline_s, TimerKind.DEADLINE, number)
        return record

    def cancel(self, record: TurnRecord, now_s: float) -> None:
        """Drop a turn that its caller no longer wants; a no-op once it is settled."""
        if self._withdraw(record, now_s):
            self._journal.failed(record, "cancelled", now_s)

    # What a stream brings.

    def started(self, attempt: Attempt) -> None:
        """Note that the request is being sent: from now on, giving up means aborting."""
        attempt.is_started = True

    def take(self, attempt: Attempt, chunk: TokenChunk, now_s: float) -> bool:
        """Take a chunk of an attempt's stream; returns whether a plan is due. Late chunks are discarded."""
        if not attempt.is_open:
            return False
        record, member = attempt.record, attempt.member
        is_over = chunk.finish_reason is not None
        version = member.version if chunk.version is None else chunk.version
        if chunk.token_ids and not is_admissible(record.versions, version, self.engines.index.run):
            self._move_on(attempt, HopEnd.ABORTED, now_s, is_over=is_over)
            return True
        try:
            taken = record.take(chunk, version)
        except EngineError as error:
            self._break_off(attempt, str(error), now_s, is_over=is_over)
            return True
        has_news = taken > 0 and self._note_progress(attempt, taken, now_s)
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
            elif subject.circuit.tick(now_s):
                self.engines.refresh(subject)

    def plan(self, now_s: float) -> tuple[list[Action], list[PoolEvent]]:
        """Route every turn that can go now; returns the I/O to do, in order, and what there is to tell."""
        self.engines.pace.now_s = now_s
        while len(self._waiting) and self.engines.index.has_open_engine():
            if not self._route_next(now_s):
                break
        actions, self._actions = self._actions, []
        return actions, self._journal.take()

    def close(self, now_s: float) -> None:
        """End every turn with an error."""
        for record in list(self.live.values()):
            self._withdraw(record, now_s)
            self._fail_turn(record, TurnFailedError("the pool was closed", tuple(record.hops)), now_s)

    def waiting_reasons(self) -> Counter[WaitReason]:
        """Count the waiting turns by what they wait for."""
        reasons: Counter[WaitReason] = Counter()
        for head in self._waiting.heads():
            decision = self.engines.index.choose(head.view())
            # An engine that takes the first but not the others has no KV room for these.
            reason = decision.reason if isinstance(decision, Wait) else WaitReason.KV
            reasons[reason] += self._waiting.num_unfit(head, self._room_for(head))
        return +reasons

    # Below: one small step each.

    def _route_next(self, now_s: float) -> bool:
        """Move the first turn in the queue that need not wait; returns whether there was one."""
        record = min(self._waiting.heads(), key=_order)
        decision = self.engines.index.choose(record.view())
        if isinstance(decision, Wait):
            movable = [first for head in self._waiting.heads() if (first := self._first_movable(head)) is not None]
            if not movable:
                return False
            record = min(movable, key=_order)
            decision = self.engines.index.choose(record.view())
        if isinstance(decision, Assign):
            self._assign(record, decision, now_s)
        else:
            self._give_up_version(record, now_s)
        return True

    def _first_movable(self, head: TurnRecord) -> TurnRecord | None:
        """Return the first turn in the line of ``head`` that an engine has room for; any, once their version is gone."""
        return head if self._is_version_gone(head) else self._waiting.first_fitting(head, self._room_for(head))

    def _room_for(self, record: TurnRecord) -> Sizes:
        return self.engines.index.room(
            record.versions, is_dedicated_only=record.is_dedicated_only, is_new=record.affinity is None
        )

    def _progress(self, turn: Turn) -> Progress:
        num_made, num_context = self._memory.progress(turn.trajectory_id)
        left = remaining_tokens(self._config.routing, num_made=num_made, num_context=len(turn.prompt_ids))
        return Progress(left_tokens=left, num_context_tokens=num_context)

    def _stalled_on(self, trajectory_id: str) -> set[EngineId]:
        """Return the engines that stalled an earlier turn of the trajectory and have shown no token since."""
        stalls = self._memory.stalls(trajectory_id)
        for engine_id, stalled_s in list(stalls.items()):
            member = self.engines.members.get(engine_id)
            if member is None or member.last_token_s > stalled_s:
                del stalls[engine_id]
        return set(stalls)

    def _assign(self, record: TurnRecord, decision: Assign, now_s: float) -> None:
        self._waiting.remove(record)
        number = next(self._numbers)
        attempt = Attempt(
            record=record,
            member=self.engines.members[decision.engine_id],
            request=record.next_request(RequestId(f"{self._name}-{number}")),
            reason=decision.reason,
            number=number,
            last_progress_s=now_s,
            assigned_s=now_s,
        )
        record.attempt = self._open[number] = attempt
        self.engines.hold(attempt.member, attempt, now_s)
        self._timers.set(now_s + self._config.stall_s, TimerKind.STALL, number)
        self._actions.append(StartAttempt(attempt))
        self._journal.assigned(attempt, now_s)

    def _note_progress(self, attempt: Attempt, taken: int, now_s: float) -> bool:
        """Count tokens; returns whether a first token closed the engine's circuit."""
        member = attempt.member
        is_first = attempt.num_tokens == 0
        self.engines.note_tokens(attempt, taken)
        attempt.last_progress_s = member.last_token_s = now_s
        if is_first and member.circuit.succeed():
            self.engines.refresh(member)
            return True
        return False

    def _finish(self, attempt: Attempt, reason: FinishReason, now_s: float) -> None:
        """Act on the finish reason that the engine gave."""
        record = attempt.record
        if reason is FinishReason.EVICTED:
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
        due_s = attempt.last_progress_s + self._config.stall_s
        if attempt.num_tokens == 0:  # a long prompt is no stall, also where nothing else runs that would show tokens
            due_s += _PREFILL_SLACK * self.engines.pace.prefill_s * attempt.num_fresh_tokens
        if member.state is EngineState.UPDATING:
            due_s = now_s + self._config.stall_s
        elif attempt.num_tokens == 0 and member.last_token_s > now_s - self._config.stall_s:
            due_s = max(
                due_s, attempt.last_progress_s + self._config.first_token_s
            )  # it waits for its place, nothing stands
            due_s = min(due_s, max(now_s, member.last_token_s) + self._config.stall_s)
        if due_s > now_s + TIME_EPSILON_S:
            self._timers.set(due_s, TimerKind.STALL, attempt.number)
            return
        if member.last_token_s <= attempt.last_progress_s:
            self._pause_member(member, member.circuit.fail(now_s))
        self._memory.note_stalled(attempt.record.turn.trajectory_id, attempt.engine_id, now_s)
        self._move_on(attempt, HopEnd.STALLED, now_s)

    def _miss_deadline(self, record: TurnRecord, now_s: float) -> None:
        doing = self._describe(record)
        self._withdraw(record, now_s)
        message = (
            f"turn of trajectory {record.turn.trajectory_id!r} was not done after {record.turn.deadline_s} s: "
            f"{len(record.token_ids)} of {record.turn.sampling.max_tokens} tokens after {len(record.hops)} attempts; "
            f"{doing}"
        )
        self._fail_turn(record, DeadlineExceededError(message), now_s)

    def _describe(self, record: TurnRecord) -> str:
        """Say where a live turn is, or what it waits for."""
        if record.attempt is not None:
            return f"it was on engine {record.attempt.engine_id!r}"
        decision = self.engines.index.choose(record.view())
        return (
            f"it waited for {_WAITED_FOR[decision.reason]}" if isinstance(decision, Wait) else "its turn had just come"
        )

    def _move_on(self, attempt: Attempt, ended: HopEnd, now_s: float, *, is_over: bool = False, why: str = "") -> None:
        """End an attempt before its turn is done: the turn is queued again, unless it turns out to be complete."""
        record = attempt.record
        self._end(attempt, ended, now_s, is_over=is_over)
        attempt.member.account.num_rerouted += 1
        self._journal.rerouted(attempt, ended, why, now_s)
        record.moved_by = ended
        record.last_error = why or record.last_error
        record.avoid.add(attempt.engine_id)
        done = record.finish_reason_so_far()
        if done is not None:
            self._settle(record, record.result(done), now_s)
        elif record.num_busy > self._config.max_busy or record.num_fruitless >= self._config.max_hops:
            self._fail_turn(record, _too_many_hops(record), now_s)
        else:
            record.queued_s = now_s
            self._waiting.add(record)

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
        self._memory.note_finished(
            record.turn.trajectory_id,
            result.hops[-1].engine_id,
            num_made_tokens=len(result.token_ids),
            num_context_tokens=record.num_prompt_tokens,
        )
        self.engines.keep_seat(result.hops[-1].engine_id, record.turn.trajectory_id, now_s)
        self._actions.append(SettleTurn(record, result))
        self._journal.finished(record, result, now_s)

    def _fail_turn(self, record: TurnRecord, error: RoseError, now_s: float) -> None:
        self.live.pop(record.number, None)
        self._actions.append(SettleTurn(record, error))
        self._journal.failed(record, str(error), now_s)

    def _is_version_gone(self, record: TurnRecord) -> bool:
        """Tell whether ready engines have a wrong version, and none will ever have the right one."""
        index = self.engines.index
        is_out_of_reach = record.pinned is not None and record.pinned.run != index.run
        if not is_out_of_reach and not index.is_out_of_reach(record.versions):
            return False
        return index.choose(record.view()) == Wait(WaitReason.VERSION)

    def _give_up_version(self, record: TurnRecord, now_s: float) -> None:
        self._waiting.remove(record)
        if record.pinned is not None:
            self._settle(record, record.result(FinishReason.ABORTED), now_s)
            return
        message = (
            f"turn of trajectory {record.turn.trajectory_id!r} asks for {record.turn.versions}, but every engine is past "
            f"that: the pool is at {self.engines.version}; ask for a current version"
        )
        self._fail_turn(record, TurnFailedError(message, tuple(record.hops)), now_s)

    def _pause_member(self, member: Member, retry_at_s: float) -> None:
        self._timers.set(retry_at_s, TimerKind.CIRCUIT, member)
        self.engines.refresh(member)

    def _is_timer_needed(self, kind: TimerKind, subject: Any) -> bool:
        if kind is TimerKind.STALL:
            return subject in self._open
        if kind is TimerKind.DEADLINE:
            return subject in self.live
        return self.engines.members.get(subject.engine_id) is subject


def _order(record: TurnRecord) -> tuple[int, int, int]:
    return record.order


def _too_many_hops(record: TurnRecord) -> TurnFailedError:
    ends = Counter(hop.ended.value for hop in record.hops)
    last_error = f"; the last error: {record.last_error}" if record.last_error else ""
    message = (
        f"turn of trajectory {record.turn.trajectory_id!r} was given up after {len(record.hops)} attempts "
        f"({', '.join(f'{count} {end}' for end, count in ends.items())}); see its hops{last_error}"
    )
    return TurnFailedError(message, tuple(record.hops))


def _name_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
