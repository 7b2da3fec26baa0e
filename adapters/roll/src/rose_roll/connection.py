"""One connection to the pool a process, shared by all its environments' threads.

Invariant: a connection lives until ``close_connections`` or the end of the process; a second proxy of the same pool finds it.
"""

from __future__ import annotations

import atexit
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import attrs

from rose.frameworks import HeldPool
from rose.sync import RolloutPool
from rose.types import TurnResult
from rose_roll.desk import Desk, Request
from rose_roll.options import RoseOptions
from rose_roll.suspension import RouterGate
from rose_roll.versions import Versions


@attrs.define(eq=False)
class Connection:
    """A pool for threads.

    Attributes:
        pool: The blocking pool; its own thread has the event loop.
        desk: Runs requests, on that loop only.
        versions: What is known of the pool's weights.
    """

    pool: RolloutPool
    desk: Desk
    versions: Versions
    _gates: dict[Any, RouterGate] = attrs.field(factory=dict, init=False)
    _gate_of: dict[str, Any] = attrs.field(factory=dict, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @classmethod
    def open(cls, options: RoseOptions) -> Connection:
        """Connect. Errors as of ``PoolPlace.connect_sync``."""
        pool, versions = options.place().connect_sync(), Versions()
        desk = pool.call(lambda remote: _make_desk(remote, options, versions))
        return cls(pool=pool, desk=desk, versions=versions)

    def run(self, request: Request, done: TurnResult, gate: RouterGate | None) -> TurnResult:
        """Run a request; errors as of ``Desk.run``."""
        with self._lock:
            self._gate_of[request.request_id] = gate
        try:
            return self.pool.call(lambda _: self.desk.run(request, done=done))
        finally:
            with self._lock:
                del self._gate_of[request.request_id]

    def begin_step(self, step: int) -> None:
        """Note which version the pool has at the beginning of a step of ROLL."""
        self.pool.call(lambda _: self.desk.begin_step(step))

    def gate(self, router: Any, poll_s: float) -> RouterGate:
        """Return the gate of a router, the same for all proxies of it in this process."""
        key = getattr(router, "_actor_id", None) or id(router)
        with self._lock:
            if key not in self._gates:
                gate = RouterGate(router, abort=lambda: self._abort_behind(self._gates[key]), poll_s=poll_s)
                self._gates[key] = gate
            return self._gates[key]

    def close(self) -> None:
        """End all turns and the connection."""
        self.pool.close()

    def _abort_behind(self, gate: RouterGate) -> None:
        with self._lock:
            wanted = [request_id for request_id, one in self._gate_of.items() if one is gate]
        if wanted:
            self.pool.call(lambda _: _abort(self.desk, wanted))


class LoopConnection:
    """The desk of one event loop, on a pool that is opened when it is first asked for and again after it could not be.

    Args:
        options: Where the pool is.
        environ: Where its address is looked up, instead of the process's environment.
    """

    def __init__(self, options: RoseOptions, environ: Mapping[str, str] | None = None) -> None:
        self.options = options
        self._environ = environ
        self._held: HeldPool | None = None
        self._desk: Desk | None = None

    async def desk(self) -> Desk:
        """Return the desk of the pool.

        Raises:
            TransportError: Nothing answers there.
            ConfigError: Nobody said where the pool is, or it does not let this process in.
        """
        if self._held is None:
            self._held = HeldPool(self.options.place(self._environ))
        pool = await self._held.get()
        if self._desk is None:
            self._desk = Desk(pool, options=self.options, versions=Versions())
        return self._desk

    async def close(self) -> None:
        """End its turns and the connection."""
        held, desk, self._held, self._desk = self._held, self._desk, None, None
        if desk is not None:
            await desk.close()
        if held is not None:
            await held.close()


async def _make_desk(pool: Any, options: RoseOptions, versions: Versions) -> Desk:
    return Desk(pool, options=options, versions=versions)


async def _abort(desk: Desk, request_ids: list[str]) -> None:
    desk.abort(request_ids)


_connections: dict[tuple[str, str | None], Connection] = {}
_lock = threading.Lock()


def shared_connection(options: RoseOptions) -> Connection:
    """Return this process's connection to the pool of these options."""
    place = options.place()
    with _lock:
        key = (place.url, place.token)
        if key not in _connections:
            _connections[key] = Connection.open(options)
        return _connections[key]


def close_connections() -> None:
    """End every connection of this process."""
    with _lock:
        while _connections:
            _connections.popitem()[1].close()


def new_request_id() -> str:
    """Return a fresh id."""
    return f"rose-{uuid.uuid4().hex}"


atexit.register(close_connections)
__all__ = ["Connection", "LoopConnection", "close_connections", "new_request_id", "shared_connection"]
