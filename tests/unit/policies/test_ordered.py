from __future__ import annotations

import math
from random import Random

import pytest

from rose.policies.ordered import NO_SIZES, OrderedRoom


def filled(entries) -> OrderedRoom:
    room = OrderedRoom()
    for key, sizes in entries.items():
        room.add(key, sizes)
    return room


def test_nothing_fits_into_nothing():
    assert OrderedRoom().largest() == NO_SIZES
    assert list(OrderedRoom().fitting((0, 0))) == []
    assert OrderedRoom().first((-math.inf, 0)) is None


def test_a_key_that_is_not_in_cannot_be_taken_out():
    room = filled({(1,): (0, 0), (3,): (0, 0)})
    for key in ((0,), (2,), (4,)):
        with pytest.raises(KeyError):
            room.remove(key)
        with pytest.raises(KeyError):
            room.move(key, (2.5,), (0, 0))
    with pytest.raises(KeyError):
        OrderedRoom().remove((1,))
    with pytest.raises(KeyError):
        OrderedRoom().move((1,), (2,), (0, 0))
    assert list(room) == [(1,), (3,)]


def test_a_search_in_vain_is_short_and_chunks_do_not_stay_short():
    """The bounds of what is left are found once, not at every search."""
    rng = Random(0)
    room = filled({(number,): (number % 7, 0) for number in range(5000)})
    left = set(range(5000))
    for number in rng.sample(range(5000), 4900):
        room.remove((number,))
        left.remove(number)
    assert len(room._chunks) <= 4
    assert list(room.fitting((7, 1))) == []
    assert all(chunk.bounds[0] <= 6 for chunk in room._chunks)
    for number in [number for number in left if number % 7 == 6]:
        room.remove((number,))
    assert list(room.fitting((6, 1))) == []
    assert all(chunk.bounds[0] < 6 for chunk in room._chunks)
