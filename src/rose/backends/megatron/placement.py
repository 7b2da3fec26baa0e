"""Where one rank's parameters lie in checkpoint coordinates. Pure: no torch, no process group.

Invariants: padding of the vocabulary is in no view; over the ranks that ``Ranks.is_owner`` names, the boxes that parameters
hold of a checkpoint tensor cover it once.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from rose.backends.megatron.families import Cut, ModelShape, Source
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec
from rose.transfer.source_views import View, gate_up_views, grouped_qkv_views

Shape = tuple[int, ...]


@attrs.frozen(kw_only=True)
class Ranks:
    """A rank's place in the groups that hold one kind of parameters (dense layers, or experts).

    Attributes:
        tensor: Its number among those that cut a parameter between them.
        num_tensor: How many they are.
        replica: Its number among those that hold the same.
    """

    tensor: int = 0
    num_tensor: int = 1
    replica: int = 0

    def is_owner(self, cut: Cut) -> bool:
        """Say whether this rank is the one to publish its box of a parameter that is cut so."""
        return self.replica == 0 and (cut is not Cut.WHOLE or self.tensor == 0)


@attrs.frozen(kw_only=True)
class Placed:
    """A parameter: the checkpoint tensors in it, in the coordinates of the uncut parameter, and the box that is this rank's."""

    views: tuple[View, ...]
    box: ShardSpec


def place(
    parameter: str,
    local_shape: Shape,
    source: Source,
    *,
    shapes: Mapping[str, Shape],
    ranks: Ranks,
    model: ModelShape,
) -> Placed:
    """Return where a rank's parameter lies.

    Args:
        parameter: Its name.
        local_shape: Shape of what this rank holds of it, padding included.
        source: What it holds.
        shapes: Shape of every checkpoint tensor.
        ranks: This rank's place.
        model: The model's sizes.

    Raises:
        LayoutMismatchError: The parameter has another shape than the model's sizes and the rank's place give.
    """
    shape = shapes[source.names[0]]
    dim, size = _cut_dim_and_size(source, local_shape, shapes, ranks)
    if dim is None:
        box = ShardSpec(offset=(0,) * len(shape), shape=shape)
    else:
        part, rest = divmod(size, ranks.num_tensor)
        if rest:
            message = f"{parameter}: {size} rows or columns cannot be cut over {ranks.num_tensor} tensor-parallel ranks"
            raise LayoutMismatchError(message)
        offset, sizes = [0] * len(shape), list(shape)
        offset[dim], sizes[dim] = ranks.tensor * part, part
        box = ShardSpec(offset=tuple(offset), shape=tuple(sizes))
    if box.shape != local_shape:
        message = (
            f"{parameter} has shape {local_shape} on tensor-parallel rank {ranks.tensor} of {ranks.num_tensor}, but "
            f"{box.shape} follows from the model's configuration; check vocab_size ({model.vocab_size}) and the family"
        )
        raise LayoutMismatchError(message)
    return Placed(views=_views(parameter, source, shapes, ranks, model), box=box)


def _cut_dim_and_size(
    source: Source, local_shape: Shape, shapes: Mapping[str, Shape], ranks: Ranks
) -> tuple[int | None, int]:
    """Return which dimension of the uncut parameter the ranks share out, and its size."""
    shape = shapes[source.names[0]]
    if source.cut is Cut.WHOLE:
        return None, 0
    if source.cut is Cut.COLUMNS:
        return 1, shape[1]
    if source.cut is Cut.VOCAB:
        return 0, max(local_shape[0] * ranks.num_tensor, shape[0])
    return 0, sum(shapes[name][0] for name in source.names)


def _views(
    parameter: str, source: Source, shapes: Mapping[str, Shape], ranks: Ranks, model: ModelShape
) -> tuple[View, ...]:
    first, *others = source.names
    shape = shapes[first]
    if source.cut is Cut.QKV:
        return grouped_qkv_views(
            parameter,
            (first, others[0], others[1]),
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rest=shape[1:],
        )
    if source.cut is Cut.GATE_UP:
        return gate_up_views(parameter, (first, others[0]), shape, num_ranks=ranks.num_tensor)
    return (View.whole(first, shape, parameter),)
