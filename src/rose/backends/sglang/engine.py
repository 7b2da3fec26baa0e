"""A running SGLang server as a ROSE serving engine, over HTTP.

Invariants, beyond those of ``rose.interfaces.serving``:

* Nothing is sent that would end the server's engine: token ids, lengths and the order of commands are checked here first.
* A request is aborted by name only while the scheduler surely has it; otherwise its connection is cut. An abort that comes too early is lost
  in SGLang, together with all later ones.
* Each request has exactly one end here, whatever the server does: an abort that is not answered in ``_ABORT_S`` is finished by a cut.
* While streams are open the server's scheduler is asked for a sign of life every ``_BEAT_S``; without one for ``timeout_s`` it counts as
  lost, and every stream ends with ``EngineLostError``, also when its process lingers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

import attrs

from rose.backends.completion import to_the_end
from rose.backends.openai.client import OpenAiClient
from rose.backends.sglang import commands
from rose.backends.sglang.client import PatientHttp, SglangClient
from rose.backends.sglang.control import SglangControl
from rose.backends.sglang.facts import read_rose_state
from rose.backends.sglang.loads import combined
from rose.backends.sglang.outputs import EventReader
from rose.backends.sglang.requests import fresh_rid, own_stops, refuse_impossible, request_body
from rose.backends.sglang.streams import Stream
from rose.backends.sglang.updating import ServerWeights
from rose.clocks import MonotonicClock
from rose.errors import (
    EngineBusyError,
    EngineError,
    EngineFencedError,
    EngineLostError,
    RequestRefusedError,
    RoseError,
)
from rose.interfaces import Clock, ServingEngine
from rose.interfaces.serving import PauseMode, Slept, Woken
from rose.transfer.kernels import Sum
from rose.transfer.layout import TargetLayout
from rose.types import (
    Activation,
    EngineAddress,
    EngineId,
    EngineRequest,
    EngineSnapshot,
    FinishReason,
    RequestId,
    TokenChunk,
    WeightUpdate,
    WeightVersion,
)

_logger = logging.getLogger(__name__)
_ABORT_S = 2.0
_BEAT_S = 1.0
_UNSET_LABEL = "default"
"""SGLang's own label of weights that nobody named."""


class SglangEngine(ServingEngine):
    """A client of one server. All methods from one event loop; the first call opens a connection.

    Args:
        url: Where the server listens, ``http://host:port``.
        engine_id: The name by which the pool knows the engine; the address when left out.
        token: The bearer token (SGLang's ``--api-key``), where the server asks for one.
        version: The published version that the server's weights are, ``run:n``, where its label does not say; nothing when they are none.
        vocab_size: Number of the model's token ids: others are refused here, for they would end the server. Asked for when left out.
        timeout_s: How long connecting, readings and short commands may take; a server that is silent for so long is lost.
        update_timeout_s: How long one command of a weight update may take.
        clock: For the time stamps of snapshots.
    """

    def __init__(
        self,
        url: str,
        *,
        engine_id: str | None = None,
        token: str | None = None,
        version: str | None = None,
        vocab_size: int | None = None,
        timeout_s: float = 10.0,
        update_timeout_s: float = 120.0,
        clock: Clock | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.engine_id = EngineId(engine_id or self.url)
        self._given = {
            "engine_id": self.engine_id,
            "token": token,
            "version": version,
            "vocab_size": vocab_size,
            "timeout_s": timeout_s,
        }
        self._token, self._timeout_s, self._update_timeout_s = token, timeout_s, update_timeout_s
        self._vocab_size = vocab_size
        self._labels = {} if version is None else {_UNSET_LABEL: WeightVersion.parse(version)}
        self._clock = clock or MonotonicClock()
        self._lost: str | None = None
        self._is_asleep = False
        self._streams: dict[RequestId, Stream] = {}
        self._watch: asyncio.Task[None] | None = None
        self._connect()

    def _connect(self) -> None:
        connections = OpenAiClient(self.url, engine_id=self.engine_id, token=self._token, timeout_s=self._timeout_s)
        self._client = SglangClient(connections)
        self._patient = PatientHttp(self._client, self._update_timeout_s)
        self._control = SglangControl(self._client, self.engine_id)
        self._weights = ServerWeights(
            self._patient,
            self._control,
            labels=self._labels,
            on_fenced=self._abort_each,
        )
        self._weights.hear(_UNSET_LABEL)

    @property
    def weight_version(self) -> WeightVersion | None:
        """Return the version of the weights as last heard, ``None`` when they are no published version."""
        return self._weights.version

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps. See ``SupportsSleep``."""
        return self._is_asleep

    async def vocab_size(self) -> int:
        """Return how many token ids the model has: as was given, or as the server tells.

        Raises:
            ConfigError: Neither says.
        """
        return await self._control.vocab_size() if self._vocab_size is None else self._vocab_size

    def address(self) -> EngineAddress:
        """Return how another process reaches the same server. See ``SupportsAddress``."""
        options = {"url": self.url, **self._given}
        return EngineAddress(
            name="sglang", options=tuple((name, value) for name, value in options.items() if value is not None)
        )

    # Tokens

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the request's tokens. See ``ServingEngine.generate``."""
        return self._generate(request)

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        self._check_serving()
        if request.request_id in self._streams:
            message = f"request id {request.request_id} is in use on engine {self.engine_id}; ids must be fresh"
            raise RequestRefusedError(message)
        stream = Stream(rid=fresh_rid(request.request_id), engine_id=self.engine_id)
        self._streams[request.request_id] = stream
        try:
            reader = await self._begin(stream, request)
            last = TokenChunk()
            while not reader.is_over:
                data = await self._next(stream)
                for chunk in reader.feed(data):
                    if last.token_ids:
                        yield last
                    last = chunk
                if not data:
                    break
                if last.token_ids and not reader.is_over:
                    yield last
                    last = TokenChunk()
            if reader.error is not None:
                if last.token_ids:
                    yield last
                raise reader.error
            await stream.finish()
            yield attrs.evolve(last, finish_reason=reader.finish_reason or FinishReason.ABORTED)
        finally:
            del self._streams[request.request_id]
            stream.release()

    async def _begin(self, stream: Stream, request: EngineRequest) -> EventReader:
        self._keep_watch()
        facts = await self._control.facts()
        refuse_impossible(request, facts, await self.vocab_size())
        stream.reader = EventReader(
            request,
            labels=self._labels,
            own_stops=own_stops(request.sampling),
            is_incremental=facts.is_incremental,
        )
        try:
            await stream.begin(self._client, request_body(request, stream.rid, facts))
        except EngineLostError as error:
            self._control.forget()
            raise stream.lost or error from error
        return stream.reader

    async def _next(self, stream: Stream) -> bytes:
        try:
            data = await stream.next(self._client)
        except EngineError as error:
            self._control.forget()
            raise stream.lost or error from error
        if not data and stream.lost is not None:
            raise stream.lost
        return data

    async def abort(self, request_id: RequestId) -> None:
        """End a request. A no-op when it is over."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.is_aborted:
            await self._abort(stream)

    async def _abort(self, stream: Stream) -> None:
        stream.is_aborted = True
        if not stream.is_with_scheduler or self._control.paused is not None:
            stream.cut()  # a paused scheduler would end it after the pause only
            return
        stream.cut_after(_ABORT_S)
        await self._control.abort(stream.rid)

    async def _abort_each(self) -> None:
        for stream in list(self._streams.values()):
            await self._abort(stream)

    # Readings

    async def snapshot(self) -> EngineSnapshot:
        """Read the load; one round trip to the scheduler and two to the server's front.

        Raises:
            EngineLostError: The server is gone, or does not answer within ``timeout_s``.
        """
        self._check_alive()
        control, num_changes = self._control, self._weights.num_changes
        facts, load, label = await asyncio.gather(control.beat(), control.load(), control.weight_label())
        state = read_rose_state(facts)
        load = load if state is None else state.load
        if num_changes == self._weights.num_changes and not self._weights.is_changing:
            if state is None:
                self._weights.hear(label)
            else:
                self._is_asleep = state.is_asleep
                await self._weights.hear_state(state, label)
        own = [(stream.num_tokens, stream.is_with_scheduler) for stream in self._streams.values()]
        load = combined(load, own, paused=control.paused)
        return EngineSnapshot(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_used_tokens=min(load.kv_used_tokens, facts.kv_total_tokens),
            kv_total_tokens=facts.kv_total_tokens,
            weight_version=self._weights.version,
            is_paused=control.paused is not None or self._is_asleep or (state is not None and state.is_paused),
            read_at_s=self._clock.now(),
            max_context_tokens=facts.max_context_tokens,
        )

    def _keep_watch(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_server(), name=f"heartbeat of {self.engine_id}")

    async def _watch_server(self) -> None:
        """Ask for signs of life while streams are open; end them all when there is none."""
        while self._streams:
            await asyncio.sleep(_BEAT_S)
            if self._weights.is_changing:  # the scheduler is busy with what was asked of it
                continue
            try:
                await self._control.beat()
            except EngineLostError as error:
                self._end_streams(error)
            except EngineError as error:
                _logger.warning("engine %s answered its heartbeat with an error: %s", self.engine_id, error)

    def _end_streams(self, error: EngineLostError) -> None:
        for stream in list(self._streams.values()):
            stream.lost = error
            stream.cut()

    # Pauses

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens; returns when none is being made."""
        self._check_alive()
        if self._is_asleep:
            return
        await self._control.pause(mode)
        for stream in list(self._streams.values()) if mode is PauseMode.ABORT else ():
            stream.is_aborted = True
            if stream.is_with_scheduler:
                stream.cut_after(_ABORT_S)  # the scheduler was told to end it
            else:
                stream.cut()

    async def resume(self) -> None:
        """Go on after ``pause``; a no-op when not paused."""
        self._check_alive()
        if not self._is_asleep:
            await self._control.resume()

    # Weights

    async def stage(self, update: WeightUpdate) -> None:
        """Fetch, verify and decode an update in the server's processes while it serves.

        Raises:
            EngineUnsupportedError: ROSE's package is not installed in the server.
            CorruptUpdateError: Also when an audit of the live weights finds them damaged; the engine is then fenced.
        """
        async with self._weights.lock:
            self._check_awake()
            await self._weights.stage(update)

    async def activate(self) -> Activation:
        """Make the staged update current, in a pause that keeps requests. A cancelled caller waits until the weights are one version again."""
        async with self._weights.lock:
            self._check_awake()
            return await to_the_end(self._weights.activate())

    async def target_layout(self) -> TargetLayout:
        """Return what each rank holds, for a publisher that should cut its cells along these boxes."""
        return await (await self._weights.updates()).target_layout()

    async def weight_sums(self) -> Mapping[str, Sum]:
        """Return the sum of every checkpoint tensor over all ranks, as the live weights are now (``rose.transfer.sums``)."""
        self._check_awake()
        return await (await self._weights.updates()).weight_sums()

    async def weight_checksums(self) -> Mapping[str, str]:
        """Return checkpoint tensor name -> xxh3_128. See ``SupportsWeightChecksums``."""
        self._check_awake()
        return await (await self._weights.updates()).weight_checksums()

    async def server_checksums(self) -> Sequence[Mapping[str, str]]:
        """Return SGLang's own digests of the live parameters, fused and cut as they are, one mapping a rank."""
        self._check_awake()
        return await (await self._weights.updates()).server_checksums()

    # What ROSE's package in the server adds

    async def set_kv_budget(self, num_tokens: int) -> int:
        """Set the KV budget in engine tokens; returns the one in force. See ``SupportsKvBudget``."""
        self._check_alive()
        return await commands.set_kv_budget(self._client, num_tokens)

    async def set_gate(self, *, is_open: bool) -> None:
        """Open or close the step gate. See ``SupportsStepGate``."""
        self._check_alive()
        await commands.set_gate(self._client, is_open=is_open)

    async def set_running_cap(self, num_requests: int) -> int:
        """Cap the requests that run at a time; those above a lowered cap go on. Returns the cap."""
        self._check_alive()
        return await commands.set_running_cap(self._client, num_requests)

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix. See ``SupportsPrefixReset``.

        Raises:
            EngineBusyError: Requests run; SGLang drops prefixes of an idle server only.
        """
        self._check_alive()
        await self._control.flush_cache()

    async def sleep(self, *, keeps_weights: bool = True) -> Slept:
        """Deactivate the engine: its requests end as evicted, its KV memory and weights leave the device. See ``SupportsSleep``."""
        async with self._weights.lock:
            start_s = time.perf_counter()
            if self._is_asleep:
                return Slept(num_evicted=0, released_bytes=0, sleep_s=0.0)
            self._check_alive()
            self._is_asleep = True
            try:
                with self._weights.changing():
                    answer = await to_the_end(commands.sleep(self._patient, keeps_weights=keeps_weights))
            except RoseError:
                self._is_asleep = False
                raise
            return Slept(
                num_evicted=int(answer["num_requests"]),
                released_bytes=int(answer["released_bytes"]),
                sleep_s=time.perf_counter() - start_s,
            )

    async def wake(self) -> Woken:
        """Activate the engine again. See ``SupportsSleep``."""
        async with self._weights.lock:
            start_s, restored_bytes = time.perf_counter(), 0
            self._check_alive()
            if await self._is_server_asleep():
                with self._weights.changing():
                    found = (await to_the_end(commands.wake(self._patient)))["weight_bytes"]
                self._is_asleep = False
                restored_bytes = found or 0
                if found is None:
                    await self._weights.lose()
            return Woken(
                version=self._weights.version,
                is_stale=self._weights.is_fenced,
                restored_bytes=restored_bytes,
                wake_s=time.perf_counter() - start_s,
            )

    async def _is_server_asleep(self) -> bool:
        """Return whether the server sleeps, whoever put it to sleep."""
        state = None if self._is_asleep else read_rose_state(await self._control.beat())
        return self._is_asleep or (state is not None and state.is_asleep)

    async def step_log(self, since_s: float = -math.inf) -> list[list[float]]:
        """Return the turns of the device since then. See ``SupportsStepLog``."""
        self._check_alive()
        return await commands.step_log(self._client, since_s)

    # Whether it may be used

    def _check_alive(self) -> None:
        if self._lost is not None:
            message = f"engine {self.engine_id} is gone: {self._lost}"
            raise EngineLostError(message)

    def _check_awake(self) -> None:
        self._check_alive()
        if self._is_asleep:
            message = f"engine {self.engine_id} is asleep; wake it, or try another engine"
            raise EngineBusyError(message)

    def _check_serving(self) -> None:
        self._check_awake()
        if self._weights.is_fenced:
            message = f"engine {self.engine_id} is fenced: its weights are of no known version; send it an anchor"
            raise EngineFencedError(message)

    async def close(self) -> None:
        """Close the connections, which ends what is under way as lost; the server stays. Idempotent."""
        self._end_streams(EngineLostError(f"engine {self.engine_id} is gone: its client was closed"))
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        await self._client.close()
