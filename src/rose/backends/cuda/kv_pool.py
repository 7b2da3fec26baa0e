"""The blocks that an engine over kvcached may not use. The face of ``rose.backends.vllm.kv_blocks.HeldBlocks``.

Invariants:

* What is cut is what requests hold beyond the limit in whole pages: pages of cached prefixes go first, and pages that wait for
  batches in flight are nobody's, so that no request ends for them.
* kvcached unmaps a page of an engine that schedules ahead only behind a barrier over the workers, at the end of a step. Where no
  step is in flight and none may come, the barrier is asked for here.
* The page of the null block never leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rose.backends.cuda.kv_limit import INSTALL, KvLimiter
from rose.backends.in_flight import InFlight
from rose.errors import EngineError


class LimitedBlocks:
    """The part of a block pool that the engine may not use, as kvcached keeps it."""

    def __init__(self, pool: Any, limiter: KvLimiter, in_flight: InFlight) -> None:
        """Start with nothing held.

        Args:
            pool: What kvcached puts in the place of vLLM's block pool.
            limiter: Moves the limit.
            in_flight: The engine's batches.

        Raises:
            EngineError: The engine runs on vLLM's own pool.
        """
        manager = getattr(pool, "kv_cache_manager", None)
        if manager is None:
            message = f"the engine's block pool is vLLM's own ({type(pool).__name__}), which kvcached does not move; {INSTALL}"
            raise EngineError(message)
        self._pool, self._manager, self._limiter, self._in_flight = pool, manager, limiter, in_flight
        num_buffers = int(manager.num_layers) * int(manager.num_kv_buffers)
        self._block_bytes = int(manager.block_mem_size) * num_buffers
        self._page_bytes = int(manager.page_size) * num_buffers
        self._blocks_per_page = int(manager.page_size) // int(manager.block_mem_size)
        self.num_held = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def num_used(self) -> int:
        """Blocks in use by requests; cached prefixes and the null block are not."""
        num_paged = self._num_pages * self._blocks_per_page - int(self._manager.num_avail_blocks)
        return max(0, num_paged - len(self._pool._evictable_blocks) - 1)  # noqa: SLF001 - there is no public count

    @property
    def num_bytes_given(self) -> int:
        """Bytes that are held back and that no page of the device is mapped for."""
        state = self._manager.page_allocator.get_page_state()
        mapped = (int(state["inuse_pages"]) + int(state["reserved_pages"])) * self._page_bytes
        return max(0, min(self.num_held * self._block_bytes, self.num_blocks * self._block_bytes - mapped))

    @property
    def _num_pages(self) -> int:
        return int(self._manager.page_allocator.get_num_inuse_pages())

    def resize(self, num_to_hold: int) -> int:
        """Hold ``num_to_hold`` blocks back; returns how many are missing because requests use their pages.

        Raises:
            EngineError: kvcached refused.
        """
        limit = max((self.num_blocks + 1 - num_to_hold) * self._block_bytes, self._page_bytes)
        answer = self._limiter.limit(limit)
        num_pages_over = self._num_pages_over(answer.effective_bytes)
        if num_pages_over > 0 and self._pool._evictable_blocks:  # noqa: SLF001 - as above
            self._pool._evict_blocks_from_pool(num_pages_over * self._blocks_per_page)  # noqa: SLF001 - whole pages first
            num_pages_over = self._num_pages_over(answer.effective_bytes)
        self.settle()
        if not answer.is_applied and not self._limiter.limit(limit).is_applied:
            self._manager.trim()  # pages kept ready are memory too; a limit that is applied has counted them
        num_missing = max(0, num_pages_over) * self._blocks_per_page
        self.num_held = num_to_hold - min(num_missing, num_to_hold)
        return num_missing

    def settle(self) -> None:
        """Let pages go that waited for batches in flight, when none is; with one in flight its step does that."""
        if not self._in_flight and self._num_retired():
            self._manager.release_retired_pages_through(self._manager.capture_physical_release_marker())

    def _num_pages_over(self, limit_bytes: int) -> int:
        """Return how many pages requests and cached prefixes hold beyond a limit."""
        return self._num_pages - self._num_retired() - limit_bytes // self._page_bytes

    def _num_retired(self) -> int:
        """Return how many empty pages wait for their release: those of a pool that frees at once are not listed."""
        if not getattr(self._manager, "defer_physical_release", False):
            return 0
        return sum(bool(page.empty()) for page in self._manager.avail_pages.values())

    def attach(self, hold_pages: Callable[[Any], int], *, group_blocks: int = 1) -> None:
        """Do nothing: pages are kvcached's."""

    def hold_every_page(self) -> None:
        """Set the limit to the null block's page. No request may use a block, and no batch may be in flight."""
        self.resize(self.num_blocks)

    def lent(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: blocks that are held back are in nobody's way."""
        return contextlib.nullcontext()
