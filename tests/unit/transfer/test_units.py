"""Cells side by side are found, read as they lie, and encoded as each alone would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.delta import Codec
from rose.transfer.encoder import RankEncoder
from rose.transfer.layout import TargetLayout, rows_of, slices_in, whole_box
from rose.transfer.parts import Share
from rose.transfer.plan import Cell, plan_source
from rose.transfer.units import SideBySide, Slot, plan_units

SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (64, 96),
    "columns": (64, 96),
    "experts": (3, 16, 48),
    "wide": (2, 70_000),
}
SPLIT_DIMS = {"rows": 0, "columns": 1, "experts": 2, "wide": 1}
SPECS = {name: TensorSpec(name=name, shape=shape, dtype="bfloat16") for name, shape in SHAPES.items()}
DTYPES = dict.fromkeys(SPECS, np.dtype("u2"))


class CastBits:
    """Bits that are a new copy each time, and how large the largest was."""

    def __init__(self, bits: np.ndarray) -> None:
        self.bits, self.shape, self.dtype = bits, bits.shape, bits.dtype
        self.largest = 0

    def __getitem__(self, index: Any) -> np.ndarray:
        found = np.array(self.bits[index])
        self.largest = max(self.largest, found.size)
        return found


def target(num_ranks: int) -> TargetLayout:
    return TargetLayout.tensor_parallel(
        f"tp{num_ranks}", list(SPECS.values()), num_ranks=num_ranks, split_dims=SPLIT_DIMS
    )


def slots_of(cells: tuple[Cell, ...], layout: dict[str, ShardSpec]) -> list[Slot]:
    return [
        Slot(cell=c, index=slices_in(c.box, layout[c.tensor]), rows=rows_of(c.box, SHAPES[c.tensor])) for c in cells
    ]


LAYOUT = {name: whole_box(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("max_cell_elements", [1 << 22, 500, 48])
def test_every_cell_is_in_one_unit_and_units_begin_in_order(max_cell_elements: int) -> None:
    cells = plan_source(0, LAYOUT, [target(2), target(4)], {}, tensors=SPECS, max_cell_elements=max_cell_elements)
    units = plan_units(slots_of(cells, LAYOUT), DTYPES)
    assert sorted(number for unit in units for number in unit.numbers) == list(range(len(cells)))
    assert [unit.numbers[0] for unit in units] == sorted(unit.numbers[0] for unit in units)


def test_columns_go_together_however_the_plan_cuts_their_rows() -> None:
    cells = plan_source(0, LAYOUT, [target(4)], {}, tensors=SPECS, max_cell_elements=500)
    units = [unit for unit in plan_units(slots_of(cells, LAYOUT), DTYPES) if unit.columns is not None]
    by_tensor: dict[str, list[int]] = {}
    for unit in units:
        assert unit.columns is not None
        by_tensor.setdefault(unit.columns.tensor, []).append(len(unit.numbers))
        boxes = [cells[number].box for number in unit.numbers]
        assert sum(box.num_elements for box in boxes) == unit.columns.rows.num_elements
    assert by_tensor == {"columns": [4] * 4, "experts": [4] * 2}, "rows are contiguous, wide cells long enough alone"


def test_slabs_are_all_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.transfer.units._BATCH_ELEMENTS", 200)
    cells = plan_source(0, LAYOUT, [target(4)], {}, tensors=SPECS)
    for unit in plan_units(slots_of(cells, LAYOUT), DTYPES):
        if unit.columns is None:
            continue
        seen = np.zeros(SHAPES[unit.columns.tensor], dtype=int)
        for index, rows in unit.columns.slabs():
            seen[index] += 1
            assert rows.num_elements == seen[index].size
        assert (seen == 1).all()


def test_neighbours_that_are_no_box_stay_apart() -> None:
    shape = (5, 2, 8)
    boxes = [ShardSpec(offset=(0, 0, 4), shape=(5, 1, 4)), ShardSpec(offset=(0, 1, 0), shape=(5, 1, 4))]
    slots = [
        Slot(
            cell=Cell(tensor="x", box=box, source_rank=0, targets=()),
            index=slices_in(box, whole_box(shape)),
            rows=rows_of(box, shape),
        )
        for box in boxes
    ]
    assert slots[0].rows.start + 4 == slots[1].rows.start
    assert SideBySide.around(slots) is None
    assert [unit.columns for unit in plan_units(slots, {"x": np.dtype("u2")})] == [None]


def versions(*, is_lazy: bool, is_overwrite: bool, num_threads: int) -> tuple[list[Share], dict[str, bytes], Any]:
    """Publish four versions of tensors that change by little, by all of one cell, and not at all."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 999, shape, dtype=np.uint16) for name, shape in SHAPES.items()}
    cells = plan_source(0, LAYOUT, [target(2), target(4)], {}, tensors=SPECS, max_cell_elements=500)
    encoder = RankEncoder(SPECS, LAYOUT, cells, num_threads=num_threads, is_overwrite=is_overwrite)
    blobs: dict[str, bytes] = {}
    shares, largest = [], 0
    for version in range(4):
        shards: Any = {name: CastBits(bits) for name, bits in arrays.items()} if is_lazy else arrays
        share = encoder.encode(
            shards,
            lambda key, payload: blobs.update({key: bytes(payload)}),
            f"v{version}",
            is_full=False,
            on_key=lambda _: None,
        )
        encoder.commit(shards)
        shares.append(share)
        if is_lazy:
            largest = max(bits.largest for bits in shards.values())
        for name in ("columns", "experts"):
            bits = arrays[name]
            if version < 2:
                bits[rng.random(bits.shape) < 0.02] += np.uint16(1)
                bits[..., 12:20] += np.uint16(1000)
    encoder.audit()
    return shares, blobs, largest


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_cells_side_by_side_are_sent_as_each_alone(monkeypatch: pytest.MonkeyPatch, *, is_overwrite: bool) -> None:
    alike = [
        versions(is_lazy=is_lazy, is_overwrite=is_overwrite, num_threads=num_threads)
        for is_lazy, num_threads in ((False, 1), (False, 3), (True, 1), (True, 2))
    ]
    monkeypatch.setattr("rose.transfer.units._NARROW_BYTES", 0)
    alone = versions(is_lazy=False, is_overwrite=is_overwrite, num_threads=1)
    codecs = {Codec(code) for share in alone[0] for code in share.columns.codec.tolist()}
    assert codecs >= {Codec.NONE, Codec.DENSE, Codec.OVERWRITE if is_overwrite else Codec.SPARSE}
    for shares, blobs, _ in alike:
        assert blobs == alone[1]
        for share, expected in zip(shares, alone[0], strict=True):
            found, wanted = (one.columns.arrays() for one in (share, expected))
            assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


def test_a_cast_is_a_slab_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.transfer.units._BATCH_ELEMENTS", 300)
    *_, largest = versions(is_lazy=True, is_overwrite=False, num_threads=1)
    assert largest <= 500
