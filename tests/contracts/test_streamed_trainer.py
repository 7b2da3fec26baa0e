"""The trainer contract where ranks are shown whole tensors, of torch or numpy, at once or one after another."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from rose.backends.sharded import ShardedTrainer
from rose.backends.streamed import StreamedTrainer
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.testing import FakeTrainer, TrainerContract


class TestStreamed(TrainerContract):
    def make_trainers(self):
        self.source = FakeTrainer.group(1)[0]
        specs = self.source.tensors().values()
        trainers = [StreamedTrainer(specs, rank=rank, world_size=3) for rank in range(3)]
        self.give(trainers)
        return trainers

    def give(self, trainers):
        for trainer in trainers:
            trainer.update(self.source.full())

    def step(self, trainers):
        self.source.step(0.5)
        self.give(trainers)
        return trainers


class TestOneAfterAnother(TestStreamed):
    def give(self, trainers):
        for trainer in trainers:
            trainer.update((name, bits.copy()) for name, bits in self.source.full().items())


class TestNobodySaidWhichTensors(TestStreamed):
    def make_trainers(self):
        torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rose-rl[fsdp]'")
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
        trainers = [StreamedTrainer(rank=rank, world_size=2, dtype="bfloat16") for rank in range(2)]
        self.give(trainers)
        return trainers

    def give(self, trainers):
        for trainer in trainers:
            trainer.update(self.model.named_parameters())

    def step(self, trainers):
        for parameter in self.model.parameters():
            parameter.data += 1.0
        self.give(trainers)
        return trainers


class TestSharded(TrainerContract):
    """Two ranks, each with half the rows of one tensor; of the other, which both hold, the first one publishes."""

    def make_trainers(self):
        self.torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rose-rl[fsdp]'")
        self.weight = self.torch.arange(12, dtype=self.torch.float32).reshape(4, 3)
        self.norm = self.torch.ones(3)
        specs = _specs((4, 3), weight="bfloat16") + _specs((3,), norm="float32")
        boxes = [{"weight": ShardSpec(offset=(2 * rank, 0), shape=(2, 3))} for rank in range(2)]
        boxes[0]["norm"] = ShardSpec(offset=(0,), shape=(3,))
        trainers = [ShardedTrainer(specs, boxes[rank], rank=rank, world_size=2) for rank in range(2)]
        return self.give(trainers)

    def give(self, trainers):
        for rank, trainer in enumerate(trainers):
            trainer.update([("weight", self.weight[2 * rank : 2 * rank + 2]), ("norm", self.norm)])
        return trainers

    def step(self, trainers):
        self.weight = self.weight + 1
        return self.give(trainers)


def _specs(shape: tuple[int, ...] = (2, 3), **dtypes: str) -> list[TensorSpec]:
    return [TensorSpec(name=name, shape=shape, dtype=dtype) for name, dtype in dtypes.items()]


def test_torch_tensors_are_copied_as_their_bits() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rose-rl[fsdp]'")
    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    trainer = StreamedTrainer(_specs(w="bfloat16"), aliases={"tied": "w"})
    trainer.update({"w": weight, "tied": weight})
    assert trainer.is_gathered
    assert trainer.shards()["w"].dtype == np.uint16
    assert trainer.shards()["w"][0, 1] == 0x3F80
    weight[0, 1] = 7.0
    assert trainer.shards()["w"][0, 1] == 0x3F80


def test_floats_are_cast_where_a_dtype_is_given() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rose-rl[fsdp]'")
    trainer = StreamedTrainer(dtype="bfloat16")
    trainer.update([("w", torch.tensor([1.0009765625, 3.0])), ("n", torch.tensor([7]))])
    assert {name: spec.dtype for name, spec in trainer.tensors().items()} == {"w": "bfloat16", "n": "int64"}
    assert trainer.shards()["w"].tolist() == [0x3F80, 0x4040]
    with pytest.raises(LayoutMismatchError, match="float13"):
        StreamedTrainer(dtype="float13")


def test_numpy_tensors_of_the_dtype_itself() -> None:
    trainer = StreamedTrainer(_specs(w="float32"))
    trainer.update({"w": np.ones((2, 3), dtype=np.float32)})
    assert trainer.shards()["w"].dtype == np.uint32
    assert trainer.shards()["w"][0, 0] == 0x3F800000


async def test_pairs_that_come_asynchronously() -> None:
    async def pairs() -> AsyncIterator[tuple[str, np.ndarray]]:
        yield "w", np.ones((2, 3), dtype=np.float32)

    trainer = StreamedTrainer()
    await trainer.update_async(pairs())
    assert trainer.shards()["w"][0, 0] == 0x3F800000


def test_tensors_are_shared_out_by_bytes() -> None:
    shapes = {"a": (8,), "b": (2,), "c": (4,), "d": (1,)}
    trainers = [StreamedTrainer(rank=rank, world_size=2) for rank in range(2)]
    for trainer in trainers:
        trainer.update((name, np.ones(shape, dtype=np.float32)) for name, shape in shapes.items())
    assert [sorted(trainer.layout()) for trainer in trainers] == [["a"], ["b", "c", "d"]]
    assert all(set(trainer.shards()) == set(trainer.layout()) for trainer in trainers), "nothing else is held"


def test_all_that_does_not_fit_is_named() -> None:
    trainer = StreamedTrainer(_specs(a="float32", b="float32", c="float32", d="float32"))
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


def test_shards_that_do_not_fit_are_named() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rose-rl[fsdp]'")
    with pytest.raises(LayoutMismatchError, match="v: no such tensor; w: box"):
        ShardedTrainer(
            _specs(w="float32"),
            {"w": ShardSpec(offset=(1, 0), shape=(2, 3)), "v": ShardSpec(offset=(), shape=())},
            rank=0,
            world_size=1,
        )
    boxes = {"a": ShardSpec(offset=(0, 0), shape=(2, 3)), "b": ShardSpec(offset=(0, 0), shape=(1, 3))}
    trainer = ShardedTrainer(_specs(a="float32", b="float32"), boxes, rank=0, world_size=1)
    with pytest.raises(LayoutMismatchError, match=r"a is missing; b has shape \(2, 3\), its box \(1, 3\)"):
        trainer.update({"b": torch.ones(2, 3)})
    with pytest.raises(LayoutMismatchError, match="call update"):
        trainer.shards()
