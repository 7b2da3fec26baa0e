"""What a relay counts."""

from __future__ import annotations

import attrs

from rose.transfer.cluster_memory import RelayMemory, attempt_prefix

_MAX_ATTEMPTS = 256


@attrs.frozen(kw_only=True)
class RelayStats:
    """Counters of a relay since its start. Bytes are those of blobs, without what carries them.

    Attributes:
        link_bytes: Bytes of the blobs that crossed the link whole, each time counted.
        link_objects: How many that were.
        distinct_bytes: Bytes of the different blobs among them.
        distinct_objects: How many that were.
        hit_bytes: Bytes that engines got without the link.
        num_hits: How many blobs that were.
        num_pointer_reads: Reads of pointers that crossed the link.
        num_retries: Calls that failed and were repeated.
        num_evicted: Copies that made room for others.
        held_bytes: Bytes that are held now.
        held_objects: Copies that are held now.
    """

    link_bytes: int
    link_objects: int
    distinct_bytes: int
    distinct_objects: int
    hit_bytes: int
    num_hits: int
    num_pointer_reads: int
    num_retries: int
    num_evicted: int
    held_bytes: int
    held_objects: int

    @property
    def redundancy(self) -> float:
        """Return how often each byte crossed the link: exactly 1.0 when none did twice (or none at all)."""
        return self.link_bytes / self.distinct_bytes if self.distinct_bytes else 1.0


@attrs.define
class Tally:
    """The counters while they count. The keys of only the newest attempts are remembered, so memory stays bounded."""

    link_bytes: int = 0
    link_objects: int = 0
    distinct_bytes: int = 0
    distinct_objects: int = 0
    hit_bytes: int = 0
    num_hits: int = 0
    num_pointer_reads: int = 0
    num_retries: int = 0
    _seen: dict[str, set[str]] = attrs.field(factory=dict)

    def hit(self, num_bytes: int) -> None:
        """Count a blob that an engine got without the link."""
        self.num_hits += 1
        self.hit_bytes += num_bytes

    def crossed(self, key: str, num_bytes: int) -> None:
        """Count a blob that crossed the link."""
        self.link_objects += 1
        self.link_bytes += num_bytes
        seen = self._seen.setdefault(attempt_prefix(key) or "", set())
        if key not in seen:
            seen.add(key)
            self.distinct_objects += 1
            self.distinct_bytes += num_bytes
        while len(self._seen) > _MAX_ATTEMPTS:
            del self._seen[next(iter(self._seen))]

    def snapshot(self, memory: RelayMemory) -> RelayStats:
        """Return the counters together with what the memory holds."""
        return RelayStats(
            link_bytes=self.link_bytes,
            link_objects=self.link_objects,
            distinct_bytes=self.distinct_bytes,
            distinct_objects=self.distinct_objects,
            hit_bytes=self.hit_bytes,
            num_hits=self.num_hits,
            num_pointer_reads=self.num_pointer_reads,
            num_retries=self.num_retries,
            num_evicted=memory.num_evicted,
            held_bytes=memory.held_bytes,
            held_objects=memory.num_held,
        )
