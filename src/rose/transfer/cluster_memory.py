"""What a relay holds: which copies are kept, and which make room. Plain state, no I/O and no locks.

Invariants:

* What is held is at most ``max_bytes``.
* The newest complete version, and what its run shares among all versions (cell maps), is never cut to make room; complete is a version
  whose manifest has been seen.
* Otherwise the oldest version goes first, its objects in the order in which they came. An object gets no room from a newer version,
  unless it belongs to the newest complete one; from its own version only where that is older than the newest complete one, so that
  an old version passes through and one that is still being written is not fetched to be thrown away.
* Versions are ordered by (when their run was first seen, number, attempt). Objects of no run are the oldest.
"""

from __future__ import annotations

import attrs

from rose.errors import TransportError
from rose.interfaces.transport import Payload

MANIFEST = "manifest"
_CELL_MAPS = "cells"
_SHARED_N = -1
"""Stands for the number of a version in what a run shares among its versions."""
_NUM_PARTS = 4


class RelayFullError(TransportError):
    """One version does not fit into a relay's memory."""


@attrs.frozen(order=True)
class Attempt:
    """One attempt at a version, as keys name it: ``run/n/attempt/…``; ordered from old to new."""

    run_index: int
    n: int
    attempt: int


def attempt_prefix(key: str) -> str | None:
    """Return ``run/n/attempt`` of a key, or ``None`` where a key is of another shape."""
    parts = key.split("/", _NUM_PARTS - 1)
    if len(parts) < _NUM_PARTS or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return "/".join(parts[:3])


@attrs.define
class RelayMemory:
    """Copies of blobs, within a limit.

    Args:
        max_bytes: The limit.
    """

    max_bytes: int
    held_bytes: int = attrs.field(default=0, init=False)
    num_evicted: int = attrs.field(default=0, init=False)
    _run_indices: dict[str, int] = attrs.field(factory=dict, init=False)
    _blobs: dict[Attempt, dict[str, Payload]] = attrs.field(factory=dict, init=False)
    _sizes: dict[Attempt, int] = attrs.field(factory=dict, init=False)
    _newest_complete: Attempt | None = attrs.field(default=None, init=False)

    @property
    def newest_complete(self) -> Attempt | None:
        """Return the newest version whose manifest has been seen."""
        return self._newest_complete

    @property
    def num_held(self) -> int:
        """Return how many objects are held."""
        return sum(map(len, self._blobs.values()))

    def keys(self) -> list[str]:
        """Return the keys of what is held, oldest version first."""
        return [key for attempt in sorted(self._blobs) for key in self._blobs[attempt]]

    def attempt_of(self, key: str) -> Attempt:
        """Return the attempt that a key belongs to, or what stands for one; ``run_index`` -1 where it names no run."""
        prefix = attempt_prefix(key)
        run, *rest = (prefix or key).split("/", 2)
        if prefix is None and rest[:1] != [_CELL_MAPS]:
            return Attempt(-1, 0, 0)
        run_index = self._run_indices.setdefault(run, len(self._run_indices))
        return Attempt(run_index, _SHARED_N, 0) if prefix is None else Attempt(run_index, int(rest[0]), int(rest[1]))

    def get(self, key: str) -> Payload | None:
        """Return a copy, if it is held."""
        return self._blobs.get(self.attempt_of(key), {}).get(key)

    def mark_complete(self, key: str) -> None:
        """Note that the version whose manifest ``key`` is can be seen."""
        if attempt_prefix(key) is None or not key.endswith(f"/{MANIFEST}"):
            return
        attempt = self.attempt_of(key)
        if self._newest_complete is None or attempt > self._newest_complete:
            self._newest_complete = attempt

    def admit(self, key: str, data: Payload) -> bool:
        """Keep a copy if there is or can be made room for it; returns whether it is kept.

        Raises:
            RelayFullError: The newest complete version does not fit.
        """
        self.discard(key)
        self.mark_complete(key)
        own = self.attempt_of(key)
        if not self._make_room(len(data), own):
            if own in self._kept():
                held = sum(self._sizes.get(kept, 0) for kept in self._kept())
                message = (
                    f"a single version does not fit: {held} bytes of it are held, {key!r} has {len(data)}, "
                    f"the relay may hold {self.max_bytes}; give it more memory (max_bytes)"
                )
                raise RelayFullError(message)
            return False
        self._blobs.setdefault(own, {})[key] = data
        self._sizes[own] = self._sizes.get(own, 0) + len(data)
        self.held_bytes += len(data)
        return True

    def has_room(self, num_bytes: int, key: str) -> bool:
        """Return whether an object of this size, to be held under ``key``, would be kept."""
        return self._can_hold(num_bytes, self._givers(self.attempt_of(key)))

    def discard(self, key: str) -> None:
        """Forget a copy."""
        attempt = self.attempt_of(key)
        data = self._blobs.get(attempt, {}).pop(key, None)
        if data is not None:
            self.held_bytes -= len(data)
            self._sizes[attempt] -= len(data)
            if not self._blobs[attempt]:
                del self._blobs[attempt], self._sizes[attempt]

    def discard_attempt(self, prefix: str) -> None:
        """Forget all copies of an attempt (``run/n/attempt``)."""
        for key in list(self._blobs.get(self.attempt_of(f"{prefix}/"), ())):
            self.discard(key)

    def _make_room(self, num_bytes: int, own: Attempt) -> bool:
        givers = self._givers(own)
        if not self._can_hold(num_bytes, givers):
            return False
        for old in givers:
            for key in list(self._blobs[old]):
                if self.max_bytes - self.held_bytes >= num_bytes:
                    return True
                self.discard(key)
                self.num_evicted += 1
        return True

    def _can_hold(self, num_bytes: int, givers: list[Attempt]) -> bool:
        return self.max_bytes - self.held_bytes + sum(self._sizes[old] for old in givers) >= num_bytes

    def _givers(self, own: Attempt) -> list[Attempt]:
        """Return the attempts that make room for an object of ``own``, in order."""
        kept = self._kept()
        held = sorted(attempt for attempt in self._blobs if attempt not in kept)
        if own in kept:
            return held
        is_old = self._newest_complete is not None and own < self._newest_complete
        return [attempt for attempt in held if attempt < own or (attempt == own and is_old)]

    def _kept(self) -> tuple[Attempt, ...]:
        """Return what never makes room."""
        newest = self._newest_complete
        return () if newest is None else (newest, Attempt(newest.run_index, _SHARED_N, 0))
