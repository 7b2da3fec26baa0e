"""A way to a lender that never holds more than so many devices.

Invariants: at every moment the job has at most ``num_most`` leases in force at the lender, whoever asks through here and whatever answers
were lost: before an ask that follows a lost answer, and before the first, the lender is asked what the job holds. A lease counts until
the lender says that it is over, not until the job's clock does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import attrs

from rose.policies.lending import Ask, Lease
from rose.pool.lease_source import LeaseSource
from rose.types import JobId, LeaseId

_NO_LEASE = LeaseId("")


class CappedLender:
    """A ``rose.pool.borrowing.LeaseSource`` in front of another one, for one job.

    Attributes:
        most_held: The most leases that the job was seen to hold at a time.

    Args:
        source: The lender.
        num_most: Leases that the job may hold at a time.
    """

    def __init__(self, source: LeaseSource, num_most: int) -> None:
        self._source = source
        self._num_most = num_most
        self._held: set[LeaseId] = set()
        self._is_sure = False
        self._lock = asyncio.Lock()
        self.most_held = 0

    async def ask(self, ask: Ask) -> Sequence[Lease]:
        """Ask for as many more devices as the job may still have; for none where it needs them all and may not.

        Raises:
            TransportError: The lender cannot be reached.
        """
        async with self._lock:
            if ask.num_devices == 0:
                return await self._source.ask(ask)
            if not self._is_sure:
                self._take(
                    await self._source.changed(ask.job, {_NO_LEASE: False})
                )  # nobody holds that one: answered at once
            num_free = self._num_most - len(self._held)
            num_asked = min(ask.num_devices, num_free)
            if num_asked <= 0 or (ask.is_whole and num_asked < ask.num_devices):
                return ()
            self._is_sure = False
            leases = await self._source.ask(attrs.evolve(ask, num_devices=num_asked))
            self._is_sure = True
            self._note(self._held | {lease.lease_id for lease in leases})
            return leases

    async def renew(self, job: JobId, lease_ids: Sequence[LeaseId]) -> Sequence[Lease]:
        """Extend leases; returns those of them that are in force."""
        leases = await self._source.renew(job, lease_ids)
        self._held -= set(lease_ids) - {lease.lease_id for lease in leases}
        return leases

    async def release(self, job: JobId, lease_ids: Sequence[LeaseId]) -> None:
        """Give devices back."""
        try:
            await self._source.release(job, lease_ids)
        except BaseException:  # a caller that is cancelled does not hear either what became of them
            self._is_sure = False
            raise
        self._held -= set(lease_ids)

    async def changed(self, job: JobId, known: Mapping[LeaseId, bool]) -> Sequence[Lease]:
        """Wait until a lease of the job ends or is asked back; return all in force."""
        leases = await self._source.changed(job, known)
        self._held -= set(known) - {lease.lease_id for lease in leases}
        return leases

    def _take(self, leases: Sequence[Lease]) -> None:
        self._note({lease.lease_id for lease in leases})

    def _note(self, held: set[LeaseId]) -> None:
        self._held = held
        self.most_held = max(self.most_held, len(held))
