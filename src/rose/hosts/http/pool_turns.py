"""Turns over HTTP that can be sent twice: a retry after a lost answer finds the turn that is under way, or its result.

Invariants:

* A turn id runs at most one turn at a time, and one that finished is not run again while it is remembered.
* A turn whose clients are all gone for ``linger_s`` is cancelled, once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import attrs

from rose.errors import ConfigError, RoseError, TurnFailedError
from rose.pool import RolloutPool
from rose.types import Turn, TurnResult


@attrs.define(eq=False)
class _Entry:
    turn: Turn
    task: asyncio.Task[TurnResult]
    num_waiters: int = 0
    leaving: asyncio.TimerHandle | None = None


class TurnDesk:
    """Runs turns by their clients' ids.

    Args:
        pool: What runs them.
        linger_s: How long a turn goes on without a client that waits for it.
        max_kept: Results that are remembered, the oldest go first.
    """

    def __init__(self, pool: RolloutPool, *, linger_s: float, max_kept: int = 1024) -> None:
        self._pool = pool
        self._linger_s = linger_s
        self._max_kept = max_kept
        self._live: dict[tuple[str, str], _Entry] = {}
        self._done: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    async def run(self, who: str, turn_id: str, turn: Turn) -> TurnResult:
        """Run a turn, or wait for the one of this id.

        Args:
            who: Whose id it is.
            turn_id: The client's.
            turn: What to generate.

        Raises:
            ConfigError: The id was used for another turn.
            RoseError: As ``RolloutPool.generate`` raises them.
        """
        entry = self._find((who, turn_id), turn)
        entry.num_waiters += 1
        if entry.leaving is not None:
            entry.leaving.cancel()
        try:
            return await asyncio.shield(entry.task)
        except asyncio.CancelledError:
            if entry.task.cancelled() and not _is_cancelled():
                message = f"turn {turn_id!r} was cancelled by its client"
                raise TurnFailedError(message) from None
            raise
        finally:
            entry.num_waiters -= 1
            if not entry.num_waiters and not entry.task.done():
                entry.leaving = asyncio.get_running_loop().call_later(self._linger_s, entry.task.cancel)

    def cancel(self, who: str, turn_id: str) -> bool:
        """Cancel a turn; returns whether it was under way."""
        entry = self._live.get((who, turn_id))
        if entry is not None:
            entry.task.cancel()
        return entry is not None

    async def close(self) -> None:
        """Cancel all turns."""
        tasks = [entry.task for entry in self._live.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, key: tuple[str, str], turn: Turn) -> _Entry:
        entry = self._live.get(key) or self._done.get(key)
        if entry is None:
            entry = _Entry(turn, asyncio.create_task(self._pool.generate(turn)))
            self._live[key] = entry
            entry.task.add_done_callback(lambda task: self._put_away(key, task))
        elif entry.turn != turn:
            message = f"turn_id {key[1]!r} was used for another turn; give every turn an id of its own"
            raise ConfigError(message)
        return entry

    def _put_away(self, key: tuple[str, str], task: asyncio.Task[TurnResult]) -> None:
        entry = self._live.pop(key)
        if entry.leaving is not None:
            entry.leaving.cancel()
        if task.cancelled() or isinstance(task.exception(), RoseError):  # a failure may be tried again
            return
        self._done[key] = entry
        if len(self._done) > self._max_kept:
            self._done.popitem(last=False)


def _is_cancelled() -> bool:
    """Tell whether the running task itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
