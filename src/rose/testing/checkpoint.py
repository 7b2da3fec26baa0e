"""A trainer made of a checkpoint on disk: real tensor names and finite values, without a framework."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rose.interfaces.trainer import ShardSpec, TensorSpec, Trainer
from rose.transfer.layout import bits_dtype, whole_box

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class CheckpointTrainer(Trainer):
    """The only rank of a model whose weights start as a checkpoint's; ``step`` changes them, ``save`` writes them out.

    Args:
        path: A Hugging Face checkpoint directory with one ``model.safetensors`` of floating-point tensors.
        seed: What the changes are drawn from.
        tied: Alias -> the tensor whose bits it shares.
    """

    rank = 0
    world_size = 1

    def __init__(self, path: str | Path, *, seed: int = 0, tied: Mapping[str, str] | None = None) -> None:
        self._path = Path(path)
        self._rng = np.random.default_rng(seed)
        self._tied = dict(tied or {})
        raw = (self._path / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        self._head, self._data = raw[: 8 + length], bytearray(raw[8 + length :])
        entries = json.loads(self._head[8:])
        entries.pop("__metadata__", None)
        self._specs: dict[str, TensorSpec] = {}
        self._bits: dict[str, np.ndarray] = {}
        for name, entry in entries.items():
            spec = TensorSpec(name=name, shape=tuple(entry["shape"]), dtype=_DTYPES[entry["dtype"]])
            start, end = entry["data_offsets"]
            self._specs[name] = spec
            view = memoryview(self._data)[start:end]
            self._bits[name] = np.frombuffer(view, dtype=bits_dtype(spec.dtype)).reshape(spec.shape)

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return the checkpoint's tensors."""
        return dict(self._specs)

    def aliases(self) -> Mapping[str, str]:
        """Return the tied names."""
        return dict(self._tied)

    def layout(self) -> Mapping[str, ShardSpec]:
        """Return the whole of each tensor."""
        return {name: whole_box(spec.shape) for name, spec in self._specs.items()}

    def shards(self) -> Mapping[str, np.ndarray]:
        """Return views of the tensors; ``step`` changes them."""
        return dict(self._bits)

    def step(self, fraction: float = 0.01) -> None:
        """Change about this fraction of the elements by a few per cent of their value (upper mantissa bits)."""
        for name, bits in self._bits.items():
            flip = {"bfloat16": 1 << 4, "float16": 1 << 7, "float32": 1 << 20}[self._specs[name].dtype]
            is_changed = self._rng.random(bits.shape) < fraction
            bits[is_changed] ^= bits.dtype.type(flip)

    def save(self, path: str | Path) -> Path:
        """Write the weights as they are now as a checkpoint of the same model, and return its directory."""
        target = Path(path)
        shutil.copytree(self._path, target, dirs_exist_ok=True)
        (target / "model.safetensors").write_bytes(self._head + bytes(self._data))
        return target
