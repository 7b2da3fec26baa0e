"""Boxes, and layouts of engine ranks."""

from __future__ import annotations

import json
import random
from itertools import combinations

import numpy as np
import pytest

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.layout import (
    TargetLayout,
    bits_dtype,
    find_cover_problem,
    has_overlap,
    intersect,
    num_bytes,
    read_whole,
    rows_of,
    slices_in,
    split_evenly,
    split_into_rows,
    split_to_size,
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


@pytest.mark.parametrize(
    ("box", "shape", "rows"),
    [
        (_box((), ()), (), (1, 1, 0, 1)),
        (_box((3,), (4,)), (10,), (1, 4, 3, 4)),
        (_box((2, 0), (3, 5)), (8, 5), (1, 15, 10, 15)),
        (_box((2, 1), (3, 2)), (8, 5), (3, 2, 11, 5)),
        (_box((0, 4), (8, 1)), (8, 5), (8, 1, 4, 5)),
        (_box((1, 2), (1, 3)), (8, 5), (1, 3, 7, 3)),
        (_box((0, 0, 2), (4, 3, 2)), (4, 3, 6), (12, 2, 2, 6)),
        (_box((1, 1, 0), (2, 2, 6)), (4, 3, 6), (2, 12, 24, 18)),
        (_box((1, 1, 1), (2, 1, 3)), (4, 3, 6), (2, 3, 25, 18)),
        (_box((0, 0, 0), (4, 1, 6)), (4, 1, 6), (1, 24, 0, 24)),
        (_box((0, 2), (3, 0)), (3, 4), (1, 0, 2, 0)),
    ],
)
def test_boxes_are_rows_at_equal_distances(
    box: ShardSpec, shape: tuple[int, ...], rows: tuple[int, int, int, int]
) -> None:
    found = rows_of(box, shape)
    assert (found.num_rows, found.row_len, found.start, found.stride) == rows


def test_rows_of_rows_are_cut() -> None:
    box, shape = _box((0, 1, 2), (3, 2, 4)), (3, 4, 8)
    with pytest.raises(LayoutMismatchError, match="not rows at equal distances"):
        rows_of(box, shape)
    parts = split_into_rows(box, shape)
    assert parts == [_box((0, 1, 2), (3, 1, 4)), _box((0, 2, 2), (3, 1, 4))]
    assert split_into_rows(_box((0, 0, 2), (3, 4, 4)), shape) == [_box((0, 0, 2), (3, 4, 4))]


def test_large_boxes_are_cut_into_near_equal_pieces() -> None:
    """Whole rows of outer dimensions, and within a row only where one row is too large."""
    assert [p.shape[0] for p in split_to_size(_box((3, 0), (10, 4)), 16)] == [3, 3, 4]
    assert [p.offset[0] for p in split_to_size(_box((3, 0), (10, 4)), 16)] == [3, 6, 9]
    assert [p.shape for p in split_to_size(_box((0, 0), (2, 5)), 4)] == [(1, 2), (1, 3)] * 2
    assert [p.shape for p in split_to_size(_box((0, 0, 0), (1, 2, 3)), 3)] == [(1, 1, 3)] * 2
    assert split_to_size(_box((0, 0), (10, 4)), 40) == [_box((0, 0), (10, 4))]
    assert len(split_to_size(_box((), ()), 1)) == 1


def test_many_boxes_are_checked() -> None:
    """Thousands of boxes: grids, stacks, and five boxes around a centre that no plane separates."""
    grid = [_box((i * 3, j * 2), (3, 2)) for i in range(70) for j in range(70)]
    random.Random(0).shuffle(grid)
    assert find_cover_problem((210, 140), grid) is None
    moved = [*grid[:-1], grid[0]]
    assert find_cover_problem((210, 140), moved) == "boxes overlap"
    wheel = [
        _box((0, 0), (1, 2)),
        _box((0, 2), (2, 1)),
        _box((2, 1), (1, 2)),
        _box((1, 0), (2, 1)),
        _box((1, 1), (1, 1)),
    ]
    assert find_cover_problem((3, 3), wheel) is None
    assert has_overlap([*wheel, _box((0, 1), (1, 1))])
    assert not has_overlap([_box((0,), (4,)), _box((2,), (0,))])
    assert has_overlap([_box((), ()), _box((), ())])


def test_overlaps_are_those_of_pairs() -> None:
    rng = random.Random(1)
    outcomes = []
    for _ in range(500):
        shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
        boxes = []
        for _ in range(rng.randint(2, 5)):
            offset = tuple(rng.randrange(size) for size in shape)
            sizes = tuple(rng.randint(1, min(2, size - o)) for size, o in zip(shape, offset, strict=True))
            boxes.append(_box(offset, sizes))
        expected = any(intersect(a, b) for a, b in combinations(boxes, 2))
        assert has_overlap(boxes) == expected
        outcomes.append(expected)
    assert 50 < sum(outcomes) < 450


def test_whole_boxes_are_read_as_arrays() -> None:
    assert read_whole(np.arange(6).reshape(2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert isinstance(read_whole(np.array(7)), np.ndarray)
