"""One FSDP2 rank that holds a part of two stacks of experts: records what its trainer says before and after a step."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from rose.backends.fsdp import FsdpTrainer
from rose.testing import TrainerRecord
from rose.transfer.source_views import stacked_experts_in


class Experts(nn.Module):
    """Three experts over two ranks: uneven along the first dimension, even along the last."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(3, 6, 4))
        self.experts.down_proj = nn.Parameter(torch.randn(3, 4, 4))
        self.norm = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        return nn.functional.pad(gate * up, (0, 1)) @ self.experts.down_proj.transpose(1, 2) * self.norm


def main() -> None:
    task = json.loads(sys.argv[1])
    init_process_group(
        "gloo", init_method=f"file://{task['out']}/meeting", rank=task["rank"], world_size=task["world_size"]
    )
    torch.manual_seed(0)
    model = nn.Sequential(Experts())
    views = stacked_experts_in({name: tuple(p.shape) for name, p in model.named_parameters()})
    whole = {name: p.detach().to(torch.bfloat16).view(torch.int16).numpy() for name, p in model.named_parameters()}
    columns = model[0].experts.down_proj
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (task["world_size"],)),
        shard_placement_fn=lambda p: Shard(2) if p is columns else None,
    )
    trainer = FsdpTrainer(model, views=views)
    records = [TrainerRecord.of(trainer)]
    model(torch.ones(2, 4)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    records.append(TrainerRecord.of(trainer))
    Path(task["out"], f"rank-{task['rank']}.pkl").write_bytes(pickle.dumps((records, whole)))
    barrier()
    destroy_process_group()
    os._exit(0)  # once in a while gloo's threads end a process by a signal when it leaves by itself


if __name__ == "__main__":
    main()
