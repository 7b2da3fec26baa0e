"""Links that transfers share, and the way of a version over them, in the running loop's time.

Invariants of ``SharedLink``: at any moment the transfers in flight have equal shares of the bandwidth; one that is cancelled gives
its share back at once; transfers that end at the same time end in the order in which they began.

Life cycle of a version (``rose.transfer`` does the same with bytes):

1. [TRAINER] ``publish``: encode on every rank, put over the thin link where engines of another cluster follow, move the pointer.
2. [POOL] ``plan``: the live planner chooses deltas or an anchor, by bytes.
3. [ENGINE] ``fetch`` while it serves: wait until its cluster has the payloads (they cross once a cluster), fetch and decode its part.
4. [ENGINE] stand still for ``activation_s``.
"""

from __future__ import annotations

import asyncio
import heapq

import attrs

from rose.backends.memory import MemoryTransport
from rose.policies.retention import RetentionConfig, RetentionSnapshot, StoredVersion, plan_retention
from rose.pool import PullCost
from rose.simulation import sync_times as times
from rose.simulation.sync import ITEM_BYTES, SyncCost
from rose.simulation.sync_times import SyncSpeeds
from rose.transfer.cells import BlobEntry, Columns
from rose.transfer.delta import Codec
from rose.transfer.manifest import Manifest
from rose.transfer.relay import POINTER, manifest_key, plan_update, version_of_key
from rose.types import TransportAddress, WeightUpdate, WeightVersion

ADDRESS = TransportAddress(name="simulated")


@attrs.define(eq=False)
class _Transfer:
    num_bytes: int
    done: asyncio.Future[None]
    is_over: bool = False


class SharedLink:
    """A link whose bandwidth the transfers in flight share equally (processor sharing).

    A change costs O(log n) in the transfers in flight: one heap, ordered by how much each transfer must have been given since the
    link was last idle, and one timer for the first of them.
    """

    def __init__(self, *, gbps: float, latency_s: float = 0.0) -> None:
        """Describe the link.

        Args:
            gbps: Bandwidth of all transfers together, 10^9 bits/s.
            latency_s: Of one trip.
        """
        if not (gbps > 0 and latency_s >= 0):
            message = f"a link needs a positive bandwidth and a latency of 0 or more, got {gbps} Gbps and {latency_s} s"
            raise ValueError(message)
        self.latency_s = latency_s
        self.bytes_per_s = gbps * 1e9 / 8
        self._order = 0
        self._heap: list[tuple[float, int, _Transfer]] = []
        self._num_active = 0
        self._given_bytes = 0.0
        self._at_s = 0.0
        self._busy_s = 0.0
        self._delivered_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_active(self) -> int:
        """Transfers that share the bandwidth now."""
        return self._num_active

    @property
    def delivered_bytes(self) -> int:
        """Bytes of all transfers that came to their end."""
        return self._delivered_bytes

    @property
    def busy_s(self) -> float:
        """Time with at least one transfer, up to the last one that began or ended."""
        return self._busy_s

    async def transfer(self, num_bytes: int, *, num_trips: int = 1) -> None:
        """Wait for ``num_trips`` latencies, one after another, then send ``num_bytes``."""
        if num_bytes < 0 or num_trips < 0:
            message = f"a transfer has 0 or more bytes and trips, got {num_bytes} and {num_trips}"
            raise ValueError(message)
        await asyncio.sleep(self.latency_s * num_trips)
        if num_bytes:
            transfer = self._begin(num_bytes)
            try:
                await transfer.done
            finally:
                self._leave(transfer)

    def _begin(self, num_bytes: int) -> _Transfer:
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        if not self._num_active:
            self._given_bytes = 0.0  # keeps the sum small, and so exact
        transfer = _Transfer(num_bytes, loop.create_future())
        self._order += 1
        self._num_active += 1
        heapq.heappush(self._heap, (self._given_bytes + num_bytes, self._order, transfer))
        self._set_timer(loop)
        return transfer

    def _leave(self, transfer: _Transfer) -> None:
        """Give back the share of a transfer that was cancelled; nothing for one that came to its end."""
        if not transfer.is_over:
            loop = asyncio.get_running_loop()
            self._advance(loop.time())
            self._end(transfer)
            self._set_timer(loop)

    def _end(self, transfer: _Transfer) -> None:
        transfer.is_over = True
        self._num_active -= 1

    def _advance(self, now_s: float) -> None:
        if self._num_active:
            self._given_bytes += (now_s - self._at_s) * self.bytes_per_s / self._num_active
            self._busy_s += now_s - self._at_s
        self._at_s = now_s

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and self._heap[0][2].is_over:
            heapq.heappop(self._heap)
        if self._heap:
            left_bytes = max(0.0, self._heap[0][0] - self._given_bytes)
            self._timer = loop.call_at(
                self._at_s + left_bytes * self._num_active / self.bytes_per_s, self._finish_first
            )

    def _finish_first(self) -> None:
        """End the transfer that the timer was for, and those that end with it."""
        loop = asyncio.get_running_loop()
        self._timer = None
        self._advance(loop.time())
        self._given_bytes = max(self._given_bytes, self._heap[0][0])  # the timer's time is rounded
        while self._heap and self._heap[0][0] <= self._given_bytes:
            _, _, transfer = heapq.heappop(self._heap)
            if transfer.is_over:
                continue
            self._end(transfer)
            if not transfer.done.cancelled():
                self._delivered_bytes += transfer.num_bytes
                transfer.done.set_result(None)
        self._set_timer(loop)


class RelayedSync:
    """The versions of one run as engines meet them: an ``UpdateSource`` that costs time instead of moving bytes.

    Version 0 is there from the start, as an anchor that every cluster has. All versions cost alike.
    """

    def __init__(
        self,
        *,
        run: str,
        cost: SyncCost,
        link: SharedLink,
        local_gbps: float,
        speeds: SyncSpeeds | None = None,
        retention: RetentionConfig | None = None,
    ) -> None:
        """Begin at version 0.

        Args:
            run: Name of the run in versions and keys.
            cost: Of one version.
            link: The thin link, shared with whatever else goes over it.
            local_gbps: Of one GPU's link inside its cluster.
            speeds: Of both ends.
            retention: What stays, and when full weights come beside a version; as the publisher's.
        """
        self.link = link
        self._run, self._cost, self._speeds, self._local_gbps = run, cost, speeds or SyncSpeeds(), local_gbps
        self._retention = retention or RetentionConfig()
        self._is_anchor_due = False
        self._store = MemoryTransport()
        self._is_anchor: dict[str, bool] = {}
        self._keys_by_n: dict[int, list[str]] = {}
        self._stored: dict[int, StoredVersion] = {}
        self._crossed: set[str] = set()
        self._crossings: dict[str, asyncio.Lock] = {}
        self._plans: dict[WeightVersion | None, WeightUpdate | None] = {}
        self._num_attempts = 1
        self._anchor = WeightVersion(run, 0)
        self._anchor_key = self._newest_key = manifest_key(self._anchor, 0)
        self._put(self._anchor, self._newest_key, base_key=None)
        self._move_to(self._anchor, self._newest_key)
        self._crossed.add(self._anchor_key)

    @property
    def version(self) -> WeightVersion:
        """The newest version."""
        return self._version

    async def publish(self, *, is_remote: bool = True) -> WeightVersion:
        """Make the next version; returns when engines can see it. One call at a time.

        Args:
            is_remote: Engines of another cluster follow, so the payloads cross the thin link first. Without it they cross when the
                first such engine asks.
        """
        version = WeightVersion(self._run, self._version.n + 1)
        key = manifest_key(version, self._num_attempts)
        self._num_attempts += 1
        await asyncio.sleep(times.encode_s(self._cost, self._speeds))
        if is_remote:
            await self._cross(key, is_anchor=False)
        if self._is_anchor_due:
            anchor_key = f"{key.removesuffix('manifest')}anchor"
            if is_remote:
                await self._cross(anchor_key, is_anchor=True)
            self._put(version, anchor_key, base_key=None)
            self._anchor, self._anchor_key = version, anchor_key
        self._put(version, key, base_key=self._newest_key)
        self._move_to(version, key)
        return version

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        """Return the update from ``known`` to the newest version, as the live planner chooses it."""
        if known not in self._plans:
            update = plan_update(self._store, known)
            self._plans[known] = None if update is None else attrs.evolve(update, address=ADDRESS)
        return self._plans[known]

    async def cost(self, update: WeightUpdate) -> PullCost:
        """Return what an update costs an engine of the other cluster now."""
        kinds = {key: self._is_anchor[key] for key in update.manifest_keys}
        return PullCost(
            pieces={key: times.put_size(self._cost, is_anchor=is_anchor)[0] for key, is_anchor in kinds.items()},
            present=frozenset(self._crossed),
            link_bytes_per_s=self.link.bytes_per_s / (self.link.num_active + 1),
            stage_s=sum(self._stage_s(is_anchor=is_anchor) for is_anchor in kinds.values()),
        )

    def next_cost(self) -> PullCost:
        """Return what the next version will cost an engine of the other cluster that has this one."""
        num_bytes, _ = times.put_size(self._cost)
        return PullCost(
            pieces={"next": num_bytes}, link_bytes_per_s=self.link.bytes_per_s, stage_s=self._stage_s(is_anchor=False)
        )

    async def fetch(self, update: WeightUpdate, *, is_local: bool) -> int:
        """Bring an update to one engine while it serves; returns the bytes fetched.

        Args:
            update: From ``plan``.
            is_local: The engine is in the trainer's cluster, so nothing has to cross the thin link for it.

        Raises:
            BlobNotFoundError: A version was retired; plan again.
        """
        num_bytes, wait_s = 0, 0.0
        for key in update.manifest_keys:
            self._store.get(key)
            is_anchor = self._is_anchor[key]
            if not is_local:
                await self._cross(key, is_anchor=is_anchor)
            num_bytes += self._cost.engine_dense_bytes if is_anchor else self._cost.engine_bytes
            wait_s += self._stage_s(is_anchor=is_anchor)
        await asyncio.sleep(wait_s)
        return num_bytes

    def _stage_s(self, *, is_anchor: bool) -> float:
        return times.stage_s(
            self._cost, self._speeds, gbps=self._local_gbps, latency_s=self.link.latency_s, is_anchor=is_anchor
        )

    def activation_s(self, update: WeightUpdate) -> float:
        """Return how long the engine stands still to take the update: the fixed pause, the writes of each version, one check of all."""
        writes_s = sum(
            times.write_s(self._cost, self._speeds, is_anchor=self._is_anchor[key]) for key in update.manifest_keys
        )
        return self._speeds.pause_s + writes_s + times.check_s(self._cost, self._speeds)

    async def _cross(self, key: str, *, is_anchor: bool) -> None:
        """Bring a version over the thin link unless it is there; who asks meanwhile waits, and begins anew if that is cancelled."""
        if key in self._crossed:
            return
        async with self._crossings.setdefault(key, asyncio.Lock()):
            if key not in self._crossed:
                num_bytes, num_trips = times.put_size(self._cost, is_anchor=is_anchor)
                await self.link.transfer(num_bytes, num_trips=num_trips)
                self._crossed.add(key)

    def _put(self, version: WeightVersion, key: str, *, base_key: str | None) -> None:
        """Put a manifest that tells the planner the bytes: one cell in one blob."""
        is_anchor = base_key is None
        num_elements = self._cost.dense_bytes // ITEM_BYTES
        length_bytes = self._cost.dense_bytes if is_anchor else self._cost.published_bytes
        columns = Columns.empty(1)
        if length_bytes:
            columns.codec[0] = Codec.DENSE if is_anchor else Codec.SPARSE
            columns.num_changed[0] = num_elements if is_anchor else num_elements * self._cost.changed_fraction
            columns.blob[0] = 0
        manifest = Manifest(
            version=version,
            base=None if base_key is None else version_of_key(base_key),
            base_key=base_key,
            anchor_key=key if is_anchor else self._anchor_key,
            map_key="",
            blobs=(BlobEntry(key=f"{key}/blob", length_bytes=length_bytes, checksum=""),) if length_bytes else (),
            columns=columns,
        )
        self._store.put(key, manifest.to_bytes())
        self._is_anchor[key] = is_anchor
        self._keys_by_n.setdefault(version.n, []).append(key)

    def _move_to(self, version: WeightVersion, key: str) -> None:
        """Move the pointer, and retire what the publisher would."""
        self._store.compare_and_set(POINTER, self._store.read_pointer(POINTER), key)
        self._version, self._newest_key = version, key
        self._plans.clear()
        self._stored[version.n] = StoredVersion(
            n=version.n,
            bytes_delta=self._cost.published_bytes if version.n else None,
            bytes_anchor=self._cost.dense_bytes if self._anchor == version else None,
        )
        plan = plan_retention(self._retention, RetentionSnapshot(versions=tuple(self._stored.values())))
        self._is_anchor_due = plan.is_anchor_due
        for n in plan.delete:
            self._store.delete(self._keys_by_n.pop(n))
            del self._stored[n]
