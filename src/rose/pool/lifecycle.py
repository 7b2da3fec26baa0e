"""What happens to the engines of a pool, and what that means for their turns. Sync; the shell carries out what follows.

Life cycle: joining -> stale -> ready -> updating -> ready. An engine may drain or be lost from anywhere, and be fenced once it
has joined. It comes back from fenced only by an acknowledged activation, from lost only by joining anew, from draining not.

Invariants:

* Only a ready engine is given turns.
* Once the pool has synced weights, an engine that joins is stale until it acknowledged an activation.
* When an engine leaves service its turns are moved in the same step; when it is updated, those that may stay do stay.
"""

from __future__ import annotations

from typing import Protocol

from rose.interfaces import ServingEngine
from rose.policies.routing import EngineState
from rose.policies.staleness import is_admissible
from rose.pool.journal import Journal
from rose.pool.membership import Member, Membership
from rose.pool.turns import Attempt
from rose.types import Activation, EngineKind, EngineSnapshot, HopEnd, LeaseId, WeightVersion


class MoveOn(Protocol):
    """Ends an attempt and queues its turn again."""

    def __call__(self, attempt: Attempt, ended: HopEnd, now_s: float) -> None:
        """End ``attempt`` as ``ended``."""


class Lifecycle:
    """Moves engines from state to state."""

    def __init__(self, engines: Membership, journal: Journal, move_on: MoveOn) -> None:
        """Act on ``engines``; ``move_on`` takes a turn off its engine."""
        self._engines = engines
        self._journal = journal
        self._move_on = move_on

    def join(self, engine: ServingEngine, kind: EngineKind, lease_id: LeaseId | None, now_s: float) -> Member:
        """Take an engine in, in state joining; it gets turns after ``joined`` at the earliest.

        Raises:
            ValueError: Its id is taken by an engine that is not lost.
        """
        member = self._engines.add(engine, kind, lease_id)
        member.joined_s = now_s
        self._journal.engine_moved(member, None, EngineState.JOINING, "added", now_s)
        return member

    def joined(self, member: Member, reading: EngineSnapshot, now_s: float) -> None:
        """Note a joining engine's first reading.

        Until the pool's first weight sync an engine is ready at once, unless its weights differ from those of the
        engines before it.
        """
        engines = self._engines
        version = reading.weight_version
        is_ready = not engines.has_synced and (engines.version is None or version == engines.version)
        if is_ready and version is not None:
            engines.acknowledge(member, version)
        member.version = version
        self.note_reading(member, reading, now_s)
        if is_ready:
            self._move(member, EngineState.READY, "first reading", now_s)
        else:
            self._move(member, EngineState.STALE, f"weights {version} are not acknowledged", now_s)

    def note_reading(self, member: Member, reading: EngineSnapshot, now_s: float) -> None:
        """Take a newer reading of an engine's load."""
        self._engines.note_reading(member, reading, now_s)

    def begin_update(self, member: Member, target: WeightVersion, now_s: float) -> bool:
        """Keep new turns away from an engine about to activate ``target``; returns whether it may.

        Turns in flight stay, unless they may not run on ``target``: those are moved.
        """
        if not self._move(member, EngineState.UPDATING, f"activating {target}", now_s):
            return False
        for attempt in self._engines.open_attempts(member):
            if not is_admissible(attempt.record.versions, target, self._engines.index.run):
                self._move_on(attempt, HopEnd.ABORTED, now_s)
        return True

    def end_update(self, member: Member, activation: Activation, now_s: float) -> None:
        """Note an acknowledged activation. The time of the update does not count as a stall."""
        if not self._engines.is_present(member):
            return
        self._engines.has_synced = True
        self._engines.acknowledge(member, activation.version)
        for attempt in self._engines.open_attempts(member):
            attempt.last_progress_s = now_s
        self._journal.activated(member, activation, now_s)
        self._move(member, EngineState.READY, f"acknowledged {activation.version}", now_s)

    def skip_update(self, member: Member, why: str, now_s: float) -> None:
        """Keep new turns away from an engine whose weights are intact but fell behind; those in flight go on."""
        self._move(member, EngineState.STALE, why, now_s)

    def drain(self, member: Member, why: str, now_s: float) -> None:
        """Send an engine no more turns; those in flight go on."""
        self._move(member, EngineState.DRAINING, why, now_s)

    def fall_out(self, member: Member, state: EngineState, why: str, now_s: float) -> None:
        """Note that an engine is fenced or lost; its turns move. A draining one that is fenced goes on draining, empty."""
        if self._move(member, state, why, now_s) and state is EngineState.LOST:
            self._note_end(member, now_s)
        self._move_all(member, HopEnd.LOST, now_s)

    def remove(self, member: Member, why: str, now_s: float) -> None:
        """Take an engine out: first from routing, then its turns move."""
        if self._engines.is_present(member):
            self._note_end(member, now_s)
        self._engines.remove(member)
        self._journal.engine_moved(member, member.state, None, why, now_s)
        self._move_all(member, HopEnd.ABORTED, now_s)

    def _note_end(self, member: Member, now_s: float) -> None:
        member.account.present_s += now_s - member.joined_s
        if member.kind is EngineKind.BORROWED:
            self._engines.ended_loans_s.append(now_s - member.joined_s)

    def _move(self, member: Member, state: EngineState, why: str, now_s: float) -> bool:
        old = member.state
        if not self._engines.is_present(member) or not self._engines.move(member, state):
            return False
        member.why = why
        self._journal.engine_moved(member, old, state, why, now_s)
        return True

    def _move_all(self, member: Member, ended: HopEnd, now_s: float) -> None:
        for attempt in self._engines.open_attempts(member):
            self._move_on(attempt, ended, now_s)
