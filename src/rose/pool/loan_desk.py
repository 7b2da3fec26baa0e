"""Asks a lender for the devices of a job's engines, and gives them back.

Invariants: a loan has the leases of all its devices or none; what was granted for no engine of the job is given back at once; leases are
forgotten before the lender is told, so that whatever comes of the telling nobody works under them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from rose.errors import ConfigError, LeaseError, LedgerError, TransportError
from rose.interfaces import Clock
from rose.policies.lending import Ask
from rose.pool.lease_source import LeaseSource
from rose.pool.loans import Loan, Loans
from rose.types import DeviceId, JobId, LeaseId

PASSING = (TransportError, LedgerError, LeaseError, ConfigError)
"""What a lender may raise that can be otherwise the next time."""
MOST_DEVICES = 1 << 16


class LoanDesk:
    """One job at one lender.

    Args:
        source: The lender.
        loans: The job's engines.
        job: Its name.
        clock: Of the leases.
        model: What the engines run.
        most_devices: Devices held at once at most; ``None``: all there are.

    Attributes:
        source: The lender.
        has_wish: The lender may keep a wish of the job for what it did not get.
    """

    def __init__(
        self,
        source: LeaseSource,
        loans: Loans,
        job: JobId,
        clock: Clock,
        *,
        model: str | None = None,
        most_devices: int | None = None,
    ) -> None:
        self.source = source
        self.has_wish = False
        self._loans = loans
        self._job = job
        self._clock = clock
        self._model = model
        self._most_devices = MOST_DEVICES if most_devices is None else most_devices

    async def ask(self, num_engines: int) -> list[Loan]:
        """Ask for the devices of up to ``num_engines`` engines more, good ones first; returns those that have theirs now.

        Raises:
            TransportError, LedgerError, LeaseError, ConfigError: The lender does not answer, and nothing was granted.
        """
        now_s = self._clock.now()
        granted: list[Loan] = []
        try:
            for gang in self._loans.gangs(now_s):
                if len(granted) < num_engines and len(gang.device_ids) <= self._room:
                    granted += await self._grant(len(gang.device_ids), gang.device_ids, gang=gang)
            for devices, but in self._loans.choices(now_s):
                if (lacking := min(num_engines - len(granted), self._room)) > 0:
                    granted += await self._grant(lacking, devices, but)
        except PASSING:
            if not granted:
                raise
        self.has_wish = len(granted) < num_engines
        return granted

    @property
    def _room(self) -> int:
        return self._most_devices - len(self._loans.leases)

    async def _grant(
        self,
        num_devices: int,
        devices: Collection[DeviceId] | None,
        but: Collection[DeviceId] = (),
        *,
        gang: Loan | None = None,
    ) -> list[Loan]:
        """Ask for devices, all or none where one engine needs them; notes what was granted, gives back what is of no use."""
        number = num_devices if devices is None else min(num_devices, len(devices))
        ask = Ask(
            job=self._job,
            num_devices=number,
            model=self._model,
            devices=None if devices is None else frozenset(devices),
            but=frozenset(but),
            is_whole=gang is not None,
        )
        leases = await self.source.ask(ask)
        granted: list[Loan] = []
        useless: list[LeaseId] = []
        for lease in leases:
            loan = gang or self._loans.on(lease.device_id)
            if loan is None:
                useless.append(lease.lease_id)
                continue
            loan.leases += (lease,)
            loan.asked_s = self._clock.now()
            granted += [] if loan in granted else [loan]
        if useless:
            await self.source.release(self._job, useless)
        return granted

    async def forget_wish(self) -> None:
        """Let the lender keep nothing for the job that it did not get."""
        with contextlib.suppress(*PASSING):
            await self.source.ask(Ask(job=self._job, num_devices=0))
            self.has_wish = False

    async def release(self, *loans: Loan) -> None:
        """Give devices back."""
        lease_ids = [lease_id for loan in loans for lease_id in loan.let_go()]
        if lease_ids:
            with contextlib.suppress(*PASSING):  # they end by themselves
                await self.source.release(self._job, lease_ids)
