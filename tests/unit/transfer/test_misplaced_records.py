"""Records that are sound in themselves but cannot be what their place or their numbers say."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from transfer_rig import Rig

from rose.errors import CorruptUpdateError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer import records
from rose.transfer.cells import MAP_SCHEMA, CellMap, Columns, PlacedCell
from rose.transfer.geometry import Geometry
from rose.transfer.relay import plan_update, read_manifest
from rose.types import WeightVersion


def replace(rig: Rig, key: str, payload: bytes) -> None:
    rig.store.delete([key])
    rig.store.put(key, payload)


@pytest.fixture
def rig() -> Rig:
    rig = Rig(world_size=1)
    for _ in range(3):
        rig.publish()
        rig.step()
    return rig


def test_a_manifest_under_the_key_of_another_is_refused(rig: Rig) -> None:
    replace(rig, "run/2/2/manifest", rig.store.get("run/1/1/manifest"))
    with pytest.raises(CorruptUpdateError, match=r"says run:1 .* cannot be there"):
        read_manifest(rig.store, "run/2/2/manifest")


@pytest.mark.parametrize(
    "changes",
    [
        {"base_key": "run/2/2/manifest"},
        {"base_key": "run/2/2/manifest", "base": WeightVersion("run", 2)},
        {"base_key": "run/3/3/manifest", "base": WeightVersion("run", 3)},
        {"base_key": "other/1/1/manifest", "base": WeightVersion("other", 1)},
    ],
)
def test_a_manifest_that_does_not_start_from_an_earlier_version_is_refused(rig: Rig, changes: dict) -> None:
    """A walk back along the bases would not end."""
    found = read_manifest(rig.store, "run/2/2/manifest")
    replace(rig, "run/2/2/manifest", bytes(attrs.evolve(found, **changes).to_bytes()))
    with pytest.raises(CorruptUpdateError, match="cannot be there"):
        plan_update(rig.store, WeightVersion("run", 0))


@pytest.mark.parametrize("shape", [[1 << 70], [1 << 40, 1 << 40], [1 << 63]])
def test_a_tensor_too_large_to_count_is_refused(shape: list[int]) -> None:
    sound = CellMap(
        tensors=(TensorSpec(name="w", shape=(4,), dtype="bfloat16"),),
        aliases={},
        cells=(PlacedCell(tensor="w", box=ShardSpec(offset=(0,), shape=(4,))),),
    )
    header, arrays = records.unpack(sound.to_bytes(), MAP_SCHEMA)
    with pytest.raises(CorruptUpdateError, match="malformed"):
        CellMap.from_bytes(records.pack(MAP_SCHEMA, {**header, "tensors": [["w", shape, "bfloat16"]]}, arrays))


def test_a_tensor_listed_twice_is_refused() -> None:
    spec = TensorSpec(name="w", shape=(0,), dtype="bfloat16")
    with pytest.raises(CorruptUpdateError, match="twice"):
        CellMap.from_bytes(CellMap(tensors=(spec, spec), aliases={}, cells=()).to_bytes())


@pytest.mark.parametrize("name", ["codec", "num_changed", "blob"])
def test_columns_are_one_row_a_cell(name: str) -> None:
    arrays = Columns.empty(4).arrays()
    with pytest.raises(ValueError, match="contradict"):
        Columns.from_arrays({**arrays, name: arrays[name].reshape(1, 4)}, 0)


def test_geometry_is_one_row_a_cell() -> None:
    cells = [PlacedCell(tensor="w", box=ShardSpec(offset=(i,), shape=(1,))) for i in range(4)]
    arrays = dict(Geometry.of(cells, ["w"]).arrays())
    square = {key: np.reshape(arrays[key], (2, 2)) for key in ("tensor", "depth")}
    with pytest.raises(ValueError, match="contradicts"):
        Geometry.from_arrays({**arrays, **square}, ["w"])
