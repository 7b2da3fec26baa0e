"""An ordered room is a sorted list that is searched by size."""

from __future__ import annotations

import math
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policies import ordered
from rose.policies.ordered import OrderedRoom

KEYS = st.tuples(st.integers(0, 3), st.integers(0, 5))
SIZES = st.tuples(*[st.sampled_from([-math.inf, 0, 1, 2, 3, math.inf])] * 2)


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
