"""KV slots that are held back from SGLang's pool, so that requests only have the rest: a live KV budget.

Invariants:

* Held slots belong to nobody: they are neither free, nor cached, nor any request's, and the pool's own leak check is told of them.
* Used, cached, free and held slots always add up to the pool.
* After the pool was cleared (a flush) every held slot is taken anew, before anyone else can have it.

The budget is logical: the pool's memory stays where it is until SGLang releases the pool as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HELD = "rose_num_held"


def held_tokens(allocator: Any) -> int:
    """Return how many slots of an allocator are held back."""
    return int(getattr(allocator, _HELD, 0))


class KvReserve:
    """The slots that one scheduler holds back."""

    def __init__(self, scheduler: Any, make_room: Callable[[Any, int], Any]) -> None:
        """Hold nothing yet. ``make_room(tree_cache, num_tokens)`` drops cached prefixes until so many slots are free."""
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._tree_cache = scheduler.tree_cache
        self._page = int(scheduler.page_size)
        self.num_tokens = int(scheduler.max_total_num_tokens)
        self._make_room = make_room
        self._slots: list[Any] = []
        self._publish()

    @property
    def num_held(self) -> int:
        """Slots that are held back."""
        return sum(len(slots) for slots in self._slots)

    @property
    def num_used(self) -> int:
        """Slots in use by requests; cached prefixes of ended ones are not counted."""
        free = int(self._allocator.available_size())
        return self.num_tokens - free - int(self._tree_cache.evictable_size()) - self.num_held

    def resize(self, num_tokens: int) -> int:
        """Hold ``num_tokens`` back, rounded up to whole pages, cached prefixes giving way.

        Returns:
            How many slots are missing because requests use them.
        """
        target = min(-(-num_tokens // self._page) * self._page, self.num_tokens // self._page * self._page)
        if target < self.num_held:
            self._let_go(self.num_held - target)
        elif target > self.num_held:
            self._take(target - self.num_held)
        self._publish()
        return target - self.num_held

    def retake(self) -> None:
        """Hold as much as before, after the pool was cleared with everything in it."""
        num_held = self.num_held
        self._slots.clear()
        self._publish()
        self.resize(num_held)

    def _take(self, num_tokens: int) -> None:
        if self._allocator.available_size() < num_tokens:
            self._make_room(self._tree_cache, num_tokens)
        num_free = int(self._allocator.available_size()) // self._page * self._page
        slots = self._allocator.alloc(min(num_tokens, num_free)) if num_free else None
        if slots is not None and len(slots):
            self._slots.append(slots)

    def _let_go(self, num_tokens: int) -> None:
        while num_tokens > 0:
            slots = self._slots.pop()
            keep = max(0, len(slots) - num_tokens)
            if keep:
                self._slots.append(slots[:keep])
            num_tokens -= len(slots) - keep
            self._allocator.free(slots[keep:])

    def _publish(self) -> None:
        setattr(self._allocator, _HELD, self.num_held)
