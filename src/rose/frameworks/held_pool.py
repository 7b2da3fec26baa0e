"""A connection to a pool that is kept for as long as a process of a framework wants it.

Invariants: the connection is opened and left by one task of its own, so that a caller that is cancelled takes nobody else's turns along; all
callers of one event loop share it; one that was given up is never handed out again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rose.frameworks.place import PoolPlace
from rose.pool.remote_pool import RemotePool


class HeldPool:
    """A pool for the coroutines of one event loop, opened when it is first asked for.

    Args:
        place: Where the pool is.
        options: As of ``PoolPlace.connect``.
    """

    def __init__(self, place: PoolPlace, **options: Any) -> None:
        self._place, self._options = place, options
        self._opening = asyncio.Lock()
        self._pool: RemotePool | None = None
        self._holder: asyncio.Task[None] | None = None
        self._released = asyncio.Event()

    async def get(self) -> RemotePool:
        """Return the open pool.

        Raises:
            TransportError: Nothing answers there.
            ConfigError: It does not let this process in.
        """
        async with self._opening:
            if self._pool is None:
                self._released = asyncio.Event()
                opened: asyncio.Future[RemotePool] = asyncio.get_running_loop().create_future()
                self._holder = asyncio.create_task(self._hold(opened, self._released), name="rose-pool")
                self._pool = await opened
            return self._pool

    def give_up(self, pool: RemotePool) -> None:
        """Leave a pool that was lost; whoever asks next gets a new connection. A no-op for one that was given up before."""
        if pool is self._pool:
            self._pool = None
            self._released.set()

    async def close(self) -> None:
        """Leave the pool, which ends what is under way. Idempotent; asking again opens it again."""
        self._pool = None
        self._released.set()
        if self._holder is not None:
            await asyncio.wait({self._holder})

    async def _hold(self, opened: asyncio.Future[RemotePool], released: asyncio.Event) -> None:
        try:
            async with self._place.connect(**self._options) as pool:
                if not opened.cancelled():  # whoever asked may be gone, and the next one opens anew
                    opened.set_result(pool)
                    await released.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)
        finally:
            opened.cancel()
