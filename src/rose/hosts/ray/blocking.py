"""The trainer's face of a pool in a Ray actor for loops without asyncio.

Invariants: all of it runs on one event loop in a thread of its own, which ``close`` ends; a call that is interrupted (Ctrl-C) cancels its turns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Self, TypeVar

from rose.errors import RoseError
from rose.hosts.ray.client import RayPool
from rose.hosts.ray.pool_host import PoolStatus
from rose.hosts.ray.specs import EngineSpec
from rose.policies.routing import EngineState
from rose.pool import EngineAccount, PoolSnapshot, SyncReport
from rose.types import EngineId, TransportAddress, Turn, TurnResult

T = TypeVar("T")


class SyncRayPool:
    """A ``RayPool`` whose methods block; any thread may call them. Use it in ``with``, or ``close`` it.

    Args:
        make: Makes the client; called on the loop's thread.
    """

    def __init__(self, make: Callable[[], RayPool]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rose-ray", daemon=True)
        self._thread.start()

        async def made() -> RayPool:
            return make()

        try:
            self._pool = self._do(made())
        except BaseException:
            self._stop()
            raise

    def generate(self, turn: Turn) -> TurnResult:
        """Run one turn. See ``RayPool.generate``."""
        return self._do(self._pool.generate(turn))

    def generate_many(self, turns: Iterable[Turn]) -> list[TurnResult | RoseError]:
        """Run turns side by side. See ``RayPool.generate_many``."""
        return self._do(self._pool.generate_many(list(turns)))

    def sync_weights(self, address: TransportAddress | Mapping[str, Any] | str) -> SyncReport:
        """Bring every engine to the newest weights. See ``RayPool.sync_weights``."""
        return self._do(self._pool.sync_weights(address))

    def status(self) -> PoolStatus:
        """Return what the pool does, and where."""
        return self._do(self._pool.status())

    def snapshot(self) -> PoolSnapshot:
        """Return the pool's state."""
        return self._do(self._pool.snapshot())

    def accounts(self) -> Mapping[EngineId, EngineAccount]:
        """Return what each engine did."""
        return self._do(self._pool.accounts())

    def add_engine(self, spec: EngineSpec) -> EngineState:
        """Let the pool make an engine in its own process. See ``RayPool.add_engine``."""
        return self._do(self._pool.add_engine(spec))

    def remove_engine(self, engine_id: EngineId, reason: str) -> bool:
        """Take an engine out for good. See ``RayPool.remove_engine``."""
        return self._do(self._pool.remove_engine(engine_id, reason))

    def close(self) -> None:
        """Leave the pool and end the thread. Idempotent."""
        if not self._loop.is_closed():
            self._do(self._pool.close())
            self._stop()

    def __enter__(self) -> Self:
        """Wait until the pool answers."""
        try:
            self._do(self._pool.wait_until_up())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt came while the work went on
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
