"""Borrowed engines in a pool for as long as their leases last and the job has use for them.

Life cycle:

1. [JOB] ``Borrower`` asks the lender for the devices where it has engines, and adds the engine of each granted one to the pool.
2. [JOB] it renews its leases after every third of their time to live; that of an engine that was lost meanwhile it ends.
3. [JOB] at every look it follows the pool's demand: it asks at once for what is lacking, and again now and then; it drains and gives back
   engines that were not used for a while and are not needed.
4. [LENDER] asks a device back: the engine gets no more turns, those in flight have until the lease ends, the device is given back.
5. [LENDER] revokes or lets expire: the ledger stops the engine at its next step; the borrower hears of it and takes the
   engine out of the pool, whose turns go on elsewhere with the tokens they have.
6. [JOB] leaving gives every device back.

Invariants: an engine is in the pool only under a lease that was in force when it was added; a device whose engine does not
answer is given back at once, and asked for again later and later; nothing is renewed that the lender ended; nothing is given back for
want of use that has a turn. The lender keeps no wish of the job for more than it wants. A lender that cannot
be reached ends nothing: leases last as long as they last, by the job's own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

import attrs

from rose.coserving.lender import Lender
from rose.errors import EngineError, EngineLostError
from rose.interfaces import Clock, ServingEngine
from rose.interfaces.serving import SupportsSleep
from rose.policies.demand import DemandConfig, DemandTracker
from rose.policies.lending import Lease
from rose.policies.routing import EngineState
from rose.pool.demand import PoolDemand
from rose.pool.lease_source import LeaseSource, LocalLender, SupportsLease
from rose.pool.loan_desk import MOST_DEVICES, PASSING, LoanDesk
from rose.pool.loans import Engines, Loan, Loans
from rose.pool.pool import RolloutPool
from rose.types import EngineKind, JobId, LeaseId

_logger = logging.getLogger(__name__)
_RENEWALS_PER_TTL = 3
_TRIES_PER_RENEWAL = 4
_LEAST_WAIT_S = 1e-3
_REMOVE_TIMEOUT_S = 2.0
_DEMAND = DemandConfig()


class Borrower:
    """Keeps a pool's borrowed engines in step with its leases and its demand. Use as an async context manager, inside the pool's own.

    Args:
        lender: Grants the devices: the lender itself or a way to it, such as ``rose.pool.remote_lender.RemoteLender``.
        pool: Where the engines join.
        engines: The rollout engine that waits on each device; one that spans several devices is borrowed with all of them or not
            at all, and is named by them in the order of its ledgers. Or a function that gives the engine on a device once that is
            granted (``None``: the job has none there); its engines are closed on leaving.
        job: In whose name devices are borrowed.
        clock: The clock of the leases and of the pool.
        model: What the engines run; the lender may know devices where that cannot be.
        ask_again_s: How long to wait before asking again for devices that were not granted, or that the lender took back. A device
            whose engine did not answer is asked for after this long, then twice as long, and so on.
        most_devices: Devices held at once at most; ``None``: all there are.
        demand: How the job's demand is followed, or what was learned of it before; ``None``: hold all that can be had, used or not.
    """

    def __init__(
        self,
        lender: Lender | LeaseSource,
        pool: RolloutPool,
        engines: Engines,
        *,
        job: JobId,
        clock: Clock,
        model: str | None = None,
        ask_again_s: float = 10.0,
        most_devices: int | None = None,
        demand: DemandConfig | DemandTracker | None = _DEMAND,
    ) -> None:
        self._pool = pool
        self._loans = Loans(engines)
        self._job = job
        self._clock = clock
        self._ask_again_s = self._look_s = ask_again_s
        source: LeaseSource = LocalLender(lender) if isinstance(lender, Lender) else lender
        self._desk = LoanDesk(source, self._loans, job, clock, model=model, most_devices=most_devices)
        self._demand: PoolDemand | None = None
        if demand is not None:
            tracker = DemandTracker(demand) if isinstance(demand, DemandConfig) else demand
            self._demand, self._look_s = PoolDemand(pool, tracker), tracker.config.look_s
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        self._troubles: set[str] = set()

    async def __aenter__(self) -> Self:
        """Borrow as many devices as are wanted and the lender grants, up to one an engine.

        Raises:
            TransportError: The lender cannot be reached.
        """
        now_s = self._clock.now()
        if self._demand is not None:
            self._demand.begin(now_s)
        loans = await self._desk.ask(self._wanted(now_s))
        await self._group.__aenter__()
        try:
            outcomes = await asyncio.gather(*(self._join(loan) for loan in loans), return_exceptions=True)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome  # noqa: TRY301 - as if it had been awaited alone
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self._tasks = [self._group.create_task(work) for work in (self._keep(), self._follow(), self._watch())]
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
            joined = [loan for loan in self._loans if loan.is_joined]
            await self._desk.release(*self._loans)
            await self._desk.forget_wish()
            await asyncio.gather(*(self._take_out(loan, "the job gave its device back") for loan in joined))
            if self._loans.is_open:
                await asyncio.gather(*(loan.engine.close() for loan in self._loans))

    # Following the demand.

    def _wanted(self, now_s: float) -> int:
        """Return how many engines the job wants to hold."""
        if self._demand is None:
            return MOST_DEVICES
        return int(min(MOST_DEVICES, self._demand.look(self._loans, self._loans.num_kept, now_s)))

    async def _follow(self) -> None:
        """Ask for what is wanted and not there, at once and again now and then; give back what is not."""
        asked_s, before = self._clock.now(), 0
        while True:
            await self._clock.sleep(self._look_s)
            now_s = self._clock.now()
            wanted = self._wanted(now_s)
            lacking = wanted - self._loans.num_kept
            if lacking > 0 and (wanted > before or now_s >= asked_s + self._ask_again_s):
                asked_s = now_s
                with self._excused("ask for devices"):
                    for loan in await self._desk.ask(lacking):
                        self._group.create_task(self._join(loan))
            elif lacking <= 0:
                if self._desk.has_wish:
                    await self._desk.forget_wish()
                if self._demand is not None:
                    for loan in self._demand.idle(self._loans, now_s)[:-lacking]:
                        self._group.create_task(self._give_back(loan))
            before = wanted

    # Joining and leaving.

    async def _join(self, loan: Loan) -> None:
        if not loan.leases:  # they ended before this began
            return
        tokens, engine = loan.tokens, loan.engine
        try:
            if isinstance(engine, SupportsLease):
                engine.set_lease(*tokens)
            await _wake(engine)
            await self._pool.add_engine(engine, EngineKind.BORROWED, lease_id=loan.leases[0].lease_id)
        except EngineError as error:
            level = logging.INFO if loan.num_failures else logging.WARNING  # once for an engine that starts anew
            _logger.log(level, "device %s is given back: %s", "+".join(loan.device_ids), error)
            await self._give_up(loan)
            await self._take_out(loan, "it does not answer")
            return
        if not loan.leases or loan.tokens != tokens:  # meanwhile
            await self._take_out(loan, "its lease is over")
            return
        loan.join(self._clock.now())
        self._pool.note_lease(engine.engine_id, loan.expires_s)
        if loan.is_revoking:
            self._group.create_task(self._drain(loan, "the lender asked its device back"))

    async def _give_up(self, loan: Loan) -> None:
        """Give back a device whose engine does not answer, and leave it alone for a while."""
        loan.fail(self._clock.now(), self._ask_again_s)
        await self._desk.release(loan)

    async def _give_back(self, loan: Loan) -> None:
        """Give an idle engine's device back, unless it got a turn since it was looked at."""
        is_idle = any(
            view.engine_id == loan.engine.engine_id and not view.num_in_flight for view in self._pool.snapshot().engines
        )
        if loan.is_joined and not loan.is_revoking and is_idle:
            loan.is_leaving = True
            await self._drain(loan, "the job has no use for it now")

    async def _drain(self, loan: Loan, why: str) -> None:
        """Let the turns in flight end as far as there is time, then give the device back."""
        leases, left_s = loan.leases, max(0.0, loan.expires_s - self._clock.now())
        with contextlib.suppress(EngineLostError):
            await self._pool.drain_engine(loan.engine.engine_id, why, timeout_s=left_s)
        if {lease.lease_id for lease in loan.leases} == {lease.lease_id for lease in leases}:
            self._group.create_task(self._take_out(loan, why))
            await self._desk.release(loan)

    async def _take_out(self, loan: Loan, why: str) -> None:
        """Remove an engine at once, then wait a little for it to stop; on the loop's time, since the clock may stand still."""
        with contextlib.suppress(EngineLostError, TimeoutError):  # it was removed by another; it does not answer
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await self._pool.remove_engine(loan.engine.engine_id, why)
        if not loan.leases and isinstance(loan.engine, SupportsLease):
            loan.engine.set_lease()

    # Keeping.

    async def _keep(self) -> None:
        """Renew; give back what was lost."""
        period_s = 0.0
        while True:
            left_s = min((lease.expires_s for lease in self._loans.leases if not lease.is_revoking), default=math.inf)
            left_s -= self._clock.now()
            wait_s = left_s / _RENEWALS_PER_TTL
            if left_s < math.inf:
                period_s = max(period_s, wait_s)
                wait_s = max(wait_s, min(left_s, period_s / _TRIES_PER_RENEWAL), _LEAST_WAIT_S)
            await self._clock.sleep(min(wait_s, self._ask_again_s))
            await self._renew()

    async def _renew(self) -> None:
        for loan in self._loans:
            if loan.is_joined and self._pool.state_of(loan.engine.engine_id) in (None, EngineState.LOST):
                await self._give_up(loan)
                self._group.create_task(self._take_out(loan, "it was lost"))
        due = [lease.lease_id for lease in self._loans.leases if not lease.is_revoking]
        if due:
            with self._excused("renew leases"):
                self._reconcile(await self._desk.source.renew(self._job, due), due)
        now_s = self._clock.now()
        self._end([loan for loan in self._loans if loan.expires_s <= now_s])

    async def _watch(self) -> None:
        while True:
            known = {lease.lease_id: lease.is_revoking for lease in self._loans.leases}
            try:
                in_force = await self._desk.source.changed(self._job, known)
            except PASSING:  # ``_keep`` tells; a lender that comes back is not stormed
                await asyncio.sleep(_REMOVE_TIMEOUT_S)
                continue
            self._reconcile(in_force, known)

    def _reconcile(self, in_force: Sequence[Lease], asked: Collection[LeaseId]) -> None:
        """Follow what the lender says of the leases ``asked`` about."""
        now = {lease.lease_id: lease for lease in in_force}
        over = []
        for loan in self._loans:
            if not any(lease.lease_id in asked for lease in loan.leases):
                continue
            if any(lease.lease_id in asked and lease.lease_id not in now for lease in loan.leases):
                over.append(loan)
                continue
            was_revoking = loan.is_revoking
            loan.leases = tuple(_latest(lease, now.get(lease.lease_id)) for lease in loan.leases)
            if loan.is_joined:
                self._pool.note_lease(loan.engine.engine_id, loan.expires_s)
                if loan.is_revoking and not was_revoking:
                    self._group.create_task(self._drain(loan, "the lender asked its device back"))
        self._end(over)

    @contextlib.contextmanager
    def _excused(self, what: str) -> Iterator[None]:
        """Let what the lender cannot do at the moment wait for the next time; that is said once."""
        try:
            yield
        except PASSING as error:
            _logger.log(logging.INFO if what in self._troubles else logging.WARNING, "cannot %s now: %s", what, error)
            self._troubles.add(what)
        else:
            self._troubles.discard(what)

    def _end(self, loans: Iterable[Loan]) -> None:
        """Take engines out of whose leases one is over, and give back what is left of those."""
        for loan in loans:
            if loan.is_joined:
                self._group.create_task(self._take_out(loan, "its lease is over"))
            if loan.is_gang:
                self._group.create_task(self._desk.release(attrs.evolve(loan)))
            loan.let_go()


async def _wake(engine: ServingEngine) -> None:
    """Wake an engine that a holder of its device put to sleep.

    Raises:
        EngineLostError: It does not answer, or cannot wake.
    """
    if not isinstance(engine, SupportsSleep):
        return
    await engine.snapshot()  # what was heard of it last may be old
    if engine.is_asleep:
        try:
            await engine.wake()
        except EngineError as error:
            message = f"engine {engine.engine_id} sleeps and does not wake: {error}"
            raise EngineLostError(message) from error


def _latest(lease: Lease, told: Lease | None) -> Lease:
    """Return what is known of a lease; an answer may be older than the last renewal, unless the device is asked back."""
    if told is None or told.is_revoking:
        return told or lease
    return attrs.evolve(told, expires_s=max(told.expires_s, lease.expires_s))
