"""Why a turn is not on an engine, or not to be sent to any. Sync, on the membership as it is; the turn is settled by the caller."""

from __future__ import annotations

from rose.errors import GroupDroppedError, RoseError
from rose.policies.routing import Wait, WaitReason
from rose.policies.staleness import staleness
from rose.pool import failures
from rose.pool.groups import GroupBreaker
from rose.pool.membership import Membership
from rose.pool.turns import TurnRecord


class Objections:
    """Looks for what speaks against a turn."""

    def __init__(self, engines: Membership, groups: GroupBreaker) -> None:
        self._engines = engines
        self._groups = groups

    def find(self, record: TurnRecord, now_s: float) -> RoseError | None:
        """Return why a turn is not to be queued, or ``None``."""
        dropped = self._groups.objection(record.turn.group_id, now_s)
        if dropped is not None:
            return GroupDroppedError(dropped, tuple(record.hops))
        return self.find_stale(record) or self.find_version(record)

    def find_stale(self, record: TurnRecord) -> RoseError | None:
        """Return an error when the pool is too many versions ahead of the trajectory's oldest token."""
        bound, latest = record.turn.max_staleness, self._engines.version
        if bound is None or (ahead := staleness(record.oldest_so_far, latest)) <= bound:
            return None
        return failures.too_stale(record, latest, ahead)

    def find_version(self, record: TurnRecord) -> RoseError | None:
        """Return an error when the turn does not wait for its version, and no engine holds it."""
        if record.turn.waits_for_version or self._engines.index.is_held(record.versions):
            return None
        return failures.version_not_there(record, self._engines.version)

    def is_version_gone(self, record: TurnRecord) -> bool:
        """Tell whether ready engines have a wrong version, and none will ever have the right one."""
        index = self._engines.index
        is_out_of_reach = record.pinned is not None and record.pinned.run != index.run
        if not is_out_of_reach and not index.is_out_of_reach(record.versions):
            return False
        return index.choose(record.view()) == Wait(WaitReason.VERSION)

    def describe(self, record: TurnRecord, *, is_waiting: bool) -> str:
        """Say where a live turn is, or what it waits for."""
        if record.attempt is not None:
            return f"it was on engine {record.attempt.engine_id!r}"
        if not is_waiting:
            return "it rested after failed attempts"
        decision = self._engines.index.choose(record.view())
        return (
            f"it waited for {failures.WAITED_FOR[decision.reason]}"
            if isinstance(decision, Wait)
            else "its turn had just come"
        )
