"""The tensors of a safetensors checkpoint on disk: where each lies, and a few of its elements without the rest."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from rose.errors import LayoutMismatchError

_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


@attrs.frozen(kw_only=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        path: The file.
        offset_bytes: Where its first element lies in the file.
        shape: Its shape; the elements follow one another in C order.
        dtype: torch's.
    """

    path: Path
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: Any

    def read(self, first: int, num_elements: int) -> torch.Tensor:
        """Return some elements that follow one another.

        Args:
            first: Flat index of the first.
            num_elements: How many, at least one.
        """
        with self.path.open("rb") as file:
            file.seek(self.offset_bytes + first * self.dtype.itemsize)
            raw = bytearray(file.read(num_elements * self.dtype.itemsize))
        return torch.frombuffer(raw, dtype=self.dtype)


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint, by name; reads the headers only.

    Raises:
        LayoutMismatchError: There is no such checkpoint, or a dtype that ROSE does not carry.
    """
    found: dict[str, StoredTensor] = {}
    for path in _files(directory):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                found[name] = _entry(path, name, entry, 8 + length)
    if not found:
        message = f"{directory} holds no *.safetensors, so the engine's checkpoint names are unknown"
        raise LayoutMismatchError(message)
    return found


def _files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint: those of its index, as engines do, since others may hold the same names."""
    files = sorted(directory.glob("*.safetensors"))
    index = directory / _INDEX
    if not index.exists():
        return files
    listed = set(json.loads(index.read_text())["weight_map"].values())
    return [path for path in files if path.name in listed]


def _entry(path: Path, name: str, entry: Mapping[str, Any], data_at_bytes: int) -> StoredTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        message = f"tensor {name!r} of {path} has dtype {entry['dtype']}, which ROSE does not carry"
        raise LayoutMismatchError(message)
    offset_bytes = data_at_bytes + entry["data_offsets"][0]
    return StoredTensor(path=path, offset_bytes=offset_bytes, shape=tuple(entry["shape"]), dtype=dtype)
