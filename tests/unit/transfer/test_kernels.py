"""The kernels write the documented format, refuse what is wrong, and are built, or not, as the machine allows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from rose.errors import BackendUnavailableError, CorruptUpdateError
from rose.transfer import kernels as api
from rose.transfer.kernels import ChangeStreams, Kernels, Rows
from rose.transfer.kernels.constants import FACTOR_SEEDS, SPAN, TABLE_SEEDS, factors, splitmix64, tables
from rose.transfer.kernels.native import NativeKernels, library_path
from rose.transfer.kernels.numpy_kernels import NumpyKernels

ROOT = Path(__file__).parents[3]
NAMES = ["numpy", "plain", "avx2", "avx512"]


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every implementation that this machine has."""
    if request.param == "numpy":
        return NumpyKernels()
    if not library_path().exists():
        pytest.skip("the C kernels are not built: python hatch_build.py")
    level = NAMES.index(request.param) - 1
    native = NativeKernels(level=level)
    if level and not native.name.endswith(request.param):
        pytest.skip(f"this machine has no {request.param}")
    return native


def line(num_elements: int) -> Rows:
    """A cell of one row at the tensor's begin."""
    return Rows(num_rows=1, row_len=num_elements, start=0, stride=num_elements)


def coded(kernels: Kernels, changes: dict[int, int], num_elements: int, dtype: str = "u2") -> ChangeStreams:
    """Streams of a cell of zeros with these differences at these positions."""
    old = np.zeros((1, num_elements), dtype=dtype)
    new = old.copy()
    for position, difference in changes.items():
        new[0, position] = difference % (1 << (8 * new.itemsize))
    streams = kernels.compare(new, old, line(num_elements), is_overwrite=False).streams
    assert streams is not None
    positions, values = kernels.decode(streams, num_elements=num_elements, dtype=new.dtype, is_overwrite=False)
    assert positions.tolist() == sorted(changes)
    assert values.tolist() == new[0, positions].tolist()
    return streams


def test_small_differences_are_half_bytes(kernels: Kernels) -> None:
    steps = [1, -1, 2, -2, 7, -7, 8, -8, 300]
    streams = coded(kernels, dict(enumerate(steps)), 20)
    assert streams.shift == 0
    assert bytes(streams.gaps) == bytes(9)
    assert bytes(streams.codes) == bytes([0x10, 0x32, 0xDC, 0xFF, 0x0F])
    assert bytes(streams.escapes) == np.array([8, -8, 300], dtype="i2").tobytes()


@pytest.mark.parametrize(
    ("gap", "high"), [(0, [0]), (254, [254]), (255, [255, 0]), (509, [255, 254]), (510, [255] * 2 + [0])]
)
def test_gaps_without_low_parts(kernels: Kernels, gap: int, high: list[int]) -> None:
    changes = {gap: 1, **{gap + 1 + k: 1 for k in range(20)}}
    assert bytes(coded(kernels, changes, 600).gaps) == bytes(high) + bytes(20)


@pytest.mark.parametrize(("num_elements", "shift"), [(97 * 2 - 1, 0), (97 * 2, 4), (1537 * 2 - 1, 4), (1537 * 2, 8)])
def test_shift_follows_the_mean_gap(kernels: Kernels, num_elements: int, shift: int) -> None:
    assert coded(kernels, {0: 1, 5: 1}, num_elements).shift == shift


def test_low_parts_of_gaps(kernels: Kernels) -> None:
    streams = coded(kernels, {0x123: 1, 0x124: 1, 0x124 + 1 + 0x45: 1}, 1000)
    assert (bytes(streams.gaps), bytes(streams.lows)) == (bytes([0x12, 0, 4]), bytes([0x03, 0x05]))
    streams = coded(kernels, {0x1234: 1, 0x1235: 1}, 10000)
    assert (bytes(streams.gaps), bytes(streams.lows)) == (bytes([0x12, 0]), bytes([0x34, 0]))


@pytest.mark.parametrize("gap", [32766, 32768, 65534, 65535, 65536, 65536 + 65535, 3 * 65536 + 255])
def test_gaps_over_blocks(kernels: Kernels, gap: int) -> None:
    coded(kernels, {0: 1, gap + 1: 1, 2 * gap + 2: -3, 2 * gap + 3: 1}, 2 * gap + 4)
    coded(kernels, {gap: 9, gap + 5: 1}, 2 * gap, "u4")


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
def test_patterns_are_byte_planes(kernels: Kernels, dtype: str) -> None:
    old = np.zeros((1, 100), dtype=dtype)
    new = old.copy()
    new[0, [3, 50]] = np.array([0x0102030405060708, 0x1112131415161718], dtype="u8").astype(dtype)
    streams = kernels.compare(new, old, line(100), is_overwrite=True).streams
    assert streams is not None
    assert bytes(streams.codes) == b"".join(bytes([8 - k, 0x18 - k]) for k in range(new.itemsize))
    assert not streams.escapes


def test_nothing_changed(kernels: Kernels) -> None:
    for shape in ((3, 5), (0, 5), (3, 0)):
        bits = np.ones(shape, dtype="u2")
        rows = Rows(num_rows=shape[0], row_len=shape[1], start=7, stride=9)
        found = kernels.compare(bits, bits.copy(), rows, is_overwrite=False)
        assert (found.num_changed, found.streams, found.sum_delta) == (0, None, (0, 0))


def test_no_streams_as_large_as_the_cell(kernels: Kernels) -> None:
    old = np.zeros((1, 200_000), dtype="u2")
    new = old + np.uint16(1000)
    found = kernels.compare(new, old, line(old.size), is_overwrite=False)
    assert (found.num_changed, found.streams) == (old.size, None)
    assert found.sum_delta == kernels.state_sum(new, line(old.size))
    assert kernels.compare(old + np.uint16(1), old, line(old.size), is_overwrite=False).streams is not None


def test_state_sum_is_the_documented_one(kernels: Kernels) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (3, 700), dtype="u2")
    rows = Rows(num_rows=3, row_len=700, start=1000, stride=5000)
    places = [1000 + 5000 * row + column for row in range(3) for column in range(700)]
    expected = []
    for lane in range(2):
        table = tables()[lane].tolist()
        multipliers = factors(np.arange(20))[lane].tolist()
        keys = [table[place % SPAN] * multipliers[place // SPAN] for place in places]
        expected.append(sum(x * key for x, key in zip(bits.reshape(-1).tolist(), keys, strict=True)) % (1 << 64))
    assert kernels.state_sum(bits, rows) == tuple(expected)
    halves = bits.astype("u8") << 40 | bits
    twice = Rows(num_rows=3, row_len=1400, start=2000, stride=10000)
    assert kernels.state_sum(halves, rows) == kernels.state_sum(halves.view("u4"), twice)


def test_constants_are_splitmix64_in_both() -> None:
    assert [int(x) for x in splitmix64(0, np.arange(2))] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert (TABLE_SEEDS, FACTOR_SEEDS) == ((1, 2), (3, 4))
    assert (tables() & 1).all()
    if not library_path().exists():
        pytest.skip("the C kernels are not built: python hatch_build.py")
    own, multipliers = np.zeros((2, SPAN), dtype="u4"), np.zeros((2, 99), dtype="u8")
    NativeKernels()._library.rose_constants(own.ctypes.data, multipliers.ctypes.data, 99)
    np.testing.assert_array_equal(own, tables())
    np.testing.assert_array_equal(multipliers, factors(np.arange(99)))


DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({"num_changed": 0}, "0 changes in a cell of 1000"),
    ({"num_changed": 1001}, "1001 changes in a cell of 1000"),
    ({"shift": 0}, "shift 0"),
    ({"gaps": b"\x00\x00"}, "gaps|changes|bytes"),
    ({"gaps": b"\x00\x00\x00\x00"}, "gaps|after the last"),
    ({"gaps": b"\x00\x00\xff"}, "gaps|before the last"),
    ({"gaps": b"\xff\xff\xfe"}, "gaps|before the last"),
    ({"gaps": b"\xfe\xfe\xfe"}, "beyond the cell|in a cell of 1000"),
    ({"lows": b"\x00"}, "low parts of gaps have 1 bytes, not 2"),
    ({"lows": b"\x00\x10"}, "half byte"),
    ({"codes": b"\x00"}, "codes have 1 bytes, not 2"),
    ({"codes": b"\x00\x10"}, "half byte"),
    ({"codes": b"\x00\x0e"}, "never written|code 14"),
    ({"codes": b"\x00\x0f"}, "before the last|1 escapes have 0 bytes"),
    ({"codes": b"\x00\x0f", "escapes": b"\x07\x00"}, "never written|have a code"),
    ({"codes": b"\x00\x0f", "escapes": b"\x00\x00"}, "never written|have a code"),
    ({"escapes": b"\x00\x01"}, "after the last|0 escapes have 2 bytes"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_streams_are_refused(kernels: Kernels, damage: dict[str, Any], message: str) -> None:
    streams = attrs.evolve(coded(kernels, {5: 1, 6: 1, 500: -1}, 1000), **damage)
    with pytest.raises(CorruptUpdateError, match=message):
        kernels.decode(streams, num_elements=1000, dtype=np.dtype("u2"), is_overwrite=False)


def test_a_difference_of_zero_is_refused(kernels: Kernels) -> None:
    streams = coded(kernels, {5: 1, 6: 1, 500: -1}, 1000, "u4")
    streams = attrs.evolve(streams, codes=bytes(12))
    with pytest.raises(CorruptUpdateError):
        kernels.decode(streams, num_elements=1000, dtype=np.dtype("u4"), is_overwrite=False)
    positions, values = kernels.decode(streams, num_elements=1000, dtype=np.dtype("u4"), is_overwrite=True)
    assert (positions.tolist(), values.tolist()) == ([5, 6, 500], [0, 0, 0])


def test_positions_out_of_range_touch_nothing(kernels: Kernels) -> None:
    array = np.zeros((2, 10), dtype="u2")[:, :7]
    for bad in ([0, 14], [-1, 3]):
        positions, values = np.array(bad, dtype="i4"), np.array([1, 2], dtype="u2")
        with pytest.raises(IndexError, match="cell of 14"):
            kernels.scatter(array, positions, values)
        with pytest.raises(IndexError, match="cell of 14"):
            kernels.gather(array, positions)
        with pytest.raises(IndexError, match="cell of 14"):
            kernels.changes_sum(positions, values, values, Rows(num_rows=2, row_len=7, start=0, stride=10))
    assert not array.any()


@pytest.mark.parametrize("index", ["i4", "i8"])
def test_gather_and_scatter_skip_what_lies_between_rows(kernels: Kernels, index: str) -> None:
    whole = np.arange(40, dtype="u2").reshape(4, 10)
    part, positions = whole[:, 2:9], np.array([0, 6, 7, 27], dtype=index)
    assert kernels.gather(part, positions).tolist() == [2, 8, 12, 38]
    assert kernels.gather(part, positions[::-1]).tolist() == [38, 12, 8, 2]
    kernels.scatter(part, positions, np.full(4, 99, dtype="u2"))
    assert np.flatnonzero(whole.reshape(-1) == 99).tolist() == [2, 8, 12, 38]


def test_wrong_arguments_are_refused(kernels: Kernels) -> None:
    good, rows = np.zeros((2, 3), dtype="u2"), Rows(num_rows=2, row_len=3, start=0, stride=3)
    for bad, error in (
        (np.zeros((3, 2), dtype="u2"), ValueError),
        (np.zeros(6, dtype="u2"), ValueError),
        (np.zeros((2, 6), dtype="u2")[:, ::2], ValueError),
        (np.zeros((2, 3), dtype="u4"), TypeError),
        (np.zeros((2, 3), dtype="f4"), TypeError),
        (np.zeros((2, 3), dtype=">u2"), TypeError),
    ):
        with pytest.raises(error):
            kernels.compare(good, bad, rows, is_overwrite=False)
    good.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.scatter(good, np.array([0], dtype="i4"), np.array([0], dtype="u2"))


def test_threads_do_not_meet(kernels: Kernels) -> None:
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 3, (1, 50_000), dtype="u2"), rng.integers(0, 3, (1, 50_000), dtype="u2")) for _ in range(4)
    ]
    expected = [kernels.compare(*pair, line(50_000), is_overwrite=False).sum_delta for pair in pairs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            found = kernels.compare(*pairs[index], line(50_000), is_overwrite=False)
            if found.sum_delta != expected[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture
def unforced() -> Iterator[None]:
    """Leave the choice of kernels as it was."""
    yield
    api.force(None)


@pytest.mark.usefixtures("unforced")
def test_the_choice_is_kept_and_can_be_forced() -> None:
    assert api.load() is api.load()
    api.force("numpy")
    assert api.load().name == "numpy"
    with pytest.raises(ValueError, match="no kernels 'cuda'"):
        api.load("cuda")


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"gone\.so"):
        NativeKernels(path=tmp_path / "gone.so")
