"""Faults of a live engine that a test turns on and off, at the role of a serving engine: above the engine, below whoever calls it.

Invariants: a fault begins and ends with its switch, also for streams under way; what the engine says of itself (its readings) stays true, so
that nobody is told of a fault but by its effect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

from rose.errors import EngineError
from rose.interfaces import ServingEngine
from rose.types import Activation, EngineRequest, TokenChunk


class Switches:
    """The faults of one engine.

    Attributes:
        fail_fast: Every request raises at once.
        fail_updates: No staged update is activated; the engine keeps the weights that it has.
    """

    def __init__(self, engine_id: str) -> None:
        self.fail_fast = False
        self.fail_updates = False
        self._engine_id = engine_id
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    @property
    def hang(self) -> bool:
        """Whether the engine takes requests and gives no token."""
        return not self._goes_on.is_set()

    @hang.setter
    def hang(self, is_on: bool) -> None:
        if is_on:
            self._goes_on.clear()
        else:
            self._goes_on.set()

    @property
    def names(self) -> list[str]:
        """Those that are on."""
        return [name for name in FAULTS if getattr(self, name)]

    def check_request(self) -> None:
        """Refuse a request if it has to be.

        Raises:
            EngineError: ``fail_fast`` is on.
        """
        if self.fail_fast:
            message = f"engine {self._engine_id} fails every request: fail_fast is on"
            raise EngineError(message)

    def check_activation(self) -> None:
        """Refuse an activation if it has to be.

        Raises:
            EngineError: ``fail_updates`` is on.
        """
        if self.fail_updates:
            message = f"engine {self._engine_id} fails every update: fail_updates is on"
            raise EngineError(message)

    async def token_may_pass(self) -> None:
        """Return once the engine does not hang."""
        await self._goes_on.wait()


FAULTS = ("fail_fast", "hang", "fail_updates")
"""Names of the switches."""


class FaultyEngine(ServingEngine):
    """To be put before a class of engines: ``class FaultyX(FaultyEngine, X)``.

    Attributes:
        switches: Its faults; must be set before the engine is used.
    """

    switches: Switches

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the request's tokens, as far as the switches let them."""
        chunks = super().generate(request)  # type: ignore[safe-super]
        return _held(self.switches, cast("AsyncGenerator[TokenChunk, None]", chunks))

    async def activate(self, **options: Any) -> Activation:
        """Make the staged update current, unless updates fail; ``options`` are the engine's own."""
        self.switches.check_activation()
        return await super().activate(**options)  # type: ignore[safe-super]


async def _held(switches: Switches, chunks: AsyncGenerator[TokenChunk, None]) -> AsyncGenerator[TokenChunk, None]:
    switches.check_request()
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            await switches.token_may_pass()
            yield chunk
