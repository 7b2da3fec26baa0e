"""The codec's inner loops: find and code changes, read them back, scatter them, and sum states.

Two implementations of one contract, ``Kernels``: a small C library, built when the package is installed where there is a C
compiler, and numpy. Both read and write the same bytes and the same sums; ``load`` gives the fastest there is.

Positions of a cell are flat row-major, 0 to ``num_elements - 1``. A cell is a number of equally long rows that lie at equal
distances in the tensor (``Rows``), and arrays given here are 2-D ``[num_rows, row_len]`` of unsigned integers (1, 2, 4 or 8
bytes an element), contiguous within a row, with any distance between rows.

Streams of the changes of one cell (``ChangeStreams``), in the order of positions:

* *gap*: how many unchanged elements lie before a changed one (after the changed one before it). Its lowest ``shift`` bits
  (0, 4 or 8) go to ``lows``: 4-bit pieces two a byte, the first in the low half, 8-bit pieces one a byte. What is above them is
  written to ``gaps`` as ``high // 255`` bytes of 255 and one byte ``high % 255``.
* *difference* (``is_overwrite`` false): new minus old pattern, modulo 2^bits, seen as signed d (never 0). For elements of 1 and
  2 bytes: a 4-bit code in ``codes``, two a byte, the first in the low half: ``2 * (d - 1)`` for 1 <= d <= 7, ``2 * (-d - 1) + 1``
  for -7 <= d <= -1, else 15 and the difference modulo 2^bits, little-endian, in ``escapes``. For elements of 4 and 8 bytes: byte planes in
  ``codes``: the lowest byte of every difference, then the next byte of every one, ...; no ``escapes``.
* *overwrite* (``is_overwrite`` true): the new patterns as byte planes in ``codes``; no ``escapes``.

``shift`` follows the density: with mean gap m = (num_elements - num_changed) / num_changed, 0 below 96, 4 below 1536, else 8.
An odd last half byte is 0.

The *sum* of a set of elements is a pair of numbers modulo 2^64, sum over elements x at global position g of ``x * key_i(g)``, with
``key_i(g) = (T_i[g % 1024] * M_i(g // 1024)) mod 2^64``, T_i odd 32-bit and M_i odd 64-bit pseudo-random numbers: outputs of
splitmix64, number j from 0, with the lowest bit set, T_i the high halves of those of seed i and M_i those of seed i + 2, i = 1, 2.
An 8-byte element counts as its two 4-byte halves, low first, at positions 2g and 2g + 1. So sums of disjoint
boxes add up to the sum of their union, however a tensor is cut, and a change moves it by ``(new - old) * key``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from rose.errors import BackendUnavailableError

Array = np.ndarray[Any, np.dtype[Any]]
Sum = tuple[int, int]
"""A state sum: two numbers, each 0 to 2^64 - 1."""
MAX_COLUMNS_CELLS, MAX_COLUMNS_WIDTH = 64, 1 << 15
"""Cells that ``compare_columns`` takes, and elements of their common row."""


@attrs.frozen(kw_only=True)
class Rows:
    """Where a cell lies in its tensor: element (r, c) has the flat global position ``start + r * stride + c``."""

    num_rows: int
    row_len: int
    start: int
    stride: int

    @property
    def num_elements(self) -> int:
        """Return how many elements the cell has."""
        return self.num_rows * self.row_len


@attrs.frozen(kw_only=True, eq=False)
class ChangeStreams:
    """The coded changes of one cell, before compression; see the module's text.

    Attributes:
        num_changed: Changed elements, at least 1.
        shift: Low bits of a gap that are kept apart: 0, 4 or 8.
        gaps: High parts of gaps.
        lows: Low parts of gaps.
        codes: Differences or patterns.
        escapes: Differences that have no 4-bit code.
        values_sum: Sum of the new patterns of the changed elements alone, as if they lay one after the other from position 0;
            ``None`` where it is not known. Tells whether differences were added to the right patterns, which the sum of the
            cell does not: that moves by the difference whatever it was added to.
    """

    num_changed: int
    shift: int
    gaps: bytes | memoryview
    lows: bytes | memoryview
    codes: bytes | memoryview
    escapes: bytes | memoryview
    values_sum: Sum | None = None

    @property
    def num_bytes(self) -> int:
        """Return the size of all streams."""
        return len(self.gaps) + len(self.lows) + len(self.codes) + len(self.escapes)


@attrs.frozen(kw_only=True, eq=False)
class Comparison:
    """What comparing a cell found.

    Attributes:
        num_changed: Elements whose bits differ.
        streams: Their coded form; ``None`` when nothing changed or the streams would not be smaller than the cell itself.
        sum_delta: What to add to the old state's sum to get the new one's, modulo 2^64 each.
    """

    num_changed: int
    streams: ChangeStreams | None
    sum_delta: Sum


class Kernels(Protocol):
    """The inner loops. Stateless and thread-safe; the C ones release the interpreter lock."""

    name: str

    def compare(self, new: Array, old: Array, rows: Rows, *, is_overwrite: bool) -> Comparison:
        """Compare a cell bit by bit with its old state and code the changes.

        Args:
            new: Patterns now, ``[num_rows, row_len]``, inner dimension contiguous.
            old: Patterns before, same shape and dtype; another row distance is fine.
            rows: Where the cell lies in its tensor.
            is_overwrite: Code new patterns instead of differences.
        """

    def compare_columns(
        self, pairs: Iterable[tuple[Array, Array]], cells: Sequence[Rows], *, is_overwrite: bool
    ) -> list[Comparison]:
        """Compare cells that lie side by side, in one pass over their common rows: what ``compare`` would find in each.

        Args:
            pairs: Patterns now and before of all columns, ``[some rows, total width]``: one after the other, all rows. What
                makes them calls no kernels.
            cells: Neighbouring columns, left to right: the same rows, each cell starts where the one before it ends. At most
                ``MAX_COLUMNS_CELLS`` of them, at most ``MAX_COLUMNS_WIDTH`` elements wide together.
            is_overwrite: Code new patterns instead of differences.

        Raises:
            ValueError: The cells do not lie so, or are too many or too wide, or the pairs are not all of their rows.
            TypeError: The pairs' types differ, or are not native unsigned integers.
        """

    def decode(
        self, streams: ChangeStreams, *, num_elements: int, dtype: np.dtype[Any], is_overwrite: bool
    ) -> tuple[Array, Array]:
        """Read streams back.

        Returns:
            Positions, ascending, int32 (int64 for a cell of 2^31 elements or more), and for each its difference modulo 2^bits
            or new pattern, of ``dtype``.

        Raises:
            CorruptUpdateError: The streams cannot be what ``compare`` makes for a cell of this size; nothing is read beyond them.
        """

    def gather(self, array: Array, positions: Array) -> Array:
        """Return the elements of a 2-D array (rows contiguous within) at flat positions."""

    def scatter(self, array: Array, positions: Array, values: Array) -> None:
        """Overwrite the elements of a 2-D array (rows contiguous within) at flat, ascending positions, all in range."""

    def add(self, array: Array, positions: Array, differences: Array) -> None:
        """Add differences, modulo 2^bits, to elements in place; otherwise as ``scatter``."""

    def state_sum(self, bits: Array, rows: Rows) -> Sum:
        """Return the sum of a whole cell."""

    def changes_sum(self, positions: Array, old: Array, new: Array, rows: Rows) -> Sum:
        """Return by how much the sum of a cell moves when elements at ``positions`` go from ``old`` to ``new``."""


_chosen: dict[str | None, Kernels] = {}


def load(name: str | None = None) -> Kernels:
    """Return an implementation: ``native`` or ``numpy``, by default the C library where it was built, else numpy.

    Raises:
        BackendUnavailableError: ``native`` was asked for by name and is not built or does not load.
        ValueError: There is none of this name.
    """
    if name not in _chosen:
        _chosen[name] = _load(name)
    return _chosen[name]


def force(name: str | None) -> None:
    """Let ``load()`` give the implementation of this name from now on, in this process; ``None`` ends that. For tests.

    Raises:
        BackendUnavailableError: ``native`` is not built or does not load.
        ValueError: There is none of this name.
    """
    _chosen.pop(None, None)
    if name is not None:
        _chosen[None] = load(name)


def _load(name: str | None) -> Kernels:
    # The implementations import this module's types.
    from rose.transfer.kernels.native import NativeKernels  # noqa: PLC0415
    from rose.transfer.kernels.numpy_kernels import NumpyKernels  # noqa: PLC0415

    if name == "numpy":
        return NumpyKernels()
    if name == "native":
        return NativeKernels()
    if name is not None:
        message = f"there are no kernels {name!r}, only 'native' and 'numpy'"
        raise ValueError(message)
    try:
        return load("native")
    except BackendUnavailableError:
        return load("numpy")
