"""What a member was given and still holds.

Invariants: the bytes held never exceed ``max_bytes`` by more than the newest blob; blobs of versions older than the newest
``keep`` of their run are let go first; what is not held is for the origin to answer.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

import attrs

from rose.transfer.delta import digest


@attrs.frozen(kw_only=True)
class FanOutCounts:
    """What a member's ``get`` was served from, and what went wrong.

    Attributes:
        num_delivered: Blobs that the collective brought.
        num_failed: Blobs that it announced and did not bring.
        num_from_collective: Reads served from what it brought.
        num_from_origin: Reads that went to the origin.
    """

    num_delivered: int
    num_failed: int
    num_from_collective: int
    num_from_origin: int


class BlobCache:
    """Blobs by key, oldest first.

    Args:
        max_bytes: How much is held.
        keep: How many of a run's newest versions are held.
    """

    def __init__(self, max_bytes: int, keep: int) -> None:
        self._max_bytes, self._keep = max_bytes, keep
        self._changed = threading.Condition()
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._held_bytes = 0
        self._arriving: set[str] = set()
        self._num_delivered = self._num_failed = self._num_hits = self._num_misses = 0

    def expect(self, key: str) -> None:
        """Note that a blob is on its way."""
        with self._changed:
            self._arriving.add(key)

    def deliver(self, key: str, data: bytes) -> None:
        """Hold a blob that has arrived and was verified."""
        with self._changed:
            self._arriving.discard(key)
            self._num_delivered += 1
            self._pop(key)
            self._held[key] = data
            self._held_bytes += len(data)
            self._trim(key)
            self._changed.notify_all()

    def fail(self, key: str) -> None:
        """Note that a blob will not arrive."""
        with self._changed:
            self._arriving.discard(key)
            self._num_failed += 1
            self._changed.notify_all()

    def drop(self, keys: list[str], damaged: str | None = None) -> None:
        """Let go of blobs; with ``damaged`` only of those whose digest it is."""
        with self._changed:
            for key in keys:
                if damaged is None or (key in self._held and digest(self._held[key]) == damaged):
                    self._pop(key)

    def find(self, key: str, timeout_s: float) -> bytes | None:
        """Return a blob, waiting for one that is on its way; ``None`` sends the caller to the origin."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while key not in self._held and key in self._arriving:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    break
            found = self._held.get(key)
            self._num_hits += found is not None
            self._num_misses += found is None
            return found

    def counts(self) -> FanOutCounts:
        """Return what happened so far."""
        with self._changed:
            return FanOutCounts(
                num_delivered=self._num_delivered,
                num_failed=self._num_failed,
                num_from_collective=self._num_hits,
                num_from_origin=self._num_misses,
            )

    def _trim(self, newest_key: str) -> None:
        newest = _version_of(newest_key)
        if newest is not None:
            run, n = newest
            for key in list(self._held):
                version = _version_of(key)
                if version is not None and version[0] == run and version[1] <= n - self._keep:
                    self._pop(key)
        while self._held_bytes > self._max_bytes and len(self._held) > 1:
            self._pop(next(iter(self._held)))

    def _pop(self, key: str) -> None:
        self._held_bytes -= len(self._held.pop(key, b""))


def _version_of(key: str) -> tuple[str, int] | None:
    """Return run and number when the key begins with them, as a publisher's do."""
    run, _, rest = key.partition("/")
    number = rest.partition("/")[0]
    return (run, int(number)) if number.isdecimal() else None
