"""Where a subscriber writes: the receiving side's view of one engine rank's live weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer import kernels
from rose.transfer.delta import Bits
from rose.transfer.layout import bits_dtype, intersect, slices_in, whole_box


@runtime_checkable
class WeightSink(Protocol):
    """The live weights of one engine rank, addressed by checkpoint names and global boxes.

    A ``box`` given to a method lies inside one of the boxes that ``boxes`` lists for that name. Bits are unsigned-integer
    arrays of the tensor's wire dtype. Writes overwrite in place; where a rank keeps several copies of an element (padding,
    replicated heads, fused parameters) the sink writes all of them. Positions are int32 or int64, ascending, flat row-major
    within the box. Reads may come from another thread than writes, never at the same time; several threads write disjoint boxes.
    """

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every checkpoint tensor the whole engine requires, tied names it holds separately included."""

    def boxes(self) -> Mapping[str, Sequence[ShardSpec]]:
        """Return the boxes this rank holds, disjoint within a tensor; a name may be absent."""

    def write_dense(self, name: str, box: ShardSpec, bits: Bits) -> None:
        """Overwrite a box; ``bits`` has the box's shape and may be read-only."""

    def write_sparse(self, name: str, box: ShardSpec, positions: Bits, values: Bits) -> None:
        """Overwrite some elements of a box."""

    def read(self, name: str, box: ShardSpec) -> Bits:
        """Return the bits of a box as the engine holds them now, in the box's shape; may be a view."""

    def gather(self, name: str, box: ShardSpec, positions: Bits) -> Bits:
        """Return the bits of some elements of a box as the engine holds them now."""


@runtime_checkable
class SupportsFlush(Protocol):
    """A sink that queues writes, as one over a device's memory does: they count once ``flush`` has returned."""

    def flush(self) -> None:
        """Return once every write so far is in the live weights, so that the engine may compute again."""


class ViewSink(ABC):
    """A sink over memory that numpy can see: a subclass says where, this class reads and writes."""

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every tensor the engine requires."""

    @abstractmethod
    def boxes(self) -> Mapping[str, Sequence[ShardSpec]]:
        """Return the boxes this rank holds."""

    @abstractmethod
    def views(self, name: str, box: ShardSpec) -> Sequence[Bits]:
        """Return the live memory of every copy of a box, in the box's shape.

        Raises:
            LayoutMismatchError: This rank does not hold it.
        """

    def write_dense(self, name: str, box: ShardSpec, bits: Bits) -> None:
        """Overwrite a box."""
        for view in self.views(name, box):
            view[...] = bits

    def write_sparse(self, name: str, box: ShardSpec, positions: Bits, values: Bits) -> None:
        """Overwrite some elements of a box."""
        for view in self.views(name, box):
            flat = flat_rows(view)
            if flat is None:
                view[np.unravel_index(positions, box.shape)] = values
            else:
                kernels.load().scatter(flat, positions, values)

    def read(self, name: str, box: ShardSpec) -> Bits:
        """Return the live memory of a box; of several copies, the first."""
        return self.views(name, box)[0]

    def gather(self, name: str, box: ShardSpec, positions: Bits) -> Bits:
        """Return some elements of a box; of several copies, the first."""
        view = self.views(name, box)[0]
        flat = flat_rows(view)
        if flat is None:
            found: Bits = view[np.unravel_index(positions, box.shape)]
            return found
        return kernels.load().gather(flat, positions)


def flat_rows(array: Bits) -> Bits | None:
    """Return an array as equal contiguous rows, ``[num_rows, row_len]``, sharing its memory; ``None`` if its strides forbid it."""
    row_len, dim = 1, array.ndim
    while dim and (array.strides[dim - 1] == row_len * array.itemsize or array.shape[dim - 1] == 1):
        dim -= 1
        row_len *= array.shape[dim]
    if array.size == 0 or (row_len == 1 and array.size > 1):
        return None
    try:
        return np.reshape(array, (array.size // row_len, row_len), copy=False)
    except ValueError:
        return None


class ArraySink(ViewSink):
    """A sink of plain numpy arrays: the reference implementation, for tests, fakes and checkers.

    Args:
        tensors: Every tensor the engine requires.
        boxes: What this rank holds; everything by default.
    """

    def __init__(
        self, tensors: Mapping[str, TensorSpec], boxes: Mapping[str, Sequence[ShardSpec]] | None = None
    ) -> None:
        self._tensors = dict(tensors)
        held = boxes if boxes is not None else {name: (whole_box(spec.shape),) for name, spec in tensors.items()}
        self._arrays = {
            name: [(box, np.zeros(box.shape, dtype=bits_dtype(tensors[name].dtype))) for box in name_boxes]
            for name, name_boxes in held.items()
        }

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every tensor the engine requires."""
        return self._tensors

    def boxes(self) -> Mapping[str, Sequence[ShardSpec]]:
        """Return the boxes this rank holds."""
        return {name: tuple(box for box, _ in held) for name, held in self._arrays.items()}

    def array(self, name: str) -> Bits:
        """Return the live array of a tensor's first box."""
        return self._arrays[name][0][1]

    def views(self, name: str, box: ShardSpec) -> Sequence[Bits]:
        """Return the view of a box."""
        for held, array in self._arrays.get(name, ()):
            if box in (held, intersect(held, box)):
                index: Any = (*slices_in(box, held), ...)  # the ellipsis keeps a scalar a view
                return (array[index],)
        message = f"this rank does not hold {name!r} at {box.offset}+{box.shape}"
        raise LayoutMismatchError(message)
