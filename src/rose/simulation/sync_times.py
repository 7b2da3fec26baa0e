"""How long each step in the life of a version takes, from its bytes and from how fast the two ends work. Pure arithmetic."""

from __future__ import annotations

import math

import attrs

from rose import checks
from rose.simulation.scenario import LinkConfig
from rose.simulation.sync import ITEM_BYTES, SyncCost
from rose.transfer.blobs import MAX_BLOB_BYTES

_SECTOR_BYTES = 32


@attrs.frozen(kw_only=True)
class SyncSpeeds:
    """How fast the two ends work.

    The defaults of the first five were measured on one core of an AMD EPYC with AVX-512 and the live codec, on cells of 64 MB and of
    512 bytes: at 1, 2, 5 % changed 12.4, 9.3, 7.1 GB/s compared, coded, compressed and checked, and 35, 40, 52 million changed
    values/s decoded and resolved against the live weights, twice that on the two threads that an engine rank has for it.

    Attributes:
        encode_bytes_per_s: Of ``SyncCost.compare_bytes``, a trainer rank.
        decode_values_per_s: Changed values, an engine rank; dense payloads need no decoding.
        record_s: Reading one cell's record: by the first trainer rank, that joins all parts, and by every engine rank.
        cell_s: Beside its bytes, each cell: encoding it, on its trainer rank; staging it, on every engine rank that needs it.
        write_cell_s: Beside its bytes, writing each cell in place.
        memory_bytes_per_s: Device memory, for writing in place and for checking what was written (default: H100, as profiled).
        pause_s: Pause, resume and the launches between them (vLLM pauses in 23 ms and resumes in 8 ms).
    """

    encode_bytes_per_s: float = attrs.field(default=9e9, validator=checks.number(above=0))
    decode_values_per_s: float = attrs.field(default=8e7, validator=checks.number(above=0))
    record_s: float = attrs.field(default=1e-7, validator=checks.number(at_least=0))
    cell_s: float = attrs.field(default=80e-6, validator=checks.number(at_least=0))
    write_cell_s: float = attrs.field(default=35e-6, validator=checks.number(at_least=0))
    memory_bytes_per_s: float = attrs.field(default=2.3e12, validator=checks.number(above=0))
    pause_s: float = attrs.field(default=0.05, validator=checks.number(at_least=0))


@attrs.frozen(kw_only=True)
class SyncTimes:
    """One version from the optimizer's last write to the engine's first token, nothing else on the way.

    Attributes:
        encode_s: Compare, encode and hash on every trainer rank; the first then joins the records.
        put_s: Payloads and records over the thin link.
        stage_s: One engine's fetch and decode; it goes on serving.
        activate_s: It stands still.
    """

    encode_s: float
    put_s: float
    stage_s: float
    activate_s: float

    @property
    def total_s(self) -> float:
        """All steps, one after the other."""
        return self.encode_s + self.put_s + self.stage_s + self.activate_s


def sync_times(cost: SyncCost, link: LinkConfig, speeds: SyncSpeeds | None = None) -> SyncTimes:
    """Return the times of one version over links that nobody else uses."""
    speeds = speeds or SyncSpeeds()
    put_bytes, num_trips = put_size(cost)
    return SyncTimes(
        encode_s=encode_s(cost, speeds),
        put_s=put_bytes * 8 / (link.gbps * 1e9) + num_trips * link.latency_s,
        stage_s=stage_s(cost, speeds, gbps=link.local_gbps, latency_s=link.latency_s),
        activate_s=speeds.pause_s + write_s(cost, speeds) + check_s(cost, speeds),
    )


def encode_s(cost: SyncCost, speeds: SyncSpeeds) -> float:
    """Return how long the trainer works before a version can leave it; the ranks work side by side."""
    cells_s = cost.num_cells * (speeds.record_s + speeds.cell_s / cost.num_training_ranks)
    return cost.compare_bytes / speeds.encode_bytes_per_s + cells_s + cost.overhead_s


def put_size(cost: SyncCost, *, is_anchor: bool = False) -> tuple[int, int]:
    """Return the bytes that cross the thin link, and the trips that a trainer rank makes one after another.

    The records cross twice: in parts, from every rank, and joined, from the first.
    """
    num_bytes = cost.dense_bytes if is_anchor else cost.published_bytes
    num_blobs = cost.dense_bytes / MAX_BLOB_BYTES if is_anchor else cost.num_blobs
    return num_bytes + cost.part_bytes + cost.manifest_bytes, math.ceil(num_blobs / cost.num_training_ranks) + 2


def stage_s(cost: SyncCost, speeds: SyncSpeeds, *, gbps: float, latency_s: float, is_anchor: bool = False) -> float:
    """Return how long one engine fetches and decodes one version, all ranks side by side, each over ``gbps`` of its own."""
    num_bytes = (cost.engine_dense_bytes if is_anchor else cost.engine_bytes) / cost.gpus_per_engine
    num_blobs = math.ceil(num_bytes / MAX_BLOB_BYTES) if is_anchor else cost.engine_blobs
    wire_s = (num_bytes + cost.manifest_bytes) * 8 / (gbps * 1e9) + (num_blobs + 1) * latency_s
    num_values = 0.0 if is_anchor or cost.is_dense else cost.changed_fraction * cost.rank_dense_bytes / ITEM_BYTES
    cells_s = cost.num_cells * speeds.record_s + cost.engine_cells * speeds.cell_s
    return wire_s + num_values / speeds.decode_values_per_s + cells_s


def write_s(cost: SyncCost, speeds: SyncSpeeds, *, is_anchor: bool = False) -> float:
    """Return how long one version's writes into device memory take: whole weights, or each changed value's sector in and out."""
    sector_bytes = cost.changed_fraction * cost.rank_dense_bytes / ITEM_BYTES * 2 * _SECTOR_BYTES
    num_bytes = cost.rank_dense_bytes if is_anchor or cost.is_dense else min(sector_bytes, 2 * cost.rank_dense_bytes)
    return num_bytes / speeds.memory_bytes_per_s + cost.engine_cells * speeds.write_cell_s


def check_s(cost: SyncCost, speeds: SyncSpeeds) -> float:
    """Return how long an activation takes to read all weights back for their checksums, once however long the chain was."""
    return cost.rank_dense_bytes / speeds.memory_bytes_per_s
