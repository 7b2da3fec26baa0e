"""A rollout engine behind an executor's HTTP interface.

Invariants, beyond those of ``rose.interfaces.serving``:

* Everything but reading is sent with the lease's fencing token; the executor compares it with the ledger. After the lease's end calls
  raise ``EngineLeaseError``, and an abort is a no-op: the executor ends the requests itself.
* The executor names each start of its engine. Once another start than the one that was read answers, the engine counts as lost,
  once: a ``snapshot`` after that takes the new one for what it is, with weights of its own.
* Leaving a stream early, or its cancellation, closes the connection, upon which the executor aborts the request.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any

from rose.backends.remote import wire
from rose.backends.remote.client import HttpClient
from rose.backends.wire import activation_from_wire, update_to_wire
from rose.clocks import MonotonicClock
from rose.errors import EngineError, EngineLeaseError, EngineLostError
from rose.interfaces import Clock, ServingEngine
from rose.interfaces.serving import PauseMode, Slept, Woken
from rose.types import (
    Activation,
    EngineAddress,
    EngineId,
    EngineRequest,
    EngineSnapshot,
    RequestId,
    TokenChunk,
    WeightUpdate,
    WeightVersion,
)


class RemoteEngine(ServingEngine):
    """A client of one executor. All methods from one event loop; ``connect`` or the first call opens the connection.

    Args:
        url: Where the executor listens, ``http://host:port``.
        engine_id: The name by which the pool knows the engine; the executor's address when left out.
        token: The bearer token, where the executor asks for one.
        timeout_s: How long readings and short commands may take.
        clock: For the time stamps of snapshots.
        lease: The fencing tokens that ``set_lease`` would set, with commas between them.
        incarnation: Which start of the executor's engine is meant; the one that ``snapshot`` meets first by default.
    """

    def __init__(
        self,
        url: str,
        *,
        engine_id: str | None = None,
        token: str | None = None,
        timeout_s: float = 10.0,
        clock: Clock | None = None,
        lease: str | None = None,
        incarnation: str | None = None,
    ) -> None:
        self.engine_id = EngineId(engine_id or url)
        self._client = HttpClient(url, token=token, timeout_s=timeout_s)
        self._clock = clock or MonotonicClock()
        self._token = token
        self._lease = lease
        self._incarnation = incarnation
        self._lost: str | None = None
        self._version: WeightVersion | None = None
        self._is_asleep = False

    def set_lease(self, *fencing_tokens: int) -> None:
        """Set the fencing token that every request carries from now on; without one: no lease.

        Args:
            fencing_tokens: The lease's; one a device for an engine over several, in the order of the executor's ledgers.
        """
        self._lease = ",".join(map(str, fencing_tokens)) or None

    def address(self) -> EngineAddress:
        """Return how another process reaches the engine, under the same lease. See ``SupportsAddress``."""
        options = {
            "url": self._client.url,
            "engine_id": self.engine_id,
            "token": self._token,
            "lease": self._lease,
            "incarnation": self._incarnation,
        }
        return EngineAddress(
            name="remote", options=tuple((name, value) for name, value in options.items() if value is not None)
        )

    @property
    def weight_version(self) -> WeightVersion | None:
        """Return the version of the weights as last heard, ``None`` when they are no published version."""
        return self._version

    @property
    def is_asleep(self) -> bool:
        """Whether the engine slept when it was last heard of. See ``SupportsSleep``."""
        return self._is_asleep

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the request's tokens. See ``ServingEngine.generate``.

        Raises:
            EngineLeaseError: The lease is over, or none was set.
        """
        return self._generate(request)

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        self._check_found()
        lines = self._client.lines("/v1/generate", wire.request_to_json(request), headers=self._headers)
        num_seen = 0
        try:
            async with contextlib.aclosing(lines):
                async for line in lines:
                    if isinstance(line, Mapping) and "error" in line:
                        raise wire.error_from_wire(line)
                    with self._understood():
                        chunk = wire.chunk_after(line, num_seen)
                    num_seen += len(chunk.token_ids)
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
        except EngineLostError as error:
            self._lose(error)
            raise
        message = f"engine {self.engine_id} broke a stream off; is its executor alive?"
        self._lose(EngineLostError(message))
        raise EngineLostError(message)

    async def abort(self, request_id: RequestId) -> None:
        """End a request. A no-op when it is over, and once the lease is: the executor ends it then."""
        with contextlib.suppress(EngineLeaseError):
            await self._command("abort", {"request_id": request_id})

    async def snapshot(self) -> EngineSnapshot:
        """Read the load; takes an engine that was started anew for what it is, if its predecessor's loss was told.

        Raises:
            EngineLostError: The executor or its engine is gone.
        """
        is_new = self._lost is not None or self._incarnation is None
        headers = {} if is_new else self._headers
        try:
            data, heard = await self._client.exchange("GET", "/v1/snapshot", headers=headers)
        except EngineLostError as error:
            self._lose(error)
            raise
        with self._understood():
            reading = wire.snapshot_from_wire(data, self._clock.now())
            self._is_asleep = bool(data.get("is_asleep"))
        self._lost, self._incarnation = None, heard.get(wire.ENGINE_HEADER)
        self._version = reading.weight_version
        return reading

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens."""
        await self._command("pause", {"mode": mode.value})

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self._command("resume")

    async def stage(self, update: WeightUpdate) -> None:
        """Let the engine fetch an update; takes as long as that takes. See ``ServingEngine.stage``."""
        await self._command("stage", update_to_wire(update), timeout_s=math.inf)

    async def activate(self) -> Activation:
        """Make the staged update current. See ``ServingEngine.activate``."""
        activation = activation_from_wire(await self._command("activate", timeout_s=math.inf))
        self._version = activation.version
        return activation

    async def weight_checksums(self) -> Mapping[str, str]:
        """Return checkpoint tensor name -> xxh3_128. See ``SupportsWeightChecksums``."""
        return {
            str(name): str(digest) for name, digest in (await self._command("checksums", timeout_s=math.inf)).items()
        }

    async def set_kv_budget(self, num_tokens: int) -> int:
        """Set the KV budget in engine tokens; returns the one in force. See ``SupportsKvBudget``."""
        return int(await self._command("kv-budget", {"num_tokens": num_tokens}))

    async def set_gate(self, *, is_open: bool) -> None:
        """Open or close the step gate. See ``SupportsStepGate``."""
        await self._command("gate", {"is_open": is_open})

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix that no running request uses. See ``SupportsPrefixReset``."""
        await self._command("prefix-reset")

    async def sleep(self, *, keeps_weights: bool = True) -> Slept:
        """Deactivate the engine. See ``SupportsSleep``."""
        data = await self._command("sleep", {"keeps_weights": keeps_weights}, timeout_s=math.inf)
        self._is_asleep = True
        return Slept(**data)

    async def wake(self) -> Woken:
        """Activate the engine again. See ``SupportsSleep``."""
        data = await self._command("wake", timeout_s=math.inf)
        self._is_asleep = False
        version = self._version = wire.version_from_wire(data.pop("version"))
        return Woken(version=version, **data)

    async def close(self) -> None:
        """Close the connections; the engine itself stays, for it is its executor's. Later calls find it gone."""
        self._lost = self._lost or "the client was closed"
        await self._client.close()

    async def _command(
        self, name: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        self._check_found()
        try:
            return await self._client.call(
                "POST", f"/v1/{name}", body or {}, headers=self._headers, timeout_s=timeout_s
            )
        except EngineLostError as error:
            self._lose(error)
            raise

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """Count the engine as lost where something else answers at its address."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = f"what answers at {self._client.url} is no executor ({error!r}); look at who listens there"
            lost = EngineLostError(message)
            self._lose(lost)
            raise lost from error

    @property
    def _headers(self) -> dict[str, str]:
        headers = {} if self._lease is None else {wire.FENCING_HEADER: self._lease}
        return headers if self._incarnation is None else {**headers, wire.ENGINE_HEADER: self._incarnation}

    def _check_found(self) -> None:
        if self._lost is not None:
            message = f"engine {self.engine_id} is gone: {self._lost}; read it before it joins again"
            raise EngineLostError(message)

    def _lose(self, error: EngineError) -> None:
        self._lost, self._version = str(error), None
