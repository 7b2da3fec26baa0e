"""The trainer contract where rank 0 alone has weights, given as torch or numpy tensors, whole or one after another."""

from __future__ import annotations

import numpy as np
import pytest

from rose.backends.gathered import GatheredTrainer
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import TensorSpec
from rose.testing import FakeTrainer, TrainerContract


class TestGathered(TrainerContract):
    def make_trainers(self):
        self.source = FakeTrainer.group(1)[0]
        specs = self.source.tensors().values()
        trainers = [GatheredTrainer(specs, rank=rank, world_size=3) for rank in range(3)]
        self.give(trainers)
        return trainers

    def give(self, trainers):
        for trainer in trainers:
            trainer.update(self.source.full())

    def step(self, trainers):
        self.source.step(0.5)
        self.give(trainers)
        return trainers


class TestOneAfterAnother(TestGathered):
    def give(self, trainers):
        for trainer in trainers:
            trainer.update((name, bits.copy()) for name, bits in self.source.full().items())


class TestOneRank(TestGathered):
    def make_trainers(self):
        self.source = FakeTrainer.group(1)[0]
        trainers = [GatheredTrainer(self.source.tensors().values())]
        self.give(trainers)
        return trainers


def _specs(**dtypes: str) -> list[TensorSpec]:
    return [TensorSpec(name=name, shape=(2, 3), dtype=dtype) for name, dtype in dtypes.items()]


def test_torch_tensors_become_their_bits_without_a_copy() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rose-rl[fsdp]'")
    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    trainer = GatheredTrainer(_specs(w="bfloat16"), aliases={"tied": "w"})
    trainer.update({"w": weight, "tied": weight})
    assert trainer.is_gathered
    assert trainer.shards()["w"].dtype == np.uint16
    weight[0, 0] = 7.0
    assert trainer.shards()["w"][0, 0] == 0x40E0
    trainer.update(iter([("w", weight)]))
    weight[0, 0] = 0.0
    assert trainer.shards()["w"][0, 0] == 0x40E0, "what came one after another is copied"


def test_numpy_tensors_of_the_dtype_itself() -> None:
    trainer = GatheredTrainer(_specs(w="float32"))
    trainer.update({"w": np.ones((2, 3), dtype=np.float32)})
    assert trainer.shards()["w"].dtype == np.uint32
    assert trainer.shards()["w"][0, 0] == 0x3F800000


def test_all_that_does_not_fit_is_named() -> None:
    trainer = GatheredTrainer(_specs(a="float32", b="float32", c="float32", d="float32"))
    with pytest.raises(LayoutMismatchError) as caught:
        trainer.update(
            {
                "a": np.ones((2, 3), dtype=np.float32),
                "b": np.ones((2, 3), dtype=np.float16),
                "c": np.ones((3, 2), dtype=np.float32),
                "e": np.ones((2, 3), dtype=np.float32),
            }
        )
    text = str(caught.value)
    for part in (
        "b is float16(2, 3), promised float32(2, 3)",
        "c is float32(3, 2), promised float32(2, 3)",
        "d is missing",
        "e is unknown",
    ):
        assert part in text
    assert "a is" not in text
    with pytest.raises(LayoutMismatchError, match="call update"):
        trainer.shards()
