"""For tests: what a machine without a GPU lacks, and what a test wants to know. On PYTHONPATH of the driver, so of every worker as well.

Nothing here is part of the adapter: OpenRLHF asks ``torch.cuda`` for its devices, and Ray for GPUs, without a way to say that there are none.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


def _torch(torch: Any) -> None:
    if torch.cuda.is_available():
        return
    import torch.distributed.device_mesh as meshes

    class Cpu(str):
        """A device id that is "cpu" where a device is meant, and 0 where a number is."""

        __slots__ = ()

        def __format__(self, _: str) -> str:
            return "0"

    def on_cpu(value: Any) -> Any:
        return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value

    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: Cpu("cpu")
    to, make_mesh = torch.Tensor.to, meshes.init_device_mesh

    def move(self: Any, *args: Any, **named: Any) -> Any:
        return to(self, *map(on_cpu, args), **{name: on_cpu(value) for name, value in named.items()})

    torch.Tensor.to = move
    meshes.init_device_mesh = lambda device, *args, **named: make_mesh(on_cpu(device), *args, **named)
    torch.distributed.init_device_mesh = meshes.init_device_mesh


def _ray(ray: Any) -> None:
    init = ray.init

    def begin(*args: Any, **named: Any) -> Any:
        sizes = {"num_gpus": 4, "num_cpus": 8, "include_dashboard": False, "object_store_memory": 200 << 20}
        return init(*args, **{**sizes, **named})

    ray.init = begin


def _record(module: Any) -> None:
    import record

    record.watch(module)


_PATCHES = {"torch": _torch, "ray": _ray}
if "ROSE_TEST_RECORD" in os.environ:
    _PATCHES |= {"openrlhf.trainer.ray.ppo_actor": _record, "openrlhf.trainer.ppo_utils.experience_maker": _record}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _PATCHES[module.__name__](module)


sys.meta_path.insert(0, _Finder())
