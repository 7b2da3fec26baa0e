"""``LimitedBlocks`` over kvcached's own Python code: its control interface, its manager and its block pool. Needs ``$KVCACHED_SRC``.

Only the compiled part is ours (``gpu_doubles.kvcached_pages``). Nothing is mapped; what is shown is that limits, statuses, evictions and
late releases go together as kvcached means them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

if not os.environ.get("KVCACHED_SRC"):
    pytest.skip("set KVCACHED_SRC to kvcached's unpacked source", allow_module_level=True)
torch = pytest.importorskip("torch")

from gpu_doubles.kvcached_pages import InternalPage, PageAllocator
from rose.backends.cuda import KvLimiter, LimitedBlocks
from rose.backends.in_flight import InFlight
from rose.bench.gpu_check import memory
from rose.bench.gpu_check.part import Bench
from rose.errors import EngineError

BLOCK_BYTES = 512 << 10
PAGE_BLOCKS, NUM_PAGES = 4, 8


class Block:
    """vLLM's block as far as kvcached uses it."""

    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt, self.is_null = block_id, 0, False
        self.block_hash: Any = None

    def set_block_hash(self, key: Any) -> None:
        self.block_hash = key

    def reset_hash(self) -> None:
        self.block_hash = None


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """kvcached's modules from its source, its compiled module replaced."""
    monkeypatch.syspath_prepend(os.environ["KVCACHED_SRC"])
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.6" if name == "kvcached" else real(name))
    operations: Any = ModuleType("kvcached.vmm_ops")
    operations.PageAllocator, operations.InternalPage = PageAllocator, InternalPage
    operations.kv_tensors_created = lambda group_id=0: True
    for name in (
        "init_kvcached",
        "shutdown_kvcached",
        "create_kv_tensors",
        "map_to_kv_tensors",
        "unmap_from_kv_tensors",
    ):
        setattr(operations, name, None)
    before = dict(sys.modules)
    package = importlib.import_module("kvcached")
    sys.modules["kvcached.vmm_ops"] = package.vmm_ops = operations  # type: ignore[attr-defined] # a module's attribute
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] == "kvcached":
            del sys.modules[name]


class Engine:
    """kvcached's block pool as it puts it into vLLM, with requests that are lists of blocks."""

    def __init__(self, *, is_async: bool = False) -> None:
        patches = importlib.import_module("kvcached.integration.vllm.patches")
        interfaces: Any = importlib.import_module("kvcached.integration.vllm.interfaces")
        interfaces._kvcached_initialized, interfaces._is_worker = True, True  # the worker is in this process
        interfaces._async_sched = is_async
        target: Any = ModuleType("block_pool")
        target.BlockPool, target.KVCacheBlock = object, Block
        patches.ElasticBlockPoolPatch().inject_elastic_block_pool(target)
        self.pool = target.ElasticBlockPool(NUM_PAGES * PAGE_BLOCKS, 16, BLOCK_BYTES // 16, 1, True, num_kv_buffers=1)  # noqa: FBT003
        self.manager = self.pool.kv_cache_manager
        self.manager._wait_post_init()
        self.allocator = PageAllocator.instances[-1]
        self.in_flight = InFlight()
        self.barriers = 0
        self.manager.physical_release_barrier = self._barrier
        self.held = LimitedBlocks(self.pool, KvLimiter.open(), self.in_flight)

    def _barrier(self) -> None:
        self.barriers += 1

    def begin(self, num_blocks: int) -> list[Any]:
        blocks: list[Any] = self.pool.get_new_blocks(num_blocks)
        return blocks

    def end(self, blocks: list[Any], *, is_cached: bool = False) -> None:
        for block in blocks if is_cached else ():
            key = block.block_id.to_bytes(8, "big")
            block.set_block_hash(key)
            self.pool._cached_blocks.setdefault(key, {})[block.block_id] = block
            self.pool._block_id_to_key[block.block_id] = key
        self.pool.free_blocks(blocks)


@pytest.fixture
def engine(source: None) -> Engine:
    return Engine()


def test_use_is_counted_as_the_pool_counts_it(engine: Engine) -> None:
    assert (engine.held.num_blocks, engine.held.num_used) == (31, 0)
    blocks = engine.begin(9)
    assert engine.held.num_used == 9
    engine.end(blocks, is_cached=True)
    assert engine.held.num_used == 0, "a cached prefix is no request's"
    assert engine.manager._get_num_alloced_blocks() == 10


def test_a_limit_of_free_pages_is_applied(engine: Engine) -> None:
    engine.begin(4)
    assert engine.held.resize(20) == 0
    assert engine.manager.memory_limit_state()["status"] == "applied"
    assert engine.allocator.total == 3
    assert engine.held.num_bytes_given == 20 * BLOCK_BYTES
    assert engine.held.resize(0) == 0
    assert engine.allocator.total == NUM_PAGES
    assert len(engine.begin(25)) == 25


def test_cached_prefixes_are_evicted_for_a_cut_and_requests_are_not(engine: Engine) -> None:
    kept = engine.begin(3)
    engine.end(engine.begin(20), is_cached=True)
    assert engine.allocator.get_num_inuse_pages() == 6
    assert engine.held.resize(28) == 0
    assert engine.manager.memory_limit_state()["status"] == "applied"
    assert (engine.allocator.total, engine.held.num_used) == (1, 3)
    assert engine.allocator.ready_list == [], "pages kept ready left too"
    assert all(block.ref_cnt == 1 for block in kept)


def test_pages_kept_ready_leave_while_a_cut_waits(engine: Engine) -> None:
    engine.begin(11)
    engine.end(engine.begin(12))
    assert len(engine.allocator.ready_list) == 2
    assert engine.held.resize(28) == 8
    assert engine.allocator.ready_list == []


def test_requests_over_it_are_missing_until_they_end(engine: Engine) -> None:
    first, second = engine.begin(11), engine.begin(12)
    assert engine.held.resize(20) == 12
    assert engine.manager.memory_limit_state()["status"] == "deferred"
    assert engine.held.num_held == 8
    engine.end(second, is_cached=True)
    assert engine.held.resize(20) == 0
    assert engine.manager.memory_limit_state()["status"] == "applied"
    assert (engine.held.num_used, engine.allocator.total) == (11, 3)
    engine.end(first)


def test_an_engine_that_schedules_ahead_waits_for_its_batches_and_ends_nobody(source: None) -> None:
    engine = Engine(is_async=True)
    engine.begin(11)
    victim = engine.begin(12)
    engine.in_flight.launch("batch", is_charged=True)
    assert engine.held.resize(20) == 12
    engine.end(victim)
    assert engine.held.resize(20) == 0, "its pages are retired, so that nobody else need go"
    assert engine.manager.memory_limit_state()["status"] == "deferred"
    assert engine.allocator.get_num_inuse_pages() == 6, "still mapped for the batch in flight"
    assert engine.barriers == 0
    engine.in_flight.land("batch")
    engine.held.settle()
    assert engine.barriers == 1
    assert engine.manager.memory_limit_state()["status"] == "applied"
    assert engine.allocator.total == 3


def test_sleep_leaves_the_null_block_s_page_and_wakes_to_the_whole(engine: Engine) -> None:
    engine.end(engine.begin(20), is_cached=True)
    engine.held.hold_every_page()
    assert engine.manager.memory_limit_state()["status"] == "applied"
    assert engine.allocator.total == 1
    engine.held.resize(0)
    assert len(engine.begin(31)) == 31


def test_two_writers_are_told_of_each_other(engine: Engine) -> None:
    control = importlib.import_module("kvcached.control")
    limiter = KvLimiter.open()
    limiter.limit(16 * BLOCK_BYTES)
    assert control.set_instance_memory_limit(8 * BLOCK_BYTES, revision=7)["status"] == "applied"
    assert limiter.limit(12 * BLOCK_BYTES).is_applied, "above the other's revision"
    assert engine.manager.memory_limit_state()["revision"] == 8
    control.set_instance_memory_limit(8 * BLOCK_BYTES, revision=9)
    with pytest.raises(EngineError, match=rf"'conflict'.*another writer set {8 * BLOCK_BYTES} bytes at revision 9"):
        limiter.limit(16 * BLOCK_BYTES)


def test_without_a_pool_it_says_how_to_start(source: None) -> None:
    with pytest.raises(EngineError, match=r"'unavailable' \(no_registered_kv_cache_pool\).*ENABLE_KVCACHED=true"):
        KvLimiter.open().limit(1 << 30)


def test_the_check_for_gpus_asks_of_a_card_what_kvcached_does(source: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part ``memory-kvcached`` over kvcached's own manager, on a card of 80 GiB whose pages are counted."""
    card_bytes, num_buffers = 80 << 30, 2 * memory._NUM_LAYERS
    interfaces: Any = importlib.import_module("kvcached.integration.vllm.interfaces")
    interfaces._kvcached_initialized, interfaces._is_worker = True, True

    def alloc_kv_cache(shape: tuple[int, ...], *_: Any) -> None:
        each_bytes = card_bytes // num_buffers
        interfaces._created_kv_tensor_capacity[0] = {
            "num_blocks": each_bytes // (memory._BLOCK_TOKENS * memory._CELL_BYTES),
            "ftensor_bytes_per_layer": 2 * each_bytes,
            "num_layers": memory._NUM_LAYERS,
            "num_kv_buffers": 2,
        }

    def mem_get_info(device: Any) -> tuple[int, int]:
        allocator = PageAllocator.instances[-1]
        num_mapped = allocator.get_num_inuse_pages() + allocator.get_num_reserved_pages()
        return card_bytes - num_mapped * allocator.page_size * num_buffers, card_bytes

    monkeypatch.setattr(interfaces, "init_kvcached", lambda **_: None)
    monkeypatch.setattr(interfaces, "alloc_kv_cache", alloc_kv_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(Bench, "wait", lambda _: None)
    monkeypatch.setattr(memory, "_WAIT_S", 0.05)
    figures = memory.KvcachedMemory().run(Bench(device=torch.device("cpu"), is_quick=False))
    assert [one.unit for one in figures] == ["ms", "ms"]
    assert mem_get_info(None)[0] == card_bytes - (2 << 30), "the pool is full again, and no larger"
