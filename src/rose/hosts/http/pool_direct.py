"""The pool's side of the direct path (``rose.pool.direct`` has the life cycle): one session a client process.

Invariants:

* A session outlives its connection by ``linger_s``; then all of its turns are cancelled, once.
* What settled is kept for a client that missed it, the last ``_MAX_SETTLED`` turns of a session.
* Time in which nothing was heard of a client is no stall of its engines.
* An engine is streamed from through the pool only for an attempt that is under way.
* Tokens follow on each other: a report from further on than what is known is dropped, and asked for again.
* A client's head start is taken over by the turn's first attempt, if it is at that engine, with the same weights and for as many tokens, or
  stopped at once.
* A session that is given up while its client is connected has its connection closed, so that the client begins a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self

import attrs
from aiohttp import WSCloseCode, WSMsgType, web

from rose.backends.remote.wire import compact
from rose.errors import ConfigError, EngineError, EngineLostError, RequestRefusedError, RoseError, TurnFailedError
from rose.hosts.http.auth import Access, require
from rose.interfaces import ServingEngine
from rose.pool import RolloutPool, direct
from rose.pool.turns import Attempt
from rose.pool.wire import error_from_plain, error_to_plain
from rose.types import EngineAddress, EngineId, FinishReason, RequestId, TokenChunk, Turn, WeightVersion

_logger = logging.getLogger(__name__)
_MAX_SETTLED = 4096
_MAX_SESSION_CHARS = 64
_LOOK_S = 0.25
_SILENT_S = 1.0
_PING_S = 15.0
_MAX_FRAME_BYTES = 16 << 20
_NONSENSE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class DirectTurn:
    """One turn of a client: the source of its tokens, fed by the client's reports."""

    def __init__(self, session: Session, turn_id: str, turn: Turn, ahead: direct.Ahead | None) -> None:
        self._session = session
        self._max_tokens = turn.sampling.max_tokens
        self._ahead = ahead
        self._has_head_start = False
        self.turn_id = turn_id
        self.attempt: Attempt | None = None
        self.is_ended = False
        self._chunks: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        self._num_heard = 0

    def begun_at(self, engine_id: EngineId, version: WeightVersion | None, max_tokens: int) -> RequestId | None:
        """Return the id of the client's head start if it is such a request; whatever the answer, no later attempt takes it over."""
        wanted, ahead = direct.Ahead(engine_id=engine_id, version=version), self._ahead
        self._ahead, self._has_head_start = None, ahead == wanted and max_tokens == self._max_tokens
        return direct.ahead_id(self._session.prefix, self.turn_id) if self._has_head_start else None

    async def stop_ahead(self) -> None:
        """Stop the client's head start unless an attempt has taken it over."""
        self._ahead = None
        if not self._has_head_start:
            await self._session.send([direct.STOP, self.turn_id, direct.AHEAD])

    async def open(self, attempt: Attempt) -> AsyncGenerator[TokenChunk, None]:
        """Tell the client to begin, and give what it reports. See ``rose.pool.sources.TokenSource``."""
        self.attempt, self._chunks, self.is_ended = attempt, asyncio.Queue(), False
        self._num_heard = len(attempt.record.token_ids)
        self._session.attempts[attempt.request.request_id] = attempt
        is_over = False
        if self._session.is_over:
            self._session.cancel(self.turn_id)
        try:
            await self.tell()
            while not is_over:
                news = await self._chunks.get()
                is_over = isinstance(news, Exception) or news.finish_reason is not None
                if isinstance(news, Exception):
                    raise news
                yield news
        finally:
            self._session.attempts.pop(attempt.request.request_id, None)
            if not is_over:
                await self._session.send([direct.STOP, self.turn_id, attempt.number])

    async def tell(self) -> None:
        """Say what the client is to do now; nothing while the turn waits for an engine."""
        attempt = self.attempt
        if attempt is None or not attempt.is_open or self.is_ended:
            return
        member = attempt.member
        version = self._session.pool.version
        start = direct.Start(
            turn_id=self.turn_id,
            attempt=attempt.number,
            request_id=attempt.request.request_id,
            engine_id=attempt.engine_id,
            reason=attempt.reason,
            address=_address_of(member.engine),
            max_tokens=attempt.request.sampling.max_tokens,
            num_kept=self._num_heard,
            hops=tuple(attempt.record.hops),
            run=None if version is None else version.run,
            version=member.version,
            versions=attempt.record.versions,
        )
        await self._session.send(direct.start_to_wire(start))

    def report(self, news: direct.Report) -> bool:
        """Take a client's news; what is of an earlier attempt, or known already, is dropped.

        Returns:
            Whether it goes on from what is known. Where it does not, an earlier report was lost with its connection.
        """
        if self.attempt is None or self.attempt.number != news.attempt or self.is_ended:
            return True
        start = news.start
        if start > self._num_heard:
            return False
        fresh: list[TokenChunk] = []
        for chunk in news.chunks:
            known = max(0, min(self._num_heard - start, len(chunk.token_ids)))
            start += len(chunk.token_ids)
            if known < len(chunk.token_ids):
                fresh.append(_without_first(chunk, known))
        self._num_heard = max(self._num_heard, start)
        if isinstance(news.end, FinishReason):
            last = fresh.pop() if fresh else TokenChunk()
            fresh.append(attrs.evolve(last, finish_reason=news.end))
        for chunk in fresh:
            self._chunks.put_nowait(chunk)
        if news.end is not None and not isinstance(news.end, FinishReason):
            self._chunks.put_nowait(_as_failure(error_from_plain(news.end)))
        self.is_ended = news.end is not None
        return True


class Session:
    """One client process: its connection, if there is one now, and its turns."""

    def __init__(
        self, pool: RolloutPool, attempts: dict[RequestId, Attempt], spawn: Callable[..., asyncio.Task[None]]
    ) -> None:
        self.pool = pool
        self.prefix = uuid.uuid4().hex
        self.attempts = attempts
        self.turns: dict[str, DirectTurn] = {}
        self.heard_s = self.lost_s = asyncio.get_running_loop().time()
        self.socket: web.WebSocketResponse | None = None
        self.num_turns = 0
        self.is_over = False
        self._spawn = spawn
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._settled: OrderedDict[str, list[Any]] = OrderedDict()

    async def send(self, message: list[Any]) -> None:
        """Send to the client, if it is there; what it misses it is told when it comes back."""
        if self.socket is not None and not self.socket.closed:
            with contextlib.suppress(ConnectionError):
                await self.socket.send_str(compact(message))

    async def take(self, message: Any) -> None:
        """Act on a client's message.

        Raises:
            TypeError, ValueError, LookupError, AttributeError, ArithmeticError: It is none.
        """
        match message[0]:
            case direct.SUBMIT:
                await self._submit(message)
            case direct.REPORT:
                news = direct.report_from_wire(message)
                if news.turn_id in self._settled:
                    await self.send(self._settled[news.turn_id])
                elif news.turn_id in self.turns and not self.turns[news.turn_id].report(news):
                    await self.turns[news.turn_id].tell()
            case direct.CANCEL:
                self.cancel(message[1])
            case direct.TURNS:
                for turn_id in set(self.turns) - set(message[1]):
                    self.cancel(turn_id)
            case direct.ALIVE:
                pass
            case other:
                reason = f"there is no message {other!r}"
                raise ValueError(reason)

    def cancel(self, turn_id: str) -> None:
        """Drop a turn; its request is aborted at the engine."""
        if turn_id in self._tasks:
            self._tasks[turn_id].cancel()

    def end(self) -> None:
        """Cancel all turns; those whose last word is in already may settle, but not begin again."""
        self.is_over = True
        for turn_id, turn in list(self.turns.items()):
            if not turn.is_ended:
                self.cancel(turn_id)

    def excuse(self, now_s: float) -> None:
        """Let the time since the last look not count as a stall of the engines."""
        for turn in self.turns.values():
            if turn.attempt is not None and turn.attempt.is_open:
                turn.attempt.last_progress_s = now_s

    async def _submit(self, message: list[Any]) -> None:
        turn_id = message[1]
        if turn_id in self._settled:
            await self.send(self._settled[turn_id])
        elif turn_id in self.turns:
            await self.turns[turn_id].tell()
            if message[-1] is not None:  # what was said of it may have been lost
                await self.turns[turn_id].stop_ahead()
        else:
            try:
                turn_id, turn, ahead = direct.submit_from_wire(message)
            except _NONSENSE as error:
                await self._settle(str(turn_id), error_to_plain(RequestRefusedError(f"this is no turn: {error}")))
                return
            known = self.turns[turn_id] = DirectTurn(self, turn_id, turn, ahead)
            self.num_turns += 1
            task = self._tasks[turn_id] = self._spawn(self._run(turn, known))
            task.add_done_callback(lambda _: self._forget(turn_id))
            if ahead is not None:
                self._spawn(known.stop_ahead())  # tasks begin in order: the pool has seen the turn by then

    async def _run(self, turn: Turn, source: DirectTurn) -> None:
        outcome: Any
        try:
            outcome = await self.pool.generate(turn, source=source)
        except RoseError as error:
            outcome = error_to_plain(error)
        except Exception as error:  # noqa: BLE001 - the root of a task: the client must hear of it
            _logger.warning("turn %s of a client failed", source.turn_id, exc_info=error)
            outcome = error_to_plain(TurnFailedError(f"the pool failed: {type(error).__name__}: {error}"))
        await self._settle(source.turn_id, outcome)

    def _forget(self, turn_id: str) -> None:
        del self.turns[turn_id], self._tasks[turn_id]

    async def _settle(self, turn_id: str, outcome: Any) -> None:
        message = self._settled[turn_id] = direct.settled_to_wire(turn_id, outcome)
        if len(self._settled) > _MAX_SETTLED:
            self._settled.popitem(last=False)
        await self.send(message)


class DirectHost:
    """All sessions of a pool. An async context manager."""

    def __init__(self, pool: RolloutPool, *, linger_s: float, silent_s: float) -> None:
        self._pool = pool
        self._linger_s = linger_s
        self._silent_s = silent_s
        self.sessions: dict[tuple[str, str], Session] = {}
        self.attempts: dict[RequestId, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers."""
        return [web.get(direct.PATH, self._serve)]

    async def __aenter__(self) -> Self:
        """Begin to look after sessions."""
        self._spawn(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all sessions and their turns."""
        await self.close_sockets()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close_sockets(self) -> None:
        """Tell the clients that the service goes away."""
        for session in list(self.sessions.values()):
            if session.socket is not None:
                await session.socket.close(code=WSCloseCode.GOING_AWAY)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        who = require(Access.JOB)
        name = request.headers.get(direct.SESSION_HEADER, "")
        if not name or len(name) > _MAX_SESSION_CHARS:
            message = f"{direct.PATH} needs a name of the client's session in {direct.SESSION_HEADER}; see rose.RolloutPool.connect"
            raise ConfigError(message)
        socket = web.WebSocketResponse(heartbeat=_PING_S, compress=False, max_msg_size=_MAX_FRAME_BYTES)
        await socket.prepare(request)
        key = (who.name, name)
        session = self.sessions.get(key)
        if session is None:
            session = self.sessions[key] = Session(self._pool, self.attempts, self._spawn)
        previous, session.socket = session.socket, socket
        if previous is not None:
            await previous.close(code=WSCloseCode.POLICY_VIOLATION, message=b"another connection of this session")
        await session.send([direct.SESSION, session.prefix])
        try:
            await self._read(session, socket)
        finally:
            if session.socket is socket:
                session.socket, session.lost_s = None, asyncio.get_running_loop().time()
                if socket.close_code == WSCloseCode.OK and self.sessions.get(key) is session:  # it said good-bye
                    self._end(key)
        return socket

    async def _read(self, session: Session, socket: web.WebSocketResponse) -> None:
        loop = asyncio.get_running_loop()
        session.heard_s = loop.time()
        async for frame in socket:
            session.heard_s = loop.time()
            try:
                if frame.type is not WSMsgType.TEXT:
                    message = "messages are text"
                    raise ValueError(message)
                await session.take(json.loads(frame.data))
            except _NONSENSE as error:
                _logger.warning("a client's message on %s is not understood: %r", direct.PATH, error)
                await socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=str(error).encode()[:120])

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = loop.time()
            for key, session in list(self.sessions.items()):
                silence_s = now_s - session.heard_s
                is_gone = session.socket is None and now_s - session.lost_s > self._linger_s
                if is_gone or (session.turns and silence_s > self._silent_s):
                    self._end(key)
                elif silence_s > _SILENT_S or session.socket is None:
                    session.excuse(self._pool.clock.now())

    def _end(self, key: tuple[str, str]) -> None:
        session = self.sessions.pop(key)
        session.end()
        if session.socket is not None and not session.socket.closed:
            self._spawn(_hang_up(session.socket))


async def _hang_up(socket: web.WebSocketResponse) -> None:
    await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"nothing was heard of this session")


def _address_of(engine: ServingEngine) -> EngineAddress | None:
    """Return the engine's address; asked of the object, since a check against the protocol costs more than all the rest."""
    address: Callable[[], EngineAddress] | None = getattr(engine, "address", None)
    return None if address is None else address()


def _without_first(chunk: TokenChunk, num: int) -> TokenChunk:
    if not num:
        return chunk
    return TokenChunk(token_ids=chunk.token_ids[num:], logprobs=chunk.logprobs[num:], version=chunk.version)


def _as_failure(error: RoseError) -> Exception:
    """Take a client's word for a failure of its attempt, not for the loss of the engine: others may reach it."""
    if isinstance(error, EngineLostError) or not isinstance(error, EngineError):
        return EngineError(f"the client could not stream from it: {error}")
    return error
