"""RolloutPool: what a trainer calls in place of its own rollout generator.

Invariants:

* ``generate`` gives exactly one result or one error for each call, or passes on its caller's cancellation.
* A caller's cancellation never waits for an engine: the request is aborted by a task of the pool.
* Leaving the pool ends every turn and every task of it. The engines are the caller's.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs

from rose.checks import shown
from rose.clocks import MonotonicClock
from rose.errors import BackendUnavailableError, EngineError, TurnFailedError
from rose.interfaces import Clock, ServingEngine, Transport
from rose.policies.demand import Announcement, Announcements
from rose.policies.routing import EngineState, EngineView, WaitReason
from rose.pool.barrier import Barrier
from rose.pool.config import PoolConfig, WeightPull
from rose.pool.driver import Driver
from rose.pool.events import Observer
from rose.pool.membership import EngineAccount, Member
from rose.pool.sources import TokenSource
from rose.pool.state import PoolState
from rose.pool.statistics import PoolStatistics
from rose.pool.weights import SyncReport, TransportSource, UpdateSource, WeightSync
from rose.types import EngineId, EngineKind, FinishReason, LeaseId, Turn, TurnResult, WeightVersion

if TYPE_CHECKING:
    from rose.pool.remote_pool import RemotePool

_logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class PoolSnapshot:
    """A reading of the whole pool: its turns, what the waiting ones wait for, its engines and its weight version."""

    num_live_turns: int
    num_waiting: int
    waiting: dict[WaitReason, int]
    engines: tuple[EngineView, ...]
    version: WeightVersion | None


class RolloutPool:
    """Runs turns of trajectories on dedicated and borrowed engines.

    Use it as an async context manager. The pool does not own its engines: it never closes them.

    Example:
        >>> async with RolloutPool([engine]) as pool:
        ...     result = await pool.generate(turn)
    """

    def __init__(
        self,
        engines: Iterable[ServingEngine] = (),
        *,
        borrowed: Iterable[ServingEngine] = (),
        config: PoolConfig | None = None,
        clock: Clock | None = None,
        on_event: Observer | None = None,
        seed: int = 0,
    ) -> None:
        """Describe a pool; it starts to work in ``async with``.

        Args:
            engines: The job's own engines.
            borrowed: Engines on devices that are lent.
            config: Settings; the defaults are safe.
            clock: Time of every wait but the last one in closing; the machine's monotonic clock by default.
            on_event: Called with every event, in order. Must not block.
            seed: Of the jitter.

        Raises:
            TypeError: An argument is of a wrong type.
        """
        check_type("config", config, PoolConfig, type(None))
        check_type("seed", seed, int)
        if clock is not None:
            _check_methods("clock", clock, "now", "sleep")
        if on_event is not None:
            _check_methods("on_event", on_event, "__call__")
        self.config = config if config is not None else PoolConfig()
        self._clock = clock if clock is not None else MonotonicClock()
        self._initial = [(engine, EngineKind.DEDICATED) for engine in _check_engines("engines", engines)]
        self._initial += [(engine, EngineKind.BORROWED) for engine in _check_engines("borrowed", borrowed)]
        self._state = PoolState(self.config, name=uuid.uuid4().hex[:8], seed=seed)
        self._driver = Driver(self._state, config=self.config, clock=self._clock, on_event=on_event)
        self._driver.on_gone = self._try_again
        self.announced = Announcements()
        self._source: TransportSource | None = None
        self._sync = WeightSync(self._state, config=self.config, clock=self._clock, apply=self._driver.apply)

    @staticmethod
    def open(job: Path | str | Mapping[str, Any]) -> AbstractAsyncContextManager[RolloutPool]:
        """Return a context with the pool that a job file describes: engines, lender and executors included.

        Example:
            >>> async with RolloutPool.open("job.toml") as pool:
            ...     result = await pool.generate(turn)

        Raises:
            ConfigError: The file is wrong; one line a problem.
        """
        opened: AbstractAsyncContextManager[RolloutPool] = import_module("rose.hosts.job").open_pool(job)
        return opened

    @staticmethod
    def connect(url: str, *, token: str | None = None, timeout_s: float = 10.0) -> RemotePool:
        """Return the face of a pool that runs in another process (``rose pool``, ``rose.hosts.http``).

        Use it as an async context manager in the same way. Tokens stream from the engines themselves where these have an
        address; the pool decides, and keeps the accounts.

        Args:
            url: Of the pool's service, ``http://host:port``.
            token: The bearer token, if the service asks for one.
            timeout_s: How long short calls may take, and how long the first connection.

        Raises:
            BackendUnavailableError: The extra ``http`` (aiohttp) is not installed.
        """
        try:
            from rose.pool.remote_pool import RemotePool  # noqa: PLC0415 - loads aiohttp
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "rose":
                raise
            message = f"a pool over HTTP needs a library that is not installed ({error}); pip install 'rose-rl[http]'"
            raise BackendUnavailableError(message) from error
        return RemotePool(url, token=token, timeout_s=timeout_s)

    # The trainer's face.

    async def generate(self, turn: Turn, *, source: TokenSource | None = None) -> TurnResult:
        """Run one turn to its end, wherever that takes it.

        An error that ends the turn, a cancellation included, has the tokens made so far in its attribute ``partial``.

        Args:
            turn: What to generate.
            source: What gives the turn's tokens once an engine was chosen; the engine's own stream by default.

        Raises:
            RequestRefusedError: No engine can ever serve it.
            DeadlineExceededError: ``turn.deadline_s`` passed.
            VersionUnavailableError: Its version is gone, or not there and the turn does not wait for it.
            StaleTrajectoryError: The trajectory is further behind than ``turn.max_staleness``.
            GroupDroppedError: Turns of its group were refused again and again.
            NoEngineError: No engine took turns for ``PoolConfig.no_engine_timeout_s``.
            TurnFailedError: It was given up after too many attempts, or the pool was closed.
            TypeError: ``turn`` is no ``Turn``.
        """
        self._check_open()
        check_type("turn", turn, Turn)
        waiter: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        record = self._state.submit(turn, waiter, self._clock.now(), source=source)
        try:
            self._driver.apply()
        except BaseException:
            # Nobody would wait for it, and left in the queue it could fail every later call as well.
            self._state.cancel(record, self._clock.now())
            raise
        try:
            return await waiter
        except asyncio.CancelledError as error:
            if waiter.done() and not waiter.cancelled():
                waiter.exception()
            vars(error)["partial"] = record.result(FinishReason.ABORTED)
            self._state.cancel(record, self._clock.now())
            self._driver.apply()
            raise

    def abort_trajectory(self, trajectory_id: str) -> int:
        """End a trajectory's live turns as aborted: ``generate`` returns the tokens that they have.

        Returns:
            How many turns that were.
        """
        self._check_open()
        num_turns = self._state.abort_trajectory(trajectory_id, self._clock.now())
        self._driver.apply()
        return num_turns

    async def barrier(self, version: WeightVersion, *, timeout_s: float | None = None) -> None:
        """Wait until nothing of older weights is under way.

        Every engine that takes turns is then at ``version`` or a later one of its run, and every live turn was made by such weights alone.
        Turns that come while it waits are not held back.

        Args:
            version: The oldest weights that are still wanted.
            timeout_s: How long to wait, on the pool's clock; ``None``: for ever.

        Raises:
            DeadlineExceededError: Something older was under way for ``timeout_s``; the message names it.
            TurnFailedError: The pool was closed.
            TypeError: ``version`` is no ``WeightVersion``.
        """
        self._check_open()
        check_type("version", version, WeightVersion)
        await self._driver.wait_for_barrier(Barrier(version), timeout_s)

    async def sync_weights(self, source: UpdateSource | Transport) -> SyncReport:
        """Bring every engine that can be reached to the newest weights of ``source``.

        Engines stage while they serve, then activate; turns in flight go on across the activation. An engine that
        fails is fenced until a later sync succeeds. Engines that join afterwards catch up from the same source.

        Args:
            source: Where updates are planned, or the transport that a publisher writes to.

        Returns:
            What each engine acknowledged, and the error of each that did not.

        Raises:
            TypeError: ``source`` is neither (a class is none; make an instance).
        """
        self._check_open()
        if not isinstance(source, Transport):
            _check_methods("source", source, "plan")
        return await self._sync.run(self._source_of(source) if isinstance(source, Transport) else source)

    def _source_of(self, transport: Transport) -> TransportSource:
        """Return the source over a transport, the same one for the same transport: it keeps what it has read."""
        if self._source is None or self._source.transport is not transport:
            self._source = TransportSource(transport)
        return self._source

    @property
    def clock(self) -> Clock:
        """The clock of every time that the pool tells."""
        return self._clock

    @property
    def version(self) -> WeightVersion | None:
        """The latest version that an engine acknowledged, ``None`` before the first."""
        return self._state.engines.version

    def expect(self, num_trajectories: int, *, at_s: float | None = None) -> None:
        """Announce demand, so that a ``Borrower`` of this pool has engines ready for it.

        What is said for a time replaces what was said for that time and later. It is a peak, not a reservation: engines that get no turns
        are given back all the same.

        Args:
            num_trajectories: How many trajectories begin then, about.
            at_s: When, on the pool's clock; now unless given.

        Raises:
            TypeError: The number is none.
            ValueError: It is negative.
        """
        check_type("num_trajectories", num_trajectories, int)
        if num_trajectories < 0:
            message = f"num_trajectories must be >= 0, got {num_trajectories}"
            raise ValueError(message)
        self.announced.add(Announcement(num_trajectories, self._clock.now() if at_s is None else at_s))

    def snapshot(self) -> PoolSnapshot:
        """Read the pool's state now."""
        waiting = self._state.waiting_reasons()
        return PoolSnapshot(
            num_live_turns=len(self._state.live),
            num_waiting=waiting.total(),
            waiting=dict(waiting),
            engines=tuple(self._state.engines.index),
            version=self._state.engines.version,
        )

    def statistics(self) -> PoolStatistics:
        """Return what became of turns and tokens since the pool was made."""
        return self._state.recorder.read()

    def live_trajectories(self) -> set[str]:
        """Return the trajectories that have a turn in the pool's hands."""
        return {record.turn.trajectory_id for record in self._state.live.values()}

    def state_of(self, engine_id: EngineId) -> EngineState | None:
        """Return an engine's state, ``None`` when it is not in the pool."""
        member = self._state.engines.members.get(engine_id)
        return None if member is None else member.state

    def accounts(self) -> dict[EngineId, EngineAccount]:
        """Return what each engine did for this pool, those that left included."""
        return self._state.engines.accounts(self._clock.now())

    @property
    def ended_loans_s(self) -> tuple[float, ...]:
        """How long borrowed engines were in the pool that are not any more, the last few hundred."""
        return tuple(self._state.engines.ended_loans_s)

    # Engines come and go.

    async def add_engine(
        self, engine: ServingEngine, kind: EngineKind = EngineKind.DEDICATED, *, lease_id: LeaseId | None = None
    ) -> EngineState:
        """Take an engine in and return its state: ready, or stale until its weights were brought up to date.

        A stale engine catches up in the background once the pool has synced weights before.

        Raises:
            ValueError: Its id is taken by an engine that is not lost.
            EngineLostError: It does not answer.
            TypeError: An argument is of a wrong type.
        """
        self._check_open()
        check_type("engine", engine, ServingEngine)
        check_type("kind", kind, EngineKind)
        check_type("lease_id", lease_id, str, type(None))
        member = self._state.lifecycle.join(engine, kind, lease_id, self._clock.now())
        try:
            reading = await self._driver.read(member)
            self._check_open()
            self._state.lifecycle.joined(member, reading, self._clock.now())
        except BaseException as error:
            self._state.lifecycle.fall_out(
                member, EngineState.LOST, f"it did not answer when it joined: {error}", self._clock.now()
            )
            self._driver.apply()
            raise
        self._driver.apply()
        self._driver.spawn(self._driver.watch(member))
        if member.state is EngineState.STALE:
            self._driver.spawn(self._catch_up(member))
        return member.state

    def note_lease(self, engine_id: EngineId, ends_s: float) -> None:
        """Note until when an engine is lent, on the pool's clock; one that put off its weights is offered them when that is renewed.

        An engine that is not in the pool is ignored: it may have left meanwhile.
        """
        member = self._state.engines.members.get(engine_id)
        if member is None:
            return
        is_renewal, member.lease_ends_s = member.lease_ends_s is not None, ends_s
        if is_renewal and member.state is EngineState.STALE and self.config.weight_pull is WeightPull.ECONOMIC:
            self._driver.spawn(self._catch_up(member))

    async def remove_engine(self, engine_id: EngineId, reason: str, *, timeout_s: float | None = None) -> bool:
        """Take an engine out at once: its turns go on elsewhere, it is told to stop working on them.

        Returns:
            Whether the engine acknowledged that within ``timeout_s`` (``None``: however long it takes).

        Raises:
            EngineLostError: It is not in the pool.
        """
        member = self._state.engines.get(engine_id)
        self._state.lifecycle.remove(member, reason, self._clock.now())
        self._driver.apply()
        return await self._driver.wait_until_free(member, timeout_s)

    async def drain_engine(self, engine_id: EngineId, reason: str, *, timeout_s: float | None = None) -> bool:
        """Send an engine no more turns and wait for those in flight; ``remove_engine`` would cut them short.

        Returns:
            Whether it is free of turns; false after ``timeout_s``.

        Raises:
            EngineLostError: It is not in the pool.
        """
        member = self._state.engines.get(engine_id)
        self._state.lifecycle.drain(member, reason, self._clock.now())
        self._driver.apply()
        return await self._driver.wait_until_free(member, timeout_s)

    # Beginning and end.

    async def __aenter__(self) -> Self:
        """Take the first engines in. One that does not answer is lost (and asked again, ``rejoin_s``), unless none answers.

        Raises:
            EngineLostError: None answers.
            TurnFailedError: The pool was opened before.
        """
        await self._driver.start()
        try:
            await self._add_first_engines()
        except BaseException:
            await self._driver.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every turn with ``TurnFailedError``, tell the engines, stop all tasks."""
        await self._driver.stop()

    async def _add_first_engines(self) -> None:
        joins = (self.add_engine(engine, kind) for engine, kind in self._initial)
        outcomes = await asyncio.gather(*joins, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            if len(errors) == len(outcomes) or not isinstance(error, EngineError):
                raise error
        for member in self._state.engines.members.values():
            if member.state is EngineState.LOST:
                self._try_again(member)

    def _check_open(self) -> None:
        if not self._driver.is_open:
            message = "the pool is not open; use it inside 'async with RolloutPool(...) as pool:'"
            raise TurnFailedError(message)

    def _try_again(self, member: Member) -> None:
        """Ask a lost engine of the job's own now and then whether it is back."""
        if member.kind is EngineKind.DEDICATED and self.config.rejoin_s is not None:
            self._driver.spawn(self._rejoin(member, self.config.rejoin_s))

    async def _rejoin(self, member: Member, pause_s: float) -> None:
        members = self._state.engines.members
        while members.get(member.engine_id) is member and member.state is EngineState.LOST:
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, self.config.rejoin_max_s)
            try:
                await self._driver.read(member)
                if members.get(member.engine_id) is member:
                    await self.add_engine(member.engine, member.kind, lease_id=member.lease_id)
            except Exception:  # noqa: BLE001 - the root of a task: the engine stays lost and is asked again
                member = members.get(member.engine_id, member)

    async def _catch_up(self, member: Member) -> None:
        """Bring an engine that joined late to the weights of the last sync."""
        try:
            await self._sync.catch_up(member)
        except Exception:  # noqa: BLE001 - the root of a task: the engine stays stale, the next sync tries again
            _logger.warning("engine %s could not catch up", member.engine_id, exc_info=True)


def check_type(name: str, value: object, *allowed: type) -> None:
    """Refuse an argument of a wrong type.

    Raises:
        TypeError: It is of none of ``allowed``; a boolean is no integer.
    """
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("None" if cls is type(None) else cls.__name__ for cls in allowed)
        message = f"{name} must be of type {names}, got {shown(value)}"
        raise TypeError(message)


def _check_methods(name: str, value: object, *methods: str) -> None:
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if isinstance(value, type) or missing:
        message = f"{name} must be an object with {'() and '.join(methods)}(), got {shown(value)}"
        raise TypeError(message)


def _check_engines(name: str, engines: object) -> list[ServingEngine]:
    if not isinstance(engines, Iterable):
        message = f"{name} must be a list of engines, got {shown(engines)}"
        raise TypeError(message)
    checked = list(engines)
    for i, engine in enumerate(checked):
        check_type(f"{name}[{i}]", engine, ServingEngine)
    return checked
