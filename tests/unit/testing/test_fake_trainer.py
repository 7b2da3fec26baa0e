"""The fake trainer cuts as torch does, and its ranks stay one model."""

from __future__ import annotations

import numpy as np

from rose.interfaces import TensorSpec
from rose.testing import FakeTrainer


def rows(num_rows, world_size):
    specs = [TensorSpec(name="w", shape=(num_rows, 2), dtype="bfloat16")]
    return [rank.layout()["w"].shape[0] for rank in FakeTrainer.group(world_size, specs)]


def test_rows_are_cut_as_torch_chunk_does():
    """Case W13 (rows) and W10 (a, d): uneven and empty shards."""
    assert rows(10, 4) == [3, 3, 3, 1]
    assert rows(5, 4) == [2, 2, 1, 0]
    assert rows(3, 8) == [1, 1, 1, 0, 0, 0, 0, 0]
    assert rows(128, 24) == [6] * 21 + [2, 0, 0]


def test_ranks_hold_one_model_through_its_steps():
    ranks = FakeTrainer.group(3, seed=4)
    for fraction in (0.0, 0.5):
        for rank in ranks:
            rank.step(fraction)
        full = ranks[0].full()
        for name, spec in ranks[0].tensors().items():
            parts = [rank.shards()[name] for rank in ranks if name in rank.shards()]
            joined = np.concatenate(parts) if spec.shape else parts[0]
            np.testing.assert_array_equal(joined, full[name])


def test_steps_change_about_the_fraction_asked_for():
    specs = [TensorSpec(name="w", shape=(100, 100), dtype="float32")]
    trainer = FakeTrainer(specs=specs)
    before = trainer.full()["w"]
    trainer.step(0.0)
    assert np.array_equal(before, trainer.full()["w"])
    trainer.step(0.1)
    assert 0.08 < np.mean(before != trainer.full()["w"]) < 0.12


def test_seeds_make_models():
    same = [FakeTrainer(seed=seed).full()["model.embed_tokens.weight"] for seed in (1, 1, 2)]
    assert np.array_equal(same[0], same[1])
    assert not np.array_equal(same[0], same[2])
