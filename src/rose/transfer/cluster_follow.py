"""Fetching a version while it is still being written.

Invariants: only what the followed attempt's ranks put as their changes is fetched; an attempt that was given up is forgotten; a miss
means the end of a rank's blobs only if it was asked for after the pointer had moved; there is always at most one claim on a blob.

Life cycle of one followed attempt (the publisher's steps in brackets):

1. ``<pointer>.open`` says ``run/n/attempt world_size`` [rank 0 begins]. An attempt that the new one repeats was given up.
2. Several streams wait for ``rank-r/blob-i`` in order, a few blobs ahead, and fetch each as soon as it is there [every rank puts].
3. The pointer shows the attempt's manifest [rank 0 makes it visible]: the manifest is fetched; the first miss of a rank is its end.
   Or ``failed`` is there [a rank gives up]: everything is forgotten.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

import attrs

from rose.errors import BlobNotFoundError, CorruptUpdateError, TransferError, TransportError
from rose.interfaces.transport import Payload
from rose.transfer.cluster_claims import Announcement, Claim, Claims
from rose.transfer.cluster_memory import MANIFEST

_logger = logging.getLogger(__name__)
_LONG_WAIT_S = 0.25
_SHORT_WAIT_S = 0.02


class Followed(Protocol):
    """What a follower needs of a relay."""

    def get(self, key: str) -> Payload:
        """Read a blob."""

    def get_when_ready(self, key: str, timeout_s: float) -> Payload:
        """Read a blob as soon as it is there."""

    def read_pointer(self, name: str) -> str | None:
        """Read a pointer."""

    def has_room(self, num_bytes: int, key: str) -> bool:
        """Return whether so many bytes would be kept."""

    def drop_attempt(self, prefix: str) -> None:
        """Forget an attempt."""


@attrs.define(eq=False)
class _Attempt:
    announced: Announcement
    claims: Claims
    is_published: bool = False
    is_over: bool = False

    @property
    def manifest_key(self) -> str:
        return f"{self.announced.prefix}/{MANIFEST}"

    def key(self, claim: Claim) -> str:
        return f"{self.announced.prefix}/rank-{claim.rank}/blob-{claim.index}"


@attrs.frozen(kw_only=True)
class FollowConfig:
    """How a follower works.

    Attributes:
        num_streams: Blobs that are on their way at a time.
        ahead: How many of them may be of one rank.
        poll_s: Pause between two looks at the pointers.
    """

    num_streams: int = 4
    ahead: int = 2
    poll_s: float = 0.02


class Follower:
    """Keeps a relay up with what is being published, until closed.

    Args:
        relay: Where blobs are fetched to.
        pointer: The pointer that the publisher moves.
        config: How.
    """

    def __init__(self, relay: Followed, *, pointer: str, config: FollowConfig | None = None) -> None:
        self._relay, self._pointer, self._config = relay, pointer, config or FollowConfig()
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._attempt: _Attempt | None = None
        self._largest_bytes = 1
        self._num_reserved = 0
        self._threads = [threading.Thread(target=self._watch, name="rose-follow", daemon=True)] + [
            threading.Thread(target=self._stream, name=f"rose-follow-{i}", daemon=True)
            for i in range(self._config.num_streams)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin no look and no blob from now on, and complain of no failure. What is on its way goes on."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, after what is on its way. Idempotent."""
        self.stop()
        for thread in self._threads:
            thread.join()

    def _watch(self) -> None:
        is_failing = False
        while not self._stopped.wait(self._config.poll_s):
            try:
                self._look()
                is_failing = False
            except (TransportError, TransferError) as error:
                if not is_failing and not self._stopped.is_set():
                    _logger.warning("following %r is held up: %s", self._pointer, error)
                is_failing = True

    def _look(self) -> None:
        announced = Announcement.parse(self._relay.read_pointer(f"{self._pointer}.open"))
        attempt = self._attempt
        if announced is not None and (attempt is None or announced != attempt.announced):
            attempt = self._begin(announced, attempt)
        if attempt is None or attempt.is_over or attempt.is_published:
            return
        if self._relay.read_pointer(self._pointer) == attempt.manifest_key:
            self._relay.get(attempt.manifest_key)
            with self._changed:
                attempt.is_published = True
                self._changed.notify_all()
        elif self._has_failed(attempt):
            self._give_up(attempt)

    def _begin(self, announced: Announcement, before: _Attempt | None) -> _Attempt:
        attempt = _Attempt(announced, Claims(announced.world_size, self._config.ahead))
        with self._changed:
            self._attempt = attempt
            self._changed.notify_all()
        if before is not None and before.announced.is_repeated_by(announced):
            self._give_up(before)
        return attempt

    def _has_failed(self, attempt: _Attempt) -> bool:
        try:
            self._relay.get(f"{attempt.announced.prefix}/failed")
        except BlobNotFoundError:
            return False
        return True

    def _give_up(self, attempt: _Attempt) -> None:
        with self._changed:
            attempt.is_over = True
        self._relay.drop_attempt(attempt.announced.prefix)

    def _stream(self) -> None:
        while not self._stopped.is_set():
            taken = self._take()
            if taken is not None:
                self._follow_one(*taken)

    def _take(self) -> tuple[_Attempt, Claim] | None:
        with self._changed:
            attempt = self._attempt
            if attempt is not None and not attempt.is_over:
                claim = attempt.claims.take()
                if claim is not None:
                    return attempt, claim
                attempt.is_over = attempt.is_published and attempt.claims.is_finished
            self._changed.wait(_LONG_WAIT_S)
        return None

    def _follow_one(self, attempt: _Attempt, claim: Claim) -> None:
        key, was_published = attempt.key(claim), attempt.is_published
        settle = attempt.claims.give_back
        has_room = self._reserve(key)
        try:
            if has_room:
                wait_s = 0.0 if was_published else self._wait_s(attempt)
                size = len(self._relay.get_when_ready(key, wait_s))
                self._largest_bytes = max(self._largest_bytes, size)
                settle = attempt.claims.fetched
            else:
                self._stopped.wait(self._config.poll_s)  # engines have to move on first
        except BlobNotFoundError:
            if was_published:
                settle = attempt.claims.end_at
        except (TransportError, CorruptUpdateError):
            self._stopped.wait(self._config.poll_s)  # the watcher says so
        finally:
            with self._changed:
                settle(claim)
                self._num_reserved -= has_room
                self._changed.notify_all()
        if attempt.is_over:
            self._forget_late(attempt, key)

    def _reserve(self, key: str) -> bool:
        """Take room for a blob as large as the largest so far, beside those on their way; returns whether there was some."""
        with self._changed:
            has_room = self._relay.has_room(self._largest_bytes * (self._num_reserved + 1), key)
            self._num_reserved += has_room
        return has_room

    def _wait_s(self, attempt: _Attempt) -> float:
        """Wait long where every rank has a stream of its own, else pass by quickly."""
        return _LONG_WAIT_S if attempt.announced.world_size <= self._config.num_streams else _SHORT_WAIT_S

    def _forget_late(self, attempt: _Attempt, key: str) -> None:
        if not attempt.is_published:
            self._relay.drop_attempt(attempt.announced.prefix)
            _logger.debug("%s came after its attempt was given up", key)
