"""A serving engine behind an OpenAI-compatible server that takes token ids and gives them: ``POST /v1/completions`` of ``vllm serve``.

Invariants, beyond those of ``rose.interfaces.serving``:

* Nothing is sent twice. A request ends at the server when its connection closes: by ``abort``, by leaving the stream, by cancellation.
* A stream is finished when the server says why; a connection that ends before that is an ``EngineError``, or a lost engine when it was
  reset. The tokens that came before have been handed out.
* Connections are used again: a stream is read to the end of its answer before its last chunk is handed out.
* The server's weights are not ROSE's: ``stage`` and ``activate`` raise ``EngineUnsupportedError``. Tokens carry the version that the
  constructor was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import aiohttp
import attrs

from rose.backends.openai.client import OK, OpenAiClient, words
from rose.backends.openai.completions import CompletionReader, request_body
from rose.backends.openai.load import parse_load
from rose.clocks import MonotonicClock
from rose.errors import EngineBusyError, EngineError, EngineLostError, EngineUnsupportedError, RequestRefusedError
from rose.interfaces import Clock, ServingEngine
from rose.interfaces.serving import PauseMode
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
_TAIL_S = 1.0
_NO_ROUTE = (404, 405)
_BROKEN = (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError, RuntimeError)
"""What reading raises when the connection ends; a ``RuntimeError`` where it had ended before."""


@attrs.define(eq=False)
class _Stream:
    """One request under way. ``scope`` is what waits for the answer to begin; afterwards there is the answer."""

    scope: asyncio.Timeout | None = None
    answer: aiohttp.ClientResponse | None = None
    is_aborted: bool = False
    leftover: bytes = b""


class OpenAiEngine(ServingEngine):
    """A client of one server. All methods from one event loop; the first call opens a connection.

    Args:
        url: Where the server listens, ``http://host:port``, without ``/v1``.
        engine_id: The name by which the pool knows the engine; the address when left out.
        model: The server's name of the model; a server of one model does not need it.
        token: The bearer token (vLLM's ``--api-key``), where the server asks for one.
        version: The published version that the server's weights are, ``run:n``; nothing when they are none.
        vocab_size: Number of the model's token ids: others are refused here. vLLM without a tokenizer does not look, and an unknown id ends it.
        kv_total_tokens: Size of the KV memory in tokens, where the server's metrics do not say.
        timeout_s: How long connecting, readings and short commands may take.
        clock: For the time stamps of snapshots.
    """

    def __init__(
        self,
        url: str,
        *,
        engine_id: str | None = None,
        model: str | None = None,
        token: str | None = None,
        version: str | None = None,
        vocab_size: int | None = None,
        kv_total_tokens: int = 0,
        timeout_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.engine_id = EngineId(engine_id or self.url)
        self.weight_version = None if version is None else WeightVersion.parse(version)
        self._model, self._vocab_size = model, vocab_size
        own = {"url": self.url, "engine_id": self.engine_id, "model": model, "token": token, "version": version}
        options = own | {"vocab_size": vocab_size, "timeout_s": timeout_s}
        self._address = EngineAddress(
            name="openai", options=tuple((name, value) for name, value in options.items() if value is not None)
        )
        self._max_model_len: int | None = None
        self._has_asked_length = False
        self._kv_total_tokens = kv_total_tokens
        self._clock = clock or MonotonicClock()
        self._client = OpenAiClient(self.url, engine_id=self.engine_id, token=token, timeout_s=timeout_s)
        self._streams: dict[RequestId, _Stream] = {}
        self._is_paused = False

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the request's tokens. See ``ServingEngine.generate``."""
        return self._generate(request)

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        self._refuse_impossible(request)
        stream = self._streams[request.request_id] = _Stream()
        reader = CompletionReader(request, self.weight_version)
        try:
            await self._begin(stream, request)
            chunk: TokenChunk | None = None
            while not reader.is_over:
                if chunk is not None:
                    yield chunk
                data = await self._next(stream, reader)
                chunk = reader.feed(data)
                if not data:
                    break
            if reader.error is not None:
                if chunk is not None:
                    yield chunk
                raise reader.error
            await self._read_tail(stream, reader)
            yield attrs.evolve(chunk or TokenChunk(), finish_reason=reader.finish_reason or FinishReason.ABORTED)
        finally:
            del self._streams[request.request_id]
            if stream.answer is not None:
                stream.answer.release()  # which closes the connection unless the answer was read to its end

    def _refuse_impossible(self, request: EngineRequest) -> None:
        if request.request_id in self._streams:
            message = f"request id {request.request_id} is in use on engine {self.engine_id}; ids must be fresh"
            raise RequestRefusedError(message)
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or (self._vocab_size is not None and highest >= self._vocab_size):
            wrong = lowest if lowest < 0 else highest
            message = (
                f"engine {self.engine_id}: token id {wrong} is outside the vocabulary [0, {self._vocab_size or ''})"
            )
            raise RequestRefusedError(message)

    async def _begin(self, stream: _Stream, request: EngineRequest) -> None:
        """Send the request and wait until its answer begins; an abort ends the wait.

        Raises:
            EngineError: What the server's refusal means.
        """
        body = request_body(request, model=self._model)
        status, refusal = OK, b""
        try:
            async with asyncio.timeout(None) as stream.scope:
                stream.answer = await self._client.completions(body)
                status = stream.answer.status
                if status != OK:
                    refusal = await stream.answer.read()
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError among them
            if not stream.is_aborted:
                raise self._client.lost(error) from error
        finally:
            stream.scope = None
        if status != OK:
            raise self._client.refusal(status, refusal)

    async def _next(self, stream: _Stream, reader: CompletionReader) -> bytes:
        """Return what came next; nothing for a request that was aborted.

        Raises:
            EngineError: The connection ended before the stream did.
        """
        if stream.answer is None or (stream.answer.closed and stream.is_aborted):
            leftover, stream.leftover = stream.leftover, b""
            return leftover
        why = "it closed the connection without a finish reason"
        try:
            data = await stream.answer.content.readany()
        except _BROKEN as error:
            if stream.is_aborted:
                return b""
            if not isinstance(error, aiohttp.ClientPayloadError):
                raise self._client.lost(error) from error
            data, why = b"", f"the answer is incomplete ({error})"
        if not data and not stream.is_aborted:
            message = f"engine {self.engine_id} broke a stream off after {reader.num_tokens} tokens: {why}"
            raise EngineError(message)
        return data

    async def _read_tail(self, stream: _Stream, reader: CompletionReader) -> None:
        """Read the answer to its end, so that its connection can be used again; gives up soon."""
        if stream.answer is None or stream.is_aborted:
            return
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(_TAIL_S):
                while data := await stream.answer.content.readany():
                    reader.feed(data)

    async def abort(self, request_id: RequestId) -> None:
        """End a request by closing its connection. A no-op when it is over."""
        stream = self._streams.get(request_id)
        if stream is None or stream.is_aborted:
            return
        stream.is_aborted = True
        if stream.answer is not None:
            with contextlib.suppress(
                RuntimeError, aiohttp.ClientError, OSError
            ):  # somebody waits for it: nothing is there
                stream.leftover = stream.answer.content.read_nowait()
            stream.answer.close()
        elif stream.scope is not None:
            stream.scope.reschedule(asyncio.get_running_loop().time())

    async def snapshot(self) -> EngineSnapshot:
        """Read the load from ``/metrics``; from what runs through this client, and ``/health``, where there is none.

        Raises:
            EngineLostError: The server is gone.
        """
        status, body = await self._client.call("GET", "/metrics")
        load = parse_load(body) if status == OK else None
        if load is None:
            status, body = await self._client.call("GET", "/health")
            if status != OK:
                message = f"engine {self.engine_id} is not healthy: status {status}, {words(body)}"
                raise EngineLostError(message)
        return EngineSnapshot(
            num_running=load.num_running if load else len(self._streams),
            num_waiting=load.num_waiting if load else 0,
            kv_used_tokens=load.kv_used_tokens if load else 0,
            kv_total_tokens=(load.kv_total_tokens if load else 0) or self._kv_total_tokens,
            weight_version=self.weight_version,
            is_paused=self._is_paused,
            read_at_s=self._clock.now(),
            max_context_tokens=await self._known_max_model_len(),
        )

    def address(self) -> EngineAddress:
        """Return how another process reaches the same server. See ``SupportsAddress``."""
        return self._address

    async def _known_max_model_len(self) -> int | None:
        """Ask for the model's length until the server answered once; a server that does not say is not asked again."""
        if not self._has_asked_length:
            try:
                self._max_model_len = await self.max_model_len()
            except EngineLostError:
                raise
            except EngineBusyError:
                return None
            except EngineError as error:
                _logger.info("engine %s does not say how long its prompts may be: %s", self.engine_id, error)
            self._has_asked_length = True
        return self._max_model_len

    async def max_model_len(self) -> int | None:
        """Return the longest prompt and answer together, in tokens; ``None`` where ``/v1/models`` does not say.

        Raises:
            EngineError: The server is gone, or is no OpenAI-compatible one.
        """
        status, body = await self._client.call("GET", "/v1/models")
        if status != OK:
            raise self._client.refusal(status, body)
        try:
            models = {str(model["id"]): model.get("max_model_len") for model in json.loads(body)["data"]}
            found = models[self._model] if self._model else next(iter(models.values()))
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
            message = f"{self.url}/v1/models does not list the model {self._model or ''} ({error!r})"
            raise EngineError(message) from error
        return found if isinstance(found, int) else None

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens, where the server lets its clients do that.

        Raises:
            EngineUnsupportedError: It does not.
        """
        await self._control(f"/pause?mode={mode.value}&clear_cache=false")
        self._is_paused = True

    async def resume(self) -> None:
        """Go on after ``pause``."""
        try:
            await self._control("/resume")
        except EngineUnsupportedError:
            if self._is_paused:
                raise
        self._is_paused = False

    async def _control(self, path: str) -> None:
        status, body = await self._client.call("POST", path)
        if status in _NO_ROUTE:
            message = (
                f"the server of engine {self.engine_id} cannot pause; start vLLM with VLLM_SERVER_DEV_MODE=1 for that"
            )
            raise EngineUnsupportedError(message)
        if status != OK:
            raise self._client.refusal(status, body)

    async def stage(self, update: WeightUpdate) -> None:
        """Refuse the update.

        Raises:
            EngineUnsupportedError: Always.
        """
        message = (
            f"engine {self.engine_id} takes no weights: a server behind the OpenAI interface keeps what it loaded; run {update.target} "
            "in a `vllm` engine, or behind `rose serve`"
        )
        raise EngineUnsupportedError(message)

    async def activate(self) -> Activation:
        """Refuse.

        Raises:
            EngineUnsupportedError: Always.
        """
        message = f"engine {self.engine_id} takes no weights; nothing is staged"
        raise EngineUnsupportedError(message)

    async def close(self) -> None:
        """Close the connections, which ends what is under way as lost; the server stays. Idempotent."""
        for stream in self._streams.values():
            if stream.answer is not None:
                stream.answer.close()  # closing the session does not wake who reads
        await self._client.close()
