"""Weights of Qwen3-8B's shapes, filled on the device: one layer after another, and what a step changes in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.layout import TargetLayout, whole_box
from rose.transfer.plan import Cell, plan_source

HIDDEN, HEAD, KV, FFN = 4096, 4096, 1024, 12288
QUICK = 64
"""By what the sizes are divided in a rehearsal."""
NUM_PARAMETERS = 8_190_735_360
_SPLIT_DIMS = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 0, "up": 0, "down": 1}


def layer_shapes(*, is_quick: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer's weights."""
    h, q, kv, ffn = (size // QUICK if is_quick else size for size in (HIDDEN, HEAD, KV, FFN))
    shapes: dict[str, tuple[int, ...]] = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
    return shapes | {"gate": (ffn, h), "up": (ffn, h), "down": (h, ffn), "norm": (h,)}


def layers(num: int, device: torch.device, *, is_quick: bool) -> dict[str, torch.Tensor]:
    """Return the weights of some layers in bfloat16, on the device."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        f"layers.{i}.{name}": torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16)
        for i in range(num)
        for name, shape in layer_shapes(is_quick=is_quick).items()
    }


def change(weights: Mapping[str, torch.Tensor], *, seed: int, fraction: float) -> None:
    """Move a share of the elements by one bit pattern, up or down, as an optimizer's step does most of them."""
    for i, tensor in enumerate(weights.values()):
        generator = torch.Generator(tensor.device).manual_seed(1000 * seed + i)
        drawn = torch.rand(tensor.shape, device=tensor.device, generator=generator)
        move = (drawn < fraction / 2).to(torch.int16) - (drawn > 1 - fraction / 2).to(torch.int16)
        tensor.view(torch.int16).add_(move)


def specs_of(weights: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Return the weights as checkpoint tensors."""
    return {
        name: TensorSpec(name=name, shape=tuple(tensor.shape), dtype="bfloat16") for name, tensor in weights.items()
    }


def cells_of(weights: Mapping[str, torch.Tensor], *, num_ranks: int) -> tuple[dict[str, ShardSpec], Sequence[Cell]]:
    """Return a trainer rank's boxes, all of everything, and its cells for engines of ``num_ranks`` tensor-parallel ranks."""
    specs = specs_of(weights)
    layout = {name: whole_box(spec.shape) for name, spec in specs.items()}
    dims = {name: _SPLIT_DIMS[name.split(".")[-1]] for name in specs if name.split(".")[-1] in _SPLIT_DIMS}
    target = TargetLayout.tensor_parallel("tp", list(specs.values()), num_ranks=num_ranks, split_dims=dims)
    return layout, plan_source(0, layout, (target,), {}, tensors=specs)


def num_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    """Return the size of the weights."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
