"""The codec: bitwise changes, the smaller of two forms, exact round trips, damaged payloads refused."""

from __future__ import annotations

import numpy as np
import pytest

from rose.errors import CorruptUpdateError
from rose.transfer import delta

U16 = np.dtype("<u2")


def _bits(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=U16)


def _apply(encoded: delta.EncodedCell, old: np.ndarray) -> np.ndarray:
    if encoded.codec == delta.NONE:
        return old.copy()
    change = delta.decode(
        encoded.payload, codec=encoded.codec, dtype=old.dtype, shape=old.shape, num_changed=encoded.num_changed
    )
    if isinstance(change, delta.Dense):
        return change.bits
    patched = old.reshape(-1).copy()
    patched[change.positions] = change.values
    return patched.reshape(old.shape)


def test_changes_are_bits_not_values() -> None:
    """Case W07."""
    old = _bits("7FC0 7FC0 7FC0 7F80 0000 8000 3F80 3F80")
    new = _bits("7FC0 7FC1 FFC0 7F80 8000 0000 3F80 3F81")
    encoded = delta.encode(new, old)
    assert (encoded.codec, encoded.num_changed) == (delta.SPARSE, 5)
    change = delta.decode(encoded.payload, codec=delta.SPARSE, dtype=U16, shape=(8,), num_changed=5)
    assert isinstance(change, delta.Sparse)
    assert change.positions.tolist() == [1, 2, 4, 5, 7]
    np.testing.assert_array_equal(_apply(delta.encode(new, old), old), new)


@pytest.mark.parametrize("code", ["<u1", "<u2", "<u4", "<u8"])
def test_sparse_and_dense_meet_at_the_measured_size(code: str) -> None:
    """One changed element costs its bits and a gap byte; dense is taken from the first count that is not fewer bytes."""
    old = np.zeros(3000, dtype=code)
    item = old.itemsize
    threshold = -(-old.nbytes // (item + 1))
    for count, codec in ((threshold - 1, delta.SPARSE), (threshold, delta.DENSE)):
        new = old.copy()
        new[:count] = 1
        encoded = delta.encode(new, old)
        assert (encoded.codec, encoded.num_changed) == (codec, count)
        assert len(encoded.payload) == min(count * (item + 1), old.nbytes)
        np.testing.assert_array_equal(_apply(encoded, old), new)


def test_escapes_count_when_the_form_is_chosen() -> None:
    """Far-apart changes need escape bytes: 1/255 byte an unchanged element, exact at every multiple of 255."""
    for gap in (0, 1, 254, 255, 256, 509, 510, 511, 100_000):
        old = np.zeros(gap + 1 + 700, dtype=U16)
        new = old.copy()
        new[gap] = 9
        encoded = delta.encode(new, old)
        assert encoded.codec == delta.SPARSE
        assert len(encoded.payload) == gap // 255 + 1 + 2
        np.testing.assert_array_equal(_apply(encoded, old), new)


def test_nothing_changed_sends_nothing() -> None:
    encoded = delta.encode(_bits("7FC0 8000"), _bits("7FC0 8000"))
    assert (encoded.codec, encoded.payload, encoded.num_changed) == (delta.NONE, b"", 0)
    assert delta.encode(np.empty((0, 4), U16), None).codec == delta.NONE


def test_without_old_bits_everything_is_sent() -> None:
    encoded = delta.encode(_bits("0000 0000 0000"), None)
    assert (encoded.codec, len(encoded.payload), encoded.num_changed) == (delta.DENSE, 6, 3)


def test_strided_and_scalar_arrays_go_row_major() -> None:
    matrix = np.arange(12, dtype=U16).reshape(3, 4).T
    assert bytes(delta.encode(matrix, None).payload) == np.ascontiguousarray(matrix).tobytes()
    scalar = np.array(0x3FC0, dtype=U16)
    encoded = delta.encode(scalar, None)
    assert bytes(encoded.payload) == bytes.fromhex("c03f")
    assert _apply(encoded, scalar).shape == ()


def test_blocks_join_without_a_seam() -> None:
    old = np.zeros(2 * (1 << 20) + 5, dtype=U16)
    new = old.copy()
    at = [0, (1 << 20) - 1, 1 << 20, 2 << 20, old.size - 1]
    new[at] = 1
    encoded = delta.encode(new, old)
    assert (encoded.codec, encoded.num_changed) == (delta.SPARSE, len(at))
    np.testing.assert_array_equal(_apply(encoded, old), new)


def test_applying_twice_is_applying_once() -> None:
    old = np.arange(100, dtype=U16)
    new = old.copy()
    new[::7] = 1
    encoded = delta.encode(new, old)
    np.testing.assert_array_equal(_apply(encoded, _apply(encoded, old)), new)


@pytest.mark.parametrize(
    ("payload", "codec", "num_changed", "what"),
    [
        (b"\0" * 19, delta.DENSE, 10, "20 bytes"),
        (b"\0" * 4, delta.SPARSE, 2, "too few"),
        (b"\xff\1\0", delta.SPARSE, 1, "escape"),
        (b"\x0a\1\0", delta.SPARSE, 1, "positions"),
        (b"\0\0\1\0", delta.SPARSE, 1, "positions"),
        (b"", delta.NONE, 0, "codec"),
    ],
)
def test_damaged_payloads_are_refused(payload: bytes, codec: str, num_changed: int, what: str) -> None:
    with pytest.raises(CorruptUpdateError, match=what):
        delta.decode(payload, codec=codec, dtype=U16, shape=(10,), num_changed=num_changed)
