"""The expected size of an encoding, beside real blobs of random small changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.transfer import delta
from rose.transfer.blobs import pack_blob
from rose.transfer.kernels import Rows

HEADER_BYTES = 350


def _blob_bytes(num_elements: int, fraction: float) -> int:
    """Return the size of a blob of one bfloat16 cell of which this share moves by a few ulps, one or two for most."""
    rng = np.random.default_rng(5)
    old = rng.integers(0x3C00, 0x3D00, num_elements, dtype=np.uint16)
    steps = rng.choice([-2, -1, 1, 2], num_elements, p=[0.02, 0.48, 0.48, 0.02])
    new = np.where(rng.random(num_elements) < fraction, old + steps, old).astype(np.uint16)
    rows = Rows(num_rows=1, row_len=num_elements, start=0, stride=num_elements)
    return len(pack_blob({0: delta.encode(new.reshape(1, -1), old.reshape(1, -1), rows)}))


@pytest.mark.parametrize("fraction", [0.001, 0.003, 0.01, 0.03, 0.1])
def test_a_large_cell_has_about_the_expected_size(fraction: float) -> None:
    found = _blob_bytes(1_000_000, fraction) - HEADER_BYTES
    assert delta.expected_bytes(1_000_000, fraction, itemsize=2) == pytest.approx(found, rel=0.15)


def test_one_per_cent_takes_no_more_than_1_4_bytes_a_change() -> None:
    assert _blob_bytes(2_000_000, 0.01) / 20_000 <= 1.4


def test_a_cell_that_changes_all_over_takes_no_more_than_itself() -> None:
    assert _blob_bytes(500_000, 1.0) <= 1.01 * 1_000_000


def test_ends_are_exact() -> None:
    assert delta.expected_bytes(0, 0.5, itemsize=2) == 0
    assert delta.expected_bytes(10**9, 0, itemsize=2) == 0
    assert delta.expected_bytes(1000, 1, itemsize=4) == 4000


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        delta.expected_bytes(10, fraction, itemsize=2)


@given(st.integers(1, 10**9), st.floats(1e-6, 0.5), st.floats(1e-6, 0.5), st.sampled_from([1, 2, 4, 8]))
def test_more_changes_are_never_fewer_bytes_and_dense_is_the_most(n: int, a: float, b: float, itemsize: int) -> None:
    """Up to one half: beyond it, positions become predictable again."""
    low, high = (delta.expected_bytes(n, fraction, itemsize=itemsize) for fraction in sorted((a, b)))
    assert 0 <= low <= high * (1 + 1e-9)
    assert high <= n * itemsize
