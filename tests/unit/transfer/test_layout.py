"""Boxes, and layouts of engine ranks."""

from __future__ import annotations

import json

import pytest

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.layout import (
    TargetLayout,
    bits_dtype,
    find_cover_problem,
    intersect,
    num_bytes,
    slices_in,
    split_evenly,
    whole_box,
)


def _box(offset: tuple[int, ...], shape: tuple[int, ...]) -> ShardSpec:
    return ShardSpec(offset=offset, shape=shape)


def test_dtypes_travel_as_unsigned_integers_of_their_size() -> None:
    assert [bits_dtype(name).itemsize for name in ("float8_e4m3fn", "bfloat16", "float32", "float64")] == [1, 2, 4, 8]
    with pytest.raises(LayoutMismatchError, match="complex64"):
        bits_dtype("complex64")
    assert num_bytes(TensorSpec(name="w", shape=(3, 5), dtype="bfloat16")) == 30


def test_intersections() -> None:
    assert intersect(_box((0, 2), (4, 4)), _box((2, 0), (4, 4))) == _box((2, 2), (2, 2))
    assert intersect(_box((0,), (4,)), _box((4,), (4,))) is None
    assert intersect(_box((), ()), _box((), ())) == _box((), ())
    assert intersect(_box((0, 0), (0, 4)), whole_box((8, 4))) is None
    assert slices_in(_box((3, 2), (1, 2)), _box((2, 2), (4, 4))) == (slice(1, 2), slice(0, 2))


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((4,), [_box((0,), (2,)), _box((2,), (2,))], None),
        ((4,), [_box((0,), (4,)), _box((4,), (0,))], None),
        ((0, 4), [], None),
        ((), [_box((), ())], None),
        ((), [], "0 of 1"),
        ((4,), [_box((0,), (2,)), _box((1,), (2,))], "overlap"),
        ((4,), [_box((0,), (2,))], "2 of 4"),
        ((4,), [_box((2,), (3,))], "leaves"),
        ((4,), [_box((-1,), (4,))], "leaves"),
        ((4, 1), [_box((0,), (4,))], "another rank"),
    ],
)
def test_covers(shape: tuple[int, ...], boxes: list[ShardSpec], problem: str | None) -> None:
    found = find_cover_problem(shape, boxes)
    assert (found is None) if problem is None else (found is not None and problem in found)


@pytest.mark.parametrize(
    ("size", "num_parts", "lengths"),
    [(10, 4, [3, 3, 3, 1]), (5, 4, [2, 2, 1, 0]), (3, 8, [1, 1, 1, 0, 0, 0, 0, 0]), (0, 2, [0, 0])],
)
def test_parts_are_those_of_torch_chunk(size: int, num_parts: int, lengths: list[int]) -> None:
    """Case W13."""
    parts = split_evenly(size, num_parts)
    assert [length for _, length in parts] == lengths
    assert [start for start, _ in parts] == [sum(lengths[:i]) for i in range(num_parts)]


def test_layouts_survive_json() -> None:
    specs = [TensorSpec(name="w", shape=(10, 4), dtype="bfloat16"), TensorSpec(name="n", shape=(), dtype="float32")]
    layout = TargetLayout.tensor_parallel("tp2", specs, num_ranks=2, split_dims={"w": 1})
    assert layout.ranks[1]["w"] == (_box((0, 2), (10, 2)),)
    assert layout.ranks[1]["n"] == (_box((), ()),)
    assert TargetLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert TargetLayout.whole("one", specs).ranks == ({"w": (whole_box((10, 4)),), "n": (whole_box(()),)},)


@pytest.mark.parametrize("data", [{}, {"layout_id": "x", "tensors": [1], "ranks": [], "aliases": {}}, {"layout_id": 1}])
def test_other_data_is_no_layout(data: dict[str, object]) -> None:
    with pytest.raises(LayoutMismatchError, match="not a target layout"):
        TargetLayout.from_json(data)
