"""The device's codec makes the CPU kernels' bytes and sums: the same code that runs on a GPU, here on CPU tensors."""

from __future__ import annotations

from itertools import accumulate

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.transfer import kernels
from rose.transfer.kernels import Comparison, Rows
from rose.transfer.resident import Part

torch = pytest.importorskip("torch")

from rose.backends.device_codec import DeviceBits, DeviceComparer
from rose.backends.device_codec.keys import Keys
from rose.backends.device_codec.torch_way import TorchWay

CPU = torch.device("cpu")
WIRE = {"u1": torch.float8_e4m3fn, "u2": torch.bfloat16, "u4": torch.float32, "u8": torch.float64}
INTS = {"u1": torch.int8, "u2": torch.int16, "u4": torch.int32, "u8": torch.int64}
DENSITIES = st.sampled_from([0.0, 0.0005, 0.005, 0.02, 0.1, 0.5, 0.8, 1.0])


@attrs.frozen
class Drawn:
    """A shard now and before, cut along its rows, and where it lies in its tensor."""

    new: np.ndarray
    old: np.ndarray
    start: int
    pad: int
    is_transposed: bool


@st.composite
def shards(draw: st.DrawFn) -> Drawn:
    """Any patterns: most are NaNs of some payload or subnormal somewhere; small and large changes, of any density."""
    dtype = np.dtype(draw(st.sampled_from(list(WIRE))))
    shape = draw(st.sampled_from([(1, 1), (1, 5000), (3, 700), (200, 17), (2, 40000), (600, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    old = rng.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)
    most = draw(st.sampled_from([2, 9, 300]))
    moves = rng.integers(-most, most + 1, shape).astype(dtype)
    new = np.where(rng.random(shape) < draw(DENSITIES), old + moves, old)
    return Drawn(new, old, draw(st.integers(0, 1 << 40)), draw(st.integers(0, 5)), draw(st.booleans()))


def as_shard(bits: np.ndarray, *, is_transposed: bool = False, comparer: DeviceComparer) -> DeviceBits:
    """Return patterns as a tensor of their wire dtype."""
    code = f"u{bits.itemsize}"
    signed = torch.from_numpy(np.ascontiguousarray(bits.T if is_transposed else bits).view(f"i{bits.itemsize}"))
    tensor = signed.view(WIRE[code])
    return DeviceBits(tensor.T if is_transposed else tensor, WIRE[code], comparer=comparer)


def parts_of(drawn: Drawn, comparer: DeviceComparer, num_cells: int) -> list[Part]:
    """Cut a shard along its rows, or a single row along its columns, into cells."""
    base = as_shard(drawn.old, comparer=comparer).new_base()
    whole = tuple(slice(0, size) for size in drawn.old.shape)
    base.take(as_shard(drawn.old, comparer=comparer), whole)
    shard = as_shard(drawn.new, is_transposed=drawn.is_transposed, comparer=comparer)
    dim = 0 if drawn.old.shape[0] > 1 else 1
    sizes = [len(piece) for piece in np.array_split(np.arange(drawn.old.shape[dim]), num_cells) if len(piece)]
    stride = drawn.old.shape[1] + drawn.pad
    parts = []
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        index = [slice(0, one) for one in drawn.old.shape]
        index[dim] = slice(end - size, end)
        start = drawn.start + (end - size) * (stride if dim == 0 else 1)
        num_rows, row_len = (index[0].stop - index[0].start, index[1].stop - index[1].start)
        rows = Rows(num_rows=num_rows, row_len=row_len, start=start, stride=stride)
        parts.append(Part(shard=shard, base=base, index=tuple(index), rows=rows))
    return parts


def facts(found: Comparison) -> tuple[object, ...]:
    """What two comparisons must have in common: everything."""
    streams = found.streams
    coded = streams and (
        streams.num_changed,
        streams.shift,
        streams.values_sum,
        *map(bytes, (streams.gaps, streams.lows, streams.codes, streams.escapes)),
    )
    return found.num_changed, found.sum_delta, coded


@given(shards(), st.booleans(), st.sampled_from([1, 3, 7]), st.sampled_from([(1, 1), (4000, 700), (1 << 26, 1 << 21)]))
def test_every_cell_has_the_kernels_bytes_and_sums(
    drawn: Drawn,
    is_overwrite: bool,  # noqa: FBT001
    num_cells: int,
    limits: tuple[int, int],
) -> None:
    comparer = DeviceComparer(CPU, make_way=lambda keys: TorchWay(keys, max_elements=limits[0], max_changes=limits[1]))
    parts = parts_of(drawn, comparer, num_cells)
    found = list(comparer.compare(parts, is_overwrite=is_overwrite))
    assert len(found) == len(parts)
    for part, one in zip(parts, found, strict=True):
        new, old = (np.ascontiguousarray(bits[part.index]) for bits in (drawn.new, drawn.old))
        expected = kernels.load().compare(new, old, part.rows, is_overwrite=is_overwrite)
        assert facts(one) == facts(expected)


@given(shards())
def test_sums_of_whole_cells_are_the_kernels(drawn: Drawn) -> None:
    stride = drawn.new.shape[1] + drawn.pad
    rows = Rows(num_rows=drawn.new.shape[0], row_len=drawn.new.shape[1], start=drawn.start, stride=stride)
    bits = torch.from_numpy(drawn.new.view(f"i{drawn.new.itemsize}"))
    assert Keys(CPU).state_sum(bits, rows) == kernels.load().state_sum(drawn.new, rows)
