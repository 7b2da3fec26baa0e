"""A lender as a borrower sees it, and the one in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import attrs

from rose.coserving.lender import LeaseChange, LeaseEvent, Lender
from rose.policies.lending import Ask, Lease
from rose.types import JobId, LeaseId

_NOTABLE = frozenset({LeaseChange.REVOKING, LeaseChange.REVOKED, LeaseChange.EXPIRED, LeaseChange.RELEASED})


@runtime_checkable
class SupportsLease(Protocol):
    """An engine that shows the fencing token of its device's lease with every request."""

    def set_lease(self, *fencing_tokens: int) -> None:
        """Work under this token from now on; under none when it is left out."""


class LeaseSource(Protocol):
    """A lender as a borrower sees it. Times of leases are on the borrower's clock.

    Every method may raise ``TransportError``: the lender cannot be reached now.
    """

    async def ask(self, ask: Ask) -> Sequence[Lease]:
        """Ask for more devices; see ``rose.coserving.lender.Lender.grant``; none for ``num_devices`` 0, which takes back what the job still wished for."""

    async def renew(self, job: JobId, lease_ids: Sequence[LeaseId]) -> Sequence[Lease]:
        """Extend leases; returns those of them that are in force. Those that are asked back are not extended."""

    async def release(self, job: JobId, lease_ids: Sequence[LeaseId]) -> None:
        """Give devices back; leases that are over already are left alone."""

    async def changed(self, job: JobId, known: Mapping[LeaseId, bool]) -> Sequence[Lease]:
        """Wait until a lease of the job ends or is asked back, or one of those ``known`` has; return all in force.

        Args:
            job: Whose leases.
            known: Leases that were in force, and whether each was asked back.
        """


@attrs.define(eq=False)
class LocalLender:
    """The ``LeaseSource`` of a lender in this process, on its event loop and clock."""

    lender: Lender

    async def ask(self, ask: Ask) -> Sequence[Lease]:
        """Ask for more devices."""
        return self.lender.grant_all([ask])

    async def renew(self, job: JobId, lease_ids: Sequence[LeaseId]) -> Sequence[Lease]:  # noqa: ARG002
        """Extend leases."""
        return self.lender.renew_all(lease_ids)

    async def release(self, job: JobId, lease_ids: Sequence[LeaseId]) -> None:  # noqa: ARG002
        """Give devices back."""
        self.lender.release(lease_ids)

    async def changed(self, job: JobId, known: Mapping[LeaseId, bool]) -> Sequence[Lease]:
        """Wait for a change."""
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hear(event: LeaseEvent) -> None:
            if event.lease.job == job and event.change in _NOTABLE and not heard.done():
                heard.set_result(None)

        self.lender.subscribe(hear)
        try:
            if not _is_outdated(known, self._held(job)):
                await heard
        finally:
            self.lender.unsubscribe(hear)
        return self._held(job)

    def _held(self, job: JobId) -> list[Lease]:
        return [lease for lease in self.lender.leases if lease.job == job]


def _is_outdated(known: Mapping[LeaseId, bool], in_force: Sequence[Lease]) -> bool:
    now = {lease.lease_id: lease.is_revoking for lease in in_force}
    return any(now.get(lease_id) is not is_revoking for lease_id, is_revoking in known.items())
