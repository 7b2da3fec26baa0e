"""A sorted list that finds its first entry with enough room without looking at every entry. Pure.

Invariants: keys are unique and sorted; no chunk is empty or longer than ``_MAX_CHUNK``; the bounds of a chunk are never below
the sizes in it, and equal to the largest ones while ``is_exact``.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Generic, TypeVar

import attrs

Key = TypeVar("Key", bound=tuple[Any, ...])

Sizes = tuple[float, float]
"""What an entry has of two things, or what is asked of either: an entry fits if it has enough of one of them."""

NO_SIZES: Sizes = (-math.inf, -math.inf)

_MAX_CHUNK = 256
_FIRST, _SECOND = itemgetter(0), itemgetter(1)


@attrs.define(eq=False)
class _Chunk(Generic[Key]):
    """Neighbouring entries, and bounds of their sizes."""

    keys: list[Key]
    sizes: list[Sizes]
    bounds: Sizes = NO_SIZES
    is_exact: bool = False

    def tighten(self) -> None:
        """Make the bounds those of the entries."""
        self.bounds = (max(map(_FIRST, self.sizes)), max(map(_SECOND, self.sizes)))
        self.is_exact = True

    def insert(self, key: Key, sizes: Sizes) -> None:
        place = bisect_left(self.keys, key)
        self.keys.insert(place, key)
        self.sizes.insert(place, sizes)
        (first, second), (most_first, most_second) = sizes, self.bounds
        if first > most_first or second > most_second:
            self.bounds = (max(first, most_first), max(second, most_second))

    def delete(self, place: int) -> None:
        first, second = self.sizes[place]
        del self.keys[place], self.sizes[place]
        if first == self.bounds[0] or second == self.bounds[1]:
            self.is_exact = False

    def cut(self) -> _Chunk[Key]:
        """Keep the first half and return the second."""
        half = len(self.keys) // 2
        rest = _Chunk(self.keys[half:], self.sizes[half:])
        del self.keys[half:], self.sizes[half:]
        self.tighten()
        rest.tighten()
        return rest


class OrderedRoom(Generic[Key]):
    """Keys in their order, each with two sizes. What a key stands for is the caller's business."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk[Key]] = []
        self._starts: list[Key] = []
        self._num_keys = 0

    def __len__(self) -> int:
        """Return how many keys there are."""
        return self._num_keys

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys in order."""
        for chunk in self._chunks:
            yield from chunk.keys

    def add(self, key: Key, sizes: Sizes) -> None:
        """Put a new key at its place."""
        self._num_keys += 1
        if not self._chunks:
            self._chunks.append(_Chunk([key], [sizes], sizes, is_exact=True))
            self._starts.append(key)
            return
        at = max(0, bisect_right(self._starts, key) - 1)
        chunk = self._chunks[at]
        chunk.insert(key, sizes)
        self._starts[at] = chunk.keys[0]
        if len(chunk.keys) > _MAX_CHUNK:
            rest = chunk.cut()
            self._chunks.insert(at + 1, rest)
            self._starts.insert(at + 1, rest.keys[0])

    def remove(self, key: Key) -> None:
        """Take a key out.

        Raises:
            KeyError: It is not in.
        """
        at = bisect_right(self._starts, key) - 1
        chunk = self._chunks[at] if at >= 0 else None
        place = bisect_left(chunk.keys, key) if chunk is not None else 0
        if chunk is None or place == len(chunk.keys) or chunk.keys[place] != key:
            raise KeyError(key)
        chunk.delete(place)
        self._num_keys -= 1
        if not chunk.keys:
            del self._chunks[at], self._starts[at]
            return
        self._starts[at] = chunk.keys[0]
        if len(chunk.keys) < _MAX_CHUNK // 4:
            self._merge(at)
            self._merge(at - 1)

    def move(self, key: Key, to: Key, sizes: Sizes) -> None:
        """Put a key that is in to another place, with other sizes: as ``remove`` and ``add``, and faster where the two places are near.

        Raises:
            KeyError: It is not in.
        """
        at = bisect_right(self._starts, key) - 1
        if at < 0 or at != max(0, bisect_right(self._starts, to) - 1):
            self.remove(key)
            self.add(to, sizes)
            return
        chunk = self._chunks[at]
        place = bisect_left(chunk.keys, key)
        if place == len(chunk.keys) or chunk.keys[place] != key:
            raise KeyError(key)
        chunk.delete(place)
        chunk.insert(to, sizes)
        self._starts[at] = chunk.keys[0]

    def _merge(self, at: int) -> None:
        """Join a chunk and the next one if both fill at most half a chunk."""
        if at < 0 or at + 1 == len(self._chunks):
            return
        chunk, other = self._chunks[at], self._chunks[at + 1]
        if len(chunk.keys) + len(other.keys) <= _MAX_CHUNK // 2:
            chunk.keys += other.keys
            chunk.sizes += other.sizes
            chunk.tighten()
            del self._chunks[at + 1], self._starts[at + 1]

    def first(self, asked: Sizes) -> Key | None:
        """Return the first key that has enough of the first or enough of the second size: nearly always the very first one."""
        if not self._chunks:
            return None
        first, second = self._chunks[0].sizes[0]
        return self._starts[0] if first >= asked[0] or second >= asked[1] else next(self.fitting(asked), None)

    def fitting(self, asked: Sizes) -> Iterator[Key]:
        """Iterate, in order, over the keys that have enough of the first or enough of the second size.

        Not to be used on after a change.
        """
        first, second = asked
        for chunk in self._chunks:
            if chunk.bounds[0] < first and chunk.bounds[1] < second:
                continue
            has_any = False
            for place, (has_first, has_second) in enumerate(chunk.sizes):
                if has_first >= first or has_second >= second:
                    has_any = True
                    yield chunk.keys[place]
            if not has_any and not chunk.is_exact:
                chunk.tighten()

    def largest(self) -> Sizes:
        """Return the largest first size and the largest second size; minus infinity when empty."""
        most_first, most_second = NO_SIZES
        for chunk in self._chunks:
            if not chunk.is_exact:
                chunk.tighten()
            first, second = chunk.bounds
            most_first, most_second = max(first, most_first), max(second, most_second)
        return most_first, most_second
