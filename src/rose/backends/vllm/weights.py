"""The live parameters of one vLLM worker as a ``WeightSink``: writes go in place, through a ``SlicePlan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from rose.backends.vllm.slices import SlicePlan
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.layout import bits_dtype, whole_box


class VllmSink:
    """A ``rose.transfer.subscriber.WeightSink`` over live parameters.

    Args:
        plan: Where each checkpoint tensor lives.
    """

    def __init__(self, plan: SlicePlan) -> None:
        self._plan = plan

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every checkpoint tensor that the engine loads from."""
        return self._plan.tensors

    def boxes(self) -> Mapping[str, Sequence[ShardSpec]]:
        """Return the boxes that this worker holds, each once however many copies there are."""
        return {name: tuple(dict.fromkeys(piece.box for piece in held)) for name, held in self._plan.pieces.items()}

    def write_dense(self, name: str, box: ShardSpec, bits: np.ndarray[Any, Any]) -> None:
        """Overwrite a box, ``bits`` in its shape."""
        values = _to_torch(bits).view(box.shape)
        for live in self._views(name, box):
            live.copy_(values)

    def write_sparse(
        self, name: str, box: ShardSpec, positions: np.ndarray[Any, np.dtype[np.int64]], values: np.ndarray[Any, Any]
    ) -> None:
        """Overwrite the elements of a box at flat row-major ``positions``."""
        index, bits = _to_torch(positions), _to_torch(values)
        for live in self._views(name, box):
            if live.is_contiguous():
                live.view(-1).index_copy_(0, index.to(live.device), bits.to(live.device))
            else:
                where = torch.unravel_index(index.to(live.device), live.shape)
                live.index_put_(where, bits.to(live.device))

    def read(self, name: str, box: ShardSpec) -> np.ndarray[Any, Any]:
        """Return a copy of the bits of a box; of several live copies, the first.

        Raises:
            LayoutMismatchError: This worker does not hold the box.
        """
        live = self._views(name, box)[0].cpu().numpy()
        return np.array(live, order="C").view(bits_dtype(self._plan.tensors[name].dtype))

    def checksums(self) -> dict[str, str]:
        """Return tensor name -> xxh3_128 of its bytes, for the tensors that this worker holds whole."""
        digests = {}
        for name, spec in self._plan.tensors.items():
            box = whole_box(spec.shape)
            if box in self.boxes()[name]:
                digests[name] = xxhash.xxh3_128_hexdigest(self.read(name, box).tobytes())
        return digests

    def _views(self, name: str, box: ShardSpec) -> list[torch.Tensor]:
        found = list(self._plan.find(name, box))
        if not found:
            message = f"this worker does not hold {name!r} at {box.offset}+{box.shape}"
            raise LayoutMismatchError(message)
        return found


def _to_torch(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the array as a tensor of the signed type of its width (torch indexes and copies those everywhere)."""
    owned = array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")
    signed = np.dtype(np.uint8) if owned.itemsize == 1 else np.dtype(f"i{owned.itemsize}")
    return torch.from_numpy(owned.view(signed))
