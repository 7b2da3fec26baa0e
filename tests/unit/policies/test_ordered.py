from __future__ import annotations

import math
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policies import ordered
from rose.policies.ordered import NO_SIZES, OrderedRoom

KEYS = st.tuples(st.integers(0, 3), st.integers(0, 5))
SIZES = st.tuples(*[st.sampled_from([-math.inf, 0, 1, 2, 3, math.inf])] * 2)


def filled(entries) -> OrderedRoom:
    room = OrderedRoom()
    for key, sizes in entries.items():
        room.add(key, sizes)
    return room


def check_chunks(room: OrderedRoom, max_chunk: int) -> None:
    """What the module promises of its chunks."""
    assert [chunk.keys[0] for chunk in room._chunks] == room._starts
    for chunk in room._chunks:
        assert 0 < len(chunk.keys) == len(chunk.sizes) <= max_chunk
        for i in (0, 1):
            largest = max(sizes[i] for sizes in chunk.sizes)
            assert chunk.bounds[i] == largest if chunk.is_exact else chunk.bounds[i] >= largest


@given(st.lists(st.tuples(KEYS, st.none() | KEYS, SIZES, SIZES), min_size=60, max_size=150))
@settings(max_examples=60, deadline=None)
def test_it_is_a_sorted_list_that_is_searched_by_size(history):
    """Each step puts a key in, or takes it out or to another place if it is in, and then asks."""
    room, entries = OrderedRoom(), {}
    with patch.object(ordered, "_MAX_CHUNK", 8):
        for key, to, sizes, asked in history:
            if key in entries and to is not None and (to == key or to not in entries):
                del entries[key]
                entries[to] = sizes
                room.move(key, to, sizes)
            elif key in entries:
                del entries[key]
                room.remove(key)
            else:
                entries[key] = sizes
                room.add(key, sizes)
            fitting = [key for key, has in sorted(entries.items()) if has[0] >= asked[0] or has[1] >= asked[1]]
            assert list(room.fitting(asked)) == fitting
            assert room.first(asked) == (fitting[0] if fitting else None)
            check_chunks(room, 8)
            assert list(room) == sorted(entries)
            assert len(room) == len(entries)
            assert room.largest() == tuple(max((has[i] for has in entries.values()), default=-math.inf) for i in (0, 1))


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
