"""Holding KV blocks back from vLLM's block pool, and giving their memory to the operating system.

Invariants: a held block belongs to no request and to no prefix-cache entry; the content of a block whose pages were
given back is lost, and the block is written before it is read once it returns to the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

GivePages = Callable[[int, int], int]


class HeldBlocks:
    """The part of a block pool that the engine may not use."""

    def __init__(self, pool: Any) -> None:
        """Start with nothing held. ``pool`` is vLLM's ``BlockPool``; its null block is never counted."""
        self._pool = pool
        self._held: list[Any] = []
        self._tensors: list[tuple[int, int]] = []
        self._give: GivePages | None = None
        self.num_bytes_given = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def num_held(self) -> int:
        """Blocks held back."""
        return len(self._held)

    @property
    def num_used(self) -> int:
        """Blocks in use by requests."""
        return self.num_blocks - int(self._pool.get_num_free_blocks()) - self.num_held

    def attach(self, tensors: Sequence[Any], give: GivePages) -> None:
        """Let held blocks give their pages back.

        Args:
            tensors: KV tensors whose first dimension counts blocks; others are left alone.
            give: Returns ``(address, num_bytes)`` to the operating system.
        """
        num_blocks = int(self._pool.num_gpu_blocks)
        self._give = give
        self._tensors = [
            (int(tensor.data_ptr()), int(tensor.stride(0)) * int(tensor.element_size()))
            for tensor in tensors
            if tensor.dim() > 1 and tensor.shape[0] == num_blocks
        ]
        self._give_pages(block.block_id for block in self._held)

    def resize(self, num_to_hold: int) -> int:
        """Hold ``num_to_hold`` blocks back, as far as free blocks allow; cached prefixes go, oldest first.

        Returns:
            How many blocks are missing because requests use them.
        """
        if num_to_hold < self.num_held:
            self._held, freed = self._held[:num_to_hold], self._held[num_to_hold:]
            self._pool.free_blocks(freed)
            return 0
        num_missing = num_to_hold - self.num_held
        num_taken = min(num_missing, int(self._pool.get_num_free_blocks()))
        if num_taken:
            taken = self._pool.get_new_blocks(num_taken)
            self._held += taken
            self._give_pages(block.block_id for block in taken)
        return num_missing - num_taken

    def _give_pages(self, block_ids: Iterable[int]) -> None:
        if self._give is None:
            return
        runs = list(_runs(sorted(block_ids)))
        for address, block_bytes in self._tensors:
            for first, num in runs:
                self.num_bytes_given += self._give(address + first * block_bytes, num * block_bytes)


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``(first, length)`` of each run of consecutive numbers."""
    start = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[at - 1] + 1:
            yield ids[start], at - start
            start = at
