"""The cells of all trainer ranks, and what one version says of each.

The geometry of the cells (``CellMap``) changes only when a layout does, so it is written once, under a key that is its own checksum,
and engines keep it. A version then has one row a cell (``Columns``) and one a blob (``BlobEntry``).

Invariants: the cells of a map cover each element of each tensor exactly once; cells of one rank are neighbours, in the rank's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import attrs
import numpy as np

from rose.errors import CorruptUpdateError, LayoutMismatchError
from rose.interfaces.trainer import TensorSpec
from rose.interfaces.transport import Payload
from rose.transfer import records
from rose.transfer.delta import Codec
from rose.transfer.geometry import Geometry, PlacedCell
from rose.transfer.kernels import Array, Sum
from rose.transfer.layout import bits_dtype

MAP_SCHEMA = "rose.cells/2"

_MAX_ELEMENTS = 1 << 62
"""Of a tensor; more would wrap around where elements are counted."""


@attrs.frozen(kw_only=True, eq=False)
class CellMap:
    """Every tensor, and every cell of it.

    Attributes:
        tensors: Every tensor, in the trainer's order.
        aliases: Tied names: alias -> the tensor whose bits it shares.
        cells: Rank by rank.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    cells: Sequence[PlacedCell]

    @property
    def geometry(self) -> Geometry:
        """Return the cells as arrays; at no cost where they are that already."""
        return Geometry.of(self.cells, [spec.name for spec in self.tensors])

    def to_bytes(self) -> bytearray:
        """Return the record that ``from_bytes`` reads; the same map gives the same bytes."""
        header = {"tensors": [[t.name, list(t.shape), t.dtype] for t in self.tensors], "aliases": dict(self.aliases)}
        return records.pack(MAP_SCHEMA, header, self.geometry.arrays())

    @classmethod
    def from_bytes(cls, payload: Payload) -> CellMap:
        """Read a map and check that it is whole.

        Raises:
            CorruptUpdateError: It is damaged, of another schema, or does not cover every tensor exactly once.
        """
        header, arrays = records.unpack(payload, MAP_SCHEMA)
        try:
            tensors = tuple(_tensor(*row) for row in header["tensors"])
            _check_names(tensors)
            found = cls(
                tensors=tensors,
                aliases=_aliases(header["aliases"]),
                cells=Geometry.from_arrays(arrays, [spec.name for spec in tensors]),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, LayoutMismatchError) as error:
            message = f"a cell map has a missing or malformed field: {error!r}"
            raise CorruptUpdateError(message) from error
        found._check_cover()
        return found

    def _check_cover(self) -> None:
        geometry = self.geometry
        for spec in self.tensors:
            problem = geometry.find_cover_problem(spec)
            if problem is not None:
                message = f"a cell map does not cover {spec.name} of shape {spec.shape}: {problem}"
                raise CorruptUpdateError(message)


def _tensor(name: object, shape: Any, dtype: object) -> TensorSpec:
    is_shape = isinstance(shape, list) and all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in shape)
    is_shape = is_shape and prod(shape) <= _MAX_ELEMENTS
    if not (isinstance(name, str) and isinstance(dtype, str) and is_shape):
        message = f"tensor row {name!r}, {shape!r}, {dtype!r}"
        raise ValueError(message)
    bits_dtype(dtype)
    return TensorSpec(name=name, shape=tuple(shape), dtype=dtype)


def _check_names(tensors: Sequence[TensorSpec]) -> None:
    if len({spec.name for spec in tensors}) != len(tensors):
        message = "a tensor is listed twice"
        raise ValueError(message)


def _aliases(found: Mapping[object, object]) -> dict[str, str]:
    aliases = {str(alias): name for alias, name in found.items() if isinstance(name, str)}
    if len(aliases) != len(found):
        message = f"aliases {found!r}"
        raise ValueError(message)
    return aliases


@attrs.frozen(kw_only=True)
class BlobEntry:
    """One blob of a version.

    Attributes:
        key: Where it is.
        length_bytes: How long it is.
        checksum: xxh3_128 of all of it, as hex.
        first_cell: What to add to the cell numbers in the blob, which count one rank's cells, to get the map's.
    """

    key: str
    length_bytes: int
    checksum: str
    first_cell: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Columns:
    """What a version says of each cell; every array has one row a cell.

    Attributes:
        codec: ``Codec`` values, uint8.
        num_changed: Elements whose bits differ from the base (all of them when sent whole), int64.
        blob: Index of the blob that carries it, -1 for none, int32.
        sums: State sum of the new bits, uint64 ``[num_cells, 2]``.
    """

    codec: Array
    num_changed: Array
    blob: Array
    sums: Array

    @classmethod
    def empty(cls, num_cells: int) -> Columns:
        """Return columns that say nothing changed."""
        return cls(
            codec=np.zeros(num_cells, dtype="|u1"),
            num_changed=np.zeros(num_cells, dtype="<i8"),
            blob=np.full(num_cells, -1, dtype="<i4"),
            sums=np.zeros((num_cells, 2), dtype="<u8"),
        )

    @classmethod
    def join(cls, parts: Sequence[Columns], num_blobs: Sequence[int]) -> Columns:
        """Return the columns of several ranks as one; ``num_blobs`` are how many blobs each has."""
        firsts = np.cumsum([0, *num_blobs[:-1]])
        blobs = [np.where(part.blob < 0, -1, part.blob + first) for part, first in zip(parts, firsts, strict=True)]
        return cls(
            codec=np.concatenate([part.codec for part in parts]),
            num_changed=np.concatenate([part.num_changed for part in parts]),
            blob=np.concatenate(blobs).astype("<i4"),
            sums=np.concatenate([part.sums for part in parts]),
        )

    @property
    def num_cells(self) -> int:
        """Return how many cells there are."""
        return int(self.codec.size)

    def state_sum(self, index: int) -> Sum:
        """Return the sum of one cell."""
        first, second = self.sums[index].tolist()
        return first, second

    def set_sum(self, index: int, value: Sum) -> None:
        """Set the sum of one cell."""
        self.sums[index] = np.array(value, dtype=np.uint64)

    def arrays(self, prefix: str = "") -> dict[str, Array]:
        """Return the arrays by name, for a record."""
        return {prefix + field.name: getattr(self, field.name) for field in attrs.fields(Columns)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], num_blobs: int, prefix: str = "") -> Columns:
        """Read what ``arrays`` gave.

        Raises:
            KeyError, ValueError: The arrays are not of that form.
        """
        found = cls(**{field.name: arrays[prefix + field.name] for field in attrs.fields(cls)})
        shapes = {found.codec.shape, found.num_changed.shape, found.blob.shape}
        is_sound = (
            shapes == {(found.num_cells,)}
            and all(getattr(found, name).dtype == plain.dtype for name, plain in cls.empty(0).arrays().items())
            and found.sums.shape == (found.num_cells, 2)
            and not np.any(found.codec > max(Codec))
            and not np.any((found.blob < -1) | (found.blob >= num_blobs))
            and not np.any((found.blob < 0) != (found.codec == Codec.NONE))
            and not np.any((found.num_changed <= 0) != (found.codec == Codec.NONE))
            and not np.any(found.num_changed < 0)
        )
        if not is_sound:
            message = f"the columns of {found.num_cells} cells contradict each other"
            raise ValueError(message)
        return found


def blobs_to_json(blobs: Sequence[BlobEntry]) -> list[list[Any]]:
    """Return plain data that ``blobs_from_json`` reads."""
    return [[blob.key, blob.length_bytes, blob.checksum, blob.first_cell] for blob in blobs]


def blobs_from_json(data: Sequence[Sequence[Any]]) -> tuple[BlobEntry, ...]:
    """Read what ``blobs_to_json`` wrote.

    Raises:
        ValueError: A row is malformed.
    """
    blobs = []
    for key, length, checksum, first in data:
        are_numbers = type(length) is type(first) is int and length >= 0 and first >= 0
        if not (isinstance(key, str) and isinstance(checksum, str) and are_numbers):
            message = f"blob row {key!r}, {length!r}, {checksum!r}, {first!r}"
            raise ValueError(message)
        blobs.append(BlobEntry(key=key, length_bytes=length, checksum=checksum, first_cell=first))
    return tuple(blobs)
