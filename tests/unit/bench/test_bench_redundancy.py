from __future__ import annotations

import pytest

from rose.bench import redundancy
from rose.bench.model_shapes import load_shapes
from rose.bench.weights import draw


@pytest.fixture
def shapes(tiny_model):
    return load_shapes(str(tiny_model))


def test_each_byte_crosses_once_whatever_the_engines(shapes):
    drawn = draw(shapes.tensors, lr=3e-5, seed=0)
    found = redundancy.measure_redundancy(shapes, drawn)
    assert found.by_engines == {1: 1.0, 4: 1.0, 16: 1.0}
    assert set(found.by_width) == {1, 2, 4, 8}
    assert not found.skipped
    assert found.shares[1].fetched == found.shares[1].needed == 1.0


def test_a_rank_needs_its_part_and_what_is_replicated(shapes):
    drawn = draw(shapes.tensors, lr=3e-5, seed=0)
    share = redundancy.measure_redundancy(shapes, drawn, widths=(8,), num_engines=(1,)).shares[8]
    assert 0.12 < share.needed < 0.15


def test_a_transport_that_keeps_nothing_shows(shapes, monkeypatch):
    """The figure must be able to be wrong: without a relay every engine reads upstream."""
    monkeypatch.setattr(redundancy, "ClusterRelay", lambda upstream, max_bytes: upstream)
    drawn = draw(shapes.tensors, lr=3e-5, seed=0)
    found = redundancy.measure_redundancy(shapes, drawn, widths=(1,), num_engines=(1, 4))
    assert found.by_engines == {1: 1.0, 4: 4.0}


def test_widths_that_heads_forbid_are_named(shapes):
    drawn = draw(shapes.tensors, lr=3e-5, seed=0)
    found = redundancy.measure_redundancy(shapes, drawn, widths=(3,), num_engines=(1,))
    assert not found.by_width
    assert "8 heads are no multiple of 3" in found.skipped[3]
