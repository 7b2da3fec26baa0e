"""The pool's events, written as they happen and handed out in order."""

from __future__ import annotations

from rose.policies.routing import EngineState
from rose.pool.events import (
    EngineStateChanged,
    PoolEvent,
    TurnAssigned,
    TurnFailed,
    TurnFinished,
    TurnRerouted,
    WeightsActivated,
)
from rose.pool.membership import Member
from rose.pool.turns import Attempt, TurnRecord
from rose.types import Activation, HopEnd, TurnResult


class Journal:
    """Builds events from the pool's own objects."""

    def __init__(self) -> None:
        self._events: list[PoolEvent] = []

    def take(self) -> list[PoolEvent]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def assigned(self, attempt: Attempt, now_s: float) -> None:
        """Note that a turn was given to an engine."""
        self._events.append(
            TurnAssigned(
                at_s=now_s,
                trajectory_id=attempt.record.turn.trajectory_id,
                engine_id=attempt.engine_id,
                reason=attempt.reason,
                waited_s=now_s - attempt.record.queued_s,
            )
        )

    def rerouted(self, attempt: Attempt, ended: HopEnd, why: str, now_s: float) -> None:
        """Note that an attempt ended before its turn."""
        self._events.append(
            TurnRerouted(
                at_s=now_s,
                trajectory_id=attempt.record.turn.trajectory_id,
                engine_id=attempt.engine_id,
                ended=ended,
                num_tokens=attempt.num_tokens,
                why=why,
            )
        )

    def finished(self, record: TurnRecord, result: TurnResult, now_s: float) -> None:
        """Note a turn's result."""
        self._events.append(
            TurnFinished(
                at_s=now_s,
                trajectory_id=record.turn.trajectory_id,
                group_id=record.turn.group_id,
                engine_id=result.hops[-1].engine_id if result.hops else None,
                finish_reason=result.finish_reason,
                num_tokens=len(result.token_ids),
                num_hops=len(result.hops),
                duration_s=now_s - record.arrived_s,
                versions=result.versions,
                hops=result.hops,
            )
        )

    def failed(self, record: TurnRecord, error: str, now_s: float) -> None:
        """Note that a turn ended without a result."""
        self._events.append(
            TurnFailed(
                at_s=now_s,
                trajectory_id=record.turn.trajectory_id,
                group_id=record.turn.group_id,
                error=error,
                num_hops=len(record.hops),
                num_tokens=len(record.token_ids),
            )
        )

    def engine_moved(
        self, member: Member, old: EngineState | None, new: EngineState | None, why: str, now_s: float
    ) -> None:
        """Note that an engine changed its state."""
        self._events.append(
            EngineStateChanged(
                at_s=now_s,
                engine_id=member.engine_id,
                kind=member.kind,
                lease_id=member.lease_id,
                old=old,
                new=new,
                why=why,
            )
        )

    def activated(self, member: Member, activation: Activation, now_s: float) -> None:
        """Note acknowledged weights."""
        self._events.append(WeightsActivated(at_s=now_s, engine_id=member.engine_id, activation=activation))
