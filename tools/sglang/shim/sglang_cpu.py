"""Lets a torchvision wheel that was built for CUDA load beside a CPU build of torch.

Such a wheel leaves out the C++ library that declares its operators, and transformers then cannot be imported at all. Declaring the two
operators that its Python code looks for is enough: nothing of SGLang's text path calls them.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[object] = []  # torch forgets the operators when the library object goes


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; runs once, when torchvision is first asked for."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            _declare()
        return None


def _declare() -> None:
    import torch  # noqa: PLC0415 - only for a process that loads torchvision

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(name + _SIGNATURE)
    _kept.append(library)


sys.meta_path.insert(0, _DeclareOperators())
