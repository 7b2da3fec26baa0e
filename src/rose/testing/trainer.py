"""Trainers without a framework: seeded numpy weights cut unevenly over ranks, and a record of another trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import attrs
import numpy as np

from rose.interfaces.trainer import ShardSpec, TensorSpec, Trainer
from rose.transfer.layout import bits_dtype, read_whole, slices_in, split_evenly, whole_box

DEFAULT_TENSORS = (
    TensorSpec(name="model.embed_tokens.weight", shape=(10, 4), dtype="bfloat16"),
    TensorSpec(name="model.layers.0.mlp.down_proj.weight", shape=(5, 3), dtype="bfloat16"),
    TensorSpec(name="model.norm.weight", shape=(3,), dtype="float32"),
    TensorSpec(name="model.scale", shape=(), dtype="float32"),
    TensorSpec(name="model.nothing", shape=(0, 4), dtype="bfloat16"),
)
"""A few small tensors with the shapes that go wrong: uneven rows, fewer rows than ranks, a scalar, an empty one."""


class FakeTrainer(Trainer):
    """One rank of a model of random bits. Ranks of one seed and the same steps hold shards of one model.

    Each tensor is cut along its first axis as ``torch.chunk`` cuts it (10 rows over 4 ranks: 3, 3, 3, 1); scalars are
    rank 0's, and absent from the layout of the others.

    Args:
        rank: This rank.
        world_size: How many ranks there are.
        specs: The tensors.
        seed: What the weights and their changes are drawn from.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, specs: Sequence[TensorSpec] = DEFAULT_TENSORS, seed: int = 0
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._specs = {spec.name: spec for spec in specs}
        self._rng = np.random.default_rng(seed)
        self._bits = {spec.name: self._draw(spec).reshape(spec.shape) for spec in specs}

    @classmethod
    def group(
        cls, world_size: int, specs: Sequence[TensorSpec] = DEFAULT_TENSORS, seed: int = 0
    ) -> tuple[FakeTrainer, ...]:
        """Return every rank of one model."""
        return tuple(cls(rank, world_size, specs, seed) for rank in range(world_size))

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return the tensors in the order they were given."""
        return dict(self._specs)

    def layout(self) -> Mapping[str, ShardSpec]:
        """Return this rank's rows of each tensor."""
        boxes = {name: self._box(spec) for name, spec in self._specs.items()}
        return {name: box for name, box in boxes.items() if box is not None}

    def shards(self) -> Mapping[str, np.ndarray]:
        """Return views of this rank's rows; ``step`` changes them."""
        views = {}
        for name, box in self.layout().items():
            whole = self._bits[name]
            views[name] = whole[slices_in(box, whole_box(whole.shape))] if box.shape else whole
        return views

    def full(self) -> Mapping[str, np.ndarray]:
        """Return the bits of the whole model, which a real rank could not: what engines must hold after an update."""
        return {name: bits.copy() for name, bits in self._bits.items()}

    def step(self, fraction: float = 0.1) -> None:
        """Change the bits of about this fraction of the elements; call it on every rank."""
        for spec in self._specs.values():
            fresh = self._draw(spec)
            is_changed = self._rng.random(fresh.size) < fraction
            flat = self._bits[spec.name].reshape(-1)
            flat[is_changed] = fresh[is_changed]

    def _draw(self, spec: TensorSpec) -> np.ndarray:
        dtype = bits_dtype(spec.dtype)
        return self._rng.integers(0, np.iinfo(dtype).max, size=prod(spec.shape), dtype=dtype.type, endpoint=True)

    def _box(self, spec: TensorSpec) -> ShardSpec | None:
        if not spec.shape:
            return whole_box(()) if self.rank == 0 else None
        first, num_rows = split_evenly(spec.shape[0], self.world_size)[self.rank]
        rest = spec.shape[1:]
        return ShardSpec(offset=(first, *(0 for _ in rest)), shape=(num_rows, *rest))


@attrs.frozen(kw_only=True)
class TrainerRecord(Trainer):
    """What one rank of a trainer said, copied: picklable, so that a test can collect the ranks of other processes."""

    rank: int
    world_size: int
    tensor_specs: Mapping[str, TensorSpec]
    boxes: Mapping[str, ShardSpec]
    bits: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, trainer: Trainer) -> TrainerRecord:
        """Record a rank as it is now."""
        return cls(
            rank=trainer.rank,
            world_size=trainer.world_size,
            tensor_specs=dict(trainer.tensors()),
            boxes=dict(trainer.layout()),
            bits={name: np.array(read_whole(bits)) for name, bits in trainer.shards().items()},
        )

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return the recorded tensors."""
        return self.tensor_specs

    def layout(self) -> Mapping[str, ShardSpec]:
        """Return the recorded boxes."""
        return self.boxes

    def shards(self) -> Mapping[str, np.ndarray]:
        """Return the recorded bits."""
        return self.bits
