"""When nothing of older weights is under way any more. Sync, on the state as it is."""

from __future__ import annotations

from collections.abc import Mapping

from rose.pool.membership import Membership
from rose.pool.turns import TurnRecord
from rose.types import WeightVersion


class Barrier:
    """Waits for one version of the weights.

    It is passed when every engine that takes turns is at the version or a later one of its run, no turn runs on an engine below it, and no
    live turn has a token of an older version. A client that streams from the engine itself may have such tokens and not have said so yet: an
    attempt that began on older weights there holds the barrier up until its first token was heard of. What held it up last is looked at first, so that asking often is cheap.
    """

    def __init__(self, version: WeightVersion) -> None:
        self.version = version
        self._blocker: TurnRecord | None = None

    def is_passed(self, engines: Membership, live: Mapping[int, TurnRecord]) -> bool:
        """Tell whether the barrier is passed now."""
        if any(member.is_serving and self._is_older(member.version) for member in engines.members.values()):
            return False
        blocker = self._blocker
        if blocker is not None and blocker.number in live and self._holds_up(blocker):
            return False
        self._blocker = next((record for record in live.values() if self._holds_up(record)), None)
        return self._blocker is None

    def what_holds_it_up(self, engines: Membership) -> str:
        """Return, for an error message, what it waits for."""
        behind = [m for m in engines.members.values() if m.is_serving and self._is_older(m.version)]
        if behind:
            return "; ".join(f"engine {m.engine_id} is at {m.version}" for m in behind[:8])
        record = self._blocker
        return "nothing" if record is None else f"a turn of trajectory {record.turn.trajectory_id!r} is not done"

    def _holds_up(self, record: TurnRecord) -> bool:
        if any(self._is_older(span.version) for span in record.spans):
            return True
        attempt = record.attempt
        if attempt is None:
            return False
        is_unheard = record.source is not None and not attempt.num_tokens
        return self._is_older(attempt.member.version) or (is_unheard and self._is_older(attempt.version))

    def _is_older(self, version: WeightVersion | None) -> bool:
        return version is None or version.run != self.version.run or version.n < self.version.n
