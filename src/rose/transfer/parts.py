"""What one trainer rank tells rank 0 about its share of a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rose.errors import CorruptUpdateError
from rose.interfaces.trainer import ShardSpec
from rose.transfer.manifest import CellRecord, cells_from_rows, cells_to_rows, pack_record, unpack_record

SCHEMA = "rose.part/1"


@attrs.frozen(kw_only=True)
class Part:
    """One rank's share of one attempt at a version.

    Attributes:
        rank: The trainer rank.
        is_full: Whether the cells hold whole weights rather than changes.
        tensors_hash: Checksum of the tensor list and tied names, which must be the same on every rank.
        layout: The boxes the rank holds.
        cells: Its cells.
        anchor_cells: Whole weights beside the changes, when an anchor was asked for and ``cells`` are changes.
    """

    rank: int
    is_full: bool
    tensors_hash: str
    layout: Mapping[str, ShardSpec]
    cells: tuple[CellRecord, ...]
    anchor_cells: tuple[CellRecord, ...] | None

    @property
    def full_cells(self) -> tuple[CellRecord, ...] | None:
        """Return the cells that hold whole weights, if the rank sent such."""
        return self.cells if self.is_full else self.anchor_cells

    def to_bytes(self) -> bytes:
        """Return the record that ``from_bytes`` reads."""
        return pack_record(
            {
                "schema": SCHEMA,
                "rank": self.rank,
                "is_full": self.is_full,
                "tensors_hash": self.tensors_hash,
                "layout": {name: [list(box.offset), list(box.shape)] for name, box in self.layout.items()},
                "changes": cells_to_rows(self.cells),
                "anchor": None if self.anchor_cells is None else cells_to_rows(self.anchor_cells),
            }
        )

    @classmethod
    def from_bytes(cls, payload: bytes) -> Part:
        """Read a part.

        Raises:
            CorruptUpdateError: It is damaged or of another schema.
        """
        data: dict[str, Any] = unpack_record(payload, SCHEMA)
        try:
            return cls(
                rank=data["rank"],
                is_full=data["is_full"],
                tensors_hash=data["tensors_hash"],
                layout={n: ShardSpec(offset=tuple(o), shape=tuple(s)) for n, (o, s) in data["layout"].items()},
                cells=cells_from_rows(data["changes"]),
                anchor_cells=None if data["anchor"] is None else cells_from_rows(data["anchor"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            message = f"a part has a missing or malformed field: {error!r}"
            raise CorruptUpdateError(message) from error
