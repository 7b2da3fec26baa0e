"""From a job file to a pool that runs: engines started or found, the lender asked, borrowed engines joining.

Life cycle:

1. [JOB] starts its dedicated engines, two at a time; nothing is borrowed before they run.
2. [JOB] opens the pool on them, then asks the lender: borrowed engines join as their devices are granted.
3. [JOB] gives every device back, closes the pool, then the engines that it started. Those of executors live on.

Invariants: whatever was started is ended, also when something later does not start; the job never has more than ``resources.n_serving``
leases (``CappedLender``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import attrs

from rose import registry
from rose.backends.remote import RemoteEngine
from rose.clocks import MonotonicClock
from rose.config import load
from rose.errors import ConfigError
from rose.hosts.job.capped import CappedLender
from rose.hosts.job.config import DedicatedConfig, JobConfig, executor_place, job_problems
from rose.interfaces import Clock, ServingEngine
from rose.pool import Borrower, RolloutPool
from rose.pool.events import Observer
from rose.pool.remote_lender import RemoteLender
from rose.types import DeviceId, EngineId, JobId, TransportAddress, WeightUpdate

_STARTS_AT_A_TIME = 2


@runtime_checkable
class SupportsStart(Protocol):
    """An engine that is made before it runs."""

    async def start(self) -> None:
        """Start it and return when it serves."""


@runtime_checkable
class SupportsOptions(Protocol):
    """A class of engines that reads its own options from plain data."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, clock: Clock) -> Self:
        """Make an engine; ``options`` have ``engine_id`` and ``model`` too."""


@attrs.frozen(kw_only=True)
class OpenJob:
    """A pool and what it stands on.

    Attributes:
        lender: Counts the leases; ``None`` where nothing is borrowed.
    """

    config: JobConfig
    pool: RolloutPool
    lender: CappedLender | None


class RelayedEngine(RemoteEngine):
    """An executor's engine that reads weights from its own cluster's relay, whatever store the pool planned from."""

    def __init__(self, url: str, *, relay: TransportAddress | None, **options: Any) -> None:
        super().__init__(url, **options)
        self._relay = relay

    async def stage(self, update: WeightUpdate) -> None:
        """Let the engine fetch an update from the relay."""
        await super().stage(update if self._relay is None else attrs.evolve(update, address=self._relay))


def open_pool(
    job: JobConfig | Mapping[str, Any] | Path | str, *, clock: Clock | None = None, on_event: Observer | None = None
) -> contextlib.AbstractAsyncContextManager[RolloutPool]:
    """Return a context with the pool that a job file describes. What ``RolloutPool.open`` does.

    Raises:
        ConfigError: The file is wrong, or an engine cannot be made from it.
    """
    config = job if isinstance(job, JobConfig) else load(JobConfig, job)
    if problems := job_problems(config):
        where = f"{job}: " if isinstance(job, Path | str) else ""
        raise ConfigError("\n".join(f"{where}{problem}" for problem in problems))
    return _only_pool(config, clock, on_event)


@contextlib.asynccontextmanager
async def _only_pool(config: JobConfig, clock: Clock | None, on_event: Observer | None) -> AsyncIterator[RolloutPool]:
    async with open_job(config, clock=clock, on_event=on_event) as job:
        yield job.pool


@contextlib.asynccontextmanager
async def open_job(
    config: JobConfig, *, clock: Clock | None = None, on_event: Observer | None = None
) -> AsyncIterator[OpenJob]:
    """Start what a checked configuration describes and give it.

    Raises:
        ConfigError: An engine cannot be made from its options.
        EngineLostError: One did not start, or no dedicated engine answers.
        TransportError: The lender cannot be reached.
    """
    clock = clock or MonotonicClock()
    async with contextlib.AsyncExitStack() as stack:
        dedicated = _dedicated(config, clock)
        for engine in dedicated:
            stack.push_async_callback(engine.close)
        await _start(dedicated)
        pool = RolloutPool(dedicated, config=config.pool, clock=clock, on_event=on_event, seed=config.job.seed)
        await stack.enter_async_context(pool)
        lender = await _borrow(stack, config, pool, clock)
        yield OpenJob(config=config, pool=pool, lender=lender)


async def _borrow(
    stack: contextlib.AsyncExitStack, config: JobConfig, pool: RolloutPool, clock: Clock
) -> CappedLender | None:
    place = config.lender
    if place is None or not config.resources.n_serving:
        return None
    token = None if place.token_file is None else registry.read_token(place.token_file)
    remote = await stack.enter_async_context(RemoteLender(place.url, token=token, clock=clock))
    lender = CappedLender(remote, config.resources.n_serving)
    engines = _borrowed(config, clock)
    for engine in engines.values():
        stack.push_async_callback(engine.close)
    borrower = Borrower(
        lender,
        pool,
        engines,
        job=JobId(config.job.name),
        clock=clock,
        model=config.model.name,
        ask_again_s=place.ask_again_s,
        most_devices=config.resources.n_serving,
        demand=place.demand,
    )
    await stack.enter_async_context(borrower)
    return lender


async def _start(engines: list[ServingEngine]) -> None:
    gate = asyncio.Semaphore(_STARTS_AT_A_TIME)

    async def start(engine: SupportsStart) -> None:
        async with gate:
            await engine.start()

    try:
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                if isinstance(engine, SupportsStart):
                    group.create_task(start(engine))
    except ExceptionGroup as errors:  # the first one ended the others
        raise errors.exceptions[0] from errors


def _dedicated(config: JobConfig, clock: Clock) -> list[ServingEngine]:
    engines: list[ServingEngine] = []
    for name, each in config.engines.items():
        if each.url is not None:
            token = None if each.token_file is None else registry.read_token(each.token_file)
            engines.append(RemoteEngine(each.url, engine_id=name, token=token, clock=clock))
        else:
            names = [name] if each.count == 1 else [f"{name}{i}" for i in range(each.count)]
            engines += [_make(config, EngineId(engine_id), each, clock) for engine_id in names]
    return engines


def _make(config: JobConfig, engine_id: EngineId, each: DedicatedConfig, clock: Clock) -> ServingEngine:
    """Make an engine of a backend from its options.

    Raises:
        ConfigError: Names the options that are wrong.
    """
    assert each.backend is not None  # noqa: S101 - the configuration was checked
    kind = registry.load("serving", each.backend)
    try:
        if isinstance(kind, SupportsOptions):
            options = {"model": str(config.model.path), **each.options, "engine_id": engine_id}
            engine: ServingEngine = kind.from_options(options, clock=clock)  # type: ignore[assignment]
            return engine
        return registry.serving_engine(each.backend, engine_id=engine_id, **each.options)
    except (ConfigError, TypeError, ValueError) as error:
        lines = str(error).splitlines()
        raise ConfigError("\n".join(f"engines.{engine_id}.options: {line}" for line in lines)) from error


def _borrowed(config: JobConfig, clock: Clock) -> dict[DeviceId | tuple[DeviceId, ...], ServingEngine]:
    relay = None if config.relay is None else registry.read_address(config.relay)
    engines: dict[DeviceId | tuple[DeviceId, ...], ServingEngine] = {}
    for name, given in config.executors.items():
        place, devices = executor_place(given), tuple(DeviceId(part) for part in name.split("+"))
        token = None if place.token_file is None else registry.read_token(place.token_file)
        engine = RelayedEngine(place.url, relay=relay, engine_id=name, token=token, clock=clock)
        engines[devices if len(devices) > 1 else devices[0]] = engine
    return engines
