"""One copy per cluster: a transport for the engines of one serving cluster, in front of one that is far away.

Invariants:

* A blob crosses the link once, however many engines and threads ask for it and when: whoever asks while it is on its way shares that
  transfer, whoever asks later gets the copy. Only ``invalidate``, or memory that is too small, makes it cross again.
* What ``get`` returns is what the origin holds or held under that key: keys are written once, so copies do not age.
* Pointers are hardly older than ``pointer_age_s``, and never older than a ``compare_and_set`` that went through this relay.
* Writes go through to the origin before they return.
* Once interrupted, nothing begins at the origin but what had passed the last look at that, and no follower is left that begins anything.

A ``get`` that meets a transfer or a wait (``get_when_ready``) for the same key shares its end. After a miss it asks once more, since the
other may have looked before the blob came: of a blob that is not there it learns at most twice ``WAIT_SLICE_S`` late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rose.errors import BlobNotFoundError, TransportError
from rose.interfaces.transport import Payload, SupportsInvalidate, Transport
from rose.transfer.cluster_flights import Flight
from rose.transfer.cluster_follow import FollowConfig, Follower
from rose.transfer.cluster_memory import RelayMemory
from rose.transfer.cluster_pointers import PointerCache
from rose.transfer.cluster_retry import RetryPolicy
from rose.transfer.cluster_stats import RelayStats, Tally
from rose.transfer.cluster_wait import wait_for_blob
from rose.transfer.delta import digest
from rose.transfer.relay import POINTER
from rose.types import TransportAddress

T = TypeVar("T")
WAIT_SLICE_S = 0.25


class ClusterRelay(Transport):
    """Reads each blob of a far transport once, and serves it to all engines of a cluster. Thread-safe.

    Engines of other processes reach it through a server (``rose.backends.memory.StoreServer``, ``rose relay``); the one who
    starts that tells the relay by ``advertise``.

    Args:
        upstream: Where the blobs come from. The relay does not close it.
        max_bytes: How much it may hold; beside that it has what is on its way.
        pointer_age_s: How old a pointer may be.
        retry: How failures of the link are met.
    """

    def __init__(
        self,
        upstream: Transport,
        *,
        max_bytes: int,
        pointer_age_s: float = 0.02,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._upstream = upstream
        self._retry = retry or RetryPolicy()
        self._interrupted = threading.Event()
        self._lock = threading.Lock()
        self._memory = RelayMemory(max_bytes)
        self._tally = Tally()
        self._flights: dict[str, Flight[Payload]] = {}
        self._pointers = PointerCache(self._read_upstream_pointer, pointer_age_s)
        self._followers: list[Follower] = []
        self._address: TransportAddress | None = None

    @property
    def stats(self) -> RelayStats:
        """Return the counters as they are now."""
        with self._lock:
            return self._tally.snapshot(self._memory)

    def put(self, key: str, payload: Payload) -> None:
        """Write a blob at the origin."""
        self._try(lambda: self._upstream.put(key, payload))

    def get(self, key: str) -> Payload:
        """Read a blob: the copy, or through the link.

        Raises:
            BlobNotFoundError: The origin has no such key.
            TransportError: The origin was not reachable, in all tries.
            RelayFullError: The newest version does not fit the relay's memory.
        """
        return self._read(key, lambda: self._upstream.get(key))

    def get_when_ready(self, key: str, timeout_s: float) -> Payload:
        """Read a blob as soon as it is there. Raises what ``get`` raises."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            slice_s = min(left_s, WAIT_SLICE_S)
            try:
                return self._read(
                    key,
                    lambda: wait_for_blob(self._upstream, key, slice_s),  # noqa: B023 - used at once
                    may_ask_again=not slice_s,
                )
            except BlobNotFoundError:
                if time.monotonic() >= deadline_s:
                    raise

    def delete(self, keys: Sequence[str]) -> None:
        """Remove blobs, here and at the origin."""
        for key in keys:
            self._forget(key)
        self._try(lambda: self._upstream.delete(keys))
        for key in keys:
            self._forget(key)

    def invalidate(self, key: str, damaged: str | None = None) -> None:
        """Forget a copy that was found damaged, here and further up; see ``rose.interfaces.transport.SupportsInvalidate``."""
        with self._lock:
            held = self._memory.get(key)
        if held is not None and damaged is not None and digest(held) != damaged:
            return
        self._forget(key)
        if isinstance(self._upstream, SupportsInvalidate):
            self._check_goes_on()
            self._upstream.invalidate(key, damaged)

    def read_pointer(self, name: str) -> str | None:
        """Return the pointer's value, as it was at most ``pointer_age_s`` and one trip ago."""
        return self._pointers.get(name)

    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Set the pointer at the origin if it holds ``expected`` there. Not repeated by the relay: the first try may have worked."""
        self._check_goes_on()
        try:
            return self._upstream.compare_and_set(name, expected, value)
        finally:
            self._pointers.note_set(name)

    def follow(self, *, pointer: str = POINTER, config: FollowConfig | None = None) -> Follower:
        """Fetch versions while they are being published, until ``close``; see ``rose.transfer.cluster_follow``.

        Args:
            pointer: The pointer that the publisher moves.
            config: How many blobs at a time, and how often to look.

        Raises:
            TransportError: The relay was interrupted.
        """
        with self._lock:
            self._check_goes_on()
            follower = Follower(self, pointer=pointer, config=config)
            self._followers.append(follower)
        return follower

    def advertise(self, address: TransportAddress) -> None:
        """Say how other processes reach this relay."""
        self._address = address

    def address(self) -> TransportAddress:
        """Return how another process reaches this relay; the origin's own address before it is advertised."""
        return self._address or self._upstream.address()

    def has_room(self, num_bytes: int, key: str) -> bool:
        """Return whether an object of this size would be kept under ``key``."""
        with self._lock:
            return self._memory.has_room(num_bytes, key)

    def drop_attempt(self, prefix: str) -> None:
        """Forget what is held of an attempt (``run/n/attempt``) that was given up."""
        with self._lock:
            self._memory.discard_attempt(prefix)
            for key, flight in self._flights.items():
                if key.startswith(f"{prefix}/"):
                    flight.is_stale = True

    def interrupt(self) -> None:
        """Begin, repeat and follow nothing at the origin from now on: whoever asks for what is not here gets a ``TransportError``.

        What is on its way goes on. Whoever wants to end at once then closes the origin's transport, and the relay after it; a
        call that was just about to begin may open that transport again, so it has to be closed until all calls have ended.
        """
        with self._lock:
            self._interrupted.set()
            followers = list(self._followers)
        for follower in followers:
            follower.stop()

    def close(self) -> None:
        """Stop following and forget all copies. Idempotent."""
        with self._lock:
            followers = list(self._followers)
        for follower in followers:
            follower.close()
        with self._lock:
            self._memory = RelayMemory(self._memory.max_bytes)

    def _read(self, key: str, fetch: Callable[[], Payload], *, may_ask_again: bool = True) -> Payload:
        with self._lock:
            held = self._memory.get(key)
            if held is not None:
                self._tally.hit(len(held))
                return held
            flight = self._flights.get(key)
            is_leader = flight is None
            if flight is None:
                flight = self._flights[key] = Flight()
        if is_leader:
            return self._lead(key, flight, fetch)
        try:
            data = flight.result()
        except BlobNotFoundError:
            if not may_ask_again:
                raise
            return self._read(key, fetch, may_ask_again=False)
        with self._lock:
            self._tally.hit(len(data))
        return data

    def _lead(self, key: str, flight: Flight[Payload], fetch: Callable[[], Payload]) -> Payload:
        """Fetch, keep, and let those go who wait; a copy is there in the same moment in which the flight is not."""
        try:
            data = self._try(fetch)
            with self._lock:
                self._tally.crossed(key, len(data))
                if not flight.is_stale:
                    self._memory.admit(key, data)
                del self._flights[key]
        except BaseException as error:
            with self._lock:
                self._flights.pop(key, None)
            flight.fail(error)
            raise
        flight.land(data)
        return data

    def _forget(self, key: str) -> None:
        with self._lock:
            self._memory.discard(key)
            if key in self._flights:
                self._flights[key].is_stale = True

    def _read_upstream_pointer(self, name: str) -> str | None:
        value = self._try(lambda: self._upstream.read_pointer(name))
        with self._lock:
            self._tally.num_pointer_reads += 1
            if value is not None:
                self._memory.mark_complete(value)
        return value

    def _check_goes_on(self) -> None:
        if self._interrupted.is_set():
            message = "the relay is stopping"
            raise TransportError(message)

    def _try(self, work: Callable[[], T]) -> T:
        self._check_goes_on()
        return self._retry.call(work, on_failure=self._count_retry, stopped=self._interrupted)

    def _count_retry(self) -> None:
        with self._lock:
            self._tally.num_retries += 1
