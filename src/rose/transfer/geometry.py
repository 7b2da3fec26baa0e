"""Many cells as arrays: where each lies, without an object for each; a large model has hundreds of thousands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import attrs
import numpy as np

from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.kernels import Array
from rose.transfer.layout import boxes_overlap

_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
_MAX_EDGE = 1 << 62
"""Offsets and sizes beyond it could wrap around when they are added."""


@attrs.frozen(kw_only=True)
class PlacedCell:
    """A piece of one tensor, in global coordinates."""

    tensor: str
    box: ShardSpec


@attrs.define(kw_only=True, eq=False, slots=False)
class Geometry(Sequence[PlacedCell]):
    """A sequence of cells. Not to be changed after it is made.

    Attributes:
        names: Tensor names that ``tensor`` indexes.
        tensor: Which tensor each cell is of, uint32.
        depth: Number of dimensions of each cell, uint8.
        offset: Where each cell begins, int64 ``[num_cells, most dimensions]``, 0 beyond its own dimensions.
        shape: Its shape, likewise.
    """

    names: Sequence[str]
    tensor: Array
    depth: Array
    offset: Array
    shape: Array

    @classmethod
    def of(cls, cells: Sequence[PlacedCell], names: Sequence[str]) -> Geometry:
        """Return cells as arrays.

        Raises:
            KeyError: A cell's tensor is not among the names.
        """
        if isinstance(cells, Geometry) and list(cells.names) == list(names):
            return cells
        number = {name: i for i, name in enumerate(names)}
        most = max((len(cell.box.shape) for cell in cells), default=0)
        padding = (0,) * most
        offsets = [cell.box.offset + padding[len(cell.box.offset) :] for cell in cells]
        shapes = [cell.box.shape + padding[len(cell.box.shape) :] for cell in cells]
        return cls(
            names=names,
            tensor=np.array([number[cell.tensor] for cell in cells], dtype="<u4"),
            depth=np.array([len(cell.box.shape) for cell in cells], dtype="|u1"),
            offset=np.array(offsets, dtype="<i8").reshape(len(cells), most),
            shape=np.array(shapes, dtype="<i8").reshape(len(cells), most),
        )

    @classmethod
    def join(cls, parts: Sequence[Geometry]) -> Geometry:
        """Return the cells of several ranks, which name the same tensors, as one."""
        most = max(part.offset.shape[1] for part in parts)

        def padded(array: Array) -> Array:
            return np.pad(array, ((0, 0), (0, most - array.shape[1])))

        return cls(
            names=parts[0].names,
            tensor=np.concatenate([part.tensor for part in parts]),
            depth=np.concatenate([part.depth for part in parts]),
            offset=np.concatenate([padded(part.offset) for part in parts]),
            shape=np.concatenate([padded(part.shape) for part in parts]),
        )

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], names: Sequence[str]) -> Geometry:
        """Read what ``arrays`` gave.

        Raises:
            KeyError, ValueError: The arrays are not of that form.
        """
        found = cls(names=names, **{key: arrays[key] for key in ("tensor", "depth", "offset", "shape")})
        is_sound = (
            found.offset.shape == found.shape.shape == (len(found), found.offset.shape[-1])
            and found.depth.shape == found.tensor.shape == (len(found),)
            and [array.dtype.str for array in found.arrays().values()] == ["<u4", "|u1", "<i8", "<i8"]
            and not np.any(found.tensor >= len(names))
            and not np.any(found.depth > found.offset.shape[1])
            and not np.any((found.offset < 0) | (found.shape < 0))
            and not np.any((found.offset > _MAX_EDGE) | (found.shape > _MAX_EDGE))
        )
        if not is_sound:
            message = f"the geometry of {len(found)} cells contradicts itself"
            raise ValueError(message)
        return found

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name, for a record."""
        return {"tensor": self.tensor, "depth": self.depth, "offset": self.offset, "shape": self.shape}

    def __len__(self) -> int:
        return int(self.tensor.size)

    @overload
    def __getitem__(self, index: int) -> PlacedCell: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PlacedCell]: ...
    def __getitem__(self, index: int | slice) -> PlacedCell | Sequence[PlacedCell]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        depth = int(self.depth[index])
        box = ShardSpec(
            offset=tuple(self.offset[index, :depth].tolist()), shape=tuple(self.shape[index, :depth].tolist())
        )
        return PlacedCell(tensor=self.names[int(self.tensor[index])], box=box)

    def __iter__(self) -> Iterator[PlacedCell]:
        columns = (self.tensor.tolist(), self.depth.tolist(), self.offset.tolist(), self.shape.tolist())
        for tensor, depth, offset, shape in zip(*columns, strict=True):
            box = ShardSpec(offset=tuple(offset[:depth]), shape=tuple(shape[:depth]))
            yield PlacedCell(tensor=self.names[tensor], box=box)

    @cached_property
    def _known_overlaps(self) -> dict[Any, bool]:
        return {}

    @cached_property
    def num_elements(self) -> _Ints:
        """Return the number of elements of each cell."""
        beyond = np.arange(self.shape.shape[1])[None, :] >= self.depth[:, None]
        sizes: _Ints = np.where(beyond, 1, self.shape).prod(axis=1, dtype=np.int64)
        return sizes

    @cached_property
    def by_tensor(self) -> Mapping[str, _Ints]:
        """Return the numbers of the cells of each tensor that has some, ascending."""
        order = np.argsort(self.tensor, kind="stable")
        present, starts = np.unique(self.tensor[order], return_index=True)
        groups = np.split(order, starts[1:]) if present.size else []
        return {self.names[tensor]: group for tensor, group in zip(present.tolist(), groups, strict=True)}

    def is_same(self, other: Geometry) -> bool:
        """Return whether these are the same cells in the same order."""
        mine, others = self.arrays(), other.arrays()
        return list(self.names) == list(other.names) and all(np.array_equal(mine[key], others[key]) for key in mine)

    def find_cover_problem(self, spec: TensorSpec) -> str | None:
        """Say why the cells do not cover each element of a tensor exactly once, or return ``None``."""
        numbers = self.by_tensor.get(spec.name, np.empty(0, dtype=np.int64))
        depth = len(spec.shape)
        if depth > self.offset.shape[1]:
            return "a cell has another rank" if numbers.size else None if 0 in spec.shape else "no cell holds any of it"
        starts, sizes = self.offset[numbers, :depth], self.shape[numbers, :depth]
        if np.any(self.depth[numbers] != depth) or np.any(starts + sizes > np.array(spec.shape, dtype=np.int64)):
            return "a cell leaves the tensor or has another rank"
        covered, whole = int(self.num_elements[numbers].sum()), int(np.prod(spec.shape, dtype=np.int64))
        if covered != whole:
            return f"cells hold {covered} of {whole} elements"
        return "cells overlap" if self._overlap(starts, sizes) else None

    def _overlap(self, starts: Array, sizes: Array) -> bool:
        """Say whether boxes overlap; layers and experts are cut alike, so the same question is asked again and again."""
        key = (starts.shape, starts.tobytes(), sizes.tobytes())
        if key not in self._known_overlaps:
            self._known_overlaps[key] = boxes_overlap(starts, starts + sizes)
        return self._known_overlaps[key]

    def common(self, name: str, box: ShardSpec) -> tuple[_Ints, Array, Array]:
        """Return what the cells of a tensor have in common with a box: numbers of those that share an element, offsets, shapes."""
        numbers = self.by_tensor.get(name, np.empty(0, dtype=np.int64))
        depth = len(box.shape)
        if not numbers.size:  # the arrays may have fewer dimensions than a tensor without a cell
            return numbers, np.empty((0, depth), dtype=np.int64), np.empty((0, depth), dtype=np.int64)
        low, size = np.array(box.offset, dtype=np.int64), np.array(box.shape, dtype=np.int64)
        starts = np.maximum(self.offset[numbers, :depth], low)
        sizes = np.minimum(self.offset[numbers, :depth] + self.shape[numbers, :depth], low + size) - starts
        shares = (sizes > 0).all(axis=1)
        return numbers[shares], starts[shares], sizes[shares]
