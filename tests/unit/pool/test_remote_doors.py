"""A client's connections to engines are all closed, whatever happens to the closing."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.pool.remote_doors import Doors, _Door
from rose.testing import FakeEngine
from rose.types import EngineId


class Slow(FakeEngine):
    """Takes its time to close."""

    is_closing = False

    async def close(self) -> None:
        self.is_closing = True
        await asyncio.sleep(60.0)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
async def test_all_are_closed_although_the_closing_is_cancelled(num_steps: int) -> None:
    engines = [Slow(engine_id=EngineId(name)) for name in "abc"]
    doors = Doors("http://127.0.0.1:9", None)
    doors._doors.update({engine.engine_id: _Door(engine) for engine in engines})
    closing = asyncio.create_task(doors.close())
    await asyncio.sleep(0)
    for _ in range(num_steps):
        await asyncio.sleep(0)
    for _ in engines:
        closing.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(closing, return_exceptions=True)
    assert all(engine.is_closing for engine in engines)
