"""Tables of checkpoints: names, shapes and dtypes of all tensors, and the numbers of the model."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
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
_FIELDS = ("name", "shape", "dtype")
_MAX_NAMES = 1_000_000


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

    The file is an object with ``model`` (name), ``config`` (numbers), ``params`` (``[name, shape, dtype]`` or an object of these
    each) and, where they apply, ``tied`` (``[alias, name]``), ``buffers_in_state_dict`` and ``fp8_scales`` (both like ``params``).
    In a name ``{a..b}`` stands for every integer from a to b.

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
    except KeyError as error:
        problem = f"it has no {error}"
    except (TypeError, ValueError, AttributeError) as error:
        problem = str(error)
    message = (
        f"{source} is not a model table: {problem}; it needs 'model', 'config' and 'params' ([name, shape, dtype] each)"
    )
    raise LayoutMismatchError(message)


def _read_table(data: Any, *, has_fp8: bool) -> ModelTable:
    if not isinstance(data, dict):
        message = f"it is a {type(data).__name__}, not an object"
        raise TypeError(message)
    params = list(_expand(data["params"], "params"))
    if not params:
        message = "'params' is empty"
        raise ValueError(message)
    scales = list(_expand(data.get("fp8_scales") or (), "fp8_scales")) if has_fp8 else []
    scaled = {scale.name.removesuffix(_SCALE_SUFFIX) for scale in scales}
    tied = data.get("tied")
    aliases = _aliases(tied) if tied else {}
    kept = [
        attrs.evolve(spec, dtype=_FP8) if spec.name in scaled else spec for spec in params if spec.name not in aliases
    ]
    tensors = (*kept, *_expand(data.get("buffers_in_state_dict") or (), "buffers_in_state_dict"), *scales)
    names = {spec.name for spec in tensors}
    if len(names) != len(tensors):
        message = f"{len(tensors) - len(names)} names are there twice"
        raise ValueError(message)
    missing = (scaled | set(aliases.values())) - names
    if missing:
        message = f"scales or ties of tensors that are not there: {sorted(missing)}"
        raise ValueError(message)
    config = data["config"]
    if not isinstance(config, dict):
        message = f"'config' is {config!r}, not an object"
        raise TypeError(message)
    return ModelTable(name=str(data["model"]), tensors=tensors, aliases=aliases, config=config)


def _aliases(tied: Any) -> dict[str, str]:
    if not (isinstance(tied, list) and len(tied) == 2 and all(isinstance(name, str) for name in tied)):  # noqa: PLR2004 - a pair
        message = f"'tied' is {tied!r}, not [alias, name]"
        raise TypeError(message)
    return {tied[0]: tied[1]}


def _expand(rows: Any, where: str) -> Iterator[TensorSpec]:
    if not isinstance(rows, list | tuple):
        message = f"{where!r} is {rows!r}, not a list"
        raise TypeError(message)
    for row in rows:
        pattern, shape, dtype = _read_row(row, where)
        texts = _RANGE.split(pattern)  # text, first, last, text, first, last, ..., text
        ranges = [range(int(a), int(b) + 1) for a, b in zip(texts[1::3], texts[2::3], strict=True)]
        if not 0 < prod(map(len, ranges)) <= _MAX_NAMES:
            message = f"{where!r}: {pattern!r} stands for {prod(map(len, ranges))} names, not for 1 to {_MAX_NAMES}"
            raise ValueError(message)
        for numbers in product(*ranges):
            parts = [text for pair in zip(texts[::3], map(str, numbers), strict=False) for text in pair]
            yield TensorSpec(name="".join((*parts, texts[-1])), shape=shape, dtype=dtype)


def _read_row(row: Any, where: str) -> tuple[str, tuple[int, ...], str]:
    """Return name, shape and dtype of a row, which is a list of the three or an object that names them."""
    fields = [row.get(key) for key in _FIELDS] if isinstance(row, dict) else row
    if not isinstance(fields, list) or len(fields) != len(_FIELDS):
        message = f"{where!r} has the row {row!r}, which is no [name, shape, dtype]"
        raise ValueError(message)
    name, shape, dtype = fields
    if not isinstance(name, str) or not name:
        message = f"{where!r} has the row {row!r} without a name"
        raise ValueError(message)
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        message = f"{name!r} in {where!r} has the shape {shape!r}; sizes are whole numbers over 0"
        raise ValueError(message)
    if not isinstance(dtype, str):
        message = f"{name!r} in {where!r} has the dtype {dtype!r}, which is no name"
        raise TypeError(message)
    bits_dtype(dtype)
    return name, tuple(shape), dtype
