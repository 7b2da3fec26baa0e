"""A RolloutPool in an actor: its engines are in other actors or in this one, its clients elsewhere.

Life cycle:

1. [HOST] the first call starts the pool: engines that answer within ``gather_s`` join, those with the newest weights first, so that the
   pool takes up the version that it had before it was started anew; the others catch up from where that version came from.
2. [HOST] every ``rejoin_s``: engines that are new, or were lost and answer again, join; those whose actor is gone leave.
3. [CLIENT] ``submit`` turns, ``read`` outcomes; see ``rose.hosts.ray.sessions``.

Invariants: an engine joins at most once at a time, and less and less often while it fails; ``close`` ends every turn and task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs

from rose import registry
from rose.clocks import MonotonicClock
from rose.errors import RoseError, TurnFailedError
from rose.hosts.ray.engine import RayEngine
from rose.hosts.ray.engine_host import EngineCard, portable
from rose.hosts.ray.peers import Peer
from rose.hosts.ray.sessions import Delivery, Sessions, TurnId
from rose.hosts.ray.specs import EngineSpec, PoolSpec
from rose.interfaces import ServingEngine, Transport
from rose.policies.routing import EngineState
from rose.pool import Borrower, EngineAccount, PoolSnapshot, PoolStatistics, RolloutPool, SyncReport
from rose.pool.remote_lender import RemoteLender
from rose.types import DeviceId, EngineId, EngineKind, JobId, TransportAddress, Turn, TurnResult, WeightVersion

_logger = logging.getLogger(__name__)
_MOST_BACKOFF = 8.0
_REMOVE_TIMEOUT_S = 5.0
FindEngines = Callable[[], Awaitable[Mapping[EngineId, Peer]]]


@attrs.frozen(kw_only=True)
class PoolStatus:
    """A reading of the pool and where it is.

    Attributes:
        incarnation: Changes when the pool is started anew; accounts begin anew with it.
        node_id: Where it runs.
        engine_nodes: Where the engines run that are in actors of their own.
        snapshot: Turns, engines and version.
        accounts: What each engine did.
        statistics: What became of turns and tokens.
        num_clients: How many clients are heard of.
    """

    incarnation: str
    node_id: str
    engine_nodes: Mapping[EngineId, str]
    snapshot: PoolSnapshot
    accounts: Mapping[EngineId, EngineAccount]
    statistics: PoolStatistics
    num_clients: int


@attrs.define(eq=False)
class _Placed:
    """An engine in an actor of its own, as far as it is known."""

    engine: RayEngine | None = None
    node_id: str = ""
    joining: asyncio.Task[None] | None = None
    num_failures: int = 0
    retry_s: float = 0.0


class PoolHost:
    """Has one pool and offers it to clients."""

    def __init__(self, spec: PoolSpec, *, find: FindEngines, node_id: str = "") -> None:
        """Describe the host; nothing is started.

        Args:
            spec: Of the pool.
            find: Returns the hosts of all engines that have actors of their own now.
            node_id: Where this is.
        """
        self._spec = spec
        self._find = find
        self._node_id = node_id
        self._incarnation = uuid.uuid4().hex
        self._running: asyncio.Task[None] | None = None
        self._started: asyncio.Future[RolloutPool] | None = None
        self._closing = asyncio.Event()
        self._sessions = Sessions(self._generate, timeout_s=spec.client_timeout_s)
        self._placed: dict[EngineId, _Placed] = {}
        self._leaving: set[EngineId] = set()
        self._own: list[ServingEngine] = []
        self._transport: tuple[TransportAddress, Transport] | None = None

    async def hello(self) -> str:
        """Start the pool unless it runs; returns its incarnation.

        Raises:
            RoseError: It does not start.
        """
        await self._pool()
        return self._incarnation

    async def submit(self, client: str, turns: Sequence[tuple[TurnId, Turn]]) -> str:
        """Run turns; returns the epoch of the client's session. See ``Sessions.submit``."""
        await self._pool()
        return self._sessions.submit(client, turns)

    async def read(self, client: str, epoch: str | None, after: int, wait_s: float) -> Delivery:
        """Return outcomes. See ``Sessions.read``."""
        return await self._sessions.read(client, epoch, after, wait_s)

    async def forget(self, client: str, turn_ids: Sequence[TurnId]) -> None:
        """Cancel turns."""
        self._sessions.forget(client, turn_ids)

    async def leave(self, client: str) -> None:
        """End a client's session."""
        self._sessions.leave(client)

    async def generate(self, turn: Turn) -> TurnResult:
        """Run one turn in this very call, for callers without a ``RayPool``.

        Cancelling the call cancels the turn; the loss of the pool loses it. Errors are those of ``RolloutPool.generate``.
        """
        await self._pool()
        return await self._generate(turn)

    async def sync_weights(self, address: TransportAddress) -> SyncReport:
        """Bring every engine to the newest weights in a store. See ``RolloutPool.sync_weights``."""
        pool = await self._pool()
        report = await pool.sync_weights(await self._opened(address))
        errors = {name: portable(error) for name, error in report.errors.items()}
        return attrs.evolve(report, errors=errors)

    async def status(self) -> PoolStatus:
        """Read the pool's state."""
        pool = await self._pool()
        return PoolStatus(
            incarnation=self._incarnation,
            node_id=self._node_id,
            engine_nodes={name: placed.node_id for name, placed in self._placed.items()},
            snapshot=pool.snapshot(),
            accounts=pool.accounts(),
            statistics=pool.statistics(),
            num_clients=self._sessions.num_clients,
        )

    async def barrier(self, version: WeightVersion, timeout_s: float | None) -> None:
        """Wait until nothing of older weights is under way. See ``RolloutPool.barrier``."""
        pool = await self._pool()
        await pool.barrier(version, timeout_s=timeout_s)

    async def add_engine(self, spec: EngineSpec) -> EngineState:
        """Make an engine in this process and take it in; it is not there any more when the pool is started anew."""
        pool = await self._pool()
        engine = await self._made(spec)
        return await pool.add_engine(engine, spec.kind)

    async def remove_engine(self, engine_id: EngineId, reason: str) -> bool:
        """Take an engine out for good; one in an actor of its own ends with it. See ``RolloutPool.remove_engine``."""
        pool = await self._pool()
        self._leaving.add(engine_id)
        try:
            found = await self._find()
            placed = self._placed.pop(engine_id, _Placed())
            await _ended([placed.joining])
            is_free = True
            if engine_id not in found or pool.state_of(engine_id) is not None:  # it may be between two joins
                is_free = await pool.remove_engine(engine_id, reason, timeout_s=_REMOVE_TIMEOUT_S)
            if placed.engine is not None:
                await placed.engine.close()
            if engine_id in found:
                with contextlib.suppress(RoseError):
                    await found[engine_id].call("close")
        finally:
            self._leaving.discard(engine_id)
        return is_free

    async def close(self) -> None:
        """End every turn and all tasks. Idempotent."""
        self._closing.set()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)

    # Below: the life of the pool.

    async def _generate(self, turn: Turn) -> TurnResult:
        return await (await self._pool()).generate(turn)

    async def _pool(self) -> RolloutPool:
        if self._closing.is_set():
            message = f"pool {self._spec.name!r} was closed"
            raise TurnFailedError(message)
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._running = asyncio.create_task(self._run(self._started))
        return await asyncio.shield(self._started)

    async def _run(self, started: asyncio.Future[RolloutPool]) -> None:
        """Be the pool from start to end: one task enters and leaves it."""
        try:
            self._own = [await self._made(spec) for spec in self._spec.engines]
            pairs = list(zip(self._own, self._spec.engines, strict=True))
            dedicated, borrowed = (
                [engine for engine, spec in pairs if spec.kind is kind]
                for kind in (EngineKind.DEDICATED, EngineKind.BORROWED)
            )
            async with RolloutPool(dedicated, borrowed=borrowed, config=self._spec.config) as pool:
                catching_up = await self._gather(pool)
                async with self._borrowing(pool):
                    started.set_result(pool)
                    supervising = asyncio.create_task(self._supervise(pool))
                    await self._closing.wait()
                    await _ended([supervising, *catching_up, *(each.joining for each in self._placed.values())])
                    await self._sessions.close()
        except Exception as error:  # noqa: BLE001 - the root of a task: told to everybody who waits for the start
            self._started = None
            if not started.done():
                started.set_exception(portable(error))
                started.exception()  # it is no fault of the loop's when nobody asks
        finally:
            await self._let_go()

    @contextlib.asynccontextmanager
    async def _borrowing(self, pool: RolloutPool) -> AsyncIterator[None]:
        """Borrow engines for the pool for as long as this lasts, where there is a lender."""
        spec = self._spec.lender
        if spec is None:
            yield
            return
        clock = MonotonicClock()
        engines = {DeviceId(device): await self._made(engine) for device, engine in spec.engines.items()}
        async with (
            RemoteLender(spec.url, token=spec.token, clock=clock) as lender,
            Borrower(lender, pool, engines, job=JobId(spec.job), clock=clock, model=spec.model),
        ):
            yield

    async def _let_go(self) -> None:
        for engine in [*self._own, *(placed.engine for placed in self._placed.values())]:
            if engine is not None:
                with contextlib.suppress(Exception):
                    await engine.close()
        if self._transport is not None:
            self._transport[1].close()

    async def _made(self, spec: EngineSpec) -> ServingEngine:
        engine = await spec.start()
        self._own.append(engine)
        return engine

    async def _gather(self, pool: RolloutPool) -> list[asyncio.Task[None]]:
        """Take in the engines that answer now, newest weights first; returns what goes on in the background."""
        found = await self._find()
        asked = {name: asyncio.create_task(_described(peer)) for name, peer in found.items()}
        if asked:
            await asyncio.wait(asked.values(), timeout=self._spec.gather_s)
        cards = [(found[name], card) for name, task in asked.items() if task.done() and (card := task.result())]
        await _ended(list(asked.values()))
        for peer, card in sorted(cards, key=lambda pair: _age(pair[1].version)):
            with contextlib.suppress(RoseError):
                await self._join(pool, peer, card)
        known = sorted((card for _, card in cards if card.source is not None), key=lambda card: _age(card.version))
        return [asyncio.create_task(self._catch_up(known[0].source))] if known and known[0].source else []

    async def _catch_up(self, source: TransportAddress) -> None:
        """Sync from where the newest weights came from, since a pool that was started anew does not know what there is."""
        try:
            pool = await self._pool()
            await pool.sync_weights(await self._opened(source))
        except Exception:  # noqa: BLE001 - the root of a task: the trainer's next sync does it
            _logger.warning("the pool could not look for newer weights after its start", exc_info=True)

    async def _supervise(self, pool: RolloutPool) -> None:
        while True:
            await asyncio.sleep(self._spec.rejoin_s)
            try:
                await self._reconcile(pool)
            except Exception:  # noqa: BLE001 - the root of a task: what Ray cannot tell now it tells later
                _logger.warning("the pool could not look for its engines", exc_info=True)

    async def _reconcile(self, pool: RolloutPool) -> None:
        """Begin to take in what is there and not in the pool; take out what is not there any more."""
        found = await self._find()
        now_s = asyncio.get_running_loop().time()
        for engine_id, peer in found.items():
            if engine_id in self._leaving:
                continue
            placed = self._placed.setdefault(engine_id, _Placed())
            is_out = pool.state_of(engine_id) in (None, EngineState.LOST)
            if is_out and now_s >= placed.retry_s and (placed.joining is None or placed.joining.done()):
                placed.joining = asyncio.create_task(self._rejoin(pool, engine_id, peer))
        for engine_id in self._placed.keys() - found.keys():
            placed = self._placed.pop(engine_id)
            await _ended([placed.joining])
            if pool.state_of(engine_id) is not None:
                await pool.remove_engine(engine_id, "its actor is gone", timeout_s=0.0)
            if placed.engine is not None:
                await placed.engine.close()

    async def _rejoin(self, pool: RolloutPool, engine_id: EngineId, peer: Peer) -> None:
        placed = self._placed[engine_id]
        try:
            await self._join(pool, peer, await peer.call("describe"))
        except Exception as error:  # noqa: BLE001 - the root of a task: it is tried again later
            placed.num_failures += 1
            wait_s = self._spec.rejoin_s * min(2.0**placed.num_failures, _MOST_BACKOFF)
            placed.retry_s = asyncio.get_running_loop().time() + wait_s
            _logger.info("engine %s did not join: %s", engine_id, error)
        else:
            placed.num_failures = 0

    async def _join(self, pool: RolloutPool, peer: Peer, card: EngineCard) -> None:
        placed = self._placed.setdefault(card.engine_id, _Placed())
        old, engine = placed.engine, RayEngine(card.engine_id, peer)
        placed.engine, placed.node_id = engine, card.node_id
        if old is not None:
            await old.close()
        try:
            await engine.open()
            await pool.add_engine(engine, card.kind)
        except BaseException:
            await engine.close()
            raise

    async def _opened(self, address: TransportAddress) -> Transport:
        """Return the transport of an address, the same one while the address stays: the pool keeps what it has read of it."""
        if self._transport is None or self._transport[0] != address:
            old = self._transport
            self._transport = (address, await asyncio.to_thread(registry.open_transport, address))
            if old is not None:
                old[1].close()
        return self._transport[1]


def _age(version: WeightVersion | None) -> tuple[bool, int]:
    """Sort newest first, engines without a published version last."""
    return (version is None, 0 if version is None else -version.n)


async def _described(peer: Peer) -> EngineCard | None:
    try:
        card: EngineCard = await peer.call("describe")
    except RoseError as error:
        _logger.info("an engine did not answer at the start: %s", error)
        return None
    return card


async def _ended(tasks: Sequence[asyncio.Task[Any] | None]) -> None:
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    await asyncio.gather(*there, return_exceptions=True)
