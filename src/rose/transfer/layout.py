"""Boxes of tensors, the bit patterns they travel as, and what a set of engine ranks holds.

A box is a ``ShardSpec`` in global coordinates. A scalar has one box of shape ``()``; a box with a zero dimension is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any

import attrs
import numpy as np

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec
from rose.transfer.kernels import Rows

_Ints = np.ndarray[Any, np.dtype[np.int64]]

_BITS_BY_DTYPE = {
    "bool": "<u1",
    "uint8": "<u1",
    "int8": "<u1",
    "float8_e4m3fn": "<u1",
    "float8_e5m2": "<u1",
    "bfloat16": "<u2",
    "float16": "<u2",
    "int16": "<u2",
    "float32": "<u4",
    "int32": "<u4",
    "float64": "<u8",
    "int64": "<u8",
}


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """Return the unsigned-integer type (little-endian) that carries the bit patterns of ``dtype``.

    Raises:
        LayoutMismatchError: The dtype is not one that ROSE carries.
    """
    code = _BITS_BY_DTYPE.get(dtype)
    if code is None:
        message = f"dtype {dtype!r} cannot be carried; allowed: {', '.join(_BITS_BY_DTYPE)}"
        raise LayoutMismatchError(message)
    return np.dtype(code)


def num_bytes(spec: TensorSpec) -> int:
    """Return the size of a whole tensor on the wire, in bytes."""
    return prod(spec.shape) * bits_dtype(spec.dtype).itemsize


def whole_box(shape: tuple[int, ...]) -> ShardSpec:
    """Return the box that is the whole tensor."""
    return ShardSpec(offset=(0,) * len(shape), shape=shape)


def intersect(a: ShardSpec, b: ShardSpec) -> ShardSpec | None:
    """Return the common part of two boxes of one tensor, or ``None`` when they share no element."""
    starts = tuple(map(max, a.offset, b.offset))
    ends = (min(ao + an, bo + bn) for ao, an, bo, bn in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    if any(size <= 0 for size in shape):
        return None
    return ShardSpec(offset=starts, shape=shape)


def slices_in(box: ShardSpec, outer: ShardSpec) -> tuple[slice, ...]:
    """Return the index of ``box`` inside an array that holds ``outer``; the box must lie inside it."""
    return tuple(
        slice(start - base, start - base + size)
        for start, size, base in zip(box.offset, box.shape, outer.offset, strict=True)
    )


def read_whole(bits: ShardBits) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the patterns of a whole box, which may be a view."""
    return np.asarray(bits[tuple(slice(0, size) for size in bits.shape)])  # numpy gives scalars for ()


def find_box_problem(shape: tuple[int, ...], box: ShardSpec) -> str | None:
    """Say why a box is no box of a tensor of this shape, or return ``None``."""
    if len(box.offset) != len(shape) or len(box.shape) != len(shape):
        return f"box {box.offset}+{box.shape} has another rank than shape {shape}"
    inside = (o >= 0 and n >= 0 and o + n <= d for o, n, d in zip(box.offset, box.shape, shape, strict=True))
    if not all(inside):
        return f"box {box.offset}+{box.shape} leaves shape {shape}"
    return None


def find_cover_problem(shape: tuple[int, ...], boxes: Sequence[ShardSpec]) -> str | None:
    """Say why the boxes do not cover each element of the shape exactly once, or return ``None``."""
    for box in boxes:
        problem = find_box_problem(shape, box)
        if problem is not None:
            return problem
    filled = [box for box in boxes if box.num_elements]
    covered = sum(box.num_elements for box in filled)
    if covered != prod(shape):
        return f"boxes hold {covered} of {prod(shape)} elements"
    if has_overlap(filled):
        return "boxes overlap"
    return None


def has_overlap(boxes: Sequence[ShardSpec]) -> bool:
    """Say whether two of the boxes of one tensor share an element."""
    filled = [box for box in boxes if box.num_elements]
    if len(filled) < 2 or not filled[0].shape:  # noqa: PLR2004 - two make a pair
        return len(filled) > 1
    cut_dims = [d for d in range(len(filled[0].shape)) if len({(box.offset[d], box.shape[d]) for box in filled}) > 1]
    if len(cut_dims) == 1:
        dim = cut_dims[0]
        spans = sorted((box.offset[dim], box.offset[dim] + box.shape[dim]) for box in filled)
        return any(first[1] > second[0] for first, second in pairwise(spans))
    starts = np.array([box.offset for box in filled], dtype=np.int64)
    return _has_overlap(starts, starts + np.array([box.shape for box in filled], dtype=np.int64))


def boxes_overlap(starts: _Ints, ends: _Ints) -> bool:
    """Say whether two of many non-empty boxes ``[num_boxes, num_dims]`` of one tensor share an element."""
    if len(starts) < 2:  # noqa: PLR2004 - two make a pair
        return False
    if not starts.shape[1]:
        return True
    return _has_overlap(starts, ends)


def _has_overlap(starts: _Ints, ends: _Ints) -> bool:
    """Split the boxes at the planes that cut none of them, again and again; compare pairs only where no plane is left."""
    if len(starts) == 1:
        return False
    for dim in range(starts.shape[1]):
        order = np.argsort(starts[:, dim], kind="stable")
        reached = np.maximum.accumulate(ends[order, dim])
        planes = np.flatnonzero(starts[order[1:], dim] >= reached[:-1]) + 1
        if len(planes):
            return any(_has_overlap(starts[group], ends[group]) for group in np.split(order, planes))
    for i in range(len(starts) - 1):
        shared = np.minimum(ends[i], ends[i + 1 :]) > np.maximum(starts[i], starts[i + 1 :])
        if bool(shared.all(axis=1).any()):
            return True
    return False


def rows_of(box: ShardSpec, shape: tuple[int, ...]) -> Rows:
    """Return where a box lies in a tensor as equally long rows at equal distances; a contiguous box is one row.

    Raises:
        LayoutMismatchError: The box is not of that form; ``split_into_rows`` cuts it into boxes that are.
    """
    row_len, levels = _levels(box, shape)
    if len(levels) > 1:
        message = f"box {box.offset}+{box.shape} of shape {shape} is not rows at equal distances"
        raise LayoutMismatchError(message)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    num_rows, stride = levels[0][1:] if levels else (1, row_len)
    return Rows(num_rows=num_rows, row_len=row_len, start=start, stride=stride)


def split_into_rows(box: ShardSpec, shape: tuple[int, ...]) -> list[ShardSpec]:
    """Cut a box along outer dimensions into as few boxes as have rows at equal distances, in row-major order."""
    _, levels = _levels(box, shape)
    if len(levels) < 2:  # noqa: PLR2004 - rows of rows are two levels
        return [box]
    kept = max(levels, key=lambda level: level[1])
    dims = [dim for level in levels if level is not kept for dim in level[0]]
    offsets = product(*(range(box.offset[dim], box.offset[dim] + box.shape[dim]) for dim in dims))
    return [_pinned(box, dims, at) for at in offsets]


def split_to_size(box: ShardSpec, max_elements: int) -> list[ShardSpec]:
    """Cut a box into near-equal pieces of at most so many elements, in row-major order, along its outermost dimensions."""
    if box.num_elements <= max_elements:
        return [box]
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    size = box.shape[dim]
    slices_a_piece = max(1, max_elements * size // box.num_elements)
    num_pieces = -(-size // slices_a_piece)
    edges = [box.offset[dim] + size * i // num_pieces for i in range(num_pieces + 1)]
    pieces = [_replaced(box, dim, start, end - start) for start, end in pairwise(edges)]
    return [part for piece in pieces for part in split_to_size(piece, max_elements)]


def _levels(box: ShardSpec, shape: tuple[int, ...]) -> tuple[int, list[tuple[list[int], int, int]]]:
    """Return the length of contiguous rows, and the levels of rows, outermost first: dimensions, how many, distance."""
    if not box.num_elements:
        return 0, []
    row_len, stride = 1, 1
    levels: list[tuple[list[int], int, int]] = []
    for dim in reversed(range(len(shape))):
        size = box.shape[dim]
        if size == 1:
            pass
        elif not levels and row_len == stride:
            row_len *= size
        elif levels and levels[-1][1] * levels[-1][2] == stride:  # the rows go on at the same distance
            dims, count, distance = levels[-1]
            levels[-1] = ([dim, *dims], count * size, distance)
        else:
            levels.append(([dim], size, stride))
        stride *= shape[dim]
    return row_len, levels[::-1]


def _pinned(box: ShardSpec, dims: Sequence[int], at: Sequence[int]) -> ShardSpec:
    for dim, start in zip(dims, at, strict=True):
        box = _replaced(box, dim, start, 1)
    return box


def _replaced(box: ShardSpec, dim: int, start: int, size: int) -> ShardSpec:
    return ShardSpec(
        offset=(*box.offset[:dim], start, *box.offset[dim + 1 :]),
        shape=(*box.shape[:dim], size, *box.shape[dim + 1 :]),
    )


def split_evenly(size: int, num_parts: int) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of each part as ``torch.chunk`` cuts: full parts first, then the rest, then empty ones."""
    step = -(-size // num_parts) if size else 0
    starts = [min(part * step, size) for part in range(num_parts)]
    return [(start, min(step, size - start)) for start in starts]


@attrs.frozen(kw_only=True)
class TargetLayout:
    """What the ranks of one kind of engine hold; the publisher cuts its cells along these boxes.

    Attributes:
        layout_id: Name of the layout, the same for every engine that shares it.
        tensors: Every checkpoint tensor the engine requires.
        ranks: Per engine rank, tensor name -> the boxes it holds (absent: none).
        aliases: Tied names: alias -> the name whose bits it shares.
    """

    layout_id: str
    tensors: tuple[TensorSpec, ...]
    ranks: tuple[Mapping[str, tuple[ShardSpec, ...]], ...]
    aliases: Mapping[str, str] = attrs.field(factory=dict)

    @classmethod
    def whole(cls, layout_id: str, tensors: Sequence[TensorSpec]) -> TargetLayout:
        """Return the layout of an engine of one rank that holds everything."""
        return cls(
            layout_id=layout_id, tensors=tuple(tensors), ranks=({t.name: (whole_box(t.shape),) for t in tensors},)
        )

    @classmethod
    def tensor_parallel(
        cls, layout_id: str, tensors: Sequence[TensorSpec], *, num_ranks: int, split_dims: Mapping[str, int]
    ) -> TargetLayout:
        """Return a layout that cuts the named tensors along one dimension and replicates the others."""
        ranks = [
            {t.name: (_split_box(t.shape, split_dims.get(t.name), rank, num_ranks),) for t in tensors}
            for rank in range(num_ranks)
        ]
        return cls(layout_id=layout_id, tensors=tuple(tensors), ranks=tuple(ranks))

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back."""
        return {
            "layout_id": self.layout_id,
            "tensors": [[t.name, list(t.shape), t.dtype] for t in self.tensors],
            "ranks": [
                {name: [[list(box.offset), list(box.shape)] for box in boxes] for name, boxes in rank.items()}
                for rank in self.ranks
            ],
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TargetLayout:
        """Read what ``to_json`` wrote.

        Raises:
            LayoutMismatchError: The data is not of that form.
        """
        try:
            return cls(
                layout_id=data["layout_id"],
                tensors=tuple(TensorSpec(name=n, shape=tuple(s), dtype=d) for n, s, d in data["tensors"]),
                ranks=tuple(
                    {
                        name: tuple(ShardSpec(offset=tuple(o), shape=tuple(s)) for o, s in boxes)
                        for name, boxes in r.items()
                    }
                    for r in data["ranks"]
                ),
                aliases=dict(data["aliases"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            message = f"not a target layout: {error!r}"
            raise LayoutMismatchError(message) from error


def _split_box(shape: tuple[int, ...], dim: int | None, rank: int, num_ranks: int) -> ShardSpec:
    if dim is None:
        return whole_box(shape)
    start, length = split_evenly(shape[dim], num_ranks)[rank]
    return _replaced(whole_box(shape), dim, start, length)
