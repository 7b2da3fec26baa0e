"""Manifests and parts: round trip, strictness, totals."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from rose.errors import CorruptUpdateError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer import records
from rose.transfer.cells import BlobEntry, CellMap, Columns, PlacedCell, blobs_to_json
from rose.transfer.delta import Codec
from rose.transfer.geometry import Geometry
from rose.transfer.manifest import SCHEMA, Manifest, codec_elements, dense_bytes, tensor_sums
from rose.transfer.parts import SCHEMA as PART_SCHEMA
from rose.transfer.parts import Part, Share
from rose.types import WeightVersion

TENSORS = (TensorSpec(name="a", shape=(4,), dtype="bfloat16"), TensorSpec(name="z", shape=(0,), dtype="int64"))
CELLS = tuple(
    PlacedCell(tensor="a", box=ShardSpec(offset=(start,), shape=(size,))) for start, size in ((0, 1), (1, 2), (3, 1))
)
GEOMETRY = Geometry.of(CELLS, ["a", "z"])
MAP = CellMap(tensors=TENSORS, aliases={"b": "a"}, cells=CELLS)
BLOBS = tuple(BlobEntry(key=f"k/blob-{i}", length_bytes=100 + i, checksum="ab", first_cell=i) for i in range(2))


def _columns(*codecs: Codec) -> Columns:
    carried = [codec is not Codec.NONE for codec in codecs]
    return Columns(
        codec=np.array(codecs, dtype="|u1"),
        num_changed=np.array(carried, dtype="<i8"),
        blob=np.where(carried, 1, -1).astype("<i4"),
        sums=np.arange(2 * len(codecs), dtype="<u8").reshape(-1, 2),
    )


MIXED = _columns(Codec.NONE, Codec.SPARSE, Codec.DENSE)
WHOLE = _columns(Codec.DENSE, Codec.DENSE, Codec.DENSE)


def _manifest(columns: Columns = MIXED, **changes: Any) -> Manifest:
    manifest = Manifest(
        version=WeightVersion("run", 3),
        base=WeightVersion("run", 2),
        base_key="run/2/0/manifest",
        anchor_key="run/0/0/manifest",
        map_key="run/cells/ab",
        blobs=BLOBS,
        columns=columns,
    )
    return attrs.evolve(manifest, **changes)


def _assert_same(found: Any, wanted: Any) -> None:
    for field in attrs.fields(type(wanted)):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(other, Columns | Share | Geometry):
            _assert_same(one, other)
        else:
            np.testing.assert_array_equal(one, other, err_msg=field.name)


def test_round_trip_and_totals() -> None:
    manifest = _manifest()
    _assert_same(Manifest.from_bytes(manifest.to_bytes()), manifest)
    assert (manifest.bytes_sent, manifest.num_changed, manifest.is_anchor) == (201, 2, False)
    sizes = np.array([1, 2, 1])
    assert codec_elements(sizes, MIXED) == {"none": 1, "dense": 1, "sparse": 2, "overwrite": 0}
    assert dense_bytes({spec.name: spec for spec in TENSORS}) == 8


def test_an_anchor_round_trip() -> None:
    anchor = _manifest(WHOLE, base=None, base_key=None)
    found = Manifest.from_bytes(anchor.to_bytes())
    assert found.is_anchor
    _assert_same(found, anchor)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.SPARSE, Codec.OVERWRITE])
def test_an_anchor_sends_every_cell_whole(codec: Codec) -> None:
    spoilt = _manifest(_columns(Codec.DENSE, codec, Codec.DENSE), base=None, base_key=None)
    with pytest.raises(CorruptUpdateError, match="anchor run:3 has cells that are not sent whole"):
        Manifest.from_bytes(spoilt.to_bytes())


def test_there_is_one_row_a_cell() -> None:
    _manifest().check_map(MAP)
    with pytest.raises(CorruptUpdateError, match="3 rows for a map of 2 cells"):
        _manifest().check_map(attrs.evolve(MAP, cells=CELLS[:2]))


def test_sums_of_a_tensor_do_not_depend_on_its_cells() -> None:
    assert tensor_sums(MAP, MIXED) == {"a": (0 + 2 + 4, 1 + 3 + 5), "z": (0, 0)}


def _spoken(**changes: Any) -> bytearray:
    """Return a manifest that was changed by someone who also fixed its checksum."""
    manifest = _manifest()
    header = {
        "version": "run:3",
        "base": "run:2",
        "base_key": manifest.base_key,
        "anchor_key": manifest.anchor_key,
        "map_key": manifest.map_key,
        "blobs": blobs_to_json(BLOBS),
    }
    arrays = manifest.columns.arrays()
    for key, value in changes.items():
        table = arrays if key in arrays else header
        table[key] = value
        if value is ...:
            del table[key]
    return records.pack(SCHEMA, header, arrays)


def test_the_unspoilt_one_is_read() -> None:
    _assert_same(Manifest.from_bytes(_spoken()), _manifest())


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "run"},
        {"version": "run:-1"},
        {"version": None},
        {"version": ...},
        {"base": 3},
        {"base": "other"},
        {"base_key": ...},
        {"base_key": None},
        {"base_key": 5},
        {"base": None},
        {"anchor_key": None},
        {"anchor_key": ...},
        {"map_key": 7},
        {"map_key": ...},
        {"blobs": None},
        {"blobs": [["k", 1]]},
        {"blobs": [["k", -1, "ab", 0], ["l", 1, "ab", 0]]},
        {"blobs": blobs_to_json(BLOBS[:1])},
        {"codec": np.array([0, 2, 7], dtype="|u1")},
        {"codec": ...},
        {"blob": np.array([-1, 0, 2], dtype="<i4")},
        {"num_changed": np.array([0, 0, 1], dtype="<i8")},
        {"sums": np.zeros((2, 2), dtype="<u8")},
    ],
)
def test_malformed_fields_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptUpdateError):
        Manifest.from_bytes(_spoken(**changes))


def test_any_flipped_byte_is_noticed() -> None:
    payload = bytes(_manifest().to_bytes())
    for at in range(len(payload)):
        with pytest.raises(CorruptUpdateError):
            Manifest.from_bytes(payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :])
    with pytest.raises(CorruptUpdateError):
        Manifest.from_bytes(b"")


def _part(**changes: Any) -> Part:
    part = Part(
        rank=1,
        is_full=False,
        tensors_hash="t",
        layout={"a": ShardSpec(offset=(0,), shape=(4,))},
        cells=GEOMETRY,
        changes=Share(columns=MIXED, blobs=BLOBS),
        anchor=Share(columns=WHOLE, blobs=BLOBS),
    )
    return attrs.evolve(part, **changes)


@pytest.mark.parametrize("is_anchored", [True, False])
def test_parts_round_trip(*, is_anchored: bool) -> None:
    part = (
        _part()
        if is_anchored
        else _part(anchor=None, cells=Geometry.of((), ["a"]), changes=Share(columns=_columns(), blobs=()))
    )
    _assert_same(Part.from_bytes(part.to_bytes()), part)


def test_what_a_part_holds_whole() -> None:
    assert _part().full is not None
    assert _part().full.columns is WHOLE
    assert _part(anchor=None).full is None
    full = _part(anchor=None, is_full=True)
    assert full.full is full.changes
    assert full.changes.bytes_sent == 201


def test_a_part_is_no_manifest() -> None:
    with pytest.raises(CorruptUpdateError, match="was expected"):
        Part.from_bytes(_manifest().to_bytes())


@pytest.mark.parametrize(
    "part",
    [
        _part(cells=Geometry.of(CELLS[:2], ["a"])),
        _part(anchor=Share(columns=_columns(Codec.DENSE), blobs=BLOBS)),
        _part(changes=Share(columns=MIXED, blobs=BLOBS[:1])),
        _part(rank="1"),
        _part(rank=-1),
        _part(is_full="no"),
        _part(tensors_hash=None),
        _part(layout={"a": ShardSpec(offset=("x",), shape=(4,))}),
    ],
)
def test_parts_that_contradict_themselves_are_refused(part: Part) -> None:
    with pytest.raises(CorruptUpdateError):
        Part.from_bytes(part.to_bytes())


def test_a_part_without_its_fields_is_refused() -> None:
    header, arrays = records.unpack(_part().to_bytes(), PART_SCHEMA)
    for key in header:
        lacking = {name: value for name, value in header.items() if name != key}
        with pytest.raises(CorruptUpdateError):
            Part.from_bytes(records.pack(PART_SCHEMA, lacking, arrays))
    for key in arrays:
        fewer = {name: value for name, value in arrays.items() if name != key}
        with pytest.raises(CorruptUpdateError):
            Part.from_bytes(records.pack(PART_SCHEMA, header, fewer))
