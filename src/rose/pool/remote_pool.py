"""A pool that runs in another process, with the face of one in this process. ``rose.pool.direct`` has the protocol.

Invariants:

* ``generate`` gives exactly one result or one error for each call, or passes on its caller's cancellation, of which the pool hears once.
* A result does not wait for the report of it.
* Leaving the pool ends its calls, streams and tasks; turns that were delivered are reported first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import uuid
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import attrs

from rose.backends.remote import wire as engine_wire
from rose.backends.remote.client import HttpClient
from rose.errors import ConfigError, EngineError, RoseError, TransportError, TurnFailedError
from rose.interfaces import Transport
from rose.pool import direct
from rose.pool.head_starts import HeadStarts
from rose.pool.membership import EngineAccount
from rose.pool.pool import PoolSnapshot, check_type
from rose.pool.remote_doors import Doors
from rose.pool.remote_link import Link
from rose.pool.remote_turns import RemoteCall
from rose.pool.statistics import PoolStatistics
from rose.pool.weights import SyncReport
from rose.pool.wire import error_from_plain, from_plain
from rose.types import EngineId, EngineRequest, TokenChunk, Turn, TurnResult, WeightVersion

_logger = logging.getLogger(__name__)
_RECONNECT_S = 30.0
_MAX_TRAJECTORIES = 8192


class RemotePool:
    """The client side of a pool's service. Use it as an async context manager, on one event loop.

    Args:
        url: Of the service, ``http://host:port``.
        token: The bearer token, if it asks for one.
        timeout_s: How long short calls may take, and how long the first connection.
        reconnect_s: How long a broken connection is tried again before the calls that wait for it fail.
        has_head_starts: Begin a trajectory's next turn where its last one ran while the pool still decides, see ``rose.pool.head_starts``.

    Raises:
        ConfigError: ``url`` is none, or ``token`` can be none.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        reconnect_s: float = _RECONNECT_S,
        has_head_starts: bool = True,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            message = f"{url!r} is no URL of a pool; give http://HOST:PORT, as rose pool prints it"
            raise ConfigError(message)
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._client = HttpClient(self.url, token=token, timeout_s=timeout_s, unreachable=TransportError)
        self._doors = Doors(self.url, token)
        self._link = Link(
            self.url,
            token=token,
            session_id=uuid.uuid4().hex,
            on_message=self._hear,
            on_open=self._tell_all,
            on_down=self._fail_all,
            reconnect_s=reconnect_s,
        )
        self._head_starts = HeadStarts(max_trajectories=_MAX_TRAJECTORIES if has_head_starts else 0)
        self._last_prefix: str | None = None
        self._calls: dict[str, RemoteCall] = {}
        self._unreported: set[RemoteCall] = set()
        self._numbers = itertools.count()
        self._tasks: asyncio.TaskGroup = asyncio.TaskGroup()
        self._own: set[asyncio.Task[None]] = set()
        self._has_calls = asyncio.Event()
        self._has_news = asyncio.Event()
        self._refused: RoseError | None = None
        self._is_open = self._was_opened = False

    async def generate(self, turn: Turn) -> TurnResult:
        """Run one turn to its end, wherever that takes it. Arguments and errors as of ``RolloutPool.generate``.

        Raises:
            TransportError: The pool could not be reached for ``reconnect_s``.
            RoseError: As ``RolloutPool.generate`` raises them.
            TypeError: ``turn`` is no ``Turn``.
        """
        check_type("turn", turn, Turn)
        self._check_open()
        turn_id = str(next(self._numbers))
        waiter: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        call = self._calls[turn_id] = RemoteCall.of(turn_id, turn, waiter)
        self._has_calls.set()
        try:
            await self._begin_ahead(call)
            for delivered in list(self._unreported):  # a trajectory's next turn comes after the report of its last
                await self._report(delivered)
            await self._link.send(direct.submit_to_wire(turn_id, turn, call.ahead))
            if call.start is None:
                engine_wire.PREPARED.prepare(turn.prompt_ids)  # while the pool decides
            return await waiter
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                vars(error)["partial"] = call.partial()
            self._drop(call)
            raise

    async def sync_weights(self, source: Transport) -> SyncReport:
        """Let the pool bring its engines to the newest weights in a transport; see ``RolloutPool.sync_weights``.

        Args:
            source: The transport that a publisher writes to. The pool opens it by its address, so it must be reachable from there.

        Raises:
            TypeError: ``source`` is no transport: other sources of updates cannot be sent.
            TransportError: The pool cannot be reached, or the transport cannot from there.
        """
        check_type("source", source, Transport)
        self._check_open()
        address = source.address()
        body = {"address": {"name": address.name, **dict(address.options)}}
        return sync_report_from_plain(await self._client.call("POST", "/v1/sync", body, timeout_s=math.inf))

    async def barrier(self, version: WeightVersion, *, timeout_s: float | None = None) -> None:
        """Wait until nothing of older weights is under way, of any client. See ``RolloutPool.barrier``.

        Args:
            version: The oldest weights that are still wanted.
            timeout_s: How long to wait, on the pool's clock; ``None``: for ever.

        Raises:
            DeadlineExceededError: Something older was under way for ``timeout_s``; the message names it.
            TransportError: The pool was lost meanwhile; ask again.
            TypeError: ``version`` is no ``WeightVersion``.
        """
        check_type("version", version, WeightVersion)
        self._check_open()
        await self._client.call(
            "POST", "/v1/barrier", {"version": str(version), "timeout_s": timeout_s}, timeout_s=math.inf
        )

    async def snapshot(self) -> PoolSnapshot:
        """Read the pool's state; a call to the pool, so it is awaited here."""
        snapshot: PoolSnapshot = from_plain(PoolSnapshot, (await self._status())["snapshot"])
        return snapshot

    async def accounts(self) -> dict[EngineId, EngineAccount]:
        """Return what each engine did for the pool, for all its clients."""
        accounts: dict[EngineId, EngineAccount] = from_plain(
            dict[str, EngineAccount], (await self._status())["accounts"]
        )
        return accounts

    async def statistics(self) -> PoolStatistics:
        """Return what became of turns and tokens since the pool was made, of all its clients."""
        statistics: PoolStatistics = from_plain(PoolStatistics, (await self._status())["statistics"])
        return statistics

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            TransportError: The pool does not answer within ``timeout_s``.
            ConfigError: It refuses this client.
            TurnFailedError: It was connected before.
        """
        if self._was_opened:
            message = "a connection to a pool is opened once; call rose.RolloutPool.connect again"
            raise TurnFailedError(message)
        self._was_opened = True
        await self._tasks.__aenter__()
        try:
            self._spawn(self._link.run())
            self._spawn(self._report_for_ever())
            await self._wait_until_open()
        except BaseException:
            await self._close()
            raise
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all calls with ``TurnFailedError``; the pool cancels their turns."""
        self._is_open = False
        self._end_all(TurnFailedError("the connection to the pool was closed"))
        await self._close()

    # What the pool says.

    def _hear(self, message: list[Any]) -> None:
        if message[0] == direct.SESSION:
            self._meet(message[1])
            return
        call = self._calls.get(message[1])
        if call is None:
            return
        if message[0] == direct.START:
            self._begin(call, direct.start_from_wire(message))
        elif message[0] == direct.SETTLED:
            del self._calls[call.turn_id]
            call.settle(message[2])
        elif message[0] == direct.STOP and call.start is not None and call.start.attempt == message[2]:
            if call.is_ahead:
                self._head_starts.judge(is_hit=False)
                call.drop_ahead()
            else:
                call.stop()

    def _meet(self, prefix: str) -> None:
        """Take up with a session; another one than before begins all turns anew, so what they have under way is nobody's any more."""
        if prefix != self._last_prefix:
            for call in self._calls.values():
                call.stop()
        self._head_starts.prefix = self._last_prefix = prefix

    def _begin(self, call: RemoteCall, start: direct.Start) -> None:
        self._head_starts.hear(start)
        is_known = call.is_making(start)
        if call.is_ahead:
            self._head_starts.judge(is_hit=is_known)
        if call.waiter.done() and not is_known:  # moved, while its result was on the way to the caller
            self._drop(call)
            return
        if not is_known:
            call.stop()
        request = call.begin(start)
        if request is not None:
            call.task = self._spawn(self._stream(call, start, request))
        elif call.end is not None or call.record.token_ids:
            self._spawn(self._tell(call))

    async def _begin_ahead(self, call: RemoteCall) -> None:
        """Begin a turn before the pool has answered, if that is likely to be right."""
        turn = call.record.turn
        start = self._head_starts.guess(call.turn_id, turn) if self._link.is_open else None
        request = None if start is None else call.begin(start)
        if start is not None and request is not None:
            call.task = self._spawn(self._stream(call, start, request))
            await asyncio.sleep(0)  # the engine hears of it first

    async def _stream(self, call: RemoteCall, start: direct.Start, request: EngineRequest) -> None:
        """Stream one attempt."""
        try:
            async with self._doors.engine(start) as engine, _closing(engine.generate(request)) as chunks:
                async for chunk in chunks:
                    if call.take(chunk):
                        break
                else:
                    call.fail(EngineError(f"engine {start.engine_id!r} ended a stream without a finish reason"))
        except RoseError as error:
            call.fail(error)
        except Exception as error:  # noqa: BLE001 - the root of a task: whatever a backend raises ends this attempt only
            _logger.warning("streaming from engine %s failed", start.engine_id, exc_info=error)
            call.fail(EngineError(f"{type(error).__name__}: {error}"))
        await self._tell(call)

    async def _tell(self, call: RemoteCall) -> None:
        """Give the caller the result if it is there, then the pool the news."""
        if call.deliver() and call.start is not None:
            self._head_starts.note(call.record.turn.trajectory_id, call.start.engine_id)
            self._unreported.add(call)
            await asyncio.sleep(0)  # the caller goes first
        await self._report(call)

    async def _report(self, call: RemoteCall) -> None:
        self._unreported.discard(call)
        news = call.news()
        if news is not None:
            await self._link.send(news)

    async def _report_for_ever(self) -> None:
        while True:
            await self._has_calls.wait()
            await asyncio.sleep(direct.REPORT_S)
            for call in list(self._calls.values()):
                await self._report(call)
            await self._link.send([direct.ALIVE, ""])
            if not self._calls:
                self._has_calls.clear()

    # Beginning and end of connections and calls.

    async def _tell_all(self) -> None:
        """Bring the pool up to date over a new connection."""
        self._head_starts.prefix = None  # it may be another pool
        calls = list(self._calls.values())
        await self._link.send([direct.TURNS, [call.turn_id for call in calls]])
        for call in calls:
            await self._link.send(direct.submit_to_wire(call.turn_id, call.record.turn, call.ahead))

    def _fail_all(self, error: RoseError) -> None:
        self._refused = error
        self._has_news.set()
        self._end_all(error)

    def _end_all(self, error: RoseError) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.stop()
            if not call.waiter.done():
                call.waiter.set_exception(error)

    def _drop(self, call: RemoteCall) -> None:
        """Forget a call and let the pool forget it."""
        if self._calls.pop(call.turn_id, None) is not None:
            call.stop()
            if self._is_open:
                self._spawn(self._link.send([direct.CANCEL, call.turn_id]))

    async def _wait_until_open(self) -> None:
        opened = asyncio.ensure_future(self._link.wait_until_open())
        failed = asyncio.ensure_future(self._has_news.wait())
        try:
            done, _ = await asyncio.wait({opened, failed}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
            failed.cancel()
        if opened in done:
            return
        if self._refused is not None:
            raise self._refused
        message = f"the pool at {self.url} did not answer within {self._timeout_s} s; is the process alive?"
        raise self._link.last_error or TransportError(message)

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # each is done, whatever cancels another
            stack.push_async_callback(self._client.close)
            stack.push_async_callback(self._doors.close)
            stack.push_async_callback(self._tasks.__aexit__, None, None, None)
            stack.callback(self._cancel_own)
            stack.push_async_callback(self._link.close)

    def _cancel_own(self) -> None:
        for task in list(self._own):
            task.cancel()

    async def _status(self) -> Any:
        self._check_open()
        return await self._client.call("GET", "/v1/pool")

    def _check_open(self) -> None:
        if not self._is_open:
            message = "the pool is not open; use it inside 'async with rose.RolloutPool.connect(...) as pool:'"
            raise TurnFailedError(message)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._tasks.create_task(work)
        self._own.add(task)
        task.add_done_callback(self._own.discard)
        return task


def sync_report_from_plain(data: dict[str, Any]) -> SyncReport:
    """Read the answer of ``POST /v1/sync``."""
    errors = {EngineId(name): error_from_plain(error) for name, error in data["errors"].items()}
    report: SyncReport = from_plain(SyncReport, {**data, "errors": {}})
    return attrs.evolve(report, errors=errors)


@contextlib.asynccontextmanager
async def _closing(chunks: AsyncIterator[TokenChunk]) -> AsyncIterator[AsyncIterator[TokenChunk]]:
    """Close a stream when it is left, if it can be closed."""
    try:
        yield chunks
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
