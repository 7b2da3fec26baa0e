"""Which box of a tensor a rank publishes, told from where a DTensor lies. No collective, and no tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rose.interfaces.trainer import ShardSpec, TensorSpec

_FUSED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


@attrs.frozen(kw_only=True)
class Plan:
    """How one rank publishes a state dict.

    Attributes:
        tensors: Every tensor of the model, in order, in the dtype in which it travels.
        layout: This rank's boxes.
        aliases: Tied names.
    """

    tensors: tuple[TensorSpec, ...]
    layout: Mapping[str, ShardSpec]
    aliases: Mapping[str, str]


def why_gathered(state: Mapping[str, Any], model_type: str | None) -> str:
    """Return why a state dict cannot be published as each rank's own boxes; empty when it can. The same on every rank."""
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            if not all(type(placement).__name__ in ("Shard", "Replicate") for placement in tensor.placements):
                return f"{name} is placed as {tensor.placements}"
        elif not isinstance(tensor, torch.Tensor) or type(tensor).__name__ not in ("Tensor", "Parameter"):
            return f"{name} is a {type(tensor).__name__}"
        if name.endswith(_FUSED) and tensor.dim() == 3 and model_type != "gpt_oss":  # noqa: PLR2004 - experts, rows, columns
            return f"{name} holds the experts of a layer in one, which engines load one by one"
    return ""


def plan_of(state: Mapping[str, Any], *, aliases: Mapping[str, str], dtype: str | None, rank: int) -> Plan:
    """Return which boxes of a state dict this rank publishes. Of replicas, the first holder publishes.

    Args:
        state: By checkpoint name; ``why_gathered`` has nothing against it.
        aliases: Tied names: alias -> the name whose bits it shares.
        dtype: What floating-point tensors travel as; ``None`` keeps each one's own.
        rank: This rank.
    """
    own = {name: tensor for name, tensor in state.items() if name not in aliases}
    boxes = {name: _box(tensor, rank) for name, tensor in own.items()}
    return Plan(
        tensors=tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=_wire_dtype(tensor, dtype))
            for name, tensor in own.items()
        ),
        layout={name: box for name, box in boxes.items() if box is not None},
        aliases={alias: name for alias, name in aliases.items() if name in own},
    )


def local_shards(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return this rank's own parts, as they lie."""
    parts = {name: state[name] for name in names}
    return {name: part.to_local() if isinstance(part, DTensor) else part for name, part in parts.items()}


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the names under which a parameter is known again: alias -> its first name. The same on every rank."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return tied


def _wire_dtype(tensor: Any, dtype: str | None) -> str:
    own = str(tensor.dtype).removeprefix("torch.")
    return dtype if dtype is not None and tensor.is_floating_point() else own


def _box(tensor: Any, rank: int) -> ShardSpec | None:
    """Return the box that this rank publishes; ``None`` where another rank does, or the box is empty."""
    if not isinstance(tensor, DTensor):
        return ShardSpec(offset=(0,) * tensor.dim(), shape=tuple(tensor.shape)) if rank == 0 else None
    coordinate = tensor.device_mesh.get_coordinate()
    is_first = coordinate is not None and not any(
        place for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )
    if not is_first:
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return ShardSpec(offset=tuple(offset), shape=tuple(shape)) if 0 not in shape else None
