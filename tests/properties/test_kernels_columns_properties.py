"""Cells compared side by side give what each gives alone, and differences are added exactly, by all kernels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import BackendUnavailableError
from rose.transfer.kernels import Comparison, Kernels, Rows, load
from rose.transfer.kernels.native import NativeKernels

NUMPY = load("numpy")
try:
    KERNELS: list[Kernels] = [NUMPY, *(NativeKernels(level=level) for level in range(3))]
except BackendUnavailableError:  # nothing to compare with; the properties hold for numpy alone
    KERNELS = [NUMPY]

DENSITIES = st.sampled_from([0.0, 0.0005, 0.005, 0.02, 0.1, 0.5, 0.8, 1.0])
CUTS = st.sampled_from([[1], [5, 1, 3], [64] * 4, [1000, 24], [512] * 8, [17, 4000, 2, 9000], [1] * 64, [20000, 12768]])
Group = tuple[np.ndarray, np.ndarray, list[Rows]]


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Neighbouring columns now and before, any row distance in each array and in the tensor, each with a density of its own."""
    dtype = np.dtype(draw(st.sampled_from(["u1", "u2", "u4", "u8"])))
    lens = draw(CUTS)
    width, num_rows = sum(lens), draw(st.sampled_from([1, 2, 7, 40, 300]))
    num_rows = min(num_rows, max(1, 300_000 // width))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    pads = draw(st.sampled_from([(0, 0, 0), (0, 0, 7), (3, 0, 0), (0, 2, 5)]))
    old = rng.integers(0, np.iinfo(dtype).max, (num_rows, width + pads[0]), dtype=dtype, endpoint=True)[:, :width]
    new = np.zeros((num_rows, width + pads[1]), dtype=dtype)[:, :width]
    new[...] = old
    most, stride, at = draw(st.sampled_from([2, 9, 300])), width + pads[2], 0
    first, cells = draw(st.integers(0, 1 << 40)), []
    for length in lens:
        moves = rng.integers(-most, most + 1, (num_rows, length)).astype(dtype)
        is_changed = rng.random((num_rows, length)) < draw(DENSITIES)
        new[:, at : at + length] += np.where(is_changed, moves, dtype.type(0))
        cells.append(Rows(num_rows=num_rows, row_len=length, start=first + at, stride=stride))
        at += length
    return new, old, cells


def parts(found: Comparison) -> tuple[object, ...]:
    """What two comparisons must have in common."""
    streams = found.streams
    coded = streams and (streams.num_changed, streams.shift, streams.gaps, streams.lows, streams.codes, streams.escapes)
    return found.num_changed, found.sum_delta, coded


@given(groups(), st.booleans(), st.data())
def test_cells_side_by_side_are_as_each_alone(group: Group, is_overwrite: bool, data: st.DataObject) -> None:  # noqa: FBT001
    new, old, cells = group
    first = cells[0].start
    expected = []
    for cell in cells:
        columns = slice(cell.start - first, cell.start - first + cell.row_len)
        expected.append(parts(NUMPY.compare(new[:, columns], old[:, columns], cell, is_overwrite=is_overwrite)))
    cuts = sorted({0, len(new), *data.draw(st.lists(st.integers(0, len(new)), max_size=3))})
    for kernels in KERNELS:
        pairs = [(new[a:b], old[a:b]) for a, b in pairwise(cuts)]
        found = kernels.compare_columns(pairs, cells, is_overwrite=is_overwrite)
        assert [parts(one) for one in found] == expected


@given(groups(), st.sampled_from(["i4", "i8"]))
def test_adding_differences_leads_from_old_to_new(group: Group, index: str) -> None:
    new, old, _ = group
    positions = np.flatnonzero(new != old).astype(index)
    differences = NUMPY.gather(new, positions) - NUMPY.gather(old, positions)
    for kernels in KERNELS:
        target = np.full((len(old), old.shape[1] + 2), 77, dtype=old.dtype)
        target[:, 1:-1] = old
        kernels.add(target[:, 1:-1], positions, differences)
        np.testing.assert_array_equal(target[:, 1:-1], new)
        assert (target[:, [0, -1]] == 77).all()
        assert kernels.gather(target[:, 1:-1], positions).tolist() == new.reshape(-1)[positions].tolist()


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda one: one.name)
def test_what_does_not_lie_side_by_side_is_refused(kernels: Kernels) -> None:
    bits = np.zeros((4, 6), dtype="u2")
    good = [Rows(num_rows=4, row_len=3, start=start, stride=6) for start in (0, 3)]
    wrong = [
        [],
        [good[1], good[0]],
        [good[0], Rows(num_rows=3, row_len=3, start=3, stride=6)],
        [good[0], Rows(num_rows=4, row_len=3, start=3, stride=7)],
        [good[0], Rows(num_rows=4, row_len=0, start=3, stride=6)],
        [Rows(num_rows=4, row_len=1 << 14, start=k << 14, stride=1 << 20) for k in range(3)],
        [Rows(num_rows=4, row_len=1, start=k, stride=99) for k in range(65)],
    ]
    for cells in wrong:
        with pytest.raises(ValueError, match=r"neighbouring columns|go together"):
            kernels.compare_columns([(bits, bits)], cells, is_overwrite=False)
    for pairs in ([], [(bits[:3], bits[:3])], [(bits, bits), (bits[:1], bits[:1])]):
        with pytest.raises(ValueError, match=r"rows or more were given|rows were given"):
            kernels.compare_columns(pairs, good, is_overwrite=False)
    with pytest.raises(ValueError, match="was given for a cell"):
        kernels.compare_columns([(bits[:, :5], bits[:, :5])], good, is_overwrite=False)
    for other in (bits.astype("u4"), bits.astype("i2")):
        with pytest.raises(TypeError):
            kernels.compare_columns([(bits, other)], good, is_overwrite=False)
    two = bits[:2].astype("u4")
    with pytest.raises(TypeError):
        kernels.compare_columns([(bits[:2], bits[:2]), (two, two)], good, is_overwrite=False)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda one: one.name)
def test_a_group_that_was_broken_off_leaves_nothing_behind(kernels: Kernels) -> None:
    old = np.zeros((4, 6), dtype="u2")
    new = old.copy()
    new[2, 4] = 1
    cells = [Rows(num_rows=4, row_len=3, start=start, stride=6) for start in (0, 3)]
    with pytest.raises(ValueError, match="rows were given"):
        kernels.compare_columns([(new[:3], old[:3])], cells, is_overwrite=False)
    found = kernels.compare_columns([(new, old)], cells, is_overwrite=False)
    assert [one.num_changed for one in found] == [0, 1]


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda one: one.name)
def test_an_addition_out_of_range_touches_nothing(kernels: Kernels) -> None:
    array = np.zeros((2, 10), dtype="u2")[:, :7]
    for bad in ([0, 14], [-1, 3]):
        for index in ("i4", "i8"):
            with pytest.raises(IndexError, match="cell of 14"):
                kernels.add(array, np.array(bad, dtype=index), np.array([1, 2], dtype="u2"))
    assert not array.any()
    one, move = np.array([1], dtype="i4"), np.array([1], dtype="u2")
    with pytest.raises(TypeError):
        kernels.add(array, one, move.astype("u4"))
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.add(array, one, move)
