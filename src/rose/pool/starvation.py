"""Keeping an engine free for a turn that smaller ones pass again and again.

A turn that waits for KV room does not hold up smaller ones, which may fill every gap that it waits for. Once it has waited ``starve_s``,
one engine takes no new turns until this turn has room on it. While seats are kept (``rose.policies.returns``), it goes on with its own trajectories at first, of which
enough may end; after ``_PATIENCE`` times as long it takes none of theirs either.

Invariants: at most one engine is kept free, for a turn that is in the queue; it could take the turn if it were empty.
"""

from __future__ import annotations

from collections.abc import Iterable

from rose.policies.routing import Circuit, EngineState, Wait, WaitReason
from rose.policies.staleness import is_admissible
from rose.pool.membership import Member, Membership
from rose.pool.turns import TurnRecord
from rose.types import EngineKind

_PATIENCE = 6.0


class Starvation:
    """Which engine is kept free, and for whom."""

    def __init__(self, engines: Membership, starve_s: float) -> None:
        """Keep one of ``engines`` free for a turn that waited ``starve_s``."""
        self._engines = engines
        self._starve_s = starve_s
        self._record: TurnRecord | None = None
        self._member: Member | None = None
        self._empty_at_s = 0.0

    def relieve(self, *, is_waiting: bool) -> TurnRecord | None:
        """Open the engine again if its turn has room now, or needs it no more.

        Args:
            is_waiting: Whether the turn of ``record`` is in the queue.

        Returns:
            The turn that is to be routed before any other, if its time has come.
        """
        record, member = self._record, self._member
        if record is None or member is None:
            return None
        can_serve = self._can_serve(member, record)
        if is_waiting and can_serve and not self._has_room(member, record):
            return None
        self._record = self._member = None
        member.is_kept_free = member.is_emptied = False
        self._engines.refresh(member)
        return record if is_waiting and can_serve else None

    @property
    def record(self) -> TurnRecord | None:
        """Return the turn that an engine is kept free for."""
        return self._record

    def look(self, heads: Iterable[TurnRecord], now_s: float) -> None:
        """Keep an engine free for the first turn that has waited too long for KV room, or the one that is kept free already at any price."""
        if self._member is not None:
            if now_s >= self._empty_at_s and not self._member.is_emptied:
                self._member.is_emptied = True
                self._engines.refresh(self._member)
            return
        starving = [head for head in heads if now_s - head.queued_s >= self._starve_s]
        for record in sorted(starving, key=lambda head: head.order):
            if self._engines.index.choose(record.view()) != Wait(WaitReason.KV):
                continue
            members = [m for m in self._engines.members.values() if self._can_serve(m, record)]
            if members:
                self._record, self._member = record, max(members, key=_rank)
                self._member.is_kept_free = True
                self._empty_at_s = now_s + _PATIENCE * self._starve_s
                self._engines.refresh(self._member)
                return

    def _can_serve(self, member: Member, record: TurnRecord) -> bool:
        """Tell whether an empty ``member`` would take the turn."""
        if member.state is not EngineState.READY or member.circuit.state is not Circuit.CLOSED:
            return False
        if not self._engines.is_present(member) or not is_admissible(
            record.versions, member.version, self._engines.index.run
        ):
            return False
        is_own = member.kind is EngineKind.DEDICATED
        return is_own or (not record.is_dedicated_only and _kv_tokens(member) > record.num_prompt_tokens)

    def _has_room(self, member: Member, record: TurnRecord) -> bool:
        index, need = self._engines.index, float(record.num_prompt_tokens + record.num_left_tokens)
        kept_tokens = member.seat_tokens if index.keeps_seats else 0
        if not (member.held or kept_tokens):
            return True
        if index.keeps_seats and len(member.held) + len(member.seats) >= member.slots.num_slots:
            return False
        if record.affinity is None:
            need = max(need, index.newcomer_tokens)
        return _kv_tokens(member) - member.kv_reserved_tokens - kept_tokens >= need


def _kv_tokens(member: Member) -> float:
    return float("inf") if member.reading is None else member.reading.kv_total_tokens


def _rank(member: Member) -> tuple[bool, float, int]:
    """Prefer the job's own, the one with most room to come, the one that is least in use."""
    return member.kind is EngineKind.DEDICATED, _kv_tokens(member), -member.kv_reserved_tokens
