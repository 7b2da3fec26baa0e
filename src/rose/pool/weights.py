"""Bringing new weights to the engines of a pool.

Life cycle of one sync:

1. [POOL] each ready, stale or fenced engine: plan the update from the version it acknowledged (nothing known for a fenced one).
2. [ENGINE] all stage at the same time, while they serve. One that cannot is stale from here on: its weights are intact.
   A relay that cannot be reached says nothing about the engines; they stay as they are.
   Borrowed engines whose loans would not pay for the bytes put it off (``PoolConfig.weight_pull``): they are stale until the next
   sync or the renewal of their lease.
3. [POOL] when the job's own engines have staged or failed: updating, so that no new turn comes; turns that may not run on the new
   version move. A borrowed engine, which may stand behind a thin link, is waited for by nobody: it goes on when it has staged.
4. [ENGINE] those activate at the same time. One that cannot is fenced, its turns move; the others go on.
5. [POOL] acknowledged: ready, at the version of the activation.

Invariants: one sync at a time; an engine never stays in updating, whatever happens to the sync; the version of the pool
moves by acknowledgements alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import attrs

from rose.errors import (
    BlobNotFoundError,
    CorruptUpdateError,
    EngineFencedError,
    EngineLostError,
    RoseError,
    TransferError,
    TransportError,
    VersionConflictError,
)
from rose.interfaces import Clock, Transport
from rose.policies.routing import EngineState
from rose.policies.weight_pull import PullAction, PullPlan, PullReason
from rose.pool.config import PoolConfig, WeightPull
from rose.pool.membership import Member
from rose.pool.pulls import PullCost, PullDesk, SupportsPullCost
from rose.pool.state import PoolState
from rose.pool.timing import within
from rose.transfer.acks import Ack, AckBoard
from rose.transfer.relay import ManifestReader, plan_update
from rose.types import Activation, EngineId, EngineKind, WeightUpdate, WeightVersion

_logger = logging.getLogger(__name__)
_UPDATABLE = (EngineState.READY, EngineState.STALE, EngineState.FENCED)


class UpdateSource(Protocol):
    """Where a pool learns what an engine needs."""

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        """Return the update from ``known`` (``None``: from nothing) to the newest version, or ``None`` if there is none to make."""


@runtime_checkable
class SupportsAcks(Protocol):
    """A source that tells publishers what engines have acknowledged."""

    async def acknowledge(self, acks: Mapping[EngineId, Ack]) -> None:
        """Tell them."""


@attrs.frozen
class TransportSource:
    """The updates that publishers put into a transport. Manifests are read once, however many engines ask.

    Attributes:
        transport: Where they are.
        board: Where to tell publishers what engines have acknowledged; ``None``: nowhere.
    """

    transport: Transport
    board: AckBoard | None = attrs.field(default=None, kw_only=True)
    _reader: ManifestReader = attrs.field(
        init=False,
        eq=False,
        repr=False,
        default=attrs.Factory(lambda self: ManifestReader(self.transport), takes_self=True),
    )

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        """Plan in a thread, since transports block; once more if old versions were retired meanwhile."""
        try:
            return await asyncio.to_thread(plan_update, self.transport, known, reader=self._reader)
        except BlobNotFoundError:
            return await asyncio.to_thread(plan_update, self.transport, known, reader=self._reader)

    async def cost(self, update: WeightUpdate) -> PullCost:
        """Return the bytes of an update's blobs."""
        manifests = [await asyncio.to_thread(self._reader.read, key) for key in update.manifest_keys]
        sizes = [manifest.bytes_sent for manifest in manifests]
        return PullCost(pieces=dict(zip(update.manifest_keys, sizes, strict=True)))

    async def acknowledge(self, acks: Mapping[EngineId, Ack]) -> None:
        """Write to the board, if there is one."""
        if self.board is not None:
            await asyncio.to_thread(self.board.write, acks)


@attrs.frozen(kw_only=True)
class SyncReport:
    """What a sync did.

    Attributes:
        activations: What each updated engine acknowledged.
        unchanged: Engines that hold the newest version already.
        errors: Why each other engine was left out.
        put_off: Borrowed engines that did not fetch the version yet, and why.
    """

    activations: Mapping[EngineId, Activation]
    unchanged: tuple[EngineId, ...]
    errors: Mapping[EngineId, Exception]
    put_off: Mapping[EngineId, PullPlan] = attrs.field(factory=dict)


class WeightSync:
    """Runs syncs, one at a time, and remembers the source for engines that join later."""

    def __init__(self, state: PoolState, *, config: PoolConfig, clock: Clock, apply: Callable[[], None]) -> None:
        """Work on ``state``; ``apply`` carries its plan out after each change."""
        self._state = state
        self._config = config
        self._clock = clock
        self._apply = apply
        self._lock = asyncio.Lock()
        self._source: UpdateSource | None = None
        self._behind: dict[Member, None] = {}
        self._desk = PullDesk(config.pull, state.engines)

    async def run(self, source: UpdateSource) -> SyncReport:
        """Update every engine that can be updated."""
        async with self._lock:
            self._source = source
            return await self._update(source, self._state.engines.members.values())

    async def catch_up(self, member: Member) -> None:
        """Update one engine from the last source, if there is one; engines that wait for that are updated together."""
        self._behind[member] = None
        async with self._lock:
            behind, self._behind = self._behind, {}
            if self._config.weight_pull is WeightPull.ECONOMIC:
                behind |= dict.fromkeys(self._stale_borrowed())  # what does not pay for one may pay for all of them
            if self._source is not None and behind:
                await self._update(self._source, behind)

    def _stale_borrowed(self) -> list[Member]:
        members = self._state.engines.members.values()
        return [each for each in members if each.kind is EngineKind.BORROWED and each.state is EngineState.STALE]

    async def _update(self, source: UpdateSource, members: Iterable[Member]) -> SyncReport:
        all_jobs = [_Job(member) for member in members if member.state in _UPDATABLE]
        put_off = await self._put_off(all_jobs, source)
        jobs = [job for job in all_jobs if job.engine_id not in put_off]
        own = [job for job in jobs if job.member.kind is EngineKind.DEDICATED]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._bring(own, source))
            for job in jobs:
                if job.member.kind is EngineKind.BORROWED:
                    group.create_task(self._bring([job], source))
        await self._acknowledge(source)
        return SyncReport(
            activations={job.engine_id: job.activation for job in jobs if job.activation is not None},
            unchanged=tuple(job.engine_id for job in jobs if job.update is None and job.error is None),
            errors={job.engine_id: job.error for job in jobs if job.error is not None},
            put_off=put_off,
        )

    async def _bring(self, jobs: Sequence[_Job], source: UpdateSource) -> None:
        """Stage on all these engines, then activate on those that could."""
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(self._stage(job, source))
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                if job.update is not None and job.error is None:
                    group.create_task(self._activate(job, job.update))

    async def _put_off(self, jobs: Sequence[_Job], source: UpdateSource) -> dict[EngineId, PullPlan]:
        """Return the borrowed engines that are not to fetch the version now, and keep turns away from those that need it."""
        if self._config.weight_pull is WeightPull.ALWAYS or not isinstance(source, SupportsPullCost):
            return {}
        borrowed = [job.member for job in jobs if job.member.kind is EngineKind.BORROWED]
        found = await asyncio.gather(*(self._weigh(member, source) for member in borrowed))
        wanted = [(member, *cost) for member, cost in zip(borrowed, found, strict=True) if cost is not None]
        now_s = self._clock.now()
        plans = self._desk.decide(wanted, now_s)
        put_off = {name: plan for name, plan in plans.items() if plan.action is not PullAction.PULL}
        for member in borrowed:
            plan = put_off.get(member.engine_id)
            if plan is not None and plan.reason is not PullReason.STILL_ADMISSIBLE:
                self._state.lifecycle.skip_update(member, plan.reason.value, now_s)
        if put_off:
            self._apply()
        return put_off

    async def _weigh(self, member: Member, source: UpdateSource) -> tuple[WeightUpdate, PullCost] | None:
        """Return what an engine would fetch; ``None`` when it is nothing, or when planning fails, which staging will report."""
        known = None if member.state is EngineState.FENCED else member.version
        assert isinstance(source, SupportsPullCost)  # noqa: S101 - the caller has looked
        try:
            update = await self._plan(source, known)
            async with asyncio.timeout(self._config.stage_timeout_s):
                return None if update is None else (update, await source.cost(update))
        except (RoseError, TimeoutError):
            return None

    async def _acknowledge(self, source: UpdateSource) -> None:
        """Tell publishers what engines have; they keep more than they need to when that fails."""
        if not isinstance(source, SupportsAcks):
            return
        now_s, now_unix_s = self._clock.now(), time.time()
        acks = {}
        for member in self._state.engines.members.values():
            if not self._state.engines.is_present(member):
                continue
            rest_s = self._config.ack_lease_s if member.lease_ends_s is None else member.lease_ends_s - now_s
            version = None if member.state is EngineState.FENCED else member.version
            acks[member.engine_id] = Ack(version=version, expires_unix_s=now_unix_s + rest_s)
        try:
            async with asyncio.timeout(self._config.stage_timeout_s):
                await source.acknowledge(acks)
        except (TransportError, TransferError, TimeoutError) as error:
            _logger.warning(
                "acknowledgements could not be told to the publisher: %s", str(error) or type(error).__name__
            )

    async def _stage(self, job: _Job, source: UpdateSource) -> None:
        member = job.member
        known = None if member.state is EngineState.FENCED else member.version
        try:
            job.update = await self._plan(source, known)
            if job.update is None and member.state is not EngineState.READY:
                known, job.update = None, await self._plan(source, None)
            if job.update is None:
                return
            try:
                await self._stage_in_time(member, job.update)
            except (VersionConflictError, BlobNotFoundError, CorruptUpdateError, EngineFencedError):
                job.update = None if known is None else await self._plan(source, None)
                if job.update is None:
                    raise
                await self._stage_in_time(member, job.update)
        except Exception as error:  # noqa: BLE001 - the root of a task: one engine's failure must not stop the others
            job.error = error
            self._leave_out(member, error)

    async def _plan(self, source: UpdateSource, known: WeightVersion | None) -> WeightUpdate | None:
        """Plan an update; bounded on the loop's time, since sources plan in threads, which a pool's clock may outrun.

        Raises:
            TransportError: The source does not answer in time; that says nothing about the engine.
        """
        limit_s = self._config.stage_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await source.plan(known)
        except TimeoutError as error:
            message = f"planning an update was not done after {limit_s} s (stage_timeout_s); is the store of the updates alive?"
            raise TransportError(message) from error

    async def _stage_in_time(self, member: Member, update: WeightUpdate) -> None:
        what = f"staging {update.target} on engine {member.engine_id!r}"
        await within(self._clock, member.engine.stage(update), self._config.stage_timeout_s, what=what)

    def _leave_out(self, member: Member, error: Exception) -> None:
        now_s = self._clock.now()
        if isinstance(error, TransportError):
            return
        if isinstance(error, EngineLostError):
            self._state.lifecycle.fall_out(member, EngineState.LOST, str(error), now_s)
        else:
            self._state.lifecycle.skip_update(member, f"could not stage: {error}", now_s)
        self._apply()

    async def _activate(self, job: _Job, update: WeightUpdate) -> None:
        member = job.member
        if not self._state.lifecycle.begin_update(member, update.target, self._clock.now()):
            message = f"engine {member.engine_id!r} is {member.state.value} and was not updated"
            job.error = EngineLostError(message)
            return
        self._apply()
        after, why = EngineState.FENCED, "the activation was cancelled"
        try:
            activation = await within(
                self._clock,
                member.engine.activate(),
                self._config.activate_timeout_s,
                what=f"activating {update.target} on engine {member.engine_id!r}",
            )
            if activation.version != update.target:
                message = f"engine {member.engine_id!r} acknowledged {activation.version} instead of {update.target}"
                raise VersionConflictError(message)  # noqa: TRY301
            job.activation = activation
        except EngineLostError as error:
            job.error, after, why = error, EngineState.LOST, str(error)
        except Exception as error:  # noqa: BLE001 - the root of a task: one engine's failure must not stop the others
            job.error, why = error, str(error)
        finally:
            if job.activation is None:
                self._state.lifecycle.fall_out(member, after, why, self._clock.now())
            else:
                self._desk.note(member, update, job.activation)
                self._state.lifecycle.end_update(member, job.activation, self._clock.now())
            self._apply()


@attrs.define(eq=False)
class _Job:
    """One engine's part of a sync."""

    member: Member
    update: WeightUpdate | None = None
    activation: Activation | None = None
    error: Exception | None = None

    @property
    def engine_id(self) -> EngineId:
        return self.member.engine_id
