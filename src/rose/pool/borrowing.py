"""Borrowed engines in a pool for as long as their leases last.

Life cycle:

1. [JOB] ``Borrower`` asks the lender for the devices where it has engines, and adds the engine of each granted one to the pool.
2. [JOB] it renews its leases after every third of their time to live; that of an engine that was lost meanwhile it ends. It
   asks again now and then for the devices that it does not have.
3. [LENDER] asks a device back: the engine gets no more turns, those in flight have until the lease ends, the device is given back.
4. [LENDER] revokes or lets expire: the ledger stops the engine at its next step; the borrower hears of it and takes the
   engine out of the pool, whose turns go on elsewhere with the tokens they have.
5. [JOB] leaving gives every device back.

Invariants: an engine is in the pool only under a lease that was in force when it was added; a device whose engine does not
answer is given back at once, and asked for again later and later; nothing is renewed that the lender ended. A lender that cannot
be reached ends nothing: leases last as long as they last, by the job's own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import attrs

from rose.coserving.lender import LeaseChange, LeaseEvent, Lender
from rose.errors import ConfigError, EngineLostError, LeaseError, LedgerError, TransportError
from rose.interfaces import Clock, ServingEngine
from rose.policies.lending import Lease
from rose.policies.routing import EngineState
from rose.pool.pool import RolloutPool
from rose.types import DeviceId, EngineKind, JobId, LeaseId

_logger = logging.getLogger(__name__)
_RENEWALS_PER_TTL = 3
_TRIES_PER_RENEWAL = 4
_LEAST_WAIT_S = 1e-3
_REMOVE_TIMEOUT_S = 2.0
_MOST_BACKOFF = 64
_PASSING = (TransportError, LedgerError, LeaseError, ConfigError)
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

    async def ask(
        self,
        job: JobId,
        num_devices: int,
        *,
        model: str | None = None,
        devices: Collection[DeviceId] | None = None,
        is_whole: bool = False,
    ) -> Sequence[Lease]:
        """Ask for more devices; see ``rose.coserving.lender.Lender.grant``."""

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

    async def ask(
        self,
        job: JobId,
        num_devices: int,
        *,
        model: str | None = None,
        devices: Collection[DeviceId] | None = None,
        is_whole: bool = False,
    ) -> Sequence[Lease]:
        """Ask for more devices."""
        return self.lender.grant(job, num_devices, model=model, devices=devices, is_whole=is_whole)

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


@attrs.define(eq=False)
class _Slot:
    """One engine and the devices that it needs; ``is_joined`` once it is in the pool under their leases."""

    device_ids: tuple[DeviceId, ...]
    engine: ServingEngine
    leases: tuple[Lease, ...] = ()
    is_joined: bool = False
    num_failures: int = 0
    retry_s: float = -math.inf

    @property
    def expires_s(self) -> float:
        return min((lease.expires_s for lease in self.leases), default=math.inf)

    @property
    def is_revoking(self) -> bool:
        return any(lease.is_revoking for lease in self.leases)

    @property
    def tokens(self) -> tuple[int, ...]:
        tokens = {lease.device_id: lease.fencing_token for lease in self.leases}
        return tuple(tokens[device_id] for device_id in self.device_ids)

    def let_go(self) -> list[LeaseId]:
        """Forget the leases; returns which they were."""
        lease_ids = [lease.lease_id for lease in self.leases]
        self.leases, self.is_joined = (), False
        return lease_ids


class Borrower:
    """Keeps a pool's borrowed engines in step with its leases. Use as an async context manager, inside the pool's own.

    Args:
        lender: Grants the devices: the lender itself or a way to it, such as ``rose.pool.remote_lender.RemoteLender``.
        pool: Where the engines join.
        engines: The rollout engine that waits on each device; one that spans several devices is borrowed with all of them or not
            at all, and is named by them in the order of its ledgers.
        job: In whose name devices are borrowed.
        clock: The clock of the leases.
        model: What the engines run; the lender may know devices where that cannot be.
        ask_again_s: How long to wait before asking again for devices that were not granted, or that the lender took back. A device
            whose engine did not answer is asked for after this long, then twice as long, and so on.
    """

    def __init__(
        self,
        lender: Lender | LeaseSource,
        pool: RolloutPool,
        engines: Mapping[DeviceId, ServingEngine] | Mapping[DeviceId | tuple[DeviceId, ...], ServingEngine],
        *,
        job: JobId,
        clock: Clock,
        model: str | None = None,
        ask_again_s: float = 10.0,
    ) -> None:
        self._source: LeaseSource = LocalLender(lender) if isinstance(lender, Lender) else lender
        self._pool = pool
        self._slots = [_Slot(key if isinstance(key, tuple) else (key,), engine) for key, engine in engines.items()]
        self._job = job
        self._clock = clock
        self._model = model
        self._ask_again_s = ask_again_s
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Borrow as many devices as the lender grants, up to one an engine.

        Raises:
            TransportError: The lender cannot be reached.
        """
        slots = await self._ask()
        await self._group.__aenter__()
        try:
            outcomes = await asyncio.gather(*(self._join(slot) for slot in slots), return_exceptions=True)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome  # noqa: TRY301 - as if it had been awaited alone
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self._tasks = [self._group.create_task(self._keep()), self._group.create_task(self._watch())]
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
            joined = [slot for slot in self._slots if slot.is_joined]
            await self._release(*self._slots)
            with contextlib.suppress(*_PASSING):
                await self._source.ask(self._job, 0)
            await asyncio.gather(*(self._take_out(slot, "the job gave its device back") for slot in joined))

    def _leases(self) -> list[Lease]:
        return [lease for slot in self._slots for lease in slot.leases]

    async def _ask(self) -> list[_Slot]:
        """Ask for the devices that are not held; returns the engines that have theirs now."""
        now_s = self._clock.now()
        wanted = [slot for slot in self._slots if not slot.leases and slot.retry_s <= now_s]
        granted: list[_Slot] = []
        try:
            for slot in wanted:
                is_gang = len(slot.device_ids) > 1
                granted += [slot] if is_gang and await self._grant(dict.fromkeys(slot.device_ids, slot)) else []
            single = {slot.device_ids[0]: slot for slot in wanted if len(slot.device_ids) == 1}
            granted += [single[lease.device_id] for lease in await self._grant(single)]
        except _PASSING:
            if not granted:
                raise
        return granted

    async def _grant(self, slots: Mapping[DeviceId, _Slot]) -> Sequence[Lease]:
        """Ask for devices, all or none where one engine needs them; notes what was granted."""
        if not slots:
            return ()
        is_whole = len(slots) > 1 and len(set(map(id, slots.values()))) == 1
        leases = await self._source.ask(
            self._job, len(slots), model=self._model, devices=tuple(slots), is_whole=is_whole
        )
        for lease in leases:
            slots[lease.device_id].leases += (lease,)
        return leases

    async def _join(self, slot: _Slot) -> None:
        if not slot.leases:  # they ended before this began
            return
        tokens, engine = slot.tokens, slot.engine
        try:
            if isinstance(engine, SupportsLease):
                engine.set_lease(*tokens)
            await self._pool.add_engine(engine, EngineKind.BORROWED, lease_id=slot.leases[0].lease_id)
        except EngineLostError as error:
            _logger.warning("device %s is given back: %s", "+".join(slot.device_ids), error)
            await self._give_up(slot)
            await self._take_out(slot, "it does not answer")
            return
        if not slot.leases or slot.tokens != tokens:  # meanwhile
            await self._take_out(slot, "its lease is over")
            return
        slot.is_joined, slot.num_failures = True, 0
        self._pool.note_lease(engine.engine_id, slot.expires_s)
        if slot.is_revoking:
            self._group.create_task(self._drain(slot))

    async def _give_up(self, slot: _Slot) -> None:
        """Give back a device whose engine does not answer, and leave it alone for a while."""
        slot.retry_s = self._clock.now() + self._ask_again_s * min(_MOST_BACKOFF, 2**slot.num_failures)
        slot.num_failures += 1
        await self._release(slot)

    async def _release(self, *slots: _Slot) -> None:
        lease_ids = [lease_id for slot in slots for lease_id in slot.let_go()]
        if lease_ids:
            with contextlib.suppress(*_PASSING):  # they end by themselves
                await self._source.release(self._job, lease_ids)

    async def _keep(self) -> None:
        """Renew, give back what is of no use, ask for what is missing."""
        asked_s, period_s = self._clock.now(), 0.0
        while True:
            now_s = self._clock.now()
            left_s = (
                min((lease.expires_s for lease in self._leases() if not lease.is_revoking), default=math.inf) - now_s
            )
            wait_s = left_s / _RENEWALS_PER_TTL
            if left_s < math.inf:
                period_s = max(period_s, wait_s)
                wait_s = max(wait_s, min(left_s, period_s / _TRIES_PER_RENEWAL), _LEAST_WAIT_S)
            if not all(slot.leases for slot in self._slots):
                wait_s = min(wait_s, asked_s + self._ask_again_s - now_s)
            await self._clock.sleep(wait_s if wait_s < math.inf else self._ask_again_s)
            await self._renew()
            if self._clock.now() >= asked_s + self._ask_again_s:
                asked_s = self._clock.now()
                with _excused("ask for devices"):
                    for slot in await self._ask():
                        self._group.create_task(self._join(slot))

    async def _renew(self) -> None:
        for slot in self._slots:
            if slot.is_joined and self._pool.state_of(slot.engine.engine_id) in (None, EngineState.LOST):
                await self._give_up(slot)
                self._group.create_task(self._take_out(slot, "it was lost"))
        due = [lease.lease_id for lease in self._leases() if not lease.is_revoking]
        if due:
            with _excused("renew leases"):
                self._reconcile(await self._source.renew(self._job, due), due)
        now_s = self._clock.now()
        self._end([slot for slot in self._slots if slot.expires_s <= now_s])

    async def _watch(self) -> None:
        while True:
            known = {lease.lease_id: lease.is_revoking for lease in self._leases()}
            try:
                in_force = await self._source.changed(self._job, known)
            except _PASSING:  # ``_keep`` tells; a lender that comes back is not stormed
                await asyncio.sleep(_REMOVE_TIMEOUT_S)
                continue
            self._reconcile(in_force, known)

    def _reconcile(self, in_force: Sequence[Lease], asked: Collection[LeaseId]) -> None:
        """Follow what the lender says of the leases ``asked`` about."""
        now = {lease.lease_id: lease for lease in in_force}
        over = []
        for slot in self._slots:
            if not any(lease.lease_id in asked for lease in slot.leases):
                continue
            if any(lease.lease_id in asked and lease.lease_id not in now for lease in slot.leases):
                over.append(slot)
                continue
            was_revoking = slot.is_revoking
            slot.leases = tuple(_latest(lease, now.get(lease.lease_id)) for lease in slot.leases)
            if slot.is_joined:
                self._pool.note_lease(slot.engine.engine_id, slot.expires_s)
                if slot.is_revoking and not was_revoking:
                    self._group.create_task(self._drain(slot))
        self._end(over)

    def _end(self, slots: Iterable[_Slot]) -> None:
        """Take engines out of whose leases one is over, and give back what is left of those."""
        for slot in slots:
            if slot.is_joined:
                self._group.create_task(self._take_out(slot, "its lease is over"))
            if len(slot.leases) > 1:
                self._group.create_task(self._release(attrs.evolve(slot)))
            slot.let_go()

    async def _drain(self, slot: _Slot) -> None:
        """Let the turns in flight end as far as there is time, then give the device back."""
        leases, left_s = slot.leases, max(0.0, slot.expires_s - self._clock.now())
        with contextlib.suppress(EngineLostError):
            await self._pool.drain_engine(slot.engine.engine_id, "the lender asked its device back", timeout_s=left_s)
        if {lease.lease_id for lease in slot.leases} == {lease.lease_id for lease in leases}:
            self._group.create_task(self._take_out(slot, "its device was asked back"))
            await self._release(slot)

    async def _take_out(self, slot: _Slot, why: str) -> None:
        """Remove an engine at once, then wait a little for it to stop; on the loop's time, since the clock may stand still."""
        with contextlib.suppress(EngineLostError, TimeoutError):  # it was removed by another; it does not answer
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await self._pool.remove_engine(slot.engine.engine_id, why)
        if not slot.leases and isinstance(slot.engine, SupportsLease):
            slot.engine.set_lease()


def _latest(lease: Lease, told: Lease | None) -> Lease:
    """Return what is known of a lease; an answer may be older than the last renewal, unless the device is asked back."""
    if told is None or told.is_revoking:
        return told or lease
    return attrs.evolve(told, expires_s=max(told.expires_s, lease.expires_s))


@contextlib.contextmanager
def _excused(what: str) -> Iterator[None]:
    """Let what the lender cannot do at the moment wait for the next time."""
    try:
        yield
    except _PASSING as error:
        _logger.warning("cannot %s now: %s", what, error)
