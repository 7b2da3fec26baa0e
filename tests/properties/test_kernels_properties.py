"""Both kernels write the same bytes and sums for any cells, read them back exactly, and survive any streams."""

from __future__ import annotations

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import BackendUnavailableError, CorruptUpdateError
from rose.transfer.kernels import ChangeStreams, Comparison, Kernels, Rows, Sum, load
from rose.transfer.kernels.native import NativeKernels

NUMPY = load("numpy")
try:
    KERNELS: list[Kernels] = [NUMPY, *(NativeKernels(level=level) for level in range(3))]
except BackendUnavailableError:  # nothing to compare with; the properties hold for numpy alone
    KERNELS = [NUMPY]

DENSITIES = st.sampled_from([0.0, 0.0005, 0.005, 0.02, 0.1, 0.5, 0.8, 1.0])
Cell = tuple[np.ndarray, np.ndarray, Rows]


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """A cell now and before: rows at a distance of their own in each array, changes small and large."""
    dtype = np.dtype(draw(st.sampled_from(["u1", "u2", "u4", "u8"])))
    num_rows, row_len = draw(st.sampled_from([(1, 1), (1, 5000), (3, 700), (200, 17), (2, 40000), (1, 150000)]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    pads = draw(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5)))
    old = rng.integers(0, np.iinfo(dtype).max, (num_rows, row_len + pads[0]), dtype=dtype, endpoint=True)
    most = draw(st.sampled_from([2, 9, 300]))
    moves = rng.integers(-most, most + 1, (num_rows, row_len)).astype(dtype)
    new = np.zeros((num_rows, row_len + pads[1]), dtype=dtype)
    is_changed = rng.random((num_rows, row_len)) < draw(DENSITIES)
    new[:, :row_len] = np.where(is_changed, old[:, :row_len] + moves, old[:, :row_len])
    rows = Rows(num_rows=num_rows, row_len=row_len, start=draw(st.integers(0, 1 << 40)), stride=row_len + pads[2])
    return new[:, :row_len], old[:, :row_len], rows


def parts(found: Comparison) -> tuple[object, ...]:
    """What two comparisons must have in common."""
    streams = found.streams
    coded = streams and (streams.num_changed, streams.shift, *map(bytes, contents(streams)))
    return found.num_changed, found.sum_delta, coded


def contents(streams: ChangeStreams) -> tuple[bytes | memoryview, ...]:
    """The four streams."""
    return streams.gaps, streams.lows, streams.codes, streams.escapes


def minus(one: Sum, other: Sum) -> Sum:
    """The difference of two sums."""
    return (one[0] - other[0]) % (1 << 64), (one[1] - other[1]) % (1 << 64)


@given(cells(), st.booleans())
def test_changes_survive_in_the_same_bytes(cell: Cell, is_overwrite: bool) -> None:  # noqa: FBT001
    new, old, rows = cell
    expected = NUMPY.compare(new, old, rows, is_overwrite=is_overwrite)
    assert expected.num_changed == np.count_nonzero(new != old)
    for kernels in KERNELS:
        found = kernels.compare(new, old, rows, is_overwrite=is_overwrite)
        assert parts(found) == parts(expected)
        if found.streams is None:
            continue
        assert found.streams.num_bytes < new.nbytes
        positions, values = kernels.decode(
            found.streams, num_elements=rows.num_elements, dtype=new.dtype, is_overwrite=is_overwrite
        )
        assert positions.tolist() == np.flatnonzero(new != old).tolist()
        target = old.copy()
        kernels.scatter(target, positions, values if is_overwrite else kernels.gather(target, positions) + values)
        np.testing.assert_array_equal(target, new)


@given(cells())
def test_sums_follow_the_changes(cell: Cell) -> None:
    new, old, rows = cell
    expected = NUMPY.state_sum(new, rows)
    positions = np.flatnonzero(new != old)
    values = new.reshape(-1)[positions], old.reshape(-1)[positions]
    for kernels in KERNELS:
        assert kernels.state_sum(new, rows) == expected
        moved = minus(expected, kernels.state_sum(old, rows))
        assert kernels.compare(new, old, rows, is_overwrite=True).sum_delta == moved
        assert kernels.changes_sum(positions, values[1], values[0], rows) == moved


@given(cells(), st.data())
def test_sums_add_up_over_any_cut(cell: Cell, data: st.DataObject) -> None:
    bits, _, rows = cell
    row, column = data.draw(st.integers(0, rows.num_rows)), data.draw(st.integers(0, rows.row_len))
    quarters = [
        (slice(0, row), slice(0, column)),
        (slice(row, None), slice(0, column)),
        (slice(0, row), slice(column, None)),
        (slice(row, None), slice(column, None)),
    ]
    for kernels in KERNELS:
        left = kernels.state_sum(bits, rows)
        for index in data.draw(st.permutations(range(4))):
            part = bits[quarters[index]]
            start = rows.start + (index % 2) * row * rows.stride + (index // 2) * column
            place = Rows(num_rows=part.shape[0], row_len=part.shape[1], start=start, stride=rows.stride)
            left = minus(left, kernels.state_sum(part, place))
        assert left == (0, 0)


@given(cells(), st.booleans(), st.data())
def test_corrupt_streams_are_refused_or_stay_in_the_cell(cell: Cell, is_overwrite: bool, data: st.DataObject) -> None:  # noqa: FBT001
    new, old, rows = cell
    streams = NUMPY.compare(new, old, rows, is_overwrite=is_overwrite).streams
    if streams is None:
        return
    name = data.draw(st.sampled_from(["gaps", "lows", "codes", "escapes"]))
    content = bytearray(getattr(streams, name))
    for _ in range(data.draw(st.integers(0, 3)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    kept = content[: data.draw(st.integers(max(0, len(content) - 3), len(content)))]
    bad = attrs.evolve(streams, **{name: bytes(kept) + data.draw(st.binary(max_size=2))})
    bad = attrs.evolve(bad, num_changed=max(0, bad.num_changed + data.draw(st.sampled_from([0, 0, 0, -1, 1]))))
    outcomes = []
    for kernels in KERNELS:
        try:
            positions, values = kernels.decode(
                bad, num_elements=rows.num_elements, dtype=new.dtype, is_overwrite=is_overwrite
            )
        except CorruptUpdateError:
            outcomes.append(None)
            continue
        assert positions.size == bad.num_changed
        assert 0 <= positions[0] <= positions[-1] < rows.num_elements
        assert (np.diff(positions) > 0).all()
        outcomes.append((positions.tolist(), values.tolist()))
    assert all(outcome == outcomes[0] for outcome in outcomes)
