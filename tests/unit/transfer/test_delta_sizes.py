"""The expected size of an encoding, beside real encodings of random changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.transfer import delta


def _mean_size(num_elements: int, fraction: float, code: str, num_runs: int) -> float:
    rng = np.random.default_rng(5)
    old = np.zeros(num_elements, dtype=code)
    sizes = []
    for _ in range(num_runs):
        new = (rng.random(num_elements) < fraction).astype(code)
        sizes.append(len(delta.encode(new, old).payload))
    return sum(sizes) / num_runs


@pytest.mark.parametrize("code", ["<u1", "<u2", "<u4"])
@pytest.mark.parametrize("fraction", [0.0005, 0.002, 0.01, 0.05, 0.3, 0.6, 0.7, 1.0])
def test_a_large_cell_has_the_expected_size(code: str, fraction: float) -> None:
    itemsize = np.dtype(code).itemsize
    found = _mean_size(400_000, fraction, code, 6)
    assert delta.expected_bytes(400_000, fraction, itemsize=itemsize) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(("num_elements", "fraction"), [(128, 0.01), (1000, 0.001), (2000, 0.001)])
def test_a_cell_with_about_one_change_has_the_expected_size(num_elements: int, fraction: float) -> None:
    """The start of a cell bounds the gap before its first change; what follows the last change costs nothing."""
    found = _mean_size(num_elements, fraction, "<u2", 8000)
    assert delta.expected_bytes(num_elements, fraction, itemsize=2) == pytest.approx(found, rel=0.02)


def test_ends_are_exact() -> None:
    assert delta.expected_bytes(0, 0.5, itemsize=2) == 0
    assert delta.expected_bytes(10**9, 0, itemsize=2) == 0
    assert delta.expected_bytes(1000, 1, itemsize=2) == 2000


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        delta.expected_bytes(10, fraction, itemsize=2)


@given(st.integers(1, 10**9), st.floats(1e-6, 1), st.floats(1e-6, 1), st.sampled_from([1, 2, 4, 8]))
def test_more_changes_are_never_fewer_bytes_and_dense_is_the_most(n: int, a: float, b: float, itemsize: int) -> None:
    low, high = sorted(delta.expected_bytes(n, fraction, itemsize=itemsize) for fraction in (a, b))
    assert delta.expected_bytes(n, min(a, b), itemsize=itemsize) <= low * (1 + 1e-9)
    assert 0 <= low <= high <= n * itemsize
