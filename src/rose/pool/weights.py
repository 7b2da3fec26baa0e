"""Bringing new weights to the engines of a pool.

Life cycle of one sync:

1. [POOL] each ready, stale or fenced engine: plan the update from the version it acknowledged (nothing known for a fenced one).
2. [ENGINE] all stage at the same time, while they serve. One that cannot is stale from here on: its weights are intact.
   A relay that cannot be reached says nothing about the engines; they stay as they are.
3. [POOL] when all have staged or failed: updating, so that no new turn comes; turns that may not run on the new version move.
4. [ENGINE] all activate at the same time. One that cannot is fenced, its turns move; the others go on.
5. [POOL] acknowledged: ready, at the version of the activation.

Invariants: one sync at a time; an engine never stays in updating, whatever happens to the sync; the version of the pool
moves by acknowledgements alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import attrs

from rose.errors import BlobNotFoundError, EngineLostError, TransportError, VersionConflictError
from rose.interfaces import Clock, Transport
from rose.policies.routing import EngineState
from rose.pool.config import PoolConfig
from rose.pool.membership import Member
from rose.pool.state import PoolState
from rose.pool.timing import within
from rose.transfer.relay import plan_update
from rose.types import Activation, EngineId, WeightUpdate, WeightVersion

_UPDATABLE = (EngineState.READY, EngineState.STALE, EngineState.FENCED)


class UpdateSource(Protocol):
    """Where a pool learns what an engine needs."""

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        """Return the update from ``known`` (``None``: from nothing) to the newest version, or ``None`` if there is none to make."""


@attrs.frozen
class TransportSource:
    """The updates that publishers put into a transport."""

    transport: Transport

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        """Plan in a thread, since transports block; once more if old versions were retired meanwhile."""
        try:
            return await asyncio.to_thread(plan_update, self.transport, known)
        except BlobNotFoundError:
            return await asyncio.to_thread(plan_update, self.transport, known)


@attrs.frozen(kw_only=True)
class SyncReport:
    """What a sync did.

    Attributes:
        activations: What each updated engine acknowledged.
        unchanged: Engines that hold the newest version already.
        errors: Why each other engine was left out.
    """

    activations: Mapping[EngineId, Activation]
    unchanged: tuple[EngineId, ...]
    errors: Mapping[EngineId, Exception]


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
        self._behind: list[Member] = []

    async def run(self, source: UpdateSource) -> SyncReport:
        """Update every engine that can be updated."""
        async with self._lock:
            self._source = source
            return await self._update(source, self._state.engines.members.values())

    async def catch_up(self, member: Member) -> None:
        """Update one engine from the last source, if there is one; engines that wait for that are updated together."""
        self._behind.append(member)
        async with self._lock:
            behind, self._behind = self._behind, []
            if self._source is not None and behind:
                await self._update(self._source, behind)

    async def _update(self, source: UpdateSource, members: Iterable[Member]) -> SyncReport:
        jobs = [_Job(member) for member in members if member.state in _UPDATABLE]
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(self._stage(job, source))
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                if job.update is not None and job.error is None:
                    group.create_task(self._activate(job, job.update))
        return SyncReport(
            activations={job.engine_id: job.activation for job in jobs if job.activation is not None},
            unchanged=tuple(job.engine_id for job in jobs if job.update is None and job.error is None),
            errors={job.engine_id: job.error for job in jobs if job.error is not None},
        )

    async def _stage(self, job: _Job, source: UpdateSource) -> None:
        member = job.member
        known = None if member.state is EngineState.FENCED else member.version
        try:
            job.update = await source.plan(known)
            if job.update is None and member.state is not EngineState.READY:
                known, job.update = None, await source.plan(None)
            if job.update is None:
                return
            try:
                await self._stage_in_time(member, job.update)
            except (VersionConflictError, BlobNotFoundError):
                job.update = None if known is None else await source.plan(None)
                if job.update is None:
                    raise
                await self._stage_in_time(member, job.update)
        except Exception as error:  # noqa: BLE001 - the root of a task: one engine's failure must not stop the others
            job.error = error
            self._leave_out(member, error)

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
