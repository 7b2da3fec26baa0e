"""A client's own connections to the engines that a pool sends it to.

Invariants:

* Only backends that give addresses themselves are opened: a pool's word starts nothing on the client.
* A connection that failed is not used again; it is closed once its last stream ended, as one is that was not used for long.
"""

from __future__ import annotations

import contextlib
import urllib.parse
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import attrs

from rose import registry
from rose.backends.remote import RemoteEngine
from rose.errors import ConfigError, EngineLostError
from rose.interfaces import ServingEngine, SupportsAddress
from rose.pool.direct import Start
from rose.types import EngineAddress

_MAX_IDLE = 1024


@attrs.define(eq=False)
class _Door:
    engine: ServingEngine
    num_streams: int = 0
    is_shut: bool = False


class Doors:
    """Opens engines by their addresses, and through the pool those that have none.

    Args:
        url: Of the pool's service.
        token: The bearer token for it.
        max_idle: Connections kept to engines that are not streamed from.
    """

    def __init__(self, url: str, token: str | None, *, max_idle: int = _MAX_IDLE) -> None:
        self._url = url
        self._token = token
        self._max_idle = max_idle
        self._doors: OrderedDict[Any, _Door] = OrderedDict()

    @contextlib.asynccontextmanager
    async def engine(self, start: Start) -> AsyncIterator[ServingEngine]:
        """Give the engine of an attempt, for the time of one stream.

        Raises:
            ConfigError: No backend of that name is installed here, or it is none to be streamed from.
        """
        key = start.address or start.engine_id
        door = self._doors.get(key)
        if door is None:
            door = self._doors[key] = _Door(self._open(start))
        self._doors.move_to_end(key)
        door.num_streams += 1
        try:
            yield door.engine
        except EngineLostError:
            if self._doors.get(key) is door:
                del self._doors[key]
            door.is_shut = True
            raise
        finally:
            door.num_streams -= 1
            if door.is_shut and not door.num_streams:
                await door.engine.close()
            await self._close_idle()

    async def close(self) -> None:
        """Close all connections, each of them also when that is cancelled: one after the other, since a task might never begin."""
        async with contextlib.AsyncExitStack() as stack:
            while self._doors:
                stack.push_async_callback(self._doors.popitem()[1].engine.close)

    def _open(self, start: Start) -> ServingEngine:
        if start.address is None:
            path = urllib.parse.quote(start.engine_id, safe="")
            return RemoteEngine(f"{self._url}/engines/{path}", engine_id=start.engine_id, token=self._token)
        return _open_address(start.address)

    async def _close_idle(self) -> None:
        while len(self._doors) > self._max_idle:
            key = next((key for key, door in self._doors.items() if not door.num_streams), None)
            if key is None:
                return
            await self._doors.pop(key).engine.close()


def _open_address(address: EngineAddress) -> ServingEngine:
    kind = registry.load("serving", address.name)
    if not issubclass(kind, SupportsAddress):
        message = f"the pool names an engine of backend {address.name!r}, which gives no addresses; is it of the same version?"
        raise ConfigError(message)
    return registry.serving_engine(address.name, **dict(address.options))
