"""The live parameters of one rank of an engine as a ``WeightSink``: writes go in place, through a ``SlicePlan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from rose.backends.torch_weights.slices import SlicePlan
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.delta import Bits
from rose.transfer.layout import bits_dtype, whole_box
from rose.transfer.sink import ViewSink


class ParameterSink(ViewSink):
    """Live parameters in this machine's memory.

    Args:
        plan: Where each checkpoint tensor lives.
    """

    def __init__(self, plan: SlicePlan) -> None:
        self._plan = plan

    @classmethod
    def over(cls, plan: SlicePlan) -> ParameterSink:
        """Return the sink for where the parameters are: memory of the machine, or of a device."""
        is_host = all(piece.live.device.type == "cpu" for held in plan.pieces.values() for piece in held)
        return ParameterSink(plan) if is_host else DeviceSink(plan)

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every checkpoint tensor that the engine loads from."""
        return self._plan.tensors

    def boxes(self) -> Mapping[str, Sequence[ShardSpec]]:
        """Return the boxes that this rank holds, each once however many copies there are."""
        return {n: tuple(dict.fromkeys(piece.box for piece in held)) for n, held in self._plan.pieces.items() if held}

    def views(self, name: str, box: ShardSpec) -> Sequence[Bits]:
        """Return the live memory of every copy of a box."""
        dtype = bits_dtype(self._plan.tensors[name].dtype)
        return [live.numpy().view(dtype) for live in self.live(name, box)]

    def live(self, name: str, box: ShardSpec) -> list[torch.Tensor]:
        """Return the live views (integer, of the box's shape) of every copy of a box.

        Raises:
            LayoutMismatchError: This worker does not hold the box.
        """
        found = list(self._plan.find(name, box))
        if not found:
            message = f"this rank does not hold {name!r} at {box.offset}+{box.shape}"
            raise LayoutMismatchError(message)
        return found

    def checksums(self) -> dict[str, str]:
        """Return tensor name -> xxh3_128 of its bytes, for the tensors that this rank holds whole."""
        digests = {}
        for name, spec in self._plan.tensors.items():
            box = whole_box(spec.shape)
            if box in self.boxes().get(name, ()):
                digests[name] = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.read(name, box)).tobytes())
        return digests


class DeviceSink(ParameterSink):
    """Live parameters in a device's memory: torch moves what numpy cannot see."""

    def write_dense(self, name: str, box: ShardSpec, bits: Bits) -> None:
        """Overwrite a box."""
        values = _to_torch(bits).view(box.shape)
        for live in self.live(name, box):
            live.copy_(values)

    def write_sparse(self, name: str, box: ShardSpec, positions: Bits, values: Bits) -> None:
        """Overwrite some elements of a box."""
        index, bits = _to_torch(positions), _to_torch(values)
        for live in self.live(name, box):
            live.index_put_(_where(live, index), bits.to(live.device))

    def read(self, name: str, box: ShardSpec) -> Bits:
        """Return a copy of a box; of several live copies, the first."""
        live = self.live(name, box)[0].cpu().numpy()
        return np.array(live, order="C").view(bits_dtype(self._plan.tensors[name].dtype))

    def gather(self, name: str, box: ShardSpec, positions: Bits) -> Bits:
        """Return some elements of a box; of several live copies, the first."""
        live = self.live(name, box)[0]
        found: np.ndarray[Any, Any] = live[_where(live, _to_torch(positions))].cpu().numpy()
        return found.view(bits_dtype(self._plan.tensors[name].dtype))


def _where(live: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return flat positions as indices of a tensor of any strides, on its device."""
    return tuple(torch.unravel_index(index.to(live.device).long(), live.shape))


def _to_torch(array: Bits) -> torch.Tensor:
    """Return the array as a tensor of the signed type of its width (torch indexes and copies those everywhere)."""
    owned = array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")
    signed = np.dtype(np.uint8) if owned.itemsize == 1 else np.dtype(f"i{owned.itemsize}")
    return torch.from_numpy(owned.view(signed))
