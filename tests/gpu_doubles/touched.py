"""What ROSE touches of libraries that only run on a GPU: the one list that signatures are recorded of.

Each entry names a source file, from the library's package, and in it functions, classes with what is used of them (methods,
properties, attributes that ``__init__`` or the class body sets), constants, and for compiled parts the names bound to Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs


@attrs.frozen(kw_only=True)
class Source:
    """One file of a library, and what is used of it."""

    path: str
    functions: Sequence[str] = ()
    classes: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    constants: Sequence[str] = ()
    bindings: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    has_statuses: bool = False


TOUCHED: dict[str, tuple[Source, ...]] = {
    "torch": (
        Source(
            path="cuda/__init__.py",
            functions=(
                "is_available",
                "device_count",
                "get_device_name",
                "current_stream",
                "set_stream",
                "synchronize",
            ),
        ),
        Source(
            path="cuda/streams.py",
            classes={"Event": ("__new__", "record", "synchronize", "elapsed_time"), "Stream": ("__new__",)},
        ),
    ),
    "vllm": (
        Source(
            path="v1/core/sched/scheduler.py",
            classes={
                "Scheduler": (
                    "schedule",
                    "update_from_output",
                    "add_request",
                    "finish_requests",
                    "_free_request",
                    "get_request_counts",
                    "get_kv_cache_usage",
                    "make_stats",
                    "reset_prefix_cache",
                    "shutdown",
                    "pause_state",
                    "running",
                    "waiting",
                    "requests",
                    "kv_cache_manager",
                    "kv_cache_config",
                    "max_num_scheduled_tokens",
                )
            },
        ),
        Source(
            path="v1/core/sched/interface.py",
            classes={"SchedulerInterface": ("has_unfinished_requests", "has_requests")},
        ),
        Source(
            path="v1/core/sched/async_scheduler.py",
            classes={"AsyncScheduler": ("__init__", "_update_after_schedule", "_update_request_with_output")},
        ),
        Source(path="config/scheduler.py", classes={"SchedulerConfig": ("async_scheduling", "get_scheduler_cls")}),
        Source(path="config/vllm.py", classes={"VllmConfig": ("max_concurrent_batches",)}),
        Source(
            path="v1/engine/core.py",
            classes={
                "EngineCore": (
                    "step_with_batch_queue",
                    "preprocess_add_request",
                    "collective_rpc",
                    "compute_weight_checksums",
                    "pause_scheduler",
                    "release_kv_cache_memory",
                    "batch_queue",
                )
            },
        ),
        Source(
            path="v1/executor/abstract.py",
            classes={"Executor": ("sleep", "wake_up", "discard", "is_sleeping", "sleeping_tags", "collective_rpc")},
            constants=("SLEEP_TAGS",),
        ),
        Source(
            path="v1/executor/uniproc_executor.py", classes={"UniProcExecutor": ("collective_rpc", "execute_model")}
        ),
        Source(path="v1/worker/gpu_worker.py", classes={"Worker": ("sleep", "wake_up", "discard")}),
        Source(
            path="device_allocator/cumem.py",
            classes={"CuMemAllocator": ("instance", "get_instance", "sleep", "wake_up", "discard")},
        ),
        Source(
            path="v1/core/block_pool.py",
            classes={
                "BlockPool": (
                    "get_num_free_blocks",
                    "evict_blocks",
                    "touch",
                    "free_blocks",
                    "reset_prefix_cache",
                    "num_gpu_blocks",
                    "blocks",
                    "free_block_queue",
                )
            },
        ),
    ),
    "kvcached": (
        Source(path="control.py", functions=("set_instance_memory_limit",), has_statuses=True),
        Source(path="pool_registry.py", functions=("get_registered_kv_cache_pools",)),
        Source(
            path="kv_cache_manager.py",
            classes={
                "KVCacheManager": (
                    "set_memory_limit",
                    "memory_limit_state",
                    "trim",
                    "capture_physical_release_marker",
                    "release_retired_pages_through",
                    "block_mem_size",
                    "page_size",
                    "num_layers",
                    "num_kv_buffers",
                    "num_avail_blocks",
                    "avail_pages",
                    "page_allocator",
                    "defer_physical_release",
                )
            },
            has_statuses=True,
        ),
        Source(
            path="integration/vllm/patches.py",
            classes={
                "ElasticBlockPool": (
                    "num_gpu_blocks",
                    "kv_cache_manager",
                    "_evictable_blocks",
                    "_evict_blocks_from_pool",
                    "get_num_free_blocks",
                )
            },
            constants=("VLLM_MRV2_RANGE",),
        ),
        Source(path="integration/version_utils.py", classes={"VersionRange": ("__init__", "contains")}),
        Source(
            path="../csrc/torch_bindings.cpp",
            bindings={
                "PageAllocator": ("get_num_inuse_pages", "get_page_state", "trim", "resize", "free_pages"),
                "InternalPage": ("empty", "num_free_blocks"),
            },
        ),
    ),
}
