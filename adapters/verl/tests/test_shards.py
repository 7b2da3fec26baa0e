"""Which boxes ranks publish: over all ranks each element once, whatever the mesh."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rose_verl.shards import local_shards, plan_of, tied_names, why_gathered

SHAPES = {"a": (10, 3), "b": (3, 4), "scalar": (), "plain": (4,)}


def state_of(rank, mesh_shape, placements):
    """A state dict as a rank of that mesh holds it; no rank talks to another."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=int(np.prod(mesh_shape)))
    mesh = init_device_mesh("cpu", mesh_shape)
    full = {name: torch.arange(max(1, int(np.prod(shape)))).reshape(shape).float() for name, shape in SHAPES.items()}
    found = {"plain": full["plain"], "scalar": full["scalar"]}
    for name in ("a", "b"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(full[name].shape, mesh, placements)
        local = full[name][tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
        found[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full[name].shape, stride=full[name].stride()
        )
    return full, found


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((1,), [Shard(0)]),
        ((4,), [Shard(0)]),  # uneven: b has three rows for four ranks
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((3,), [Replicate()]),
    ],
)
def test_over_all_ranks_each_element_is_published_once(mesh_shape, placements):
    counts = {name: np.zeros(shape, int) for name, shape in SHAPES.items()}
    for rank in range(int(np.prod(mesh_shape))):
        full, state = state_of(rank, mesh_shape, placements)
        try:
            assert not why_gathered(state, "qwen3")
            plan = plan_of(state, aliases={}, dtype="bfloat16", rank=rank)
            assert {spec.name: spec.shape for spec in plan.tensors} == {name: SHAPES[name] for name in state}
            assert {spec.dtype for spec in plan.tensors} == {"bfloat16"}
            for name, part in local_shards(state, plan.layout).items():
                box = plan.layout[name]
                where = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
                assert torch.equal(part, full[name][where])
                counts[name][where] += 1
        finally:
            torch.distributed.destroy_process_group()
    for name, count in counts.items():
        assert (count == 1).all(), name


def test_what_cannot_be_read_shard_by_shard_says_why():
    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 6, 2)}
    assert "experts" in why_gathered(fused, "qwen3_moe")
    assert not why_gathered(fused, "gpt_oss")

    class Odd(torch.Tensor):
        pass

    assert "Odd" in why_gathered({"x": torch.zeros(2).as_subclass(Odd)}, None)


def test_tied_parameters_are_published_under_their_first_name():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    assert tied_names(model) == {"head.weight": "embed.weight"}
    plan = plan_of(model.state_dict(), aliases=tied_names(model), dtype=None, rank=0)
    assert [spec.name for spec in plan.tensors] == ["embed.weight"]
    assert plan.aliases == {"head.weight": "embed.weight"}
    assert plan.tensors[0].dtype == "float32"
    assert not plan_of(model.state_dict(), aliases={}, dtype=None, rank=1).layout


def test_integers_keep_their_type():
    (spec,) = plan_of({"steps": torch.zeros(2, dtype=torch.int64)}, aliases={}, dtype="bfloat16", rank=0).tensors
    assert spec.dtype == "int64"
