"""The per-turn router: names the trajectory to whoever runs the turn.

veRL's servers get a fresh request id at every turn; only the router hears the trajectory's. ``RoseRouter`` answers with a door in place of a
server's handle: calling it runs the turn from the caller's own process, under the trajectory's name.
Use it where ``RoseAgentLoopManager`` cannot be: with trainers or agent loop managers of other kinds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from rose_verl.board import find_board
from rose_verl.turns import run_turn


@attrs.frozen
class Door:
    """Has the one method of a server that clients of servers call, in the shape of a Ray actor's. Pickles.

    Attributes:
        board: The job's board.
        trajectory_id: Whose turns go through it.
    """

    board: Any
    trajectory_id: str

    @property
    def generate(self) -> _Method:
        """Return what has ``remote``."""
        return _Method(self)


@attrs.frozen
class _Method:
    door: Door

    def remote(
        self,
        *,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        priority: int = 0,
        **media: Any,
    ) -> asyncio.Future[Any]:
        """Run a turn; awaiting gives its ``TokenOutput``. Whoever calls takes an aborted turn up again, if it is to be."""
        del request_id, priority  # one that nobody else knows; the pool orders turns by trajectories
        door = self.door
        work = run_turn(door.board, door.trajectory_id, prompt_ids, sampling_params, media, is_resumed=False)
        return asyncio.ensure_future(work)


class RoseRouter:
    """A ``RequestLoadBalancer`` of veRL. The pool chooses engines; here turns are counted and named.

    Args:
        servers: Fronts by their address.
        config: The router's YAML; ``router_class`` and nothing else.
        board: The job's board; ``None``: found.

    Raises:
        ValueError: The YAML has other keys.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any], board: Any = None) -> None:
        unknown = sorted(set(config) - {"router_class"})
        if unknown:
            message = f"a router of a pool has no {', '.join(unknown)}; how turns are routed is in the pool's job.toml, [pool.routing]"
            raise ValueError(message)
        self._servers = dict(servers)
        self._num_turns: Counter[str] = Counter()
        self._board = board

    def acquire_server(self, request_id: str, **_: Any) -> tuple[str, Door]:
        """Return a front to count the turn on, and the trajectory's door.

        Raises:
            RuntimeError: There is no front, in the words that veRL's clients wait on.
        """
        if not self._servers:
            message = "No available servers in load balancer"
            raise RuntimeError(message)
        if self._board is None:
            self._board = find_board()
        server_id = min(self._servers, key=self._num_turns.__getitem__)
        self._num_turns[server_id] += 1
        return server_id, Door(self._board, str(request_id))

    def require_acquire_fields(self) -> list[str]:
        """Return what ``acquire_server`` needs beside the id: nothing."""
        return []

    def require_release_fields(self) -> list[str]:
        """Return what ``release_server`` needs beside the server: nothing."""
        return []

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Count a turn as ended."""
        del request_id
        if self._num_turns[server_id] > 0:
            self._num_turns[server_id] -= 1

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Add fronts."""
        self._servers.update(servers)

    def remove_servers(self, server_ids: Iterable[str]) -> None:
        """Take fronts out; turns that are counted on them go on."""
        for server_id in server_ids:
            self._servers.pop(server_id, None)
            self._num_turns.pop(server_id, None)

    def get_all_servers(self) -> list[str]:
        """Return the fronts' addresses."""
        return list(self._servers)

    def get_status(self) -> dict[str, Any]:
        """Return the counts."""
        servers = {server_id: self._num_turns[server_id] for server_id in self._servers}
        return {"servers": servers, "total_inflight": sum(servers.values()), "active_servers": len(servers)}

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Do nothing: trajectories stay with engines for as long as the pool finds that right."""
        return {"cleared_entries": 0, "server_loads": {one: self._num_turns[one] for one in self._servers}}

    def get_total_inflight(self) -> int:
        """Return how many turns are under way."""
        return sum(self._num_turns[server_id] for server_id in self._servers)
