"""Any bits survive the codec, and any set of boxes is cut into cells that cover each element once."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer import delta
from rose.transfer.layout import TargetLayout, find_cover_problem, intersect
from rose.transfer.plan import plan_source
from rose.transfer.staging import restrict

DTYPES = st.sampled_from(["<u1", "<u2", "<u4", "<u8"])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40)


@st.composite
def old_and_new(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays that differ in anything from nothing to everything."""
    old = draw(hnp.arrays(draw(DTYPES), draw(SHAPES), elements=st.integers(0, 3)))
    is_changed = np.random.default_rng(draw(st.integers(0, 99))).random(old.shape) < draw(st.floats(0, 1))
    return old, np.where(is_changed, old + 1, old).astype(old.dtype)


@given(old_and_new())
def test_codec_round_trip(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = pair
    encoded = delta.encode(new, old)
    assert encoded.num_changed == np.count_nonzero(new != old)
    assert len(encoded.payload) <= new.nbytes
    if encoded.codec == delta.NONE:
        np.testing.assert_array_equal(new, old)
        return
    change = delta.decode(
        encoded.payload, codec=encoded.codec, dtype=new.dtype, shape=new.shape, num_changed=encoded.num_changed
    )
    if isinstance(change, delta.Dense):
        np.testing.assert_array_equal(change.bits, new)
    else:
        patched = old.copy().reshape(-1)
        patched[change.positions] = change.values
        np.testing.assert_array_equal(patched.reshape(new.shape), new)
        assert change.positions.tolist() == np.flatnonzero(new != old).tolist()


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=30))
def test_any_gaps_round_trip(gaps: list[int]) -> None:
    positions = np.cumsum(np.array(gaps) + 1) - 1
    coded = delta._encode_gaps(positions)
    assert delta._decode_gaps(coded).tolist() == positions.tolist()
    assert coded.size == sum(gap // 255 + 1 for gap in gaps)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TensorSpec, list[dict[str, ShardSpec]], list[TargetLayout]]:
    """A tensor, its rows cut unevenly over trainer ranks, and engine ranks with boxes anywhere."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    spec = TensorSpec(name="w", shape=shape, dtype="bfloat16")
    edges = sorted([0, *draw(st.lists(st.integers(0, shape[0]), max_size=3)), shape[0]])
    rest = shape[1:]
    sources = [
        {"w": ShardSpec(offset=(a, *(0 for _ in rest)), shape=(b - a, *rest))} for a, b in itertools.pairwise(edges)
    ]

    def box() -> ShardSpec:
        spans = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        return ShardSpec(offset=tuple(a for a, _ in spans), shape=tuple(b - a for a, b in spans))

    targets = [
        TargetLayout(
            layout_id=f"t{i}", tensors=(spec,), ranks=tuple({"w": (box(),)} for _ in range(draw(st.integers(1, 2))))
        )
        for i in range(draw(st.integers(0, 2)))
    ]
    return spec, sources, targets


@given(layouts())
def test_cells_cover_each_element_once_and_each_target_exactly(
    case: tuple[TensorSpec, list[dict[str, ShardSpec]], list[TargetLayout]],
) -> None:
    spec, sources, targets = case
    plan = [cell for rank, layout in enumerate(sources) for cell in plan_source(rank, layout, targets, {})]
    assert find_cover_problem(spec.shape, [cell.box for cell in plan]) is None
    assert all(cell.box.num_elements for cell in plan)
    for target in targets:
        for rank, held in enumerate(target.ranks):
            cells = [cell for cell in plan if f"{target.layout_id}/{rank}" in cell.targets]
            assert sum(cell.box.num_elements for cell in cells) == held["w"][0].num_elements
            assert all(intersect(cell.box, held["w"][0]) == cell.box for cell in cells)


@given(old_and_new(), st.data())
def test_a_part_of_a_change_is_the_change_of_the_part(pair: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    old, new = pair
    spans = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in new.shape]
    index = tuple(slice(10 + a, 10 + b) for a, b in spans)
    part = ShardSpec(offset=tuple(s.start for s in index), shape=tuple(s.stop - s.start for s in index))
    cell = ShardSpec(offset=(10,) * new.ndim, shape=new.shape)
    encoded = delta.encode(new, old)
    if encoded.codec == delta.NONE or not part.num_elements:
        return
    whole = delta.decode(
        encoded.payload, codec=encoded.codec, dtype=new.dtype, shape=new.shape, num_changed=encoded.num_changed
    )
    change = restrict(whole, cell, part)
    local = tuple(slice(a, b) for a, b in spans)
    patched = old[(*local, ...)].copy()
    if isinstance(change, delta.Dense):
        patched = change.bits
    elif change.positions.size:
        patched.reshape(-1)[change.positions] = change.values
    np.testing.assert_array_equal(patched, new[local])
