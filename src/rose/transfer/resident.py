"""What a trainer may offer whose weights lie on a device: to keep the last published bits there and to compare there.

An optional ability of ``ShardBits``. Where a shard has it, the encoder keeps no copy of its bits: the trainer makes a ``ResidentBase``
for it once, and a ``Comparer`` gives for each cell what ``Kernels.compare`` would give, byte for byte. Nothing else is different:
not what is sent, not what is kept of a failed attempt, not what an audit finds.

Life cycle of one shard (the encoder's steps; see ``rose.transfer.encoder`` for what commits):

1. [COMMIT of a first version] ``new_base``, then ``take`` of every cell, then ``settle``.
2. [ENCODE of a later one] ``Comparer.compare`` of all cells in their order; what is sent whole is read from the shard as always.
3. [COMMIT] ``take`` of every cell that changed, then ``settle``: from then on the trainer may change its weights.

A shard that comes without the ability while its base is resident, or the other way round, costs a copy of each cell, no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np

from rose.interfaces.trainer import ShardBits
from rose.transfer.kernels import Comparison, Rows, Sum


@runtime_checkable
class ResidentBase(Protocol):
    """The last published bits of one shard, where the trainer keeps them. A ``ShardBits``: a slice is a copy on the host."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the shard."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the unsigned-integer type of the patterns."""

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the patterns of a part, on the host."""

    def take(self, shard: ShardBits, index: tuple[slice, ...]) -> None:
        """Take a part of a shard, of any kind, as published; may return before it has."""

    def settle(self) -> None:
        """Return once all parts that were taken are here."""

    def state_sum(self, index: tuple[slice, ...], rows: Rows) -> Sum:
        """Return the sum of a cell; ``index`` is where it is in the shard, ``rows`` where in the tensor."""


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """One cell to compare: where it is in its shard, and where in the tensor."""

    shard: ShardBits
    base: ResidentBase
    index: tuple[slice, ...]
    rows: Rows


class Comparer(Protocol):
    """Compares cells of one device."""

    def compare(self, parts: Iterable[Part], *, is_overwrite: bool) -> Iterator[Comparison]:
        """Yield what ``Kernels.compare`` would find in each cell, in their order; works ahead of its caller.

        Args:
            parts: Cells, none empty; of any shards that have this comparer, and bases that these made.
            is_overwrite: Code new patterns instead of differences.
        """


@runtime_checkable
class SupportsResidentBase(ShardBits, Protocol):
    """A shard whose base may stay where it is."""

    @property
    def comparer(self) -> Comparer:
        """Return what compares it: the same object for all shards of a device."""

    def new_base(self) -> ResidentBase:
        """Return memory for its base, of undefined content."""
