"""The KV memory of a guest engine on serving's device: its budget follows serving's use by the live policy, or by the published rule.

Invariants: a cut holds at once and evicts what no longer fits; the budget grows as slowly as the policy says; nothing is
computed anew while neither serving's use (in granules), the lender's cap nor a growth that is due has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum

from rose.policies.memory import MemoryConfig, next_budget
from rose.simulation.batch import Job
from rose.simulation.device import NEVER_S, Lane


class MemoryRule(Enum):
    """How the device's KV memory is shared."""

    HEADROOM = "headroom"  # the live policy: a head-room for serving, cut at once, grown slowly
    PUBLISHED = "published"  # the paper: cut to half when the head-room is used up, frozen until the job's next step


class GuestMemory:
    """The budget of one guest lane."""

    def __init__(
        self,
        owner: Lane,
        guest: Lane,
        config: MemoryConfig,
        rule: MemoryRule,
        *,
        evict: Callable[[Sequence[Job]], None],
    ) -> None:
        """Begin without memory. ``evict`` is called with jobs of the guest that have to go at once."""
        self._owner = owner
        self._guest = guest
        self._config = config
        self._rule = rule
        self._evict = evict
        self._budget_bytes = 0
        self._grown_s = -math.inf
        self._is_frozen = False
        self._has_settled = False
        self._seen: tuple[int, float] | None = None

    def next_growth_s(self, now_s: float) -> float:
        """Return when the budget may grow though nothing else changes; ``inf``: not before serving's use changes."""
        return NEVER_S if self._has_settled else max(now_s, self._grown_s + self._config.growth_interval_s)

    def note_job_step(self) -> None:
        """A new step of the RL job begins: a budget that was frozen may grow again."""
        self._is_frozen, self._seen = False, None

    def withdraw(self) -> None:
        """Take all memory back and evict every job, those that wait included: the lease is over."""
        self._budget_bytes, self._seen = 0, None
        self._guest.batch.cut(0)
        if len(self._guest.batch):
            self._evict(self._guest.batch.everybody())

    def follow(self, cap_bytes: float, now_s: float) -> None:
        """Set the budget by serving's present use and the lender's cap; evict what no longer fits."""
        config, guest = self._config, self._guest
        used_bytes = self._owner.batch.kv_tokens_used * self._owner.times.kv_bytes_per_token
        seen = ((config.pool_bytes - config.headroom_bytes - used_bytes) // config.granule_bytes, cap_bytes)
        if seen == self._seen and self._has_settled:
            return
        before_bytes, self._seen = self._budget_bytes, seen
        self._budget_bytes = self._next_bytes(used_bytes, cap_bytes, now_s)
        # a growth may be due again one interval after the last one, however little time has passed since
        self._has_settled = self._budget_bytes == before_bytes and now_s >= self._grown_s + config.growth_interval_s
        num_tokens = self._budget_bytes // guest.times.kv_bytes_per_token
        if num_tokens != guest.batch.kv_tokens:
            victims = guest.batch.cut(num_tokens)
            if victims:
                self._evict(victims)

    def _next_bytes(self, used_bytes: int, cap_bytes: float, now_s: float) -> int:
        is_published = self._rule is MemoryRule.PUBLISHED
        if is_published and self._is_pressed(used_bytes):
            self._is_frozen = True
            return self._budget_bytes // 2
        change = next_budget(
            self._config,
            serving_used_bytes=0.0 if is_published else used_bytes,
            cap_bytes=cap_bytes,
            current_bytes=self._budget_bytes,
            since_growth_s=now_s - self._grown_s,
        )
        if self._is_frozen:
            return min(self._budget_bytes, change.budget_bytes)
        if change.has_grown:
            self._grown_s = now_s
        return change.budget_bytes

    def _is_pressed(self, used_bytes: int) -> bool:
        """Whether serving has used up its head-room."""
        return self._budget_bytes > 0 and used_bytes + self._budget_bytes > self._config.pool_bytes
