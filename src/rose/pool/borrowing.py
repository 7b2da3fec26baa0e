"""Borrowed engines in a pool for as long as their leases last.

Life cycle:

1. [JOB] ``Borrower`` asks the lender for devices and adds the rollout engine of each granted one to the pool.
2. [JOB] it renews its leases after every third of their time to live; that of an engine that was lost meanwhile it ends.
3. [LENDER] revokes or lets expire: the ledger stops the engine at its next step; the borrower hears of it and takes the
   engine out of the pool, whose turns go on elsewhere with the tokens they have.
4. [JOB] leaving gives every device back.

Invariants: an engine is in the pool only under a lease that was in force when it was added; a device whose engine does not
answer is given back at once; nothing is renewed that the lender ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rose.coserving.lender import LeaseChange, LeaseEvent, Lender
from rose.errors import EngineLostError, LeaseError
from rose.interfaces import Clock, ServingEngine
from rose.policies.lending import Lease
from rose.policies.routing import EngineState
from rose.pool.pool import RolloutPool
from rose.types import DeviceId, EngineKind, JobId

_logger = logging.getLogger(__name__)
_RENEWALS_PER_TTL = 3
_REMOVE_TIMEOUT_S = 2.0


class Borrower:
    """Keeps a pool's borrowed engines in step with its leases. Use as an async context manager, inside the pool's own.

    Args:
        lender: Grants the devices.
        pool: Where the engines join.
        engines: The rollout engine that waits on each device.
        job: In whose name devices are borrowed.
        clock: The clock of the leases.
    """

    def __init__(
        self,
        lender: Lender,
        pool: RolloutPool,
        engines: Mapping[DeviceId, ServingEngine],
        *,
        job: JobId,
        clock: Clock,
    ) -> None:
        self._lender = lender
        self._pool = pool
        self._engines = engines
        self._job = job
        self._clock = clock
        self._leases: dict[DeviceId, Lease] = {}
        self._ended: asyncio.Queue[Lease] = asyncio.Queue()
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Borrow as many devices as the lender grants, up to one an engine."""
        leases = self._lender.grant(self._job, len(self._engines))
        await self._group.__aenter__()
        self._lender.subscribe(self._hear)
        try:
            outcomes = await asyncio.gather(*(self._join(lease) for lease in leases), return_exceptions=True)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome  # noqa: TRY301 - as if it had been awaited alone
        except BaseException:
            for lease in leases:
                self._give_back(lease)
            await self.__aexit__(None, None, None)
            raise
        self._tasks = [self._group.create_task(self._renew()), self._group.create_task(self._leave())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give every device back."""
        try:
            for task in self._tasks:
                task.cancel()
            await self._group.__aexit__(None, None, None)
        finally:
            self._lender.unsubscribe(self._hear)
            for lease in self._leases.values():
                self._give_back(lease)
            await asyncio.gather(
                *(self._take_out(lease, "the job gave its device back") for lease in self._leases.values())
            )

    async def _join(self, lease: Lease) -> None:
        engine = self._engines.get(lease.device_id)
        if engine is None:
            _logger.warning("device %s is given back: the job has no engine there", lease.device_id)
            self._give_back(lease)
            return
        try:
            await self._pool.add_engine(engine, EngineKind.BORROWED, lease_id=lease.lease_id)
        except EngineLostError as error:
            _logger.warning("device %s is given back: %s", lease.device_id, error)
            self._give_back(lease)
        else:
            self._leases[lease.device_id] = lease
            self._pool.note_lease(engine.engine_id, lease.expires_s)

    def _give_back(self, lease: Lease) -> None:
        """End a lease unless it is over already: the device may be another job's by now."""
        if self._lender.is_in_force(lease.lease_id):
            self._lender.revoke(lease.device_id)

    def _hear(self, event: LeaseEvent) -> None:
        if event.change in (LeaseChange.REVOKED, LeaseChange.EXPIRED):
            self._ended.put_nowait(event.lease)

    async def _renew(self) -> None:
        while True:
            now_s = self._clock.now()
            ends_s = min((lease.expires_s for lease in self._leases.values()), default=now_s + _RENEWALS_PER_TTL)
            await self._clock.sleep((ends_s - now_s) / _RENEWALS_PER_TTL)
            for device_id, lease in list(self._leases.items()):
                if self._pool.state_of(self._engines[device_id].engine_id) in (None, EngineState.LOST):
                    self._give_back(lease)
                    continue  # ``_leave`` hears of that, as of every lease that the lender ended
                with contextlib.suppress(LeaseError):
                    renewed = self._leases[device_id] = self._lender.renew(lease.lease_id)
                    self._pool.note_lease(self._engines[device_id].engine_id, renewed.expires_s)

    async def _leave(self) -> None:
        while True:
            lease = await self._ended.get()
            held = self._leases.get(lease.device_id)
            if held is not None and held.lease_id == lease.lease_id:
                del self._leases[lease.device_id]
                self._group.create_task(self._take_out(lease, "its lease is over"))

    async def _take_out(self, lease: Lease, why: str) -> None:
        """Remove an engine at once, then wait a little for it to stop; on the loop's time, since the clock may stand still."""
        with contextlib.suppress(EngineLostError, TimeoutError):  # it was removed by another; it does not answer
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await self._pool.remove_engine(self._engines[lease.device_id].engine_id, why)
