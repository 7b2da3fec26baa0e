"""A model of kvcached's pages behind doubles with its signatures: capacity, limits with revisions, cached prefixes, late release."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import pytest

from gpu_doubles import doubles


class Kvcached:
    """One pool of ``num_pages`` pages with ``blocks_per_page`` blocks of ``block_bytes`` each (one layer, one buffer); block 0 is null."""

    def __init__(self, num_pages: int = 8, blocks_per_page: int = 4, block_bytes: int = 10) -> None:
        self.blocks_per_page, self.block_bytes = blocks_per_page, block_bytes
        self.page_bytes = blocks_per_page * block_bytes
        self.num_pages = self.capacity = num_pages
        self.used: set[int] = {0}
        self.retired: set[int] = set()
        self.num_reserved = 0
        self.revision, self.limit_bytes, self.in_shrink = -1, None, False
        self.calls: list[tuple[int, int]] = []
        self.log: list[str] = []
        self.status: str | None = None
        self.failure: Exception | None = None
        self._make_doubles()

    def _make_doubles(self) -> None:
        page = doubles.make_class("kvcached", "InternalPage", {"empty": lambda page: page.double_empty})
        allocator = doubles.make_class(
            "kvcached",
            "PageAllocator",
            {
                "get_num_inuse_pages": lambda _: len(self.pages()),
                "get_page_state": lambda _: {
                    "total_pages": self.capacity,
                    "free_pages": self.capacity - len(self.pages()),
                    "inuse_pages": len(self.pages()),
                    "reserved_pages": self.num_reserved,
                },
            },
        )
        self.page_class = page
        manager = doubles.make_class(
            "kvcached",
            "KVCacheManager",
            {
                "memory_limit_state": lambda _: self.state(),
                "trim": lambda _: self._trim(),
                "capture_physical_release_marker": lambda _: len(self.log),
                "release_retired_pages_through": lambda _, marker: self.release(),
            },
        )
        self.manager = manager()
        self.manager.block_mem_size, self.manager.page_size = self.block_bytes, self.page_bytes
        self.manager.num_layers = self.manager.num_kv_buffers = 1
        self.manager.defer_physical_release = False
        self.manager.page_allocator = allocator()
        pool = doubles.make_class(
            "kvcached",
            "ElasticBlockPool",
            {"_evict_blocks_from_pool": self._evict, "get_num_free_blocks": lambda _: 0},
        )
        self.pool = pool()
        self.pool.num_gpu_blocks = self.num_pages * self.blocks_per_page
        self.pool.kv_cache_manager = self.manager
        self.pool._evictable_blocks = {}
        self._sync()

    # What a test does.

    def use(self, *blocks: int) -> None:
        self.used |= set(blocks)
        self.retired -= {block // self.blocks_per_page for block in blocks}
        self._sync()

    def end(self, *blocks: int, is_cached: bool = False) -> None:
        """A request ends: its blocks are free, or cached prefixes."""
        if is_cached:
            self.pool._evictable_blocks.update(dict.fromkeys(blocks))
            return
        before = self.pages()
        self.used -= set(blocks)
        if self.manager.defer_physical_release:
            self.retired |= before - {block // self.blocks_per_page for block in self.used}
        self._sync()

    def release(self) -> None:
        """Steps in flight have drained."""
        self.log.append(f"barrier, {len(self.retired)} pages")
        self.retired = set()
        self._sync()

    # The model.

    def pages(self) -> set[int]:
        return {block // self.blocks_per_page for block in self.used} | self.retired

    def _sync(self) -> None:
        if self.in_shrink and len(self.pages()) <= self._target():
            self.capacity, self.in_shrink = self._target(), False
        self.manager.num_avail_blocks = len(self.pages()) * self.blocks_per_page - len(self.used)
        pages = {}
        for number in self.pages():
            pages[number] = self.page_class()
            pages[number].double_empty = number in self.retired
        self.manager.avail_pages = pages

    def _target(self) -> int:
        return min(int(self.limit_bytes or 0) // self.page_bytes, self.num_pages)

    def _trim(self) -> None:
        self.log.append("trim")
        self.num_reserved = 0

    def _evict(self, _: Any, num_to_evict: int, **how: Any) -> int:
        """Evict cached prefixes, those whose pages come free first."""
        cached = list(self.pool._evictable_blocks)
        busy = self.used - set(cached)
        cached.sort(key=lambda block: block // self.blocks_per_page in {one // self.blocks_per_page for one in busy})
        chosen = cached[:num_to_evict]
        for block in chosen:
            del self.pool._evictable_blocks[block]
        self.log.append(f"evict {len(chosen)}")
        self.end(*chosen)
        return len(chosen)

    def state(self, status: str | None = None) -> dict[str, Any]:
        mapped = (len(self.pages()) + self.num_reserved) * self.page_bytes
        effective = self._target() * self.page_bytes
        return {
            "status": status or ("deferred" if self.in_shrink else "applied"),
            "revision": self.revision,
            "limit_bytes": self.limit_bytes,
            "mapped_bytes": mapped,
            "effective_limit_bytes": effective,
        }

    def set_limit(self, limit_bytes: int, *, revision: int) -> dict[str, Any]:
        self.calls.append((limit_bytes, revision))
        if self.failure is not None:
            raise self.failure
        status = self.status
        if status is None and revision < self.revision:
            status = "stale"
        elif status is None and revision == self.revision and limit_bytes != self.limit_bytes:
            status = "conflict"
        if status is None:
            self.revision, self.limit_bytes = revision, limit_bytes
            self.in_shrink = len(self.pages()) > self._target()
            if not self.in_shrink:
                self.capacity = self._target()
        pool = self.state(status)
        return doubles.answer(
            status=pool["status"],
            reason="why",
            revision=revision,
            limit_bytes=limit_bytes,
            mapped_bytes=pool["mapped_bytes"],
            effective_limit_bytes=pool["effective_limit_bytes"],
            pools=[pool],
        )


def install(model: Kvcached, monkeypatch: pytest.MonkeyPatch, version: str = "0.1.6") -> None:
    """Put the doubles where kvcached's modules are looked for."""
    modules: dict[str, Any] = {
        name: ModuleType(name)
        for name in (
            "kvcached",
            "kvcached.control",
            "kvcached.pool_registry",
            "kvcached.integration",
            "kvcached.integration.vllm",
            "kvcached.integration.vllm.patches",
            "kvcached.integration.version_utils",
        )
    }
    modules["kvcached.control"].set_instance_memory_limit = doubles.function(
        "kvcached", "set_instance_memory_limit", model.set_limit
    )
    modules["kvcached.pool_registry"].get_registered_kv_cache_pools = doubles.function(
        "kvcached", "get_registered_kv_cache_pools", lambda **_: [(model.manager, "vllm")]
    )
    adapted = str(doubles.names_of("kvcached")["VLLM_MRV2_RANGE"]).strip("'")
    modules["kvcached.integration.vllm.patches"].VLLM_MRV2_RANGE = adapted
    modules["kvcached.integration.version_utils"].VersionRange = _range_class()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "kvcached" else real(name))


def _range_class() -> type[Any]:
    def contains(self: Any, ver: str) -> bool:
        oldest, first_unknown = (part.strip("><=") for part in self.double_spec.split(","))
        return _numbers(oldest) <= _numbers(ver) < _numbers(first_unknown)

    def init(self: Any, range_spec: str) -> None:
        self.double_spec = range_spec

    return doubles.make_class("kvcached", "VersionRange", {"__init__": init, "contains": contains})


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
