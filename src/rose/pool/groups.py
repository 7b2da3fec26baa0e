"""Groups whose turns are refused again and again: no engine is asked for them any more.

Invariants: a finished turn of a group forgives its failures; a dropped group comes back by time alone, with one failure to go; at most
``max_trajectories`` groups are remembered, the least recently failed go.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import attrs

from rose.pool.config import PoolConfig


@attrs.define
class _Failures:
    num_failures: int = 0
    last_error: str = ""
    dropped_until_s: float = -math.inf


class GroupBreaker:
    """Counts the failures of each group in a row."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._groups: OrderedDict[str, _Failures] = OrderedDict()

    def fail(self, group_id: str, error: str, now_s: float) -> bool:
        """Note a failed turn; returns whether the group is dropped by it."""
        group = self._groups.setdefault(group_id, _Failures())
        self._groups.move_to_end(group_id)
        if len(self._groups) > self._config.max_trajectories:
            self._groups.popitem(last=False)
        group.num_failures += 1
        group.last_error = error
        if group.num_failures < self._config.max_group_failures:
            return False
        was_dropped = now_s < group.dropped_until_s
        group.dropped_until_s = now_s + self._config.group_drop_s
        return not was_dropped

    def succeed(self, group_id: str) -> None:
        """Note a finished turn."""
        self._groups.pop(group_id, None)

    def objection(self, group_id: str, now_s: float) -> str | None:
        """Return why turns of the group are not to be tried now, or ``None``."""
        group = self._groups.get(group_id)
        if group is None or now_s >= group.dropped_until_s:
            return None
        return (
            f"group {group_id!r} was dropped after {group.num_failures} turns of it failed in a row "
            f"(max_group_failures = {self._config.max_group_failures}); the last error: {group.last_error}"
        )
