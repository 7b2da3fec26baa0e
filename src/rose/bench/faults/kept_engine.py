"""A vLLM engine that an operator keeps running: when its process dies, another one is started from the same checkpoint.

Invariants: between a death and the end of the next start every call raises ``EngineLostError``, as the dead process's; the new
process is another engine of the same name, at the checkpoint's weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Self

from rose.backends.vllm import VllmEngine, VllmOptions
from rose.errors import EngineLostError
from rose.interfaces.serving import PauseMode, ServingEngine
from rose.types import Activation, EngineRequest, EngineSnapshot, RequestId, TokenChunk, WeightUpdate


class KeptEngine(ServingEngine):
    """Use as an async context manager; ``lock`` keeps several of them from starting at once."""

    def __init__(self, options: VllmOptions, lock: asyncio.Lock) -> None:
        self.engine_id = options.engine_id
        self._options = options
        self._lock = lock
        self._engine = VllmEngine(options)
        self._keeper: asyncio.Task[None] | None = None
        self._is_dead = asyncio.Event()
        self.is_well = asyncio.Event()
        self.is_hurt = False
        self.num_starts = 0

    async def __aenter__(self) -> Self:
        """Start the engine."""
        await self._start()
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End it for good; raises what ended the keeping of it, if something did."""
        await self.close()
        if self._keeper is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the engine's process; ``SIGKILL`` ends it, and another one is started.

        Raises:
            EngineLostError: There is no process now.
        """
        if not self.is_well.is_set():
            message = f"engine {self.engine_id} is being started"
            raise EngineLostError(message)
        os.kill(self._engine.pid, number)
        if number is signal.SIGKILL:
            self.is_well.clear()
            self._is_dead.set()

    async def _start(self) -> None:
        async with self._lock:
            await self._engine.start()
        self.num_starts += 1
        self.is_well.set()

    async def _keep(self) -> None:
        while True:
            await self._is_dead.wait()
            self._is_dead.clear()
            dead, fresh = self._engine, VllmEngine(self._options)
            self._engine = fresh  # not started yet: it is lost, too
            await dead.close()
            await self._start()

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream from the process that runs now."""
        return self._engine.generate(request)

    async def abort(self, request_id: RequestId) -> None:
        """End a request of the process that runs now."""
        await self._engine.abort(request_id)

    async def snapshot(self) -> EngineSnapshot:
        """Read its load."""
        return await self._engine.snapshot()

    async def pause(self, mode: PauseMode) -> None:
        """Pause it."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """Let it go on."""
        await self._engine.resume()

    async def stage(self, update: WeightUpdate) -> None:
        """Stage an update."""
        await self._engine.stage(update)

    async def activate(self) -> Activation:
        """Activate it."""
        return await self._engine.activate()

    async def close(self) -> None:
        """End the process, and start no other."""
        self.is_well.clear()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        await self._engine.close()
