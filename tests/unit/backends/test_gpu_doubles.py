"""The recorded signatures are those of the installed libraries and of kvcached's source, and a change is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gpu_doubles import doubles
from gpu_doubles.make import package_of, version_of
from gpu_doubles.signatures import MISSING, differences, read_library
from gpu_doubles.touched import TOUCHED

LIBRARIES = ("torch", "vllm", "kvcached")


def package(name: str) -> Path:
    found = package_of(name)
    if found is None:
        pytest.skip(f"{name} is not here" + (": set KVCACHED_SRC to its unpacked source" if name == "kvcached" else ""))
    return found


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_recorded_is_what_the_library_has(library: str) -> None:
    where = package(library)
    assert version_of(library, where) == doubles.RECORDED[library]["version"], "record anew: tests/gpu_doubles/make.py"
    assert differences(doubles.RECORDED[library]["names"], read_library(library, where)) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_everything_that_is_touched_was_found(library: str) -> None:
    names = doubles.RECORDED[library]["names"]
    assert set(names) == {source.path for source in TOUCHED[library]}
    flat = [value for part in names.values() for value in part.values()]
    members = [value for part in flat if isinstance(part, dict) for value in part.values()]
    assert MISSING not in [*flat, *members]


CHANGES = [
    ("torch", "cuda/streams.py", "def elapsed_time(self, end_event", "def elapsed_time(self, other", "elapsed_time"),
    ("vllm", "v1/core/sched/scheduler.py", "def update_from_output(", "def update_from_outputs(", "update_from_output"),
    ("vllm", "v1/executor/abstract.py", "def discard(self, tags", "def discard(self, names", "discard"),
    ("vllm", "v1/executor/abstract.py", '("weights", "kv_cache")', '("weights", "kv")', "SLEEP_TAGS"),
    ("vllm", "config/vllm.py", "def max_concurrent_batches(", "def max_batches(", "max_concurrent_batches"),
    ("vllm", "v1/engine/core.py", "self.batch_queue", "self.batches", "batch_queue"),
    ("kvcached", "control.py", "    revision: int,\n) ->", "    generation: int,\n) ->", "set_instance_memory_limit"),
    ("kvcached", "control.py", '"conflict"', '"clash"', "statuses"),
    ("kvcached", "control.py", '"mapped_bytes": mapped', '"bytes": mapped', "answer keys"),
    ("kvcached", "kv_cache_manager.py", "def trim(", "def shrink(", "trim"),
    ("kvcached", "kv_cache_manager.py", "self.block_mem_size = ", "self.block_bytes = ", "block_mem_size"),
    ("kvcached", "integration/vllm/patches.py", '<0.31.0"  # MRV2', '<0.33.0"  # MRV2', "VLLM_MRV2_RANGE"),
    ("kvcached", "../csrc/torch_bindings.cpp", '"get_page_state"', '"page_state"', "get_page_state"),
]


@pytest.mark.parametrize(("library", "path", "old", "new", "name"), CHANGES)
def test_a_changed_signature_is_noticed(library: str, path: str, old: str, new: str, name: str, tmp_path: Path) -> None:
    """A copy of the library's sources, changed in one place."""
    where, copy = package(library), tmp_path / "package"
    for source in TOUCHED[library]:
        target = copy / source.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(where / source.path, target)
    text = (copy / path).read_text()
    assert old in text
    (copy / path).write_text(text.replace(old, new))
    changed = differences(doubles.RECORDED[library]["names"], read_library(library, copy))
    assert changed
    assert all(name in line for line in changed)


def test_a_double_has_nothing_that_the_library_lacks() -> None:
    with pytest.raises(AssertionError, match="no method unmap_pages"):
        doubles.make_class("kvcached", "KVCacheManager", {"unmap_pages": lambda _: None})
    with pytest.raises(AssertionError, match="no function set_limit"):
        doubles.function("kvcached", "set_limit", lambda: None)
    executor: Any = doubles.make_class("vllm", "Executor", {"sleep": lambda _, level=1: level})()
    with pytest.raises(AssertionError, match="no attribute is_tired"):
        executor.is_tired = True
    with pytest.raises(TypeError, match="depth"):
        executor.sleep(depth=2)
    assert executor.sleep(level=2) == 2
    with pytest.raises(AssertionError, match=r"no \['code'\]"):
        doubles.answer(status="applied", code=3)
