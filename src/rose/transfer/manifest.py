"""The manifest: what one version is made of.

Invariants: a manifest has one row for every cell of its cell map, unchanged ones too; every row has the sum of the cell's whole new
state; an anchor sends every cell whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from rose.errors import CorruptUpdateError
from rose.interfaces.trainer import TensorSpec
from rose.interfaces.transport import Payload
from rose.transfer import records
from rose.transfer.cells import BlobEntry, CellMap, Columns, blobs_from_json, blobs_to_json
from rose.transfer.delta import Codec
from rose.transfer.kernels import Sum
from rose.transfer.layout import num_bytes
from rose.types import WeightVersion

SCHEMA = "rose.manifest/2"


@attrs.frozen(kw_only=True, eq=False)
class Manifest:
    """One version: a delta from ``base``, or full weights (an anchor) when ``base`` is ``None``.

    Attributes:
        version: The version it leads to.
        base: The version it starts from.
        base_key: Manifest key of the base.
        anchor_key: Manifest key of the newest anchor at or before this version; its own key for an anchor.
        map_key: Key of the cell map.
        blobs: What carries the payloads.
        columns: One row a cell of the map.
    """

    version: WeightVersion
    base: WeightVersion | None
    base_key: str | None
    anchor_key: str
    map_key: str
    blobs: tuple[BlobEntry, ...]
    columns: Columns

    @property
    def is_anchor(self) -> bool:
        """Return whether it holds full weights."""
        return self.base is None

    @property
    def bytes_sent(self) -> int:
        """Return the size of all blobs, in bytes."""
        return sum(blob.length_bytes for blob in self.blobs)

    @property
    def num_changed(self) -> int:
        """Return the number of elements sent as changed."""
        return int(self.columns.num_changed.sum())

    def to_bytes(self) -> bytearray:
        """Return the record that ``from_bytes`` reads."""
        header = {
            "version": str(self.version),
            "base": None if self.base is None else str(self.base),
            "base_key": self.base_key,
            "anchor_key": self.anchor_key,
            "map_key": self.map_key,
            "blobs": blobs_to_json(self.blobs),
        }
        return records.pack(SCHEMA, header, self.columns.arrays())

    @classmethod
    def from_bytes(cls, payload: Payload) -> Manifest:
        """Read a manifest.

        Raises:
            CorruptUpdateError: It is damaged, of another schema, or contradicts itself.
        """
        header, arrays = records.unpack(payload, SCHEMA)
        try:
            base, base_key = header["base"], header["base_key"]
            keys = [header["anchor_key"], header["map_key"], *([] if base is None else [base_key])]
            if (base is None) != (base_key is None) or not all(isinstance(key, str) for key in keys):
                message = f"base {base!r} at {base_key!r}, anchor {keys[0]!r}, map {keys[1]!r}"
                raise ValueError(message)  # noqa: TRY301 - like any other malformed field
            blobs = blobs_from_json(header["blobs"])
            manifest = cls(
                version=WeightVersion.parse(header["version"]),
                base=None if base is None else WeightVersion.parse(base),
                base_key=base_key,
                anchor_key=keys[0],
                map_key=keys[1],
                blobs=blobs,
                columns=Columns.from_arrays(arrays, len(blobs)),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            message = f"the manifest has a missing or malformed field: {error!r}"
            raise CorruptUpdateError(message) from error
        if manifest.is_anchor and bool(np.any(manifest.columns.codec != Codec.DENSE)):
            message = f"anchor {manifest.version} has cells that are not sent whole"
            raise CorruptUpdateError(message)
        return manifest

    def check_map(self, cell_map: CellMap) -> None:
        """Check that there is one row a cell.

        Raises:
            CorruptUpdateError: There is not.
        """
        if len(cell_map.cells) != self.columns.num_cells:
            message = (
                f"manifest {self.version} has {self.columns.num_cells} rows for a map of {len(cell_map.cells)} cells"
            )
            raise CorruptUpdateError(message)


def tensor_sums(cell_map: CellMap, columns: Columns) -> dict[str, Sum]:
    """Return tensor -> sum of its whole state: the sums of its cells, however it was cut."""
    cells = cell_map.geometry.by_tensor
    sums = {}
    for spec in cell_map.tensors:
        first, second = (
            columns.sums[cells[spec.name]].sum(axis=0, dtype=np.uint64).tolist() if spec.name in cells else (0, 0)
        )
        sums[spec.name] = (first, second)
    return sums


def dense_bytes(tensors: Mapping[str, TensorSpec]) -> int:
    """Return the size of the full weights on the wire, in bytes."""
    return sum(map(num_bytes, tensors.values()))


def codec_elements(cell_map_sizes: np.ndarray[tuple[int], np.dtype[np.int64]], columns: Columns) -> dict[str, int]:
    """Return codec -> elements of the cells sent with it, every codec named; ``cell_map_sizes`` are elements a cell."""
    return {codec.name.lower(): int(cell_map_sizes[columns.codec == codec].sum()) for codec in Codec}
