"""A serving engine in another actor, seen from the pool's.

Invariants:

* One task reads for all streams; the number of calls does not grow with the number of streams.
* The first failure to reach the engine's host ends every stream and every later call with ``EngineLostError``: what was under way may be
  gone. The pool takes the engine in anew by a new ``RayEngine``.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from typing import Any

import attrs

from rose.clocks import MonotonicClock
from rose.errors import EngineLostError, RequestRefusedError, RoseError
from rose.hosts.ray.peers import Peer
from rose.interfaces import Clock, ServingEngine
from rose.interfaces.serving import PauseMode, Slept, Woken
from rose.types import Activation, EngineId, EngineRequest, EngineSnapshot, RequestId, TokenChunk, WeightUpdate

_WAIT_S = 10.0


@attrs.define(eq=False)
class _Stream:
    """One request under way. ``is_known``: the host has heard of it, or never will."""

    items: asyncio.Queue[TokenChunk | Exception] = attrs.field(factory=asyncio.Queue)
    is_known: asyncio.Event = attrs.field(factory=asyncio.Event)
    needs_abort: bool = True


class RayEngine(ServingEngine):
    """A ``ServingEngine`` over the ``EngineHost`` of another actor.

    Args:
        engine_id: The engine's name.
        peer: Its host; raises ``EngineLostError`` when that cannot be reached.
        clock: For the time stamps of snapshots.
    """

    def __init__(self, engine_id: EngineId, peer: Peer, *, clock: Clock | None = None) -> None:
        self.engine_id = engine_id
        self._peer = peer
        self._clock = clock or MonotonicClock()
        self._client = uuid.uuid4().hex
        self._streams: dict[RequestId, _Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: EngineLostError | None = None
        self._is_asleep = False

    async def open(self) -> None:
        """Take the engine over from whoever had it, and begin to read.

        Raises:
            EngineLostError: It cannot be reached.
        """
        await self._call("open")
        self._spawn(self._read())

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the request's tokens. See ``ServingEngine.generate``."""
        return self._generate(request)

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        if request.request_id in self._streams:
            message = f"a request {request.request_id!r} is in flight already; every attempt needs a fresh id"
            raise RequestRefusedError(message)
        stream = self._streams[request.request_id] = _Stream()
        try:
            try:
                await self._call("begin", request)
            finally:
                stream.is_known.set()
            while True:
                item = await stream.items.get()
                if isinstance(item, Exception):
                    stream.needs_abort = False
                    raise item
                if item.finish_reason is not None:
                    stream.needs_abort = False
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            del self._streams[request.request_id]
            if stream.needs_abort and self._lost is None:
                self._spawn(self._abort(request.request_id))

    async def abort(self, request_id: RequestId) -> None:
        """End a request; see ``ServingEngine.abort``."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        await stream.is_known.wait()
        stream.needs_abort = False
        await self._call("abort", request_id)

    async def snapshot(self) -> EngineSnapshot:
        """Read the load.

        Raises:
            EngineLostError: The engine or its host is gone.
        """
        reading: EngineSnapshot
        reading, self._is_asleep = await self._call("snapshot")
        return attrs.evolve(reading, read_at_s=self._clock.now())

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens."""
        await self._command("pause", mode=mode)

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self._command("resume")

    async def stage(self, update: WeightUpdate) -> None:
        """Let the engine fetch an update. See ``ServingEngine.stage``."""
        await self._call("stage", update)

    async def activate(self) -> Activation:
        """Make the staged update current. See ``ServingEngine.activate``."""
        activation: Activation = await self._call("activate")
        return activation

    async def weight_checksums(self) -> Mapping[str, str]:
        """Return checkpoint tensor name -> xxh3_128. See ``SupportsWeightChecksums``."""
        checksums: Mapping[str, str] = await self._command("weight_checksums")
        return checksums

    async def set_kv_budget(self, num_tokens: int) -> int:
        """Set the KV budget in engine tokens; returns the one in force. See ``SupportsKvBudget``."""
        return int(await self._command("set_kv_budget", num_tokens=num_tokens))

    async def set_gate(self, *, is_open: bool) -> None:
        """Open or close the step gate. See ``SupportsStepGate``."""
        await self._command("set_gate", is_open=is_open)

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix that no running request uses. See ``SupportsPrefixReset``."""
        await self._command("reset_prefix_cache")

    @property
    def is_asleep(self) -> bool:
        """Whether the engine slept when it was last heard of. See ``SupportsSleep``."""
        return self._is_asleep

    async def sleep(self, *, keeps_weights: bool = True) -> Slept:
        """Deactivate the engine. See ``SupportsSleep``."""
        slept: Slept = await self._command("sleep", keeps_weights=keeps_weights)
        self._is_asleep = True
        return slept

    async def wake(self) -> Woken:
        """Activate the engine again. See ``SupportsSleep``."""
        woken: Woken = await self._command("wake")
        self._is_asleep = False
        return woken

    async def close(self) -> None:
        """Let go of the engine, which stays as it is; later calls find it gone."""
        self._lose(EngineLostError(f"engine {self.engine_id!r}: this client was closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _command(self, name: str, **arguments: Any) -> Any:
        return await self._call("command", name, arguments)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._lost is not None:
            raise EngineLostError(str(self._lost))
        try:
            return await self._peer.call(method, self._client, *arguments)
        except EngineLostError as error:
            self._lose(error)
            raise

    async def _read(self) -> None:
        after = 0
        while True:
            try:
                after, items = await self._call("read", after, _WAIT_S)
            except Exception as error:  # noqa: BLE001 - the root of a task: streams would wait for ever
                self._lose(EngineLostError(f"engine {self.engine_id!r} cannot be read: {error}"))
                return
            for request_id, item in items:
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.items.put_nowait(item)

    async def _abort(self, request_id: RequestId) -> None:
        with contextlib.suppress(RoseError):
            await self._call("abort", request_id)

    def _lose(self, error: EngineLostError) -> None:
        if self._lost is None:
            self._lost = error
            for stream in self._streams.values():
                stream.items.put_nowait(EngineLostError(str(error)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
