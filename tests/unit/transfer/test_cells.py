"""Cell maps and the columns of a version: round trips, and every contradiction refused."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from rose.errors import CorruptUpdateError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer import records
from rose.transfer.cells import (
    MAP_SCHEMA,
    BlobEntry,
    CellMap,
    Columns,
    PlacedCell,
    blobs_from_json,
    blobs_to_json,
)
from rose.transfer.delta import Codec
from rose.transfer.geometry import Geometry

TENSORS = (
    TensorSpec(name="w", shape=(4, 6), dtype="bfloat16"),
    TensorSpec(name="s", shape=(), dtype="float32"),
    TensorSpec(name="none", shape=(0, 3), dtype="float32"),
)


def _cell(tensor: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> PlacedCell:
    return PlacedCell(tensor=tensor, box=ShardSpec(offset=offset, shape=shape))


CELLS = (_cell("w", (0, 0), (4, 2)), _cell("w", (0, 2), (4, 4)), _cell("s", (), ()))


def _map(cells: tuple[PlacedCell, ...] = CELLS) -> CellMap:
    return CellMap(tensors=TENSORS, aliases={"head": "w"}, cells=cells)


def test_a_map_comes_back() -> None:
    found = CellMap.from_bytes(_map().to_bytes())
    assert (found.tensors, dict(found.aliases), tuple(found.cells)) == (TENSORS, {"head": "w"}, CELLS)
    assert found.to_bytes() == _map().to_bytes(), "the same map is the same bytes"


@pytest.mark.parametrize(
    ("cells", "what"),
    [
        (CELLS[:2], r"s of shape \(\): cells hold 0 of 1"),
        (CELLS[1:], r"w of shape \(4, 6\): cells hold 16 of 24"),
        ((*CELLS, _cell("s", (), ())), "cells hold 2 of 1"),
        ((_cell("w", (0, 0), (4, 3)), _cell("w", (0, 1), (4, 3)), CELLS[2]), "cells overlap"),
        ((_cell("w", (0, 0), (4, 2)), _cell("w", (0, 3), (4, 4)), CELLS[2]), "leaves the tensor"),
        ((_cell("w", (0, 0), (4, 2)), _cell("w", (0, 10), (-4, -4)), CELLS[2]), "contradicts itself"),
        ((_cell("w", (0,), (24,)), CELLS[2]), "another rank"),
    ],
)
def test_a_map_covers_each_element_once(cells: tuple[PlacedCell, ...], what: str) -> None:
    with pytest.raises(CorruptUpdateError, match=what):
        CellMap.from_bytes(_map(cells).to_bytes())


def _spoilt_map(**changes: Any) -> bytearray:
    header = {"tensors": [[t.name, list(t.shape), t.dtype] for t in TENSORS], "aliases": {}}
    arrays = Geometry.of(CELLS, [t.name for t in TENSORS]).arrays()
    header.update({key: value for key, value in changes.items() if key in header})
    arrays.update({key: value for key, value in changes.items() if key in arrays})
    return records.pack(MAP_SCHEMA, header, arrays)


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor": np.array([0, 0, 9], dtype="<u4")},
        {"tensor": np.array([0, 0], dtype="<u4")},
        {"tensor": np.array([0, 0, -2], dtype="<i8")},
        {"offset": np.array([[0, 0], [0, (1 << 63) - 1], [0, 0]], dtype="<i8")},
        {"shape": np.array([[4, 2], [1 << 62, 1 << 62], [0, 0]], dtype="<i8")},
        {"tensor": np.array([[0, 0, 1]], dtype="<u4")},
        {"depth": np.array([2, 2, 9], dtype="|u1")},
        {"depth": np.array([2, 2], dtype="|u1")},
        {"offset": np.zeros(3, dtype="<i8")},
        {"offset": np.zeros((3, 1), dtype="<i8")},
        {"shape": np.zeros((2, 2), dtype="<i8")},
        {"shape": np.full((3, 2), 1 << 62, dtype="<i8")},
        {"tensors": [["w", [4, 6]]]},
        {"tensors": [["w", ["4", 6], "bfloat16"], ["s", [], "float32"], ["none", [0], "float32"]]},
        {"tensors": [["w", [4.5, 6], "bfloat16"], ["s", [], "float32"], ["none", [0], "float32"]]},
        {"tensors": [["w", [-4, -6], "bfloat16"], ["s", [], "float32"], ["none", [0], "float32"]]},
        {"tensors": [["w", [4, 6], "bfloat17"], ["s", [], "float32"], ["none", [0], "float32"]]},
        {"tensors": [["w", [4, 6], 3], ["s", [], "float32"], ["none", [0], "float32"]]},
        {"tensors": [[["w"], [4, 6], "bfloat16"], ["s", [], "float32"], ["none", [0], "float32"]]},
        {"tensors": [["w", [4, 6], "bfloat16"], ["w", [4, 6], "bfloat16"], ["s", [], "float32"]]},
        {"tensors": None},
        {"aliases": [1]},
        {"aliases": {"a": ["w"]}},
    ],
)
def test_malformed_maps_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptUpdateError):
        CellMap.from_bytes(_spoilt_map(**changes))


def test_the_unspoilt_map_is_accepted() -> None:
    assert tuple(CellMap.from_bytes(_spoilt_map()).cells) == CELLS


def _columns() -> Columns:
    return Columns(
        codec=np.array([Codec.NONE, Codec.DENSE, Codec.SPARSE], dtype="|u1"),
        num_changed=np.array([0, 4, 1], dtype="<i8"),
        blob=np.array([-1, 0, 1], dtype="<i4"),
        sums=np.array([[0, 0], [1, 2], [(1 << 64) - 1, 3]], dtype="<u8"),
    )


def _arrays(columns: Columns) -> dict[str, Any]:
    return attrs.asdict(columns)


def test_columns_come_back_with_and_without_a_prefix() -> None:
    for prefix in ("", "anchor_"):
        found = Columns.from_arrays(_columns().arrays(prefix), 2, prefix)
        for name, array in _arrays(_columns()).items():
            np.testing.assert_array_equal(getattr(found, name), array, strict=True)
        assert found.state_sum(2) == ((1 << 64) - 1, 3)


def test_a_sum_is_set_whole() -> None:
    columns = Columns.empty(2)
    columns.set_sum(1, ((1 << 64) - 1, 5))
    assert [columns.state_sum(n) for n in range(2)] == [(0, 0), ((1 << 64) - 1, 5)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("codec", [0, 1, 9]),  # no such form
        ("codec", [0, 0, 2]),  # says unchanged, yet has a blob and changes
        ("codec", [1, 1, 2]),  # says changed, yet has no blob
        ("num_changed", [0, 0, 1]),  # a form, but nothing changed
        ("num_changed", [3, 4, 1]),  # changes without a form
        ("num_changed", [0, -4, 1]),  # fewer than none
        ("blob", [0, 0, 1]),  # unchanged, yet carried
        ("blob", [-1, -1, 1]),  # changed, yet not carried
        ("blob", [-1, 0, 2]),  # no such blob
        ("blob", [-2, 0, 1]),
        ("codec", [0, 1]),
        ("num_changed", [0, 4]),
        ("blob", [-1, 0]),
        ("sums", [[0, 0], [1, 2]]),
        ("sums", [0, 1, 2]),
        ("sums", [[0], [1], [2]]),
    ],
)
def test_columns_that_contradict_each_other_are_refused(name: str, values: list[Any]) -> None:
    array = np.array(values, dtype=getattr(_columns(), name).dtype)
    with pytest.raises(ValueError, match="contradict"):
        Columns.from_arrays({**_columns().arrays(), name: array}, 2)


@pytest.mark.parametrize(
    ("name", "kind"), [("codec", "<i8"), ("num_changed", "<u8"), ("blob", "<u4"), ("sums", "<i8"), ("blob", "|u1")]
)
def test_columns_of_another_type_are_refused(name: str, kind: str) -> None:
    """An unsigned blob index would make -1 the largest number, and 2^64 - 1 changes would wrap around."""
    array = np.ones_like(getattr(_columns(), name), dtype=kind)
    with pytest.raises(ValueError, match="contradict"):
        Columns.from_arrays({**_columns().arrays(), name: array}, 2)


def test_a_missing_column_is_refused() -> None:
    arrays = _columns().arrays()
    del arrays["sums"]
    with pytest.raises(KeyError):
        Columns.from_arrays(arrays, 2)


def test_columns_of_ranks_are_joined_with_their_blobs_renumbered() -> None:
    joined = Columns.join([_columns(), Columns.empty(1), _columns()], [2, 0, 2])
    assert joined.blob.tolist() == [-1, 0, 1, -1, -1, 2, 3]
    assert joined.codec.tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert joined.num_cells == 7
    assert joined.blob.dtype == np.dtype("<i4")


def test_blob_rows_come_back() -> None:
    blobs = (BlobEntry(key="a/b", length_bytes=7, checksum="00ff", first_cell=3),)
    assert blobs_from_json(blobs_to_json(blobs)) == blobs


@pytest.mark.parametrize(
    "row",
    [
        [1, 7, "00", 0],
        ["a", "7", "00", 0],
        ["a", 7.0, "00", 0],
        ["a", True, "00", 0],
        ["a", 7, None, 0],
        ["a", 7, "00", "0"],
        ["a", 7, "00"],
        ["a", -7, "00", 0],
        ["a", 7, "00", -1],
    ],
)
def test_malformed_blob_rows_are_refused(row: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"blob row|unpack"):
        blobs_from_json([row])
