"""One rank of an FSDP2 model as a source of weights.

Invariants: nothing here is a collective, each rank reads its own shard only; the bits handed out are those of the sharded
(master) parameters cast to the wire dtype, whatever the mixed-precision policy computes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rose.backends.fsdp.bits import dtype_name, torch_dtype
from rose.backends.fsdp.shard_bits import BaseIn, held_bits, shard_bits
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec, Trainer
from rose.transfer.layout import bits_dtype
from rose.transfer.source_views import View, held_tensors, view_specs

_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@attrs.frozen(kw_only=True, eq=False)
class _Source:
    """One parameter or buffer of the model: the live tensor, how it travels, and this rank's box."""

    tensor: torch.Tensor
    spec: TensorSpec
    dtype: torch.dtype
    box: ShardSpec | None

    def bits(self, base_in: BaseIn) -> ShardBits:
        if (
            self.box is None or not self.box.num_elements
        ):  # a replica here may hold elements that another rank publishes
            return np.empty(self.box.shape if self.box else (), dtype=bits_dtype(self.spec.dtype))
        return shard_bits(_local(self.tensor), self.dtype, base_in=base_in)


class FsdpTrainer(Trainer):
    """The weights of a model that ``fully_shard`` has sharded; plain (unsharded) models work as well.

    Make it after ``fully_shard`` and while the parameters are sharded, not between a forward and its backward.
    Uneven and empty shards are fine. A parameter that every rank holds, or a replica group of a hybrid mesh, is published
    by its first holder only. Tied parameters go under their first name; the others are aliases.

    Args:
        model: The sharded model; parameter names are the checkpoint names.
        wire_dtype: What floating-point parameters travel as; ``None`` keeps each one's own dtype.
        has_buffers: Also publish floating-point buffers that are part of the state dict, in their own dtype.
        views: How parameters that are fused or stacked hold checkpoint tensors; such a parameter travels as those alone.
        base_in: Where the last published bits of shards on a GPU are kept and compared: ``device`` takes as much of its memory as the
            shards in the wire dtype, ``pinned`` as much page-locked memory of the host, ``host`` compares on the host.

    Raises:
        LayoutMismatchError: A parameter's placement is not one box per rank, a dtype cannot be carried, or the views do not
            fit; names it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wire_dtype: str | None = "bfloat16",
        has_buffers: bool = False,
        views: Sequence[View] = (),
        base_in: BaseIn = "device",
    ) -> None:
        self._base_in = base_in
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if is_distributed else 0
        self.world_size = torch.distributed.get_world_size() if is_distributed else 1
        self._aliases: dict[str, str] = {}
        self._sources: dict[str, _Source] = {}
        names: dict[int, str] = {}
        for raw_name, parameter in model.named_parameters(remove_duplicate=False):
            name = _clean(raw_name)
            if id(parameter) in names:
                self._aliases[name] = names[id(parameter)]
                continue
            names[id(parameter)] = name
            self._sources[name] = self._source(name, parameter, wire_dtype)
        for raw_name, buffer in _float_buffers(model) if has_buffers else ():
            name = _clean(raw_name)
            self._sources[name] = self._source(name, buffer, None)

        self._set_views(views)

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every tensor, in the model's order."""
        return dict(self._specs)

    def aliases(self) -> Mapping[str, str]:
        """Return the other names of tied parameters."""
        return dict(self._aliases)

    def layout(self) -> Mapping[str, ShardSpec]:
        """Return this rank's boxes; scalars and views that other ranks publish are absent."""
        boxes = {name: source.box for name, source in self._sources.items() if source.box is not None}
        own = {name: box for name, box in boxes.items() if name not in self._viewed}
        return own | {name: held.box for name, held in self._held.items()}

    def shards(self) -> Mapping[str, ShardBits]:
        """Return this rank's bits: views where dtype and strides allow, else cast when a slice is read."""
        with torch.no_grad():
            bits = {
                name: source.bits(self._base_in) for name, source in self._sources.items() if source.box is not None
            }
        own = {name: one for name, one in bits.items() if name not in self._viewed}
        return own | {name: held_bits(held, bits) for name, held in self._held.items()}

    def _set_views(self, views: Sequence[View]) -> None:
        parameters = {name: source.spec for name, source in self._sources.items()}
        specs = view_specs(views, parameters)
        views_of: dict[str, list[View]] = {}
        for view in views:
            views_of.setdefault(view.parameter, []).append(view)
        tied = sorted(views_of.keys() & set(self._aliases.values()))
        if tied:
            message = f"views of tied parameters cannot be published: {', '.join(tied)}"
            raise LayoutMismatchError(message)
        self._viewed = frozenset(views_of)
        self._specs: dict[str, TensorSpec] = {}
        for name, spec in parameters.items():
            self._specs |= (
                {view.name: specs[view.name] for view in views_of[name]} if name in views_of else {name: spec}
            )
        boxes = {name: source.box for name, source in self._sources.items() if source.box is not None}
        self._held = held_tensors(views, boxes)

    def _source(self, name: str, tensor: torch.Tensor, wire_dtype: str | None) -> _Source:
        is_cast = wire_dtype is not None and tensor.is_floating_point()
        dtype = torch_dtype(wire_dtype) if is_cast and wire_dtype is not None else tensor.dtype
        spec = TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype_name(dtype))
        return _Source(tensor=tensor, spec=spec, dtype=dtype, box=self._box(name, tensor))

    def _box(self, name: str, tensor: torch.Tensor) -> ShardSpec | None:
        shape = tuple(tensor.shape)
        nothing = ShardSpec(offset=(0,) * len(shape), shape=(0,) * len(shape)) if shape else None
        if not isinstance(tensor, DTensor):
            return ShardSpec(offset=(0,) * len(shape), shape=shape) if self.rank == 0 else nothing
        if not all(isinstance(placement, Shard | Replicate) for placement in tensor.placements):
            message = (
                f"{name} is placed as {tensor.placements}; only sharded and replicated parameters can be published"
            )
            raise LayoutMismatchError(message)
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None or any(
            isinstance(placement, Replicate) and index != 0
            for placement, index in zip(tensor.placements, coordinate, strict=True)
        ):
            return nothing
        sizes, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        held = tuple(tensor.to_local().shape)
        if tuple(sizes) != held:
            message = (
                f"{name} of shape {shape} placed as {tensor.placements} should be {tuple(sizes)} here but is {held}"
            )
            raise LayoutMismatchError(message)
        return ShardSpec(offset=tuple(offset), shape=held)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _clean(name: str) -> str:
    for part in _WRAPPER_PARTS:
        name = name.replace(part, "")
    return name


def _float_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    persistent = set(model.state_dict())
    return [
        (name, buffer) for name, buffer in model.named_buffers() if name in persistent and buffer.is_floating_point()
    ]
