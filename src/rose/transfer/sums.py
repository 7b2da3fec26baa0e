"""Proof by sums: that a trainer, a version and an engine have the same bits, tensor by tensor, however each of them cuts them.

The sum of a tensor is the sum over any boxes that cover it once (see ``rose.transfer.kernels``), so nobody gathers anything: every rank
sums what it holds, and small numbers are added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec, Trainer
from rose.transfer import delta, kernels
from rose.transfer.delta import add_sums
from rose.transfer.kernels import Sum
from rose.transfer.layout import find_cover_problem, rows_of, slices_in, split_into_rows, split_to_size
from rose.transfer.sink import WeightSink

_BLOCK_ELEMENTS = 4 << 20

BoxSum = tuple[str, ShardSpec, Sum]
"""A tensor's name, a box of it, and the sum of the box's bits."""


def box_sum(bits: ShardBits, box: ShardSpec, shape: tuple[int, ...]) -> Sum:
    """Return the sum of a box, read block by block.

    Args:
        bits: The box's bits.
        box: The box.
        shape: The whole tensor's shape.
    """
    loops = kernels.load()
    total: Sum = (0, 0)
    if not box.num_elements:
        return total
    for piece in split_into_rows(box, shape):
        for part in split_to_size(piece, _BLOCK_ELEMENTS):
            rows = rows_of(part, shape)
            block = delta.as_rows(np.asarray(bits[slices_in(part, box)]), rows)
            total = add_sums(total, loops.state_sum(block, rows))
    return total


def trainer_sums(trainer: Trainer) -> dict[str, Sum]:
    """Return the sum of every box that this trainer rank holds; a tensor's is that of all ranks, added by ``add_sums``."""
    tensors, shards = trainer.tensors(), trainer.shards()
    return {
        name: box_sum(shards[name], box, tensors[name].shape) if box.num_elements else (0, 0)
        for name, box in trainer.layout().items()
    }


def sink_sums(sink: WeightSink) -> list[BoxSum]:
    """Return the sum of every box that an engine rank holds, as its live weights are now."""
    tensors = sink.tensors()
    return [
        (name, box, box_sum(sink.read(name, box), box, tensors[name].shape))
        for name, boxes in sink.boxes().items()
        for box in boxes
    ]


def engine_sums(ranks: Iterable[Iterable[BoxSum]], tensors: Mapping[str, TensorSpec]) -> dict[str, Sum]:
    """Return the sum of every tensor of an engine, from those of its ranks' boxes; copies of a box must agree.

    Raises:
        LayoutMismatchError: The boxes do not cover a tensor exactly once, or copies of a box differ; names the tensors.
    """
    found: defaultdict[str, dict[ShardSpec, Sum]] = defaultdict(dict)
    problems = []
    for rows in ranks:
        for name, box, total in rows:
            if found[name].setdefault(box, total) != total:
                problems.append(f"{name} at {box.offset}+{box.shape} differs between ranks")
    for name, spec in tensors.items():
        problem = find_cover_problem(spec.shape, list(found[name]))
        if problem is not None:
            problems.append(f"{name} of shape {spec.shape}: {problem}")
    if problems:
        message = f"the engine's ranks do not hold one copy of the weights together: {'; '.join(problems)}"
        raise LayoutMismatchError(message)
    return {name: add_sums(*boxes.values()) for name, boxes in found.items()}
