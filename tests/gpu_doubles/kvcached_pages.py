"""The compiled part of kvcached as plain Python, so that its own Python parts run without a GPU: pages are numbers.

What it does was read in ``csrc/page_allocator.cpp`` and ``csrc/page.cpp`` of 0.1.6: a resize below the pages in use is refused, pages kept
ready are dropped for one that needs them, and freed pages fill up what is kept ready before any is unmapped.
"""

from __future__ import annotations

from typing import Any, ClassVar

MAX_READY = 2


class InternalPage:
    """One page and which of its blocks are free."""

    def __init__(self, page_id: int, page_size: int) -> None:
        self.page_id, self.page_size = page_id, page_size
        self.blocks: set[int] = set()
        self.free_blocks: list[int] = []

    @staticmethod
    def get_block_range(page_id: int, page_size: int, block_mem_size: int) -> tuple[int, int]:
        """Return the first block that lies whole in a page, and the one after the last."""
        return -(-page_id * page_size // block_mem_size), (page_id + 1) * page_size // block_mem_size

    @staticmethod
    def get_num_blocks(page_size: int, block_mem_size: int) -> int:
        return page_size // block_mem_size

    def init(self, block_mem_size: int) -> None:
        first, end = self.get_block_range(self.page_id, self.page_size, block_mem_size)
        self.blocks, self.free_blocks = set(range(first, end)), list(range(first, end))

    def alloc(self, num_blocks: int = 1) -> list[int]:
        taken, self.free_blocks = self.free_blocks[:num_blocks], self.free_blocks[num_blocks:]
        return taken

    def free_batch(self, blocks: list[int]) -> None:
        assert not set(blocks) & set(self.free_blocks), "a block is freed twice"
        self.free_blocks += blocks

    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def empty(self) -> bool:
        return len(self.free_blocks) == len(self.blocks)

    def full(self) -> bool:
        return not self.free_blocks


class PageAllocator:
    """Pages of one pool: in use, kept ready (mapped too), free."""

    instances: ClassVar[list[PageAllocator]] = []

    def __init__(self, num_layers: int, mem_size: int, page_size: int, world_size: int, **_: Any) -> None:
        self.page_size = page_size
        self.total = mem_size // page_size
        self.free_list, self.ready_list, self.reclaimed_list = list(range(self.total)), [], []
        self.num_free = self.total
        self.unmapped: list[int] = []
        self.instances.append(self)

    def alloc_page(self) -> InternalPage:
        if self.num_free <= 0:
            message = "no free pages left"
            raise RuntimeError(message)
        self.num_free -= 1
        return InternalPage((self.ready_list or self.free_list).pop(0), self.page_size)

    def free_pages(self, page_ids: list[int]) -> None:
        self.num_free += len(page_ids)
        num_ready = max(0, MAX_READY - len(self.ready_list))
        self.ready_list += page_ids[:num_ready]
        self.unmapped += page_ids[num_ready:]
        self.free_list += page_ids[num_ready:]

    def resize(self, new_mem_size: int) -> bool:
        new_total = new_mem_size // self.page_size
        if new_total < self.total - self.num_free:
            return False
        if new_total >= self.total:
            num_more = new_total - self.total
            again, self.reclaimed_list = self.reclaimed_list[:num_more], self.reclaimed_list[num_more:]
            self.free_list += again + list(range(self.total, self.total + num_more - len(again)))
            self.num_free += num_more
        else:
            num_less = self.total - new_total
            if len(self.free_list) < num_less:
                self.trim()
            if len(self.free_list) < num_less:
                return False
            self.reclaimed_list += self.free_list[-num_less:]
            del self.free_list[-num_less:]
            self.num_free -= num_less
        self.total = new_total
        return True

    def trim(self) -> None:
        self.unmapped += self.ready_list
        self.free_list += self.ready_list
        self.ready_list = []

    def group_indices_by_page(self, indices: list[int], block_mem_size: int) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for index in indices:
            groups.setdefault(index * block_mem_size // self.page_size, []).append(index)
        return groups

    def get_page_state(self) -> dict[str, int]:
        return {
            "total_pages": self.total,
            "free_pages": self.num_free,
            "inuse_pages": self.total - self.num_free,
            "reserved_pages": len(self.ready_list),
        }

    def get_num_free_pages(self) -> int:
        return self.num_free

    def get_num_inuse_pages(self) -> int:
        return self.total - self.num_free

    def get_num_total_pages(self) -> int:
        return self.total

    def get_num_reserved_pages(self) -> int:
        return len(self.ready_list)

    def get_avail_physical_pages(self) -> int:
        return 1_000

    def get_resize_target(self) -> int:
        return 0

    def set_use_worker_ipc(self, use_worker_ipc: Any) -> None:
        assert not use_worker_ipc

    def start_prealloc_thread(self) -> None:
        pass
