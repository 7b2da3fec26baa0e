"""What a publisher leaves in the store: which versions go, and whether the next one needs full weights.

Rank 0 decides, by the pure policy ``rose.policies.retention`` from sizes, acknowledgements and leases, and writes its decision beside
the manifest, before the pointer moves; so every rank reads the same one. Each rank deletes what it has put itself.

Invariants: nothing is deleted before the version that replaces it is visible; a decision is carried out once, and what could not be deleted
is tried again after the next version; a decision of an attempt that failed is made again; a run before this one is deleted by rank 0 once
this one has two versions, the oldest first, so that what is left can be found again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

import attrs

from rose.errors import BlobNotFoundError, CorruptUpdateError, DeadlineExceededError, TransferError, TransportError
from rose.interfaces.transport import Payload, Transport
from rose.policies.retention import RetentionConfig, RetentionSnapshot, StoredVersion, plan_retention
from rose.transfer import records
from rose.transfer.acks import ACKS_POINTER, known_versions, leases_of, read_acks
from rose.transfer.attempt import Attempt
from rose.transfer.manifest import Manifest
from rose.transfer.relay import read_manifest, version_of_key

SCHEMA = "rose.keep/1"

_logger = logging.getLogger(__name__)
_HOLD_POLL_S = 0.25


@attrs.frozen(kw_only=True)
class Decision:
    """What rank 0 decided with a version: versions to delete, and whether the next one should carry full weights."""

    delete: tuple[int, ...]
    is_anchor_due: bool

    def to_bytes(self) -> bytearray:
        """Return the record that ``from_bytes`` reads."""
        return records.pack(SCHEMA, {"delete": list(self.delete), "is_anchor_due": self.is_anchor_due}, {})

    @classmethod
    def from_bytes(cls, payload: Payload) -> Decision:
        """Read a decision.

        Raises:
            CorruptUpdateError: It is damaged.
        """
        header, _ = records.unpack(payload, SCHEMA)
        delete, is_due = header.get("delete"), header.get("is_anchor_due")
        if not (isinstance(delete, list) and all(type(n) is int for n in delete) and isinstance(is_due, bool)):
            message = f"a decision to delete {delete!r}, with full weights due: {is_due!r}"
            raise CorruptUpdateError(message)
        return cls(delete=tuple(delete), is_anchor_due=is_due)


class Housekeeper:
    """One rank's part of keeping the store small.

    Args:
        transport: The store.
        config: What to keep.
        run: The run that is published.
        acks_pointer: Where the pool says what engines have.
    """

    def __init__(
        self, transport: Transport, config: RetentionConfig, *, run: str, acks_pointer: str = ACKS_POINTER
    ) -> None:
        self._transport, self._config, self._run, self._acks_pointer = transport, config, run, acks_pointer
        self._keys_by_n: dict[int, list[str]] = {}
        self._doomed: set[int] = set()
        self._stored: dict[int, StoredVersion] = {}
        self._followed: str | None = None
        self._is_anchor_due = False
        self._old_run_key: str | None = None

    def note(self, n: int, key: str) -> None:
        """Remember a key that this rank is about to write for version ``n``."""
        self._keys_by_n.setdefault(n, []).append(key)

    def decide(self, attempt: Attempt, *, bytes_delta: int | None, bytes_anchor: int | None) -> Decision:
        """Rank 0: decide what goes once this version is visible; waits while readers pin more than there is room for. Blocking.

        Args:
            attempt: The version; all of it but the pointer is written.
            bytes_delta: Size of its changes, ``None`` for full weights alone.
            bytes_anchor: Size of its full weights, if it has them.

        Raises:
            DeadlineExceededError: The attempt's deadline passed while it waited.
        """
        if attempt.pointer_before is not None and attempt.base_key is None:
            self._old_run_key = attempt.pointer_before
        if attempt.base_key is None:
            self._stored.clear()
        n = attempt.version.n
        self._stored[n] = StoredVersion(n=n, bytes_delta=bytes_delta, bytes_anchor=bytes_anchor)
        holding_since_s: float | None = None
        while True:
            now_s = time.time()
            plan = plan_retention(self._config, self._snapshot(now_s, holding_since_s))
            if plan.hold is None:
                break
            if time.monotonic() >= attempt.deadline_s:
                message = (
                    f"version {attempt.version} waited for {', '.join(plan.hold.holders)} to let go of old versions"
                )
                raise DeadlineExceededError(message)
            holding_since_s = now_s if holding_since_s is None else holding_since_s
            time.sleep(_HOLD_POLL_S)
        for holder in plan.broken:
            _logger.warning("%s reads too slowly: what it needs is deleted, it will get full weights", holder)
        return Decision(delete=plan.delete, is_anchor_due=plan.is_anchor_due)

    def follow(self, visible_key: str | None, decision_key: str | None) -> bool:
        """Carry out the decision of a visible version, once; returns whether the next version should carry full weights.

        Args:
            visible_key: What the pointer shows; ``None`` or another run's when this run has published nothing yet.
            decision_key: Where the decision is.
        """
        if visible_key is None or decision_key is None:
            return False
        if visible_key != self._followed:
            try:
                decision = Decision.from_bytes(self._transport.get(decision_key))
            except (BlobNotFoundError, CorruptUpdateError, TransportError) as error:
                _logger.warning("nothing is deleted with %s: %s", visible_key, error)
                return False
            self._followed, self._is_anchor_due = visible_key, decision.is_anchor_due
            self._doomed |= set(decision.delete)
            for gone in decision.delete:
                self._stored.pop(gone, None)
        self._sweep(version_of_key(visible_key).n)
        return self._is_anchor_due

    def _snapshot(self, now_s: float, holding_since_s: float | None) -> RetentionSnapshot:
        try:
            acks = read_acks(self._transport, pointer=self._acks_pointer)
        except (CorruptUpdateError, TransportError) as error:
            _logger.warning("acknowledgements cannot be read, so none count: %s", error)
            acks = {}
        newest_anchor_n = max((version.n for version in self._stored.values() if version.is_anchor), default=0)
        return RetentionSnapshot(
            versions=tuple(self._stored.values()),
            acknowledged=known_versions(acks, self._run),
            leases=leases_of(acks, self._run, newest_anchor_n),
            now_s=now_s,
            holding_since_s=holding_since_s,
        )

    def _sweep(self, newest_n: int) -> None:
        """Delete what is doomed; what cannot be reached stays doomed."""
        try:
            for n in sorted(self._doomed):
                self._delete(self._keys_by_n.get(n, []))
                self._keys_by_n.pop(n, None)
                self._doomed.discard(n)
            if self._old_run_key is not None and newest_n > 0:
                for keys in reversed(list(_keys_of_run(self._transport, self._old_run_key))):
                    self._delete(keys)
                self._old_run_key = None
        except TransportError as error:
            _logger.warning("old versions could not be deleted, they will be tried again: %s", error)

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete; what the store holds in a damaged form stays there, since it would be no different the next time."""
        try:
            self._transport.delete(keys)
        except TransferError as error:
            _logger.warning("some of %d old keys from %r on are left in the store: %s", len(keys), keys[0], error)


def _keys_of_run(transport: Transport, key: str) -> Iterator[list[str]]:
    """Yield the keys of each version of a run, newest first, as far as its manifests can be read.

    A version's manifest is the last of its keys, so that one that was deleted in part is found again.
    """
    found: str | None = key
    with contextlib.suppress(BlobNotFoundError, CorruptUpdateError):
        while found is not None:
            manifest = read_manifest(transport, found)
            prefix = found.rsplit("/", 1)[0]
            ranks = {blob.key.rsplit("/", 2)[1].rsplit("-", 1)[1] for blob in manifest.blobs}
            keys = [manifest.map_key, *(blob.key for blob in manifest.blobs), *_keys_of_anchor(transport, manifest)]
            yield [*keys, f"{prefix}/keep", *(f"{prefix}/part-{rank}" for rank in ranks), found]
            found = manifest.base_key


def _keys_of_anchor(transport: Transport, manifest: Manifest) -> list[str]:
    """Return the keys of the full weights that are beside a version's changes, if there are some that can be read."""
    if manifest.is_anchor or version_of_key(manifest.anchor_key) != manifest.version:
        return []
    try:
        anchor = read_manifest(transport, manifest.anchor_key)
    except (BlobNotFoundError, CorruptUpdateError):
        return [manifest.anchor_key]
    return [*(blob.key for blob in anchor.blobs), manifest.anchor_key]
