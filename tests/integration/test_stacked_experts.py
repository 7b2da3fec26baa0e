"""A mixture of experts as transformers holds it in memory, published under the names and bits of its checkpoint."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from rose.backends.fsdp import FsdpTrainer, bits_of
from rose.interfaces.trainer import Trainer
from rose.testing import TrainerContract
from rose.transfer.layout import read_whole, slices_in, whole_box
from rose.transfer.source_views import stacked_experts_in

WORKER = Path(__file__).with_name("stacked_experts_worker.py")


def test_w17_a_real_model_leaves_as_its_saved_checkpoint(tmp_path: Path) -> None:
    """Case W17: names, shapes and bits are those that ``save_pretrained`` writes."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    saved = {name: t for file in tmp_path.glob("*.safetensors") for name, t in safetensors.load_file(file).items()}
    views = stacked_experts_in({name: tuple(p.shape) for name, p in model.named_parameters()})
    shards = FsdpTrainer(model, views=views).shards()
    assert len(views) == 2 * 4 * 3
    assert set(shards) == set(saved)
    for name, tensor in saved.items():
        np.testing.assert_array_equal(read_whole(shards[name]), bits_of(tensor), err_msg=name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Let two processes shard a model of stacked experts, and bring back what they recorded."""
    out = tmp_path_factory.mktemp("experts")
    tasks = [json.dumps({"rank": rank, "world_size": 2, "out": str(out)}) for rank in range(2)]
    workers = [subprocess.Popen([sys.executable, str(WORKER), task]) for task in tasks]
    try:
        assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [pickle.loads((out / f"rank-{rank}.pkl").read_bytes()) for rank in range(2)]  # noqa: S301 - our own


@pytest.mark.distributed
class TestStackedExpertsOnTwoRanks(TrainerContract):
    """Experts cut by expert on two ranks, 2 and 1, and every down projection cut along its columns."""

    @pytest.fixture
    def trainers(self, trained: list[Any]) -> Sequence[Trainer]:
        self.after = [records[1] for records, _ in trained]
        return [records[0] for records, _ in trained]

    def step(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        assert len(trainers) == len(self.after)
        return self.after

    def test_bits_are_the_experts(self, trainers: Sequence[Trainer], trained: list[Any]) -> None:
        """Each rank's box of an expert is that part of the stack."""
        stack = trained[0][1]["0.experts.gate_up_proj"].view(np.uint16)
        down = trained[0][1]["0.experts.down_proj"].view(np.uint16)
        assert "0.experts.2.up_proj.weight" not in trainers[0].layout()
        np.testing.assert_array_equal(trainers[1].shards()["0.experts.2.up_proj.weight"], stack[2, 3:])
        for trainer in trainers:
            box = trainer.layout()["0.experts.1.down_proj.weight"]
            assert box.shape == (4, 2)
            part = down[1][slices_in(box, whole_box((4, 4)))]
            np.testing.assert_array_equal(trainer.shards()["0.experts.1.down_proj.weight"], part)
