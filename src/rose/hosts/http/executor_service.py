"""The executor's HTTP interface to its rollout engine. Serving's traffic never passes here.

Life cycle of a request for tokens:

1. [CLIENT] ``POST /v1/generate`` with the lease's fencing token; [SERVICE] compares it with the ledger, then asks the engine.
2. [SERVICE] answers with the first chunk (an error before it has a status of its own), then one line a chunk.
3. [SERVICE] every ``_LOOK_S`` compares the stream's token again: a lease that is over ends it as evicted, with the tokens it has.
4. [CLIENT] goes away: the handler is cancelled, which closes the engine's stream and so aborts the request, once.

Invariants: nothing makes the engine do something without the token of a lease in force, and what a lease's holder held back (a pause, a
closed gate, a smaller KV budget) is let go with the lease; a stream that began has a last line, with a
finish reason or an error, unless its client is gone or the process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Self, cast

import attrs
from aiohttp import web

from rose.backends.remote import wire
from rose.errors import EngineBusyError, EngineError, EngineLostError, RoseError
from rose.hosts.http.auth import Access, require
from rose.hosts.http.executor_commands import COMMANDS, LASTING, Command, restore
from rose.hosts.http.executor_lease import HoldWatch, LeaseGate, Tokens
from rose.hosts.http.executor_rollout import RolloutSupervisor
from rose.hosts.http.server import read_json
from rose.interfaces.serving import (
    ServingEngine,
    SupportsKvBudget,
    SupportsPrefixReset,
    SupportsSleep,
    SupportsStepGate,
    SupportsWeightChecksums,
)
from rose.types import FinishReason, JobId, RequestId, TokenChunk

_logger = logging.getLogger(__name__)
_LOOK_S = 0.02
_ABORT_S = 2.0
_ABORT_AGAIN_S = 0.25
_ABILITIES = (SupportsKvBudget, SupportsStepGate, SupportsPrefixReset, SupportsSleep, SupportsWeightChecksums)


@attrs.define(eq=False)
class _Stream:
    """One request for tokens under way."""

    request_id: RequestId
    engine: ServingEngine
    tokens: Tokens
    is_evicted: bool = False
    abort_again_s: float = -math.inf


class RolloutService:
    """Handlers over a supervised engine and the leases of its devices. A context manager while it serves.

    Args:
        supervisor: Has the engine.
        gate: Knows the lease.
        holds: Sampled along with the lease, if given.

    Attributes:
        num_tokens: Rollout tokens handed out.
        outcomes: How requests for tokens ended: a finish reason, an error's name, or ``gone`` when the client went away.
        num_fenced: Requests refused for want of a lease.
    """

    def __init__(self, supervisor: RolloutSupervisor, gate: LeaseGate, holds: HoldWatch | None = None) -> None:
        self._supervisor = supervisor
        self._gate = gate
        self._holds = holds
        self._streams: set[_Stream] = set()
        self._is_draining = False
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: tuple[ServingEngine, Tokens] | None = None
        self.num_tokens = 0
        self.outcomes: Counter[str] = Counter()
        self.num_fenced = 0

    @property
    def num_streams(self) -> int:
        """Requests for tokens under way."""
        return len(self._streams)

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers, below ``/v1``."""
        return [
            web.get("/v1/engine", self._describe),
            web.get("/v1/snapshot", self._snapshot),
            web.post("/v1/generate", self._generate),
            *(web.post(f"/v1/{name}", self._handler(name, command)) for name, command in COMMANDS.items()),
        ]

    async def __aenter__(self) -> Self:
        """Begin to watch the leases."""
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop watching."""
        tasks = [task for task in (self._watching, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and end those under way as evicted, with their tokens; returns whether all ended in time."""
        self._is_draining = True
        for stream in list(self._streams):
            self._evict(stream)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._streams:  # noqa: ASYNC110 - handlers end one by one
                    await asyncio.sleep(_LOOK_S)
        return not self._streams

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for stream in list(self._streams):
                if stream.is_evicted or self._gate.is_over(stream.tokens):
                    self._evict(stream)
            if self._changed is not None and self._gate.is_over(self._changed[1]):
                self._spawn(restore(self._changed[0]))
                self._changed = None
            if self._holds is not None:
                self._holds.look()

    def _evict(self, stream: _Stream) -> None:
        """End a stream, and again while it is still there: the engine may not have known it yet."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= stream.abort_again_s:
            stream.is_evicted, stream.abort_again_s = True, now_s + _ABORT_AGAIN_S
            self._spawn(_end(stream))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Reading needs no lease.

    async def _describe(self, request: web.Request) -> web.Response:
        engine = self._supervisor.engine(request.headers.get(wire.ENGINE_HEADER))
        abilities = [kind.__name__ for kind in _ABILITIES if isinstance(engine, kind)]
        return self._answer({"engine_id": engine.engine_id, "abilities": abilities})

    async def _snapshot(self, request: web.Request) -> web.Response:
        engine, headers = self._supervisor.engine(request.headers.get(wire.ENGINE_HEADER)), self._headers
        answer = wire.snapshot_to_wire(await engine.snapshot())
        answer["is_asleep"] = isinstance(engine, SupportsSleep) and engine.is_asleep
        return web.json_response(answer, headers=headers)

    # All else does.

    def _permit(self, request: web.Request) -> tuple[ServingEngine, Tokens]:
        """Return the engine that is meant, and under which leases; raises unless they are in force."""
        who = require(Access.JOB)
        job = JobId(who.name) if who.access is Access.JOB else None
        try:
            tokens = self._gate.require(request.headers.get(wire.FENCING_HEADER), job)
        except EngineBusyError:
            self.num_fenced += 1
            raise
        return self._supervisor.engine(request.headers.get(wire.ENGINE_HEADER)), tokens

    def _handler(self, name: str, command: Command) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            body = await read_json(request)
            engine, tokens = self._permit(request)
            if name in LASTING:
                changed, self._changed = self._changed, (engine, tokens)
                if changed is not None and changed[1] != tokens:  # of the holder before, whose end was not seen yet
                    await restore(changed[0])
            return self._answer(await command(engine, body))

        return handle

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        wanted = wire.request_from_wire(await read_json(request))
        engine, tokens = self._permit(request)
        if self._is_draining:
            message = f"the executor of engine {engine.engine_id} is ending; ask another engine"
            raise EngineBusyError(message)
        stream = _Stream(wanted.request_id, engine, tokens)
        self._streams.add(stream)
        outcome = "gone"
        try:
            chunks = cast("AsyncGenerator[TokenChunk, None]", engine.generate(wanted))
            async with aclosing(chunks):
                response, outcome = await self._pass_on(request, stream, chunks)
                return response
        except RoseError as error:
            outcome = wire.error_name(type(error))
            raise
        finally:
            self._streams.discard(stream)
            self.outcomes[outcome] += 1

    async def _pass_on(
        self, request: web.Request, stream: _Stream, chunks: AsyncGenerator[TokenChunk, None]
    ) -> tuple[web.StreamResponse, str]:
        """Write the chunks to the client; returns how the stream ended. An error before the first line is raised."""
        response: web.StreamResponse | None = None
        line: dict[str, Any] = {}
        num_sent = 0
        try:
            async for chunk in chunks:
                line = wire.chunk_to_wire(_as_evicted(chunk) if stream.is_evicted else chunk, num_sent)
                num_sent += len(chunk.token_ids)
                self.num_tokens += len(chunk.token_ids)
                response = response or await self._begin(request)
                await response.write(_encoded(line))
        except RoseError as error:
            if response is None:
                raise
            line = wire.error_to_wire(error)
            await response.write(_encoded(line))
        if response is None:
            message = f"engine {stream.engine.engine_id} ended a stream without a finish reason"
            raise EngineError(message)
        await response.write_eof()
        return response, line.get("finish_reason") or wire.name_in(line)

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "application/x-ndjson", **self._headers}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        return response

    @property
    def _headers(self) -> dict[str, str]:
        return {wire.ENGINE_HEADER: self._supervisor.incarnation}

    def _answer(self, data: Any) -> web.Response:
        return web.json_response(data, headers=self._headers)


def _encoded(line: object) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _as_evicted(chunk: TokenChunk) -> TokenChunk:
    """Call an end that the executor itself brought about by its name."""
    is_ours = chunk.finish_reason is FinishReason.ABORTED
    return attrs.evolve(chunk, finish_reason=FinishReason.EVICTED) if is_ours else chunk


async def _end(stream: _Stream) -> None:
    try:
        async with asyncio.timeout(_ABORT_S):
            await stream.engine.abort(stream.request_id)
    except EngineLostError:
        return  # its streams end by themselves
    except (RoseError, TimeoutError):
        _logger.warning("request %s could not be ended", stream.request_id, exc_info=True)
