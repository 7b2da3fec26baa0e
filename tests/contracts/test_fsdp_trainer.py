"""The trainer contract on FSDP2 with one rank in this process; two ranks: tests/integration/test_fsdp_publish.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard

from rose.backends.fsdp import FsdpTrainer
from rose.interfaces.trainer import Trainer
from rose.testing import TrainerContract
from rose.transfer.source_views import stacked_experts_in


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting: Path = tmp_path_factory.mktemp("gloo") / "store"
    init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    destroy_process_group()


class TestFsdp(TrainerContract):
    def make_trainers(self) -> Sequence[Trainer]:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(129, 16), nn.Linear(16, 16), nn.LayerNorm(16))
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(self.model[1], mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        return [FsdpTrainer(self.model)]

    def step(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        return trainers


class Experts(nn.Module):
    """Two stacks of experts, cut by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(4, 6, 5))
        self.experts.down_proj = nn.Parameter(torch.randn(4, 5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        return (gate * up) @ self.experts.down_proj.transpose(1, 2)


class TestFsdpExperts(TrainerContract):
    """Stacked experts under checkpoint names."""

    def make_trainers(self) -> Sequence[Trainer]:
        torch.manual_seed(0)
        self.model = nn.Sequential(Experts())
        views = stacked_experts_in({name: tuple(p.shape) for name, p in self.model.named_parameters()})
        fully_shard(self.model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        return [FsdpTrainer(self.model, views=views)]

    def step(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        return trainers
