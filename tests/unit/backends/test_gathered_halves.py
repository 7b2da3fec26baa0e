"""Gathered tensors whose update ends half-way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rose.backends.gathered import GatheredTrainer
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import TensorSpec

SPECS = [TensorSpec(name=name, shape=(4,), dtype="float32") for name in "ab"]


def pairs(value: float, *names: str) -> Iterator[tuple[str, np.ndarray]]:
    for name in names:
        yield name, np.full(4, value, dtype=np.float32)


def test_half_an_update_from_pairs_is_never_published() -> None:
    """The copies of the update before are overwritten by then, so that what is there is a mixture."""
    trainer = GatheredTrainer(SPECS)
    trainer.update(pairs(1.0, "a", "b"))
    with pytest.raises(LayoutMismatchError, match="b is missing"):
        trainer.update(pairs(2.0, "a"))
    with pytest.raises(LayoutMismatchError, match="call update"):
        trainer.shards()
    trainer.update(pairs(3.0, "a", "b"))
    assert all(bits.view(np.float32).tolist() == [3.0] * 4 for bits in trainer.shards().values())


def test_a_gather_that_breaks_off_leaves_nothing_to_publish() -> None:
    trainer = GatheredTrainer(SPECS)
    trainer.update(pairs(1.0, "a", "b"))

    def breaking() -> Iterator[tuple[str, np.ndarray]]:
        yield from pairs(2.0, "a")
        message = "a rank was lost"
        raise RuntimeError(message)

    with pytest.raises(RuntimeError):
        trainer.update(breaking())
    with pytest.raises(LayoutMismatchError, match="call update"):
        trainer.shards()


def test_a_mapping_that_does_not_fit_leaves_the_update_before() -> None:
    trainer = GatheredTrainer(SPECS)
    trainer.update(dict(pairs(1.0, "a", "b")))
    with pytest.raises(LayoutMismatchError):
        trainer.update(dict(pairs(2.0, "a")))
    assert all(bits.view(np.float32).tolist() == [1.0] * 4 for bits in trainer.shards().values())
