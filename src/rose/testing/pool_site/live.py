"""A site as it runs: engines, executors, lender, pool and service, opened and closed as one.

Life cycle:

1. [SITE] starts the lender and the executors, each of which starts its serving engine and then its rollout engine.
2. [SITE] meanwhile starts the dedicated engines, two at a time.
3. [SITE] opens the pool on the dedicated ones and serves it; borrows every device and waits until its engine takes turns.
4. [SITE] at the end: stopped processes go on, the service closes, devices are given back, the pool closes, engines and executors end, the
   reaper ends what is left and removes the folder.

Invariants: what was started is ended, also when something later does not start; the reaper knows of a process before anybody is told of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import attrs

from rose.backends.memory import MemoryTransport
from rose.backends.remote import RemoteEngine
from rose.backends.remote.client import HttpClient
from rose.backends.vllm import VllmEngine, VllmOptions
from rose.backends.vllm.lifeline import LIFELINE
from rose.clocks import MonotonicClock
from rose.coserving.ledger import Ledger
from rose.errors import DeadlineExceededError, EngineError, EngineLostError, TransportError
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.pool import Borrower, RolloutPool
from rose.pool.remote_lender import RemoteLender
from rose.pool.store_offer import StoreOffer
from rose.testing.models import make_qwen3
from rose.testing.pool_site.children import Child, Reaper, reaping
from rose.testing.pool_site.faults import FaultyEngine, Switches
from rose.testing.pool_site.front import fronted
from rose.testing.pool_site.options import SiteOptions, executor_config, lender_config
from rose.transfer.layout import TargetLayout
from rose.types import DeviceId, EngineId, JobId

_STARTS_AT_A_TIME = 2
_ASK_AGAIN_S = 0.5
_JOIN_S = 60.0
_POLL_S = 0.05
_JOB = "site"


class FaultyVllm(FaultyEngine, VllmEngine):
    """A vLLM engine with faults on command."""


@attrs.define(eq=False, kw_only=True)
class LiveSite:
    """What the commands work on.

    Attributes:
        url: Of the pool's service.
        pool: The pool.
        own: Dedicated engines.
        lent: Clients of the executors' engines; each can be asked under a lease alone.
        ledgers: Of the devices of the latter.
        switches: Each engine's faults.
        store: Where weights are published.
        layout: What an engine holds of them.
        lender: Client of the lender.
        reaper: Cleans up.
        start_s: How long the start took.
        stopped: Processes that were stopped.
    """

    options: SiteOptions
    url: str = ""
    pool: RolloutPool
    own: Mapping[str, FaultyVllm]
    lent: Mapping[str, RemoteEngine]
    ledgers: Mapping[str, Ledger]
    switches: Mapping[str, Switches]
    store: MemoryTransport
    layout: TargetLayout
    lender: HttpClient | None
    reaper: Reaper
    start_s: float = 0.0
    stopped: set[int] = attrs.field(factory=set)

    def pid(self, engine_id: str) -> int | None:
        """Return the process that computes for an engine now, ``None`` while there is none."""
        if engine_id in self.own:
            return self.own[engine_id].pid
        return self.ledgers[engine_id].rollout().pid or None

    def engine(self, engine_id: str) -> FaultyVllm | RemoteEngine:
        """Return an engine, to be asked."""
        return self.own[engine_id] if engine_id in self.own else self.lent[engine_id]


@contextlib.asynccontextmanager
async def open_site(options: SiteOptions) -> AsyncIterator[LiveSite]:
    """Start everything; gives the site once all engines take turns.

    Raises:
        EngineLostError: Something did not start.
        BackendUnavailableError: vLLM is not installed.
    """
    began_s = time.monotonic()
    os.environ[LIFELINE] = "1"  # of the dedicated engines
    async with contextlib.AsyncExitStack() as stack:
        reaper = stack.enter_context(reaping())
        store = stack.enter_context(contextlib.closing(MemoryTransport()))
        store.serve()
        switches = {name: Switches(name) for name in (*options.own_ids, *options.lent_ids)}
        own = {name: _dedicated(options, name, switches[name]) for name in options.own_ids}
        processes = _Processes(options, own.values(), reaper)
        stack.push_async_callback(processes.end)
        await processes.start()
        clock = MonotonicClock()
        config = options.pool_config
        pool = await stack.enter_async_context(
            RolloutPool(own.values(), config=config, clock=clock, seed=options.seed or 0)
        )
        lent = {}
        for name, url in processes.urls.items():
            front = await stack.enter_async_context(fronted(url, switches[name]))
            lent[name] = RemoteEngine(front, engine_id=name, clock=clock)
            stack.push_async_callback(lent[name].close)
        site = LiveSite(
            options=options,
            pool=pool,
            own=own,
            lent=lent,
            ledgers={name: Ledger.attach(reaper.folder / f"{name}.ledger") for name in lent},
            switches=switches,
            store=store,
            layout=await own[options.own_ids[0]].target_layout(),
            lender=None,
            reaper=reaper,
        )
        await _borrow(site, stack, processes.lender_url, clock)
        service = PoolService(pool, name=_JOB, store=StoreOffer(address=store.address()))
        site.url = await stack.enter_async_context(serve_pool(service))
        stack.callback(_let_go_on, site)
        site.start_s = time.monotonic() - began_s
        yield site


def _dedicated(options: SiteOptions, name: str, switches: Switches) -> FaultyVllm:
    engine = FaultyVllm(VllmOptions(engine_id=EngineId(name), model=str(options.model), **options.engine_options))
    engine.switches = switches
    return engine


async def _borrow(
    site: LiveSite, stack: contextlib.AsyncExitStack, lender_url: str | None, clock: MonotonicClock
) -> None:
    """Join the engines behind executors, and hold their devices as long as they are lent."""
    if lender_url is None:
        return
    site.lender = HttpClient(lender_url, unreachable=TransportError)
    stack.push_async_callback(site.lender.close)
    source = await stack.enter_async_context(RemoteLender(lender_url, clock=clock))
    engines = {DeviceId(name): engine for name, engine in site.lent.items()}
    borrower = Borrower(source, site.pool, engines, job=JobId(_JOB), clock=clock, ask_again_s=_ASK_AGAIN_S, demand=None)
    await stack.enter_async_context(borrower)
    give_up_s = time.monotonic() + _JOIN_S
    while waiting := [name for name in site.lent if site.pool.state_of(EngineId(name)) is None]:
        if time.monotonic() > give_up_s:
            message = f"engines {', '.join(waiting)} were not lent within {_JOIN_S:g} s; the site's log says why"
            raise DeadlineExceededError(message)
        await asyncio.sleep(_POLL_S)


def _let_go_on(site: LiveSite) -> None:
    """Let stopped processes go on, for they could not end."""
    for pid in site.stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for switches in site.switches.values():
        switches.hang = False


class _Processes:
    """All processes of a site: what takes long, in the beginning and at the end.

    Attributes:
        urls: Where executors listen, by device.
        lender_url: Where the lender does, if there is one.
    """

    def __init__(self, options: SiteOptions, own: Iterable[FaultyVllm], reaper: Reaper) -> None:
        self.urls: dict[str, str] = {}
        self.lender_url: str | None = None
        self._options = options
        self._own = list(own)
        self._reaper = reaper
        self._children: list[Child] = []
        self._gate = asyncio.Semaphore(_STARTS_AT_A_TIME)

    async def start(self) -> None:
        """Start all; returns when all are up.

        Raises:
            EngineError: The first of those that are not.
        """
        if self._options.borrowed:
            make_qwen3(self._reaper.folder / "serving", layers=1, vocab=512)
        try:
            async with asyncio.TaskGroup() as group:
                for name in self._options.lent_ids:
                    group.create_task(self._executor(name))
                if self._options.borrowed:
                    group.create_task(self._lender())
                for engine in self._own:
                    group.create_task(self._engine(engine))
        except ExceptionGroup as errors:  # the first one ended the others
            raise errors.exceptions[0] from errors

    async def _executor(self, name: str) -> None:
        path = self._reaper.folder / f"{name}.toml"
        path.write_text(executor_config(self._options, name, self._reaper.folder))
        child = await self._child(name, "serve", str(path), "--json")
        try:
            self.urls[name] = await child.told("url", event="ready")
        except EngineError as error:
            log = self._reaper.folder / name / "serving.log"
            tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            message = f"{error}\n{tail}" if tail else str(error)
            raise EngineLostError(message) from error

    async def _lender(self) -> None:
        path = self._reaper.folder / "lender.toml"
        path.write_text(lender_config(self._options, self._reaper.folder))
        child = await self._child("the lender", "lend", str(path))
        self.lender_url = await child.told("url")

    async def _child(self, name: str, *arguments: str) -> Child:
        child = await Child.start(name, *arguments)
        self._children.append(child)
        self._reaper.name(child.process.pid)
        return child

    async def _engine(self, engine: FaultyVllm) -> None:
        async with self._gate:
            await engine.start()
        self._reaper.name(engine.pid)

    async def end(self) -> None:
        """End all, side by side."""
        await asyncio.gather(*(child.end() for child in self._children), *(engine.close() for engine in self._own))


def address_of(store: MemoryTransport) -> dict[str, Any]:
    """Return the store's address as plain data, as ``rose.open_transport`` reads it."""
    address = store.address()
    return {"name": address.name, **dict(address.options)}
