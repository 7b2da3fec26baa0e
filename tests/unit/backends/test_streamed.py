"""Tensors that are shown one after another, and passes that end half-way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rose.backends.streamed import StreamedTrainer
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import TensorSpec

SPECS = [TensorSpec(name=name, shape=(4,), dtype="float32") for name in "ab"]


def pairs(value: float, *names: str) -> Iterator[tuple[str, np.ndarray]]:
    for name in names:
        yield name, np.full(4, value, dtype=np.float32)


def test_half_an_update_from_pairs_is_never_published() -> None:
    """The copies of the update before are overwritten by then, so that what is there is a mixture."""
    trainer = StreamedTrainer(SPECS)
    trainer.update(pairs(1.0, "a", "b"))
    with pytest.raises(LayoutMismatchError, match="b is missing"):
        trainer.update(pairs(2.0, "a"))
    with pytest.raises(LayoutMismatchError, match="call update"):
        trainer.shards()
    trainer.update(pairs(3.0, "a", "b"))
    assert all(bits.view(np.float32).tolist() == [3.0] * 4 for bits in trainer.shards().values())


def test_a_gather_that_breaks_off_leaves_nothing_to_publish() -> None:
    trainer = StreamedTrainer(SPECS)
    trainer.update(pairs(1.0, "a", "b"))

    def breaking() -> Iterator[tuple[str, np.ndarray]]:
        yield from pairs(2.0, "a")
        message = "a rank was lost"
        raise RuntimeError(message)

    with pytest.raises(RuntimeError):
        trainer.update(breaking())
    with pytest.raises(LayoutMismatchError, match="call update"):
        trainer.shards()


def test_a_first_pass_that_breaks_off_is_begun_anew() -> None:
    """What was learned of it stays, so that ranks which saw more of it still agree on who publishes what."""
    ranks = [StreamedTrainer(rank=rank, world_size=2) for rank in range(2)]

    def breaking(*names: str) -> Iterator[tuple[str, np.ndarray]]:
        yield from pairs(2.0, *names)
        message = "a rank was lost"
        raise RuntimeError(message)

    for trainer, names in zip(ranks, ("a", "ab"), strict=True):
        with pytest.raises(RuntimeError):
            trainer.update(breaking(*names))
    for trainer in ranks:
        trainer.update(pairs(3.0, "a", "b", "c"))
    assert sorted(name for trainer in ranks for name in trainer.layout()) == ["a", "b", "c"]
    with pytest.raises(LayoutMismatchError, match="d is unknown"):
        ranks[0].update(pairs(3.0, "a", "b", "c", "d"))
