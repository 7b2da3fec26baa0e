"""Stands in for SGLang's kernel package, of which no CPU build is published.

SGLang imports one name of it while it starts; on a CPU without AMX its layers fall back to plain torch and call none. A call says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def _missing(name: str) -> Callable[..., NoReturn]:
    def call(*_args: object, **_kwargs: object) -> NoReturn:
        message = f"sgl_kernel.{name} is a stand-in: there is no CPU build of sgl_kernel; use --attention-backend torch_native"
        raise NotImplementedError(message)

    return call


copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Give a function that refuses to be called, for any name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
