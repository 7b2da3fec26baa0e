"""Holding KV blocks back from vLLM's block pool, in whole pages of memory as far as may be.

Invariants:

* A held block belongs to no request and to no prefix-cache entry; the content of a block whose pages were given back is
  lost, and the block is written before it is read once it returns to the pool.
* Blocks in use, free blocks and held blocks are the pool, the null block aside.
* With batches in flight, pages leave when those have landed that were launched before their blocks were held; a block returns to the
  pool with its page, at once.
* Blocks are taken a group at a time (a group shares a page of every layer): groups without cached prefixes first, then
  those whose prefixes were used least recently. Blocks of groups that are in use are taken when nothing else is left, and
  exchanged for whole groups when these come free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rose.backends.in_flight import InFlight

Runs = list[tuple[int, int]]
HoldPages = Callable[[Runs], int]


class HeldBlocks:
    """The part of a block pool that the engine may not use."""

    def __init__(self, pool: Any, in_flight: InFlight | None = None) -> None:
        """Start with nothing held.

        Args:
            pool: vLLM's ``BlockPool``; its null block is never counted.
            in_flight: The engine's batches; ``None`` where none is in flight while budgets change.
        """
        self._pool = pool
        self._in_flight = InFlight() if in_flight is None else in_flight
        self._mark: int | None = None
        self._is_held = np.zeros(int(pool.num_gpu_blocks), bool)
        self._is_left = self._is_held.copy()  # whose pages may have left
        self._num_held = 0
        self._hold_pages: HoldPages | None = None
        self._group_blocks = 1
        self._num_loose = 0
        self._num_free_seen = 0
        self.num_bytes_given = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def num_held(self) -> int:
        """Blocks held back."""
        return self._num_held

    @property
    def num_used(self) -> int:
        """Blocks in use by requests."""
        return self.num_blocks - int(self._pool.get_num_free_blocks()) - self.num_held

    def attach(self, hold_pages: HoldPages, *, group_blocks: int = 1) -> None:
        """Let held blocks give their pages back.

        Args:
            hold_pages: Takes all held blocks, as ``(first, length)`` of each run; returns the bytes given back by now.
            group_blocks: Blocks that share a page in a layer.
        """
        self._hold_pages, self._group_blocks = hold_pages, group_blocks
        self._update_pages()

    def resize(self, num_to_hold: int) -> int:
        """Hold ``num_to_hold`` blocks back, as far as free blocks allow.

        Returns:
            How many blocks are missing because requests use them.
        """
        num_held = self.num_held
        if num_to_hold == num_held:
            return 0
        num_missing = self._take(num_to_hold) if num_to_hold > num_held else 0
        self._give_up(num_held - num_to_hold)
        self._update_pages()
        return num_missing

    def settle(self) -> None:
        """Let pages go whose batches have landed; exchange held blocks that free no page for whole groups that have come free.

        Cheap when nothing came free.
        """
        if self._mark is not None and self._in_flight.has_passed(self._mark):
            self._let_pages_go()
        num_free = int(self._pool.get_num_free_blocks())
        has_news, self._num_free_seen = num_free > self._num_free_seen, num_free
        if not has_news or self._num_loose < self._group_blocks or self._group_blocks == 1:
            return
        may_hold = self._is_held.copy()
        may_hold[[block.block_id for block in self._free_blocks()]] = True
        num_exchanged = min(self._num_whole(may_hold) - self._num_whole(self._is_held), self._num_loose)
        if num_exchanged:
            num_held = self.num_held
            self._take(num_held + num_exchanged)
            self._give_up(self.num_held - num_held)
            self._update_pages()

    def hold_every_page(self) -> None:
        """Give all pages back at once, the null block's too. The engine must not compute until the next ``resize``.

        What is still in flight belongs to requests that have ended; whoever unmaps memory of a device waits for that.
        """
        self.resize(self.num_blocks)
        self._mark, self._is_left = None, self._is_held.copy()
        if self._hold_pages is not None:
            self.num_bytes_given = self._hold_pages([(0, self.num_blocks + 1)])

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Let the pool have the held blocks for the time of a call that takes none; their pages stay where they are."""
        held = [self._pool.blocks[i] for i in np.flatnonzero(self._is_held).tolist()]
        self._pool.free_blocks(held)
        try:
            yield
        finally:
            self._pool.touch(held)

    def _take(self, num_to_hold: int) -> int:
        num_missing = num_to_hold - self.num_held
        free = self._free_blocks()
        num_taken = min(num_missing, len(free))
        if num_taken:
            taken = [free[i] for i in self._order(free)[:num_taken].tolist()]
            self._pool.evict_blocks({block.block_id for block in taken})
            self._pool.touch(taken)
            self._is_held[[block.block_id for block in taken]] = True
            self._num_held += num_taken
        return num_missing - num_taken

    def _order(self, free: Sequence[Any]) -> Any:
        """Return the order in which free blocks are taken; ``free`` is in vLLM's order, least recently used first."""
        ids = np.array([block.block_id for block in free])
        groups = self._group_of(ids)
        num_groups = int(self._group_of(np.array([self.num_blocks]))[0]) + 1
        last_use = np.where([block.block_hash is not None for block in free], np.arange(1, len(free) + 1), 0)
        newest = np.zeros(num_groups, np.int64)
        np.maximum.at(newest, groups, last_use)
        have = np.bincount(groups, minlength=num_groups)
        have += np.bincount(self._group_of(np.flatnonzero(self._is_held)), minlength=num_groups)
        is_whole = have == self._group_sizes(num_groups)
        # the last key goes first: whole groups, the least recently used, high ids before low ones
        return np.lexsort((-ids, -groups, newest[groups], ~is_whole[groups]))

    def _give_up(self, num: int) -> None:
        """Return so many held blocks to the pool, those that free no page first, then low ids."""
        if num <= 0:
            return
        ids = np.flatnonzero(self._is_held)
        groups = self._group_of(ids)
        held = np.bincount(groups)
        is_whole = held[groups] == self._group_sizes(len(held))[groups]
        chosen = ids[np.lexsort((ids, is_whole))[:num]]
        self._is_held[chosen] = False
        self._num_held -= len(chosen)
        self._pool.free_blocks([self._pool.blocks[i] for i in chosen.tolist()])

    def _update_pages(self) -> None:
        """Follow what is held now: pages of blocks that returned at once, those of new ones when their batches have landed."""
        self._num_loose = self.num_held - self._num_whole(self._is_held)
        if not self._in_flight:
            self._let_pages_go()
            return
        self._mark = self._in_flight.mark()
        if (self._is_left & ~self._is_held).any():
            self._is_left &= self._is_held
            self._tell_pages()

    def _let_pages_go(self) -> None:
        self._mark, self._is_left = None, self._is_held.copy()
        self._tell_pages()

    def _tell_pages(self) -> None:
        if self._hold_pages is not None:
            self.num_bytes_given = self._hold_pages(_runs(np.flatnonzero(self._is_left)))

    def _free_blocks(self) -> list[Any]:
        free: list[Any] = self._pool.free_block_queue.get_all_free_blocks()
        return free

    def _group_of(self, ids: Any) -> Any:
        return ids // self._group_blocks

    def _group_sizes(self, num_groups: int) -> Any:
        """Return how many blocks each group has; the null block is none of the first one's."""
        edges = np.minimum(np.arange(num_groups + 1) * self._group_blocks, self.num_blocks + 1)
        sizes = np.diff(edges)
        sizes[0] = -1  # the null block's page stays
        return sizes

    def _num_whole(self, is_chosen: Any) -> int:
        """Return how many of the chosen blocks are in groups that are chosen whole."""
        have = np.bincount(self._group_of(np.flatnonzero(is_chosen)), minlength=1)
        return int(have[have == self._group_sizes(len(have))].sum())


def _runs(ids: Any) -> Runs:
    """Return ``(first, length)`` of each run of consecutive numbers of a sorted array."""
    if not len(ids):
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    return [(int(run[0]), len(run)) for run in np.split(ids, breaks)]
