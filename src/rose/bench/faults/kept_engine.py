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

from rose.backends.vllm import VllmEngine, VllmOptions
from rose.errors import EngineLostError
from rose.interfaces.serving import PauseMode, ServingEngine
from rose.types import Activation, EngineRequest, EngineSnapshot, RequestId, TokenChunk, WeightUpdate

_LOOK_S = 0.02


class KeptEngine(ServingEngine):
    """``start`` it, ``close`` it; ``gate`` bounds how many start at once."""

    def __init__(self, options: VllmOptions, gate: asyncio.Semaphore) -> None:
        self.engine_id = options.engine_id
        self._options = options
        self._gate = gate
        self._engine = VllmEngine(options)
        self._keeper: asyncio.Task[None] | None = None
        self._is_dead = asyncio.Event()
        self.is_well = asyncio.Event()
        self.is_hurt = False
        self.num_starts = 0

    async def start(self) -> None:
        """Start the engine, and keep it running from then on.

        Raises:
            EngineLostError: It did not start.
        """
        await self._start()
        self._keeper = asyncio.create_task(self._keep())

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
        async with self._gate:
            await self._engine.start()
        self.num_starts += 1
        self.is_well.set()

    async def _keep(self) -> None:
        while True:
            await self._is_dead.wait()
            self._is_dead.clear()
            dead, fresh = self._engine, VllmEngine(self._options)
            with contextlib.suppress(EngineLostError):
                while True:  # until the kernel said so: those who stream from it hear of it as from any that dies
                    await dead.snapshot()
                    await asyncio.sleep(_LOOK_S)
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
        """End the process, and start no other; raises what ended the keeping of it, if something did."""
        self.is_well.clear()
        keeper, self._keeper = self._keeper, None
        try:
            if keeper is not None:
                keeper.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await keeper
        finally:
            await self._engine.close()
