"""Where a subscriber writes: the receiving side's view of one engine rank's live weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.delta import Bits
from rose.transfer.layout import bits_dtype, intersect, slices_in, whole_box


@runtime_checkable
class WeightSink(Protocol):
    """The live weights of one engine rank, addressed by checkpoint names and global boxes.

    A ``box`` given to a method lies inside one of the boxes that ``boxes`` lists for that name. Bits are unsigned-integer
    arrays of the tensor's wire dtype. Writes overwrite in place; where a rank keeps several copies of an element (padding,
    replicated heads, fused parameters) the sink writes all of them.
    """

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every checkpoint tensor the whole engine requires, tied names it holds separately included."""

    def boxes(self) -> Mapping[str, Sequence[ShardSpec]]:
        """Return the boxes this rank holds, disjoint within a tensor; a name may be absent."""

    def write_dense(self, name: str, box: ShardSpec, bits: Bits) -> None:
        """Overwrite a box; ``bits`` has the box's shape and may be read-only."""

    def write_sparse(
        self, name: str, box: ShardSpec, positions: np.ndarray[Any, np.dtype[np.int64]], values: Bits
    ) -> None:
        """Overwrite some elements of a box; ``positions`` (int64, ascending) are flat row-major within the box."""

    def read(self, name: str, box: ShardSpec) -> Bits:
        """Return the bits of a box as the engine holds them now, in the box's shape."""


class ArraySink:
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

    def write_dense(self, name: str, box: ShardSpec, bits: Bits) -> None:
        """Overwrite a box."""
        self._view(name, box)[...] = bits

    def write_sparse(
        self, name: str, box: ShardSpec, positions: np.ndarray[Any, np.dtype[np.int64]], values: Bits
    ) -> None:
        """Overwrite some elements of a box."""
        self._view(name, box)[np.unravel_index(positions, box.shape)] = values

    def read(self, name: str, box: ShardSpec) -> Bits:
        """Return a copy of a box."""
        return self._view(name, box).copy()

    def _view(self, name: str, box: ShardSpec) -> Bits:
        for held, array in self._arrays.get(name, ()):
            if box in (held, intersect(held, box)):
                index: Any = (*slices_in(box, held), ...)  # the ellipsis keeps a scalar a view
                view: Bits = array[index]
                return view
        message = f"this rank does not hold {name!r} at {box.offset}+{box.shape}"
        raise LayoutMismatchError(message)
