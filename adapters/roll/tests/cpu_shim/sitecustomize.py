"""Completes ROLL's CPU platform in every process of a test: it lacks what its resource manager and its workers ask a platform for.

Python imports this module by itself where it is on ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_WANTED = "roll.platforms.cpu"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        del target
        if name != _WANTED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), _complete(module.CpuPlatform))  # type: ignore[method-assign]
        return spec


def _complete(cls: Any) -> None:
    """Count devices of a Ray resource of the test's own, and answer questions about a GPU's memory."""
    cls.ray_device_key = "rolldevice"
    cls.device_control_env_var = "ROLLDEVICE_VISIBLE"
    cls.ray_experimental_noset = "ROLLDEVICE_NOSET"
    cls.device_count = classmethod(lambda _: 4)
    cls.current_device = classmethod(lambda _: "cpu")
    for name in (
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
        "reset_peak_memory_stats",
        "empty_cache",
        "init",
    ):
        setattr(cls, name, classmethod(lambda *_, **__: None))
    for name in (
        "device_memory_used",
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(cls, name, classmethod(lambda *_, **__: 0))
    cls.get_rng_state = classmethod(lambda *_, **__: __import__("torch").get_rng_state())
    cls.set_rng_state = classmethod(lambda _, state, **__: __import__("torch").set_rng_state(state))
    cls.random = types.SimpleNamespace(get_rng_state_all=list, set_rng_state_all=lambda _: None)
    cls.mem_get_info = classmethod(lambda *_, **__: (1, 1))


sys.meta_path.insert(0, _Finder())
