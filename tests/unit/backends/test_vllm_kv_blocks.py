"""Which KV blocks are held back, and which pages go with them; on a stand-in of vLLM's block pool."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.backends.in_flight import InFlight
from rose.backends.vllm.kv_blocks import HeldBlocks


class Block(SimpleNamespace):
    def __hash__(self) -> int:
        return self.block_id


class Pool:
    """vLLM's block pool as far as it is used: ids from 1, free ones least recently used first."""

    def __init__(self, num: int) -> None:
        self.num_gpu_blocks = num + 1
        self.blocks = [Block(block_id=i, ref_cnt=0, block_hash=None) for i in range(num + 1)]
        self.free = self.blocks[1:]
        self.free_block_queue = SimpleNamespace(get_all_free_blocks=lambda: list(self.free))

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.free.remove(block)
            block.ref_cnt += 1

    def evict_blocks(self, ids: set[int]) -> None:
        for block_id in ids:
            self.blocks[block_id].block_hash = None

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self.free.append(block)

    def use(self, *ids: int) -> None:
        self.touch([self.blocks[i] for i in ids])

    def cache(self, *ids: int) -> None:
        """Let free blocks hold prefixes, the first used least recently."""
        for i in ids:
            self.blocks[i].block_hash = i
            self.free.remove(self.blocks[i])
            self.free.append(self.blocks[i])


class Pages:
    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.num_calls = 0

    def __call__(self, runs: list[tuple[int, int]]) -> int:
        self.runs = runs
        self.num_calls += 1
        return sum(length for _, length in runs) * 100


@pytest.fixture
def pages() -> Pages:
    return Pages()


def held_blocks(pool: Pool, pages: Pages, group_blocks: int = 4) -> HeldBlocks:
    held = HeldBlocks(pool)
    held.attach(pages, group_blocks=group_blocks)
    return held


def test_blocks_are_held_and_returned(pages: Pages) -> None:
    pool = Pool(10)
    held = held_blocks(pool, pages, 1)
    assert held.resize(4) == 0
    assert (held.num_blocks, held.num_held, held.num_used, len(pool.free)) == (10, 4, 0, 6)
    pool.use(*(block.block_id for block in pool.free[:4]))
    assert held.num_used == 4
    assert held.resize(9) == 3, "two of five were free"
    assert held.resize(1) == 0
    assert (held.num_held, len(pool.free), held.num_bytes_given) == (1, 5, 100)


def test_whole_groups_go_before_parts_of_used_ones(pages: Pages) -> None:
    """Groups of four: 8-11 is in use by one block, 12-15 is free, 4-7 is free."""
    pool = Pool(15)
    pool.use(8, 1)
    held = held_blocks(pool, pages)
    held.resize(8)
    assert pages.runs == [(4, 4), (12, 4)]
    held.resize(11)
    assert pages.runs == [(4, 4), (9, 7)], "then the rest of the group that is in use"
    held.resize(9)
    assert {(4, 4), (12, 4)} <= {*pages.runs, (12, 4)}
    assert held.num_held == 9
    held.resize(8)
    assert pages.runs == [(4, 4), (12, 4)], "blocks that free no page come back first"


def test_cached_prefixes_go_last_and_the_least_recent_first(pages: Pages) -> None:
    pool = Pool(19)
    pool.cache(17, 5, 13)
    held = held_blocks(pool, pages)
    held.resize(4)
    assert pages.runs == [(8, 4)], "the one group without a prefix"
    held.resize(8)
    assert pages.runs == [(8, 4), (16, 4)]
    assert pool.blocks[17].block_hash is None, "a held block may not be found by its prefix"
    held.resize(12)
    assert pages.runs == [(4, 8), (16, 4)]
    assert pool.blocks[13].block_hash == 13


def test_loose_blocks_are_exchanged_for_groups_that_come_free(pages: Pages) -> None:
    pool = Pool(15)
    pool.use(4, 8, 12)
    held = held_blocks(pool, pages)
    held.settle()
    held.resize(6)
    assert len(pages.runs) > 1, "every group is in use by one block"
    held.settle()
    pool.free_blocks([pool.blocks[8]])
    held.settle()
    assert (8, 4) in pages.runs
    assert held.num_held == 6
    before = list(pages.runs)
    held.settle()
    assert pages.runs == before


def test_an_exchange_gives_up_no_more_than_it_takes(pages: Pages) -> None:
    pool = Pool(15)
    pool.use(5)
    held = held_blocks(pool, pages)
    held.resize(14)
    pool.free_blocks([pool.blocks[5]])
    held.settle()
    assert held.num_held == 14
    assert pages.runs[-1] == (2, 14), "the group of 4 to 7 is whole for one block of the null block's group"


def test_asleep_every_page_goes_and_comes_back(pages: Pages) -> None:
    pool = Pool(15)
    held = held_blocks(pool, pages)
    held.resize(3)
    held.hold_every_page()
    assert pages.runs == [(0, 16)], "the null block's page too"
    assert held.num_held == 15
    held.resize(3)
    assert (held.num_held, len(pool.free)) == (3, 12)
    assert pages.runs == [(13, 3)]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(["resize", "use", "free", "settle"]), st.integers(0, 40)), max_size=40))
def test_every_block_is_used_free_or_held(ops: list[tuple[str, int]]) -> None:
    pool = Pool(37)
    pages = Pages()
    held = held_blocks(pool, pages, 8)
    used: list[Any] = []
    for op, n in ops:
        if op == "resize":
            goal, free = min(n, 37), 37 - len(used)
            assert held.resize(goal) == max(0, goal - free)
            assert held.num_held == min(goal, free)
        elif op == "use" and pool.free:
            used.append(pool.free[n % len(pool.free)])
            pool.use(used[-1].block_id)
        elif op == "free" and used:
            pool.free_blocks([used.pop(n % len(used))])
        elif op == "settle":
            before, num_loose = held.num_held, held._num_loose
            held.settle()
            assert held.num_held == before
            assert held._num_loose <= num_loose
        given_ids = {i for first, length in pages.runs for i in range(first, first + length)}
        assert len(given_ids) == held.num_held
        assert given_ids.isdisjoint(block.block_id for block in [*used, *pool.free])
        assert held.num_used == len(used)
        assert len(pool.free) + len(used) + held.num_held == 37


def test_a_page_goes_when_all_its_blocks_are_held() -> None:
    torch = pytest.importorskip("torch")
    from rose.backends.vllm.kv_memory import KvPages  # noqa: PLC0415 - after the skip

    given_ranges: list[tuple[int, int]] = []

    def give(address: int, num_bytes: int, *, page_bytes: int) -> int:
        assert page_bytes == mmap.PAGESIZE
        given_ranges.append((address, num_bytes))
        return num_bytes

    base = torch.zeros(5 * mmap.PAGESIZE, dtype=torch.int8)
    start = -base.data_ptr() % mmap.PAGESIZE + 64  # off the page by some bytes
    layer = base[start : start + 16 * 1024].view(16, 1024)
    pages = KvPages([layer, torch.zeros(5, 8)], 16, give)
    assert pages.group_blocks == mmap.PAGESIZE // 1024
    first = layer.data_ptr() - 64 + mmap.PAGESIZE
    assert pages.hold([(1, 6)]) == 0, "the first whole page holds blocks 3 to 7"
    assert pages.hold([(1, 7)]) == mmap.PAGESIZE
    assert given_ranges == [(first, mmap.PAGESIZE)]
    assert pages.hold([(3, 13)]) == 3 * mmap.PAGESIZE
    assert given_ranges[1:] == [(first + mmap.PAGESIZE, 2 * mmap.PAGESIZE)], "what is gone is not given again"
    assert pages.hold([(4, 12)]) == 2 * mmap.PAGESIZE, "a part of block 3 is on the first page"
    pages.hold([(3, 13)])
    assert given_ranges[2:] == [(first, mmap.PAGESIZE)]


def test_pages_leave_when_the_batches_before_have_landed() -> None:
    """The engine schedules ahead, so that a batch is always in flight: a mark is passed all the same."""
    pool, pages, in_flight = Pool(8), Pages(), InFlight()
    held = HeldBlocks(pool, in_flight)
    held.attach(pages)
    in_flight.launch("a", is_charged=True)
    assert held.resize(4) == 0
    held.settle()
    assert (held.num_held, pages.runs, held.num_bytes_given) == (4, [], 0), "batch a may still write there"
    in_flight.launch("b", is_charged=True)
    in_flight.land("a")
    held.settle()
    assert pages.runs == [(5, 4)]
    held.resize(2)
    assert pages.runs == [(7, 2)], "blocks that return have their pages at once"
    held.resize(6)
    assert pages.runs == [(7, 2)]
    in_flight.land("b")
    held.settle()
    assert pages.runs == [(3, 6)]
    num_told = pages.num_calls
    held.settle()
    assert pages.num_calls == num_told


def test_blocks_that_return_before_their_pages_left_keep_them() -> None:
    pool, pages, in_flight = Pool(8), Pages(), InFlight()
    held = HeldBlocks(pool, in_flight)
    held.attach(pages)
    in_flight.launch("a", is_charged=True)
    held.resize(8)
    held.resize(0)
    assert not pages.runs
    in_flight.land("a")
    held.settle()
    assert not pages.runs


def test_lent_blocks_come_back_as_they_were() -> None:
    pool, pages = Pool(8), Pages()
    held = HeldBlocks(pool)
    held.attach(pages)
    pool.use(1)
    held.resize(5)
    num_told = pages.num_calls
    with held.lent():
        assert pool.get_num_free_blocks() == 7, "only what requests use is taken"
    assert (pool.get_num_free_blocks(), held.num_held, held.num_used) == (2, 5, 1)
    assert pages.num_calls == num_told, "no page moved"
    held.resize(0)
    assert pool.get_num_free_blocks() == 7


def test_a_block_of_a_woken_engine_has_its_page_before_it_is_used() -> None:
    """Also when a batch was in flight as it fell asleep and another one is as it wakes."""
    pool, pages, in_flight = Pool(8), Pages(), InFlight()
    held = HeldBlocks(pool, in_flight)
    held.attach(pages)
    in_flight.launch("a", is_charged=True)
    held.hold_every_page()
    assert pages.runs == [(0, 9)]
    held.resize(3)
    assert pages.runs == [(6, 3)]
