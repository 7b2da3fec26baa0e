"""A pool as a service: token ids in and out, the OpenAI routes, and the direct path, behind one URL.

Invariants: what a client started and no longer waits for is cancelled; nothing but reading is done without a token of access ``job``
where tokens are configured. The pool is the caller's: it is open before the service begins and outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any, Self

import attrs
from aiohttp import web
from prometheus_client import CollectorRegistry

from rose import checks
from rose.backends.remote import wire
from rose.errors import ConfigError, EngineError, RequestRefusedError, RoseError
from rose.hosts.http.auth import Access, TokenConfig, caller, require
from rose.hosts.http.pool_chat import ChatRoutes
from rose.hosts.http.pool_direct import DirectHost
from rose.hosts.http.pool_metrics import PoolCollector
from rose.hosts.http.pool_turns import TurnDesk
from rose.hosts.http.server import Health, bind, make_app, parse_place, read_json, served
from rose.hosts.http.streams import NDJSON, answer_stream
from rose.hosts.http.tokenizers import Tokenizer
from rose.interfaces import Transport
from rose.policies.routing import EngineState
from rose.pool import RolloutPool, SyncReport
from rose.pool.sources import stream
from rose.pool.store_offer import StoreOffer
from rose.pool.wire import error_to_plain, from_plain, to_plain, turn_from_wire
from rose.registry import open_transport, read_address
from rose.types import TokenChunk, TransportAddress, TurnResult, WeightVersion

_LINGER_S = 2.0
_SILENT_S = 30.0


@attrs.frozen(kw_only=True)
class _Barrier:
    """The body of ``/v1/barrier``."""

    version: WeightVersion
    timeout_s: float | None = attrs.field(default=None, validator=checks.optional(checks.number(at_least=0)))


class PoolService:
    """Handlers of a pool's HTTP interface.

    Args:
        pool: An open pool.
        name: The model's name in the OpenAI routes and in ``/v1/pool``.
        tokens: Who may call; without any, everybody who can reach it.
        tokenizer: For routes that take or give text; without it they take and give token ids only.
        store: Where trainers are to publish; without it they must know themselves.
        linger_s: How long turns go on after their client's connection broke.
        silent_s: How long they go on while a client that is connected says nothing.
    """

    def __init__(
        self,
        pool: RolloutPool,
        *,
        name: str,
        tokens: Sequence[TokenConfig] = (),
        tokenizer: Tokenizer | None = None,
        store: StoreOffer | None = None,
        linger_s: float = _LINGER_S,
        silent_s: float = _SILENT_S,
    ) -> None:
        self.tokens = tuple(tokens)
        self._pool = pool
        self._name = name
        self._store = store
        self._desk = TurnDesk(pool, linger_s=linger_s)
        self._direct = DirectHost(pool, linger_s=linger_s, silent_s=silent_s)
        self._transports: dict[TransportAddress, Transport] = {}
        self._chat = ChatRoutes(pool, name=name, tokenizer=tokenizer)

    def app(self) -> web.Application:
        """Return the application. It must be run by ``serve_pool``, or inside the service as a context manager."""
        registry = CollectorRegistry()
        registry.register(PoolCollector(self._pool, self._direct))
        routes = [
            web.post("/v1/generate", self.generate),
            web.delete("/v1/turns/{turn_id}", self.cancel),
            web.get("/v1/store", self.store),
            web.post("/v1/sync", self.sync),
            web.post("/v1/barrier", self.barrier),
            web.get("/v1/pool", self.status),
            web.post("/engines/{engine_id}/v1/generate", self.proxy),
            *self._direct.routes(),
            *self._chat.routes(),
        ]
        app = make_app(routes, tokens=self.tokens, health=self.health, registry=registry)
        app.on_shutdown.append(self._close_sockets)
        return app

    async def __aenter__(self) -> Self:
        """Begin."""
        await self._direct.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel every turn that came through the service."""
        await self._direct.__aexit__()
        await self._desk.close()
        for transport in self._transports.values():
            transport.close()

    def health(self) -> Health:
        """Tell whether turns can run."""
        snapshot = self._pool.snapshot()
        num_ready = sum(engine.state is EngineState.READY for engine in snapshot.engines)
        reasons = [] if num_ready else [f"none of {len(snapshot.engines)} engines is ready"]
        return Health(reasons=reasons, details={"num_ready_engines": num_ready})

    # Turns.

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/generate``: a turn in, its result out; with ``stream`` its tokens before that, one JSON object a line.

        With a ``turn_id`` of the client's a retry finds the turn that is under way, unless it is streamed.
        """
        require(Access.JOB)
        data = await read_json(request)
        if not isinstance(data, dict):
            message = "a turn is a JSON object with trajectory_id, group_id, prompt_ids and sampling"
            raise RequestRefusedError(message)
        turn_id, is_streamed = data.pop("turn_id", None), data.pop("stream", None)
        if not isinstance(is_streamed, bool | None):
            message = f"stream is true or false, not {is_streamed!r:.80}"
            raise RequestRefusedError(message)
        turn = turn_from_wire(data)
        if is_streamed and turn_id is not None:
            message = "a stream cannot be taken up again by its turn_id; leave out turn_id or stream"
            raise RequestRefusedError(message)
        if is_streamed:
            async with contextlib.aclosing(stream(self._pool, turn)) as items:
                return await answer_stream(request, _counted(items), NDJSON)
        if turn_id is None:
            return _json(to_plain(await self._pool.generate(turn)))
        return _json(to_plain(await self._desk.run(caller().name, _turn_id(turn_id), turn)))

    async def cancel(self, request: web.Request) -> web.Response:
        """``DELETE /v1/turns/ID``: cancel a turn that was sent with that ``turn_id``."""
        who = require(Access.JOB)
        return _json({"was_live": self._desk.cancel(who.name, request.match_info["turn_id"])})

    async def proxy(self, request: web.Request) -> web.StreamResponse:
        """``POST /engines/ID/v1/generate``: stream an attempt of the direct path from an engine that only the pool can reach."""
        require(Access.JOB)
        wanted = wire.request_from_wire(await read_json(request))
        attempt = self._direct.attempts.get(wanted.request_id)
        if attempt is None or not attempt.is_open or attempt.engine_id != request.match_info["engine_id"]:
            message = (
                f"request {wanted.request_id!r} is no attempt under way on engine {request.match_info['engine_id']!r}"
            )
            raise EngineError(message)
        chunks: Any = attempt.member.engine.generate(wanted)
        async with contextlib.aclosing(chunks):
            return await answer_stream(request, _counted(chunks), NDJSON)

    # The pool.

    async def store(self, _: web.Request) -> web.Response:
        """``GET /v1/store``: where trainers publish, with the store's token, and the engines to cut for."""
        require(Access.JOB)
        if self._store is None:
            message = 'this pool does not know where weights go; give [transport] of its job file keeper = "pool", or the address of a store'
            raise ConfigError(message)
        return _json(self._store.to_wire())

    async def sync(self, request: web.Request) -> web.Response:
        """``POST /v1/sync``: bring all engines to the newest weights of the store at ``address``."""
        require(Access.JOB)
        data = await read_json(request)
        if not isinstance(data, dict) or not isinstance(data.get("address"), dict):
            message = 'the body is {"address": {"name": ..., and its options}}, as Transport.address() gives it'
            raise ConfigError(message)
        if "token_file" in data["address"]:
            message = "a store's address names no file here; give its token itself"
            raise ConfigError(message)
        return _json(_report(await self._pool.sync_weights(await self._transport(read_address(data["address"])))))

    async def barrier(self, request: web.Request) -> web.Response:
        """``POST /v1/barrier``: answered once nothing of weights older than ``version`` is under way."""
        require(Access.JOB)
        try:
            asked: _Barrier = from_plain(_Barrier, await read_json(request))
        except (TypeError, ValueError, AttributeError) as error:
            message = f'the body is {{"version": "run:n", "timeout_s": seconds or null}}: {error}'
            raise ConfigError(message) from error
        await self._pool.barrier(asked.version, timeout_s=asked.timeout_s)
        return _json({})

    async def status(self, _: web.Request) -> web.Response:
        """``GET /v1/pool``: turns, engines, accounts."""
        require(Access.JOB, Access.READ)
        return _json(
            {
                "name": self._name,
                "snapshot": to_plain(self._pool.snapshot()),
                "accounts": to_plain(self._pool.accounts()),
                "statistics": to_plain(self._pool.statistics()),
                "num_sessions": len(self._direct.sessions),
            }
        )

    async def _transport(self, address: TransportAddress) -> Transport:
        """Open a store, once: engines that join later catch up from it."""
        if address not in self._transports:
            self._transports[address] = await asyncio.to_thread(open_transport, address)
        return self._transports[address]

    async def _close_sockets(self, _: web.Application) -> None:
        await self._direct.close_sockets()


@contextlib.asynccontextmanager
async def serve_pool(service: PoolService, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serve a pool at ``HOST:PORT`` or ``HOST:FIRST-LAST``; gives the URL.

    Raises:
        ConfigError: The place is none, or can be reached from other machines and no tokens are configured.
        TransportError: The port is taken.
    """
    listener = bind(parse_place(listen), service.tokens)
    with contextlib.closing(listener):
        async with service, served(service.app(), listener) as url:
            yield url


async def _counted(items: AsyncIterable[TokenChunk | TurnResult]) -> AsyncIterator[dict[str, Any]]:
    """Render a stream; each line says how many tokens came before it."""
    num_tokens = 0
    async for item in items:
        if isinstance(item, TurnResult):
            yield {"result": to_plain(item)}
        else:
            yield wire.chunk_to_wire(item, num_tokens)
            num_tokens += len(item.token_ids)


def _turn_id(given: Any) -> str:
    if not isinstance(given, str) or not given:
        message = f"turn_id is a text of the client's own, not {given!r}"
        raise ConfigError(message)
    return given


def _report(report: SyncReport) -> dict[str, Any]:
    errors = {name: error_to_plain(_as_ours(error)) for name, error in report.errors.items()}
    return {**to_plain(attrs.evolve(report, errors={})), "errors": errors}


def _as_ours(error: Exception) -> RoseError:
    return error if isinstance(error, RoseError) else EngineError(f"{type(error).__name__}: {error}")


def _json(data: Any) -> web.Response:
    return web.Response(body=wire.compact(data).encode(), content_type="application/json")
