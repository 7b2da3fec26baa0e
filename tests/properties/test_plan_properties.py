"""Plans of any sources and engines: every element in one cell, every cell rows at equal distances, engines get their boxes."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.layout import TargetLayout, rows_of, slices_in, whole_box
from rose.transfer.plan import check_sources, plan_source

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


def _boxes(shape: tuple[int, ...]) -> st.SearchStrategy[ShardSpec]:
    spans = [
        st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(lambda p, n=n: (p[0], min(p[1], n - p[0])))
        for n in shape
    ]
    return st.tuples(*spans).map(lambda s: ShardSpec(offset=tuple(a for a, _ in s), shape=tuple(b for _, b in s)))


@st.composite
def _grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[ShardSpec]:
    """Return a partition of the shape: what trainer ranks hold."""
    spans = []
    for size in shape:
        edges = sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=2))})
        spans.append([(a, b - a) for a, b in pairwise(edges)])
    return [ShardSpec(offset=tuple(a for a, _ in s), shape=tuple(n for _, n in s)) for s in product(*spans)]


@given(data=st.data(), shape=SHAPES, max_elements=st.integers(1, 40), is_shape_known=st.booleans())
def test_plans_write_every_element_once(
    data: st.DataObject, shape: tuple[int, ...], max_elements: int, *, is_shape_known: bool
) -> None:
    spec = TensorSpec(name="w", shape=shape, dtype="bfloat16")
    sources = data.draw(_grids(shape))
    engine_boxes = data.draw(st.lists(_boxes(shape), max_size=3))
    target = TargetLayout(layout_id="t", tensors=(spec,), ranks=tuple({"w": (box,)} for box in engine_boxes))
    targets = [target] if is_shape_known else [TargetLayout(layout_id="t", tensors=(), ranks=target.ranks)]
    check_sources({"w": spec}, [{"w": box} for box in sources])
    cells = [
        cell
        for rank, box in enumerate(sources)
        for cell in plan_source(rank, {"w": box}, targets, {}, max_cell_elements=max_elements)
    ]
    counts = np.zeros(shape, dtype=int)
    flat = np.arange(counts.size).reshape(shape)
    for cell in cells:
        assert 0 < cell.box.num_elements <= max_elements
        index = slices_in(cell.box, whole_box(shape))
        counts[index] += 1
        rows = rows_of(cell.box, shape)
        positions = rows.start + np.arange(rows.num_rows)[:, None] * rows.stride + np.arange(rows.row_len)
        assert positions.ravel().tolist() == flat[index].ravel().tolist()
    assert (counts == 1).all()
    for rank, box in enumerate(engine_boxes):
        arrived = np.zeros(shape, dtype=int)
        for cell in cells:
            if f"t/{rank}" in cell.targets:
                arrived[slices_in(cell.box, whole_box(shape))] += 1
        wanted = np.zeros(shape, dtype=int)
        wanted[slices_in(box, whole_box(shape))] = 1
        assert (arrived == wanted).all()
