"""What every trainer must do; see ``rose.interfaces.trainer``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rose.interfaces.trainer import ShardSpec, Trainer
from rose.testing.trainer import TrainerRecord
from rose.transfer.layout import bits_dtype, find_cover_problem, read_whole


class TrainerContract:
    """Subclass it and override ``make_trainers``; override ``step`` to test that changes show.

    Ranks that live in other processes are brought to the test as ``rose.testing.TrainerRecord``.
    """

    def make_trainers(self) -> Sequence[Trainer]:
        """Return every rank of one model, in order of rank."""
        message = "override make_trainers() and return every rank of one model"
        raise NotImplementedError(message)

    def step(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        """Change some weights on every rank, as an optimizer would, and return the ranks."""
        pytest.skip(f"step() is not overridden for {len(trainers)} ranks")

    @pytest.fixture
    def trainers(self) -> Sequence[Trainer]:
        """Give every rank for the length of one test."""
        return self.make_trainers()

    def test_ranks_are_numbered(self, trainers: Sequence[Trainer]) -> None:
        """Ranks count from 0 and all know the world's size."""
        assert [trainer.rank for trainer in trainers] == list(range(len(trainers)))
        assert {trainer.world_size for trainer in trainers} == {len(trainers)}

    def test_every_rank_names_the_same_tensors(self, trainers: Sequence[Trainer]) -> None:
        """Names, global shapes, dtypes and order agree on all ranks: the plan of an update is made from them alone."""
        first = list(trainers[0].tensors().items())
        assert first, "a trainer without tensors"
        assert all(name == spec.name for name, spec in first)
        for trainer in trainers[1:]:
            assert list(trainer.tensors().items()) == first, f"rank {trainer.rank} sees another model"

    def test_boxes_cover_every_element_once(self, trainers: Sequence[Trainer]) -> None:
        """Over all ranks the boxes are a partition. Look at uneven and empty shards, and at replicated parameters.

        A replicated tensor is published by one rank; the others give an empty box or leave it out.
        """
        boxes: dict[str, list[ShardSpec]] = {name: [] for name in trainers[0].tensors()}
        for trainer in trainers:
            for name, box in trainer.layout().items():
                assert name in boxes, f"rank {trainer.rank} has a box of {name}, which is no tensor of the model"
                boxes[name].append(box)
        for name, spec in trainers[0].tensors().items():
            problem = find_cover_problem(spec.shape, boxes[name])
            assert problem is None, f"{name}: {problem}"

    def test_shards_are_the_bits_of_the_boxes(self, trainers: Sequence[Trainer]) -> None:
        """One array a box, of the box's shape, as unsigned integers as wide as the wire dtype: bits, never values."""
        for trainer in trainers:
            layout, shards, specs = trainer.layout(), trainer.shards(), trainer.tensors()
            assert set(shards) == set(layout)
            for name, bits in shards.items():
                assert bits.shape == layout[name].shape, f"{name} on rank {trainer.rank}"
                assert bits.dtype == bits_dtype(specs[name].dtype), f"{name} on rank {trainer.rank}"

    def test_reading_changes_nothing(self, trainers: Sequence[Trainer]) -> None:
        """Without a step in between, two readings are the same bits."""
        for trainer in trainers:
            first = TrainerRecord.of(trainer).shards()
            for name, bits in trainer.shards().items():
                np.testing.assert_array_equal(read_whole(bits), first[name], err_msg=name)

    def test_slices_are_parts_of_the_box(self, trainers: Sequence[Trainer]) -> None:
        """A slice is that part of the box, contiguous in its last dimension. Look at casts of non-contiguous parameters."""
        for trainer in trainers:
            for name, bits in trainer.shards().items():
                whole = read_whole(bits)
                assert whole.shape == bits.shape
                assert whole.dtype == bits.dtype
                index = tuple(slice(size // 3, size) for size in bits.shape)
                part = bits[index]
                np.testing.assert_array_equal(part, whole[index], err_msg=name)
                assert part.size == 0 or not part.ndim or part.shape[-1] == 1 or part.strides[-1] == part.itemsize, name

    def test_a_step_shows(self, trainers: Sequence[Trainer]) -> None:
        """After a step the shards are the new weights. Look at casts that are made only once."""
        before = [TrainerRecord.of(trainer) for trainer in trainers]
        after = self.step(trainers)
        pairs = [
            (read_whole(old.shards()[name]), read_whole(bits))
            for old, new in zip(before, after, strict=True)
            for name, bits in new.shards().items()
        ]
        assert any(not np.array_equal(old, new) for old, new in pairs), "no bit changed over a step"
