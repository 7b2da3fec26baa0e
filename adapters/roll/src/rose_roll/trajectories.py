"""Which trajectory a request belongs to, where ROLL does not say: the one whose last sequence the prompt begins with. Pure.

A pool wants a trajectory's turns under one name: its next turn runs best where its KV memory is. A sequence is gone on with once, so
that twins with the same tokens are two trajectories. A wrong guess costs a prefix that is computed anew, nothing else.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence

import attrs
import numpy as np
import xxhash

_MAX_SEQUENCES = 8192


@attrs.define
class Trajectories:
    """Names of trajectories by the sequences that they ended with."""

    prefix: str
    max_sequences: int = _MAX_SEQUENCES
    _names: OrderedDict[tuple[int, bytes], str] = attrs.field(factory=OrderedDict, init=False)
    _lengths: list[int] = attrs.field(factory=list, init=False)
    _at_length: dict[int, int] = attrs.field(factory=dict, init=False)
    _numbers: itertools.count[int] = attrs.field(factory=itertools.count, init=False)

    def find(self, prompt_ids: Sequence[int]) -> str:
        """Return the trajectory of the longest known sequence that the prompt begins with, and forget that; or a new one."""
        digest = xxhash.xxh3_128()
        ids = np.asarray(prompt_ids, dtype=np.int64)
        found, at = None, 0
        for length in self._lengths[: bisect_right(self._lengths, len(ids))]:
            digest.update(ids[at:length].tobytes())
            at, key = length, (length, digest.digest())
            found = key if key in self._names else found
        if found is None:
            return f"{self.prefix}/{next(self._numbers)}"
        self._count(found[0], -1)
        return self._names.pop(found)

    def end(self, trajectory_id: str, sequence: Sequence[int]) -> None:
        """Note where a trajectory's turn ended: its prompt, and its answer where it has one."""
        ids = np.asarray(sequence, dtype=np.int64)
        key = (len(ids), xxhash.xxh3_128_digest(ids.tobytes()))
        if key not in self._names:
            self._count(len(ids), 1)
        self._names[key] = trajectory_id
        self._names.move_to_end(key)
        while len(self._names) > self.max_sequences:
            (length, _), _ = self._names.popitem(last=False)
            self._count(length, -1)

    def _count(self, length: int, change: int) -> None:
        number = self._at_length.get(length, 0) + change
        if number and length not in self._at_length:
            insort(self._lengths, length)
        if number:
            self._at_length[length] = number
        else:
            del self._at_length[length]
            self._lengths.remove(length)
