"""Who still waits for devices, and how far each job is behind its fair share.

Invariants: a wish is good for as long as a lease without a renewal, so that a job that is gone reserves nothing for long;
deficits are kept only while somebody waits whom another job's devices would help.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from rose.policies.fair_shares import accrue
from rose.policies.lending import Ask, DeviceUse, Lease, LendingConfig
from rose.policies.recalls import plan_recalls, plan_shares
from rose.types import DeviceId, JobId

_MOST_HOLDS = 10


class WaitingJobs:
    """The unmet wishes of a lender's jobs."""

    def __init__(self, config: LendingConfig) -> None:
        """Begin with nobody waiting."""
        self._config = config
        self._wishes: dict[tuple[JobId, frozenset[DeviceId] | None], tuple[float, Ask]] = {}
        self._shares: dict[JobId, float] = {}
        self._accrued_s = 0.0
        self.deficits: dict[JobId, float] = {}

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to divide: nobody waits, as far as was looked."""
        return not self._wishes and not self._shares

    def wishes(self, now_s: float, *, but: Iterable[JobId] = ()) -> list[Ask]:
        """Return what is still wished for by jobs other than those in ``but``."""
        if not self._wishes:
            return []
        self._wishes = {key: wish for key, wish in self._wishes.items() if wish[0] > now_s}
        without = set(but)
        return [ask for _, ask in self._wishes.values() if ask.job not in without]

    def note(self, asks: Sequence[Ask], leases: Sequence[Lease], now_s: float) -> None:
        """Remember what ``asks`` did not get of the ``leases`` that they were granted. Who asks for none wishes for none."""
        granted = Counter(lease.job for lease in leases)
        for ask in asks:
            lacking = ask.num_devices - granted[ask.job]
            granted[ask.job] = max(0, -lacking)
            key = (ask.job, ask.devices if ask.is_whole else None)
            for each in [each for each in self._wishes if each == key or (each[0] == ask.job and not ask.num_devices)]:
                del self._wishes[each]
            if lacking > 0:
                self._wishes[key] = (now_s + self._config.ttl_s, attrs.evolve(ask, num_devices=lacking))

    def settle(self, held: Iterable[Lease], now_s: float) -> None:
        """Charge the time since the last call to what jobs held meanwhile; call it before that changes."""
        elapsed_s, self._accrued_s = now_s - self._accrued_s, now_s
        if self._shares or self.deficits:
            bound_s = _MOST_HOLDS * self._config.min_hold_s
            number = Counter(lease.job for lease in held)
            self.deficits = accrue(self.deficits, self._shares, number, elapsed_s, bound_s)

    def recalls(self, uses: Sequence[DeviceUse], now_s: float) -> tuple[Lease, ...]:
        """Work out the shares anew and return the leases to ask back for the sake of those who wait."""
        wishes = self.wishes(now_s)
        jobs = {wish.job for wish in wishes} | {use.lease.job for use in uses if use.lease is not None}
        if not wishes or len(jobs) == 1:
            self._shares = {}
            return ()
        self._shares = plan_shares(self._config, uses, wishes)
        return plan_recalls(self._config, uses, wishes, self._shares, self.deficits, now_s)
