"""Tables of checkpoints: names, shapes and dtypes of all tensors, and the numbers of the model."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import attrs

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import TensorSpec
from rose.transfer.layout import bits_dtype, num_bytes

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SCALE_SUFFIX = "_scale_inv"
_FP8 = "float8_e4m3fn"


@attrs.frozen(kw_only=True)
class ModelTable:
    """What a checkpoint holds.

    Attributes:
        name: Name of the model.
        tensors: Every tensor once, in the checkpoint's order; tied ones under one name.
        aliases: Tied names: alias -> the name in ``tensors`` whose bits it shares.
        config: Numbers of the model: ``hidden``, ``layers``, ``heads``, ``kv``, ``vocab``, ``experts``, ...
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    config: Mapping[str, Any]

    @property
    def num_elements(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(prod(spec.shape) for spec in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors on the wire, in bytes."""
        return sum(num_bytes(spec) for spec in self.tensors)


def load_model_table(path: str | Path, *, has_fp8: bool = True) -> ModelTable:
    """Read a table from JSON, plain or gzipped.

    The file is an object with ``model`` (name), ``config`` (numbers), ``params`` (``[name, shape, dtype]`` each) and, where they
    apply, ``tied`` (``[alias, name]``), ``buffers_in_state_dict`` and ``fp8_scales`` (both like ``params``). In a name ``{a..b}``
    stands for every integer from a to b.

    Args:
        path: The file.
        has_fp8: Where the file lists block scales: whether to give the checkpoint as stored, scales and 8-bit weights; otherwise
            all weights in the dtype of ``params`` and no scales.

    Raises:
        LayoutMismatchError: There is no such file, or it is no such table; says what is wrong.
    """
    source = Path(path)
    try:
        raw = source.read_bytes()
        data = json.loads(gzip.decompress(raw) if source.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError) as error:  # bad gzip is an OSError, bad JSON or UTF-8 a ValueError
        message = f"cannot read the model table {source}: {error}; give a .json or .json.gz file with a 'params' list"
        raise LayoutMismatchError(message) from error
    try:
        return _read_table(data, has_fp8=has_fp8)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"{source} is not a model table: {error!r}; it needs 'model', 'config' and 'params' ([name, shape, dtype] each)"
        raise LayoutMismatchError(message) from error


def _read_table(data: Mapping[str, Any], *, has_fp8: bool) -> ModelTable:
    params = list(_expand(data["params"]))
    scales = list(_expand(data.get("fp8_scales", ()))) if has_fp8 else []
    scaled = {scale.name.removesuffix(_SCALE_SUFFIX) for scale in scales}
    tied = data.get("tied")
    aliases = dict([tuple(tied)]) if tied else {}
    kept = [
        attrs.evolve(spec, dtype=_FP8) if spec.name in scaled else spec for spec in params if spec.name not in aliases
    ]
    tensors = (*kept, *_expand(data.get("buffers_in_state_dict", ())), *scales)
    names = {spec.name for spec in tensors}
    if len(names) != len(tensors):
        message = f"{len(tensors) - len(names)} names are there twice"
        raise ValueError(message)
    missing = (scaled | set(aliases.values())) - names
    if missing:
        message = f"scales or ties of tensors that are not there: {sorted(missing)}"
        raise ValueError(message)
    return ModelTable(name=str(data["model"]), tensors=tensors, aliases=aliases, config=dict(data["config"]))


def _expand(rows: Sequence[Sequence[Any]]) -> Iterator[TensorSpec]:
    for pattern, shape, dtype in rows:
        bits_dtype(dtype)
        sizes = tuple(int(size) for size in shape)
        texts = _RANGE.split(pattern)  # text, first, last, text, first, last, ..., text
        ranges = [range(int(a), int(b) + 1) for a, b in zip(texts[1::3], texts[2::3], strict=True)]
        for numbers in product(*ranges):
            parts = [text for pair in zip(texts[::3], map(str, numbers), strict=False) for text in pair]
            yield TensorSpec(name="".join((*parts, texts[-1])), shape=sizes, dtype=dtype)
