"""What every process of a job does before it imports OpenRLHF: the driver through the launcher, Ray's workers through their setup hook.

OpenRLHF imports vLLM and flash_attn without asking whether they are there. A trainer over a pool runs no engine, so:

* Where no ``vllm`` is installed, the folder of the stand-in goes to the end of the import path. With ``ROSE_OPENRLHF_VLLM=stand-in`` it goes to the front,
  which keeps an installed vLLM out of the trainer's processes, and weights cross through host memory.
* Where no ``flash_attn`` is installed, ``openrlhf.models.ring_attn_utils``, the one module that needs it, is loaded beside functions that refuse to be called.
  They are gone again when it is loaded, so that nobody else takes flash_attn for installed.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import attrs

VLLM_VARIABLE = "ROSE_OPENRLHF_VLLM"
SETUP_HOOK = "rose_openrlhf.workers.set_up"

_STAND_INS = str(Path(__file__).parent / "stand_ins")
_NEEDS_FLASH_ATTN = "openrlhf.models.ring_attn_utils"
_NAMES = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}


@attrs.frozen(kw_only=True)
class Setup:
    """What stands in for what in this process."""

    vllm: bool
    flash_attn: bool


def set_up() -> Setup:
    """Make OpenRLHF importable in this process. May be called again."""
    is_forced = os.environ.get(VLLM_VARIABLE) == "stand-in"
    if _STAND_INS not in sys.path:
        if is_forced:
            sys.path.insert(0, _STAND_INS)
        elif not _is_installed("vllm"):
            sys.path.append(_STAND_INS)
    lacks_flash_attn = not _is_installed("flash_attn")
    if lacks_flash_attn and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return Setup(vllm=_STAND_INS in sys.path, flash_attn=lacks_flash_attn)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module that needs flash_attn, and has it loaded beside the stand-in."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NEEDS_FLASH_ATTN:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with _flash_attn():
            super().exec_module(module)


@contextlib.contextmanager
def _flash_attn() -> Iterator[None]:
    """Have modules of the name for a moment."""
    from einops import rearrange  # noqa: PLC0415 - the framework's environment has it

    for name, functions in _NAMES.items():
        module = ModuleType(name)
        vars(module).update({function: _refusing(f"{name}.{function}") for function in functions})
        sys.modules[name] = module
    vars(sys.modules["flash_attn.bert_padding"])["rearrange"] = rearrange
    try:
        yield
    finally:
        for name in _NAMES:
            del sys.modules[name]


def _refusing(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        message = f"{name} was called and flash_attn is not installed: pip install flash-attn, or drop --ds.packing_samples and --ds.ring_attn_size"
        raise RuntimeError(message)

    return refuse
