"""What one trainer rank tells rank 0 about its share of a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rose.errors import CorruptUpdateError
from rose.interfaces.trainer import ShardSpec
from rose.interfaces.transport import Payload
from rose.transfer import records
from rose.transfer.cells import (
    BlobEntry,
    Columns,
    blobs_from_json,
    blobs_to_json,
)
from rose.transfer.geometry import Geometry

SCHEMA = "rose.part/2"


@attrs.frozen(kw_only=True, eq=False)
class Share:
    """Rows and blobs of one rank's cells."""

    columns: Columns
    blobs: tuple[BlobEntry, ...]

    @property
    def bytes_sent(self) -> int:
        """Return the size of the blobs, in bytes."""
        return sum(blob.length_bytes for blob in self.blobs)


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """One rank's share of one attempt at a version.

    Attributes:
        rank: The trainer rank.
        is_full: Whether ``changes`` hold whole weights.
        tensors_hash: Checksum of the tensor list and tied names, which must be the same on every rank.
        layout: The boxes the rank holds.
        cells: Its cells, over the names of all tensors.
        changes: What it sends of them.
        anchor: Whole weights beside the changes, when an anchor was asked for and ``changes`` are changes.
    """

    rank: int
    is_full: bool
    tensors_hash: str
    layout: Mapping[str, ShardSpec]
    cells: Geometry
    changes: Share
    anchor: Share | None

    @property
    def full(self) -> Share | None:
        """Return what holds whole weights, if the rank sent such."""
        return self.changes if self.is_full else self.anchor

    def to_bytes(self) -> bytearray:
        """Return the record that ``from_bytes`` reads."""
        header = {
            "rank": self.rank,
            "is_full": self.is_full,
            "tensors_hash": self.tensors_hash,
            "layout": {name: [list(box.offset), list(box.shape)] for name, box in self.layout.items()},
            "names": list(self.cells.names),
            "blobs": blobs_to_json(self.changes.blobs),
            "anchor_blobs": None if self.anchor is None else blobs_to_json(self.anchor.blobs),
        }
        arrays = {**self.cells.arrays(), **self.changes.columns.arrays()}
        if self.anchor is not None:
            arrays |= self.anchor.columns.arrays("anchor_")
        return records.pack(SCHEMA, header, arrays)

    @classmethod
    def from_bytes(cls, payload: Payload) -> Part:
        """Read a part.

        Raises:
            CorruptUpdateError: It is damaged or of another schema.
        """
        header, arrays = records.unpack(payload, SCHEMA)
        try:
            _check_fields(header)
            cells = Geometry.from_arrays(arrays, header["names"])
            changes = _share(arrays, header["blobs"], len(cells))
            anchor = header["anchor_blobs"]
            return cls(
                rank=header["rank"],
                is_full=header["is_full"],
                tensors_hash=header["tensors_hash"],
                layout={n: ShardSpec(offset=tuple(o), shape=tuple(s)) for n, (o, s) in header["layout"].items()},
                cells=cells,
                changes=changes,
                anchor=None if anchor is None else _share(arrays, anchor, len(cells), "anchor_"),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            message = f"a part has a missing or malformed field: {error!r}"
            raise CorruptUpdateError(message) from error


def _check_fields(header: Mapping[str, Any]) -> None:
    rank, is_full, tensors_hash = header["rank"], header["is_full"], header["tensors_hash"]
    numbers = [number for box in header["layout"].values() for part in box for number in part]
    is_sound = type(rank) is int and rank >= 0 and isinstance(is_full, bool) and isinstance(tensors_hash, str)
    names = header["names"]
    is_sound = is_sound and isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not (is_sound and all(type(number) is int and number >= 0 for number in numbers)):
        message = f"rank {rank!r}, is_full {is_full!r}, hash {tensors_hash!r}, layout {header['layout']!r}"
        raise ValueError(message)


def _share(arrays: Mapping[str, Any], blobs: list[list[Any]], num_cells: int, prefix: str = "") -> Share:
    entries = blobs_from_json(blobs)
    columns = Columns.from_arrays(arrays, len(entries), prefix)
    if columns.num_cells != num_cells:
        message = f"{columns.num_cells} rows for {num_cells} cells"
        raise ValueError(message)
    return Share(columns=columns, blobs=entries)
