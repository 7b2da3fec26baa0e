"""The meeting point of a group that has nothing to do with ``torch.distributed``'s default one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

TIMEOUT = timedelta(minutes=30)


@dataclass
class StatelessProcessGroup:
    """A store that all ranks reach, and a place among them."""

    store: Any
    rank: int
    world_size: int

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> StatelessProcessGroup:
        """Meet the others at ``host:port``, where rank 0 serves the store."""
        from torch.distributed import TCPStore

        store = TCPStore(host, port, world_size, rank == 0, timeout=TIMEOUT)
        return StatelessProcessGroup(store, rank, world_size)
