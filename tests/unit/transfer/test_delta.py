"""The codec of a cell: bitwise changes, the smaller of two forms, exact round trips, sums that follow."""

from __future__ import annotations

import numpy as np
import pytest

from rose.errors import CorruptUpdateError
from rose.transfer import delta, kernels
from rose.transfer.delta import Codec, EncodedCell
from rose.transfer.kernels import ChangeStreams, Rows

U16 = np.dtype("<u2")
CODES = ["<u1", "<u2", "<u4", "<u8"]


def _bits(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=U16)


def one_row(num_elements: int, start: int = 0) -> Rows:
    return Rows(num_rows=1, row_len=num_elements, start=start, stride=num_elements)


def encode(new: np.ndarray, old: np.ndarray | None, *, is_overwrite: bool = False) -> EncodedCell:
    """Encode a flat cell that is a tensor of its own, with the right old sum."""
    rows, loops = one_row(new.size), kernels.load()
    old_sum = (0, 0) if old is None else loops.state_sum(old.reshape(1, -1), rows)
    flat_old = None if old is None else old.reshape(1, -1)
    return delta.encode(new.reshape(1, -1), flat_old, rows, old_sum=old_sum, is_overwrite=is_overwrite)


def apply(encoded: EncodedCell, old: np.ndarray) -> np.ndarray:
    """Return the new bits of a flat cell."""
    if encoded.codec is Codec.NONE:
        return old.copy()
    if encoded.bits is not None:
        return encoded.bits.reshape(-1).copy()
    change = delta.decode(encoded.streams, codec=encoded.codec, dtype=old.dtype, num_elements=old.size)
    new = old.copy()
    new[change.positions] = change.values + (old[change.positions] if change.is_difference else 0)
    return new


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_w07_changes_are_bits_not_values(*, is_overwrite: bool) -> None:
    old = _bits("7FC0 7FC0 7FC0 7F80 0000 8000 3F80 3F80" + 64 * " 0000")
    new = _bits("7FC0 7FC1 FFC0 7F80 8000 0000 3F80 3F81" + 64 * " 0000")
    encoded = encode(new, old, is_overwrite=is_overwrite)
    assert (encoded.codec, encoded.num_changed) == (Codec.OVERWRITE if is_overwrite else Codec.SPARSE, 5)
    change = delta.decode(encoded.streams, codec=encoded.codec, dtype=U16, num_elements=new.size)
    assert change.positions.tolist() == [1, 2, 4, 5, 7]
    np.testing.assert_array_equal(apply(encoded, old), new)


def test_w09_no_element_of_a_million_is_off_by_a_rounding() -> None:
    rng = np.random.default_rng(0)
    masters = (rng.standard_normal(1 << 20) * 0.02).astype(np.float32)
    old = (masters.view(np.uint32) >> 16).astype(U16)
    new = ((masters + rng.standard_normal(1 << 20).astype(np.float32) * 3e-4).view(np.uint32) >> 16).astype(U16)
    encoded = encode(new, old)
    assert 0 < encoded.num_changed == np.count_nonzero(new != old)
    assert np.count_nonzero(apply(encoded, old) != new) == 0


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("is_overwrite", [False, True])
def test_the_smaller_form_is_taken_and_never_more_than_the_cell(code: str, *, is_overwrite: bool) -> None:
    rng = np.random.default_rng(1)
    old = rng.integers(0, 200, 4000, dtype=code)
    forms = []
    for fraction in (0.0, 0.0003, 0.01, 0.1, 0.4, 0.8, 1.0):
        new = np.where(rng.random(old.size) < fraction, old + 1, old).astype(code)
        encoded = encode(new, old, is_overwrite=is_overwrite)
        forms.append(encoded.codec)
        assert encoded.num_changed == np.count_nonzero(new != old)
        assert encoded.num_bytes <= old.nbytes
        np.testing.assert_array_equal(apply(encoded, old), new)
    sparse = Codec.OVERWRITE if is_overwrite else Codec.SPARSE
    assert forms[0] is Codec.NONE
    assert forms[2] is sparse
    if is_overwrite:
        assert forms[-1] is Codec.DENSE, "patterns and positions together are more than the patterns"


def test_dense_is_taken_where_streams_would_be_larger() -> None:
    rng = np.random.default_rng(2)
    old = rng.integers(0, 1 << 16, 5000, dtype=U16)
    assert encode(~old, old).codec is Codec.DENSE, "differences of any size need escapes"


@pytest.mark.parametrize("gap", [0, 1, 95, 96, 254, 255, 256, 509, 510, 511, 1535, 1536, 65_534, 65_536, 200_000])
def test_gaps_are_exact_at_every_edge(gap: int) -> None:
    old = np.zeros(gap + 1 + 700, dtype=U16)
    for at in ([gap], [0, gap], [gap, old.size - 1]):
        new = old.copy()
        new[at] = 9
        encoded = encode(new, old)
        assert encoded.codec is Codec.SPARSE
        np.testing.assert_array_equal(apply(encoded, old), new)


@pytest.mark.parametrize("step", [1, -1, 7, -7, 8, -8, 127, 128, 255, 256, 32767, 32768, 65535])
@pytest.mark.parametrize("code", CODES)
def test_differences_are_exact_at_every_edge(code: str, step: int) -> None:
    """Around the largest and the smallest 4-bit code, around half of the range, and over the wrap at its ends."""
    dtype = np.dtype(code)
    largest = np.iinfo(dtype).max
    old = np.array([0, 1, largest, largest // 2, largest // 2 + 1] * 40, dtype=dtype)
    new = old.copy()
    new[:5] += np.array(step % (int(largest) + 1), dtype=dtype)
    np.testing.assert_array_equal(apply(encode(new, old), old), new)


def test_nothing_changed_sends_nothing() -> None:
    old = _bits("7FC0 8000")
    encoded = encode(old.copy(), old)
    assert (encoded.codec, encoded.num_bytes, encoded.num_changed) == (Codec.NONE, 0, 0)
    assert encoded.state_sum == kernels.load().state_sum(old.reshape(1, -1), one_row(2))


def test_without_old_bits_everything_is_sent() -> None:
    encoded = encode(_bits("0000 0000 0000"), None)
    assert (encoded.codec, encoded.num_bytes, encoded.num_changed) == (Codec.DENSE, 6, 3)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("fraction", [0.0, 0.02, 1.0])
def test_the_sum_that_moved_is_the_sum_of_the_new_bits(code: str, fraction: float) -> None:
    rng = np.random.default_rng(3)
    old = rng.integers(0, np.iinfo(code).max, 5000, dtype=code, endpoint=True)
    new = np.where(rng.random(old.size) < fraction, ~old, old).astype(code)
    assert encode(new, old).state_sum == kernels.load().state_sum(new.reshape(1, -1), one_row(new.size))


def test_sums_of_parts_add_up_to_the_whole() -> None:
    loops, whole = kernels.load(), np.arange(5000, dtype=U16).reshape(50, 100)
    left = loops.state_sum(whole[:, :30], Rows(num_rows=50, row_len=30, start=0, stride=100))
    right = loops.state_sum(whole[:, 30:], Rows(num_rows=50, row_len=70, start=30, stride=100))
    assert delta.add_sums(left, right) == loops.state_sum(whole.reshape(1, -1), one_row(5000))
    assert delta.add_sums(((1 << 64) - 1, 0), (1, 5)) == (0, 5), "modulo 2^64"


def test_w11_strided_arrays_are_rows_or_copies_never_scrambled() -> None:
    transposed = np.arange(12, dtype=U16).reshape(3, 4).T
    rows = delta.as_rows(transposed, one_row(12))
    assert rows.reshape(-1).tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    part = np.arange(10, dtype=U16)[3:7]
    assert delta.encode(delta.as_rows(part, one_row(4)), None, one_row(4)).bits.tobytes() == part.tobytes()
    every_other = np.arange(12, dtype=U16)[::2]
    assert delta.as_rows(every_other, one_row(6)).tolist() == [[0, 2, 4, 6, 8, 10]]
    scalar = np.array(0x3FC0, dtype=U16)
    assert delta.as_rows(scalar, one_row(1)).tobytes() == bytes.fromhex("c03f")
    assert bytes(delta.byte_view(scalar)) == bytes.fromhex("c03f")


def test_rows_of_a_wider_array_are_a_view() -> None:
    wide = np.arange(60, dtype=U16).reshape(6, 10)
    assert np.shares_memory(delta.as_rows(wide[:, 2:5], Rows(num_rows=6, row_len=3, start=2, stride=10)), wide)


def test_overwriting_twice_is_overwriting_once() -> None:
    old = np.arange(2000, dtype=U16)
    new = old.copy()
    new[::7] ^= 0x5555
    encoded = encode(new, old, is_overwrite=True)
    change = delta.decode(encoded.streams, codec=encoded.codec, dtype=U16, num_elements=old.size)
    assert not change.is_difference
    np.testing.assert_array_equal(apply(encoded, apply(encoded, old)), new)


def test_digests_follow_the_row_major_bytes() -> None:
    matrix = np.arange(12, dtype=U16).reshape(3, 4)
    assert delta.digest(matrix.T) == delta.digest(np.ascontiguousarray(matrix.T).tobytes()) != delta.digest(matrix)


def _streams(**changes: object) -> ChangeStreams:
    fields = {"num_changed": 2, "shift": 0, "gaps": b"\x01\x02", "lows": b"", "codes": b"\x00", "escapes": b""}
    return ChangeStreams(**{**fields, **changes})


def test_the_unspoilt_streams_are_read() -> None:
    change = delta.decode(_streams(), codec=Codec.SPARSE, dtype=U16, num_elements=10)
    assert (change.positions.tolist(), change.values.tolist()) == ([1, 4], [1, 1])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_changed": 0},
        {"num_changed": 11},
        {"num_changed": 1},
        {"num_changed": 3},
        {"shift": 4},
        {"gaps": b""},
        {"gaps": b"\x01"},
        {"gaps": b"\x01\x02\x00"},
        {"gaps": b"\x01\x09"},
        {"gaps": b"\xff\x01\x00"},
        {"gaps": b"\xff\xff"},
        {"lows": b"\x00"},
        {"codes": b""},
        {"codes": b"\x00\x00"},
        {"codes": b"\x0f"},
        {"codes": b"\x0e"},
        {"escapes": b"\x01\x02"},
        {"codes": b"\x0f", "escapes": b"\x01"},
        {"codes": b"\x0f", "escapes": b"\x01\x02\x03\x04"},
    ],
)
def test_streams_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptUpdateError):
        delta.decode(_streams(**changes), codec=Codec.SPARSE, dtype=U16, num_elements=10)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.DENSE])
def test_only_the_sparse_forms_have_streams(codec: Codec) -> None:
    with pytest.raises(CorruptUpdateError, match=f"sent as {codec.name.lower()} has no streams"):
        delta.decode(_streams(), codec=codec, dtype=U16, num_elements=10)
