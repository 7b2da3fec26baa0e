"""Which trajectory a turn belongs to, and what has been told of its earlier turns."""

from __future__ import annotations

import uuid
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import attrs
import xxhash

from rose_verl.fields import Answer, group_of

_MAX_KNOWN = 16384


@attrs.define(eq=False)
class Trajectory:
    """What is known of one.

    Attributes:
        group_id: Named by its first prompt.
        turns: One record a turn, in order. Every turn's ``extra_fields`` has this very list: agent loops keep those of the first turn.
    """

    group_id: str
    turns: list[dict[str, Any]] = attrs.field(factory=list)

    def add(self, prompt_ids: Sequence[int], answer: Answer) -> dict[str, Any]:
        """Record a turn; returns its ``extra_fields``, with the records of all turns."""
        start = len(prompt_ids)
        fields = answer.extra_fields
        spans = [[start + first, start + last, step] for first, last, step in fields["version_spans"]]
        self.turns.append({"version_spans": spans, "hops": fields["hops"]})
        return {**fields, "rose_turns": self.turns}


class Trajectories:
    """Those that were heard of lately, by id."""

    def __init__(self, max_known: int = _MAX_KNOWN) -> None:
        self._max_known = max_known
        self._known: OrderedDict[str, Trajectory] = OrderedDict()

    def get(self, trajectory_id: str, prompt_ids: Sequence[int]) -> Trajectory:
        """Return a trajectory, new if its id is."""
        found = self._known.pop(trajectory_id, None) or Trajectory(group_of(prompt_ids))
        self._known[trajectory_id] = found
        while len(self._known) > self._max_known:
            self._known.popitem(last=False)
        return found


class PrefixBook:
    """Tells a trajectory by its tokens, where nobody names it: its next prompt begins with its last prompt and answer."""

    def __init__(self, max_known: int = _MAX_KNOWN) -> None:
        self._max_known = max_known
        self._ids: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._lengths: dict[int, int] = {}

    def take(self, prompt_ids: Sequence[int]) -> str:
        """Return the id of the trajectory whose known tokens are the longest beginning of a prompt, else a fresh one."""
        ids, digest, done, found = array("q", prompt_ids), xxhash.xxh3_64(), 0, None
        for length in sorted(length for length in self._lengths if length <= len(ids)):
            digest.update(ids[done:length].tobytes())
            done = length
            if (length, digest.intdigest()) in self._ids:
                found = (length, digest.intdigest())
        return uuid.uuid4().hex if found is None else self._forget(found)

    def note(self, trajectory_id: str, ids: Sequence[int]) -> None:
        """Remember all tokens of a trajectory so far."""
        key = (len(ids), xxhash.xxh3_64_intdigest(array("q", ids).tobytes()))
        if key not in self._ids:
            self._lengths[key[0]] = self._lengths.get(key[0], 0) + 1
        self._ids[key] = trajectory_id
        while len(self._ids) > self._max_known:
            self._forget(next(iter(self._ids)))

    def _forget(self, key: tuple[int, int]) -> str:
        trajectory_id = self._ids.pop(key)
        self._lengths[key[0]] -= 1
        if not self._lengths[key[0]]:
            del self._lengths[key[0]]
        return trajectory_id
