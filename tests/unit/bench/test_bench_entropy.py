from __future__ import annotations

import numpy as np
import pytest

from rose.bench.entropy import bound


def test_half_of_the_elements_by_two_differences():
    """One bit a position, one bit a difference for every changed element: 2 bits of position (n = 2k), 1 of value."""
    old = {"a": np.zeros(8, dtype=np.uint16)}
    new = {"a": np.array([0, 1, 0, 1, 0, 2, 0, 2], dtype=np.uint16)}
    found = bound(old, new)
    assert (found.num_changed, found.position_bits, found.value_bits) == (4, 8.0, 4.0)
    assert found.bytes_per_changed == pytest.approx(12 / 8 / 4)


def test_each_tensor_has_its_own_share():
    """Everything in one tensor and nothing in the other cost no position."""
    old = {name: np.zeros(16, dtype=np.uint16) for name in "ab"}
    new = {"a": np.ones(16, dtype=np.uint16), "b": old["b"]}
    assert bound(old, new).bytes_per_changed == 0
    assert bound(old, new).num_changed == 16


def test_nothing_changed():
    old = {"a": np.zeros((2, 3), dtype=np.uint8)}
    assert bound(old, old).bytes_per_changed == 0


def test_differences_wrap():
    """0 to 65535 and 1 to 0 are the same difference."""
    old, new = np.array([0, 1], dtype=np.uint16), np.array([65535, 0], dtype=np.uint16)
    assert bound({"a": old}, {"a": new}).value_bits == 0
