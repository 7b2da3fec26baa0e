"""One serving engine in an actor, for a pool in another one.

Life cycle:

1. [HOST] makes and starts its engine when it is first asked for, and anew when a client opens or asks what it is and it is lost.
2. [CLIENT] ``open``: from now on the engine works for this client only; what ran for an earlier one is ended.
3. [CLIENT] ``begin`` a request; ``read`` what all requests gave since the last time, in one call for all.
4. [CLIENT] ``abort`` a request, stage and activate weights.

Invariants: a chunk reaches the client once and in order, or the client ends; an older client changes nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs

from rose.errors import EngineError, EngineLostError, RoseError, TransportError
from rose.hosts.ray.outbox import Outbox
from rose.hosts.ray.specs import EngineSpec
from rose.interfaces import ServingEngine
from rose.types import (
    Activation,
    EngineId,
    EngineKind,
    EngineRequest,
    EngineSnapshot,
    RequestId,
    TokenChunk,
    TransportAddress,
    WeightUpdate,
    WeightVersion,
)

_logger = logging.getLogger(__name__)
Item = tuple[RequestId, TokenChunk | Exception]
FindRelay = Callable[[], Awaitable[TransportAddress]]
COMMANDS = frozenset(
    {"pause", "resume", "set_kv_budget", "set_gate", "reset_prefix_cache", "weight_checksums", "sleep", "wake"}
)


@attrs.frozen(kw_only=True)
class EngineCard:
    """What a host says of its engine.

    Attributes:
        engine_id: Its name.
        kind: Whose device it runs on.
        node_id: The node that it runs on.
        version: Of its weights.
        source: Where its last update came from; ``None`` when it has had none.
    """

    engine_id: EngineId
    kind: EngineKind
    node_id: str
    version: WeightVersion | None
    source: TransportAddress | None


class EngineHost:
    """Has one engine and offers it to one client at a time."""

    def __init__(self, spec: EngineSpec, *, node_id: str = "", relay: FindRelay | None = None) -> None:
        """Describe the host; nothing is started.

        Args:
            spec: Of the engine.
            node_id: Where this is.
            relay: Finds the store of this node's or cluster's relay.
        """
        self._spec = spec
        self._node_id = node_id
        self._relay = relay
        self._engine: asyncio.Task[ServingEngine] | None = None
        self._client: str | None = None
        self._outbox: Outbox[Item] = Outbox()
        self._pumps: dict[RequestId, asyncio.Task[None]] = {}
        self._is_closed = False
        self._staged_from: TransportAddress | None = None
        self._source: TransportAddress | None = None

    async def describe(self) -> EngineCard:
        """Return what the engine is, once it serves.

        Raises:
            RoseError: It does not start.
        """
        reading = await (await self._renewed()).snapshot()
        return EngineCard(
            engine_id=EngineId(self._spec.engine_id),
            kind=self._spec.kind,
            node_id=self._node_id,
            version=reading.weight_version,
            source=self._source,
        )

    async def open(self, client: str) -> None:
        """Work for ``client`` from now on; end what runs for another one."""
        self._client, self._outbox = client, Outbox()
        pumps, self._pumps = self._pumps, {}
        for pump in pumps.values():
            pump.cancel()
        await self._renewed()

    async def begin(self, client: str, request: EngineRequest) -> None:
        """Start a request; ``read`` gives what comes of it."""
        self._check(client)
        engine = await self._found()
        self._check(client)
        pump = asyncio.create_task(self._pump(engine, request, self._outbox))
        self._pumps[request.request_id] = pump
        pump.add_done_callback(lambda _: self._forget(request.request_id, pump))

    async def read(self, client: str, after: int, wait_s: float) -> tuple[int, Sequence[Item]]:
        """Return what requests gave since item ``after``; see ``Outbox.read``."""
        self._check(client)
        return await self._outbox.read(after, wait_s)

    async def abort(self, client: str, request_id: RequestId) -> None:
        """End a request."""
        self._check(client)
        await (await self._found()).abort(request_id)

    async def snapshot(self, client: str) -> tuple[EngineSnapshot, bool]:
        """Return the load, and whether the engine sleeps."""
        self._check(client)
        engine = await self._found()
        return await engine.snapshot(), bool(getattr(engine, "is_asleep", False))

    async def stage(self, client: str, update: WeightUpdate) -> None:
        """Let the engine fetch an update: from the relay where there is one that works, else from where it says."""
        self._check(client)
        engine, self._staged_from = await self._found(), update.address
        if self._relay is not None:
            try:
                return await engine.stage(attrs.evolve(update, address=await self._relay()))
            except TransportError as error:
                _logger.warning("engine %s: its relay does not work: %s", self._spec.engine_id, error)
        return await engine.stage(update)

    async def activate(self, client: str) -> Activation:
        """Make the staged update current."""
        self._check(client)
        activation = await (await self._found()).activate()
        self._source = self._staged_from
        return activation

    async def command(self, client: str, name: str, arguments: dict[str, Any]) -> Any:
        """Call one of ``COMMANDS``.

        Raises:
            EngineError: The engine cannot do that.
        """
        self._check(client)
        engine = await self._found()
        if name not in COMMANDS or not hasattr(engine, name):
            message = f"engine {self._spec.engine_id!r} ({self._spec.backend}) cannot {name}"
            raise EngineError(message)
        return await getattr(engine, name)(**arguments)

    async def close(self) -> None:
        """End everything; nothing is started any more. Idempotent."""
        self._client, self._is_closed = None, True
        for pump in self._pumps.values():
            pump.cancel()
        if self._engine is not None:
            with contextlib.suppress(Exception):
                await (await self._engine).close()

    def _check(self, client: str) -> None:
        if client != self._client:
            message = f"engine {self._spec.engine_id!r} works for another pool now; this one must take it in anew"
            raise EngineLostError(message)

    async def _found(self) -> ServingEngine:
        """Return the engine, started if nobody has asked for it before."""
        if self._is_closed:
            message = f"engine {self._spec.engine_id!r} was closed"
            raise EngineLostError(message)
        if self._engine is None:
            self._engine = asyncio.create_task(self._start())
        return await asyncio.shield(self._engine)

    async def _renewed(self) -> ServingEngine:
        """Return the engine, made anew where it was lost or did not start."""
        old = self._engine
        if old is not None and old.done() and await _is_lost(old) and self._engine is old:
            self._engine, self._source = asyncio.create_task(self._start()), None
            if not old.cancelled() and old.exception() is None:
                await old.result().close()
        return await self._found()

    async def _start(self) -> ServingEngine:
        try:
            return await self._spec.start()
        except Exception as error:
            raise portable(error) from error

    async def _pump(self, engine: ServingEngine, request: EngineRequest, outbox: Outbox[Item]) -> None:
        name = request.request_id
        try:
            async for chunk in engine.generate(request):
                outbox.put((name, chunk))
                if chunk.finish_reason is not None:
                    return
        except Exception as error:  # noqa: BLE001 - the root of a task: whatever an engine raises is the client's to judge
            outbox.put((name, portable(error)))
        else:
            outbox.put((name, EngineError(f"engine {self._spec.engine_id!r} ended a stream without a finish reason")))

    def _forget(self, request_id: RequestId, pump: asyncio.Task[None]) -> None:
        if self._pumps.get(request_id) is pump:
            del self._pumps[request_id]


def portable(error: Exception) -> Exception:
    """Return an error that any process can read: of the ROSE tree or of Python's own, never of a library that may be missing there."""
    if isinstance(error, RoseError):
        return error
    for kind in (TypeError, ValueError):
        if isinstance(error, kind):
            return kind(f"{type(error).__name__}: {error}")
    return EngineError(f"{type(error).__name__}: {error}")


async def _is_lost(task: asyncio.Task[ServingEngine]) -> bool:
    if task.cancelled() or task.exception() is not None:
        return True
    try:
        await task.result().snapshot()
    except EngineLostError:
        return True
    return False
