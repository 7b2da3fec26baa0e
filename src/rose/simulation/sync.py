"""What a version of the weights costs, in bytes from the real transfer planner (times: ``rose.simulation.sync_times``).

Nothing is encoded: the cells are those that ``rose.transfer.plan`` cuts for FSDP2 ranks and vLLM's tensor parallelism, their
sizes those that the codec is expected to give. ``ASSUMPTIONS`` says what is assumed beside that.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import attrs

from rose.errors import ConfigError
from rose.simulation.model_shapes import LAYER_PREFIX, ModelShape, engine_layout, fsdp_layout, model_shape
from rose.transfer.blobs import MAX_BLOB_BYTES, MIN_BLOB_BYTES
from rose.transfer.delta import expected_bytes
from rose.transfer.layout import bits_dtype
from rose.transfer.plan import Cell, plan_source

ITEM_BYTES = bits_dtype("bfloat16").itemsize
RECORD_BYTES = 29
"""Of one cell in a manifest."""
PART_RECORD_BYTES = 190
"""Of one cell in the part that a trainer rank sends to the first one: as in the manifest, and where it lies."""
BLOB_ENTRY_BYTES = 75
"""Of one blob in either."""
PAPER_BUCKET_BYTES = 64 << 20
PAPER_PULL_BYTES = 1 << 30
PAPER_BUCKET_S = 0.0174
_COO_BYTES = 4 + ITEM_BYTES
_BUFFER_FRACTION = 0.02
_CODE_BYTES, _ESCAPE_BYTES, _ESCAPED_FRACTION = 0.5, 2, 0.001
_SHORT_GAP, _MEDIUM_GAP = 96, 1536

ASSUMPTIONS = (
    "every bfloat16 value changes with the same chance, on its own, in every tensor",
    "changes are of one or a few ulps, as AdamW's steps on bfloat16 are",
    "one thread a trainer rank compares, encodes, compresses and sums, two an engine rank decode and resolve; copies between device "
    "and host are not counted",
    "an engine reads from the relay of its own cluster at its own links' speed, however many others read at that time",
    "an activation reads and writes device memory at its full bandwidth; the host's part of it is the fixed pause",
)
PAPER_ASSUMPTIONS = (
    "published: deltas as coordinates, 64 MB buckets pushed, 1 GB pulls, keys by shard range, Qwen3-32B in about 20 s",
    "assumed: a changed value is an int32 index and its bfloat16 bits; an engine rank pulls every trainer shard it needs any of",
    f"assumed: buckets are cut from the full weights and handled one after another, {PAPER_BUCKET_S:g} s each, so that Qwen3-32B "
    "from 32 ranks to TP 4 takes 20 s at 100 Gbps and 2 % changed, reconstruction included",
)


@attrs.frozen(kw_only=True)
class SyncCost:
    """The bytes of one version that leads on from the one before. Payloads only, without the records that list them.

    Attributes:
        published_bytes: Cross the thin link once a cluster.
        engine_bytes: One engine (all its ranks) fetches from the relay.
        num_blobs: Of all trainer ranks.
        dense_bytes: The full weights.
        compare_bytes: The busiest trainer rank reads to find the changes: its shard now and as last published.
        engine_dense_bytes: Full weights as one engine holds them: what is replicated counts on every rank.
        engine_blobs: One engine rank fetches, one after another; at most.
        num_cells: Records in the manifest.
        engine_cells: Cells that one engine rank needs; at most.
        num_training_ranks, gpus_per_engine: Trainer and engine ranks.
        changed_fraction: Share of the values that changed.
        overhead_s: Beside bytes and records, before the version is visible; 0 for ROSE's own transfer.
    """

    published_bytes: int
    engine_bytes: int
    num_blobs: int
    dense_bytes: int
    compare_bytes: int
    engine_dense_bytes: int
    engine_blobs: int
    num_cells: int
    engine_cells: int
    num_training_ranks: int
    gpus_per_engine: int
    changed_fraction: float
    overhead_s: float = 0.0

    @property
    def manifest_bytes(self) -> int:
        """The record that lists cells and blobs, put by the first trainer rank."""
        return self.num_cells * RECORD_BYTES + self.num_blobs * BLOB_ENTRY_BYTES

    @property
    def part_bytes(self) -> int:
        """The records from which the first trainer rank joins it, put by all of them."""
        return self.num_cells * PART_RECORD_BYTES + self.num_blobs * BLOB_ENTRY_BYTES

    @property
    def rank_dense_bytes(self) -> float:
        """Full weights of one engine rank."""
        return self.engine_dense_bytes / self.gpus_per_engine

    @property
    def is_dense(self) -> bool:
        """Whether so much changed that whole cells are sent."""
        return self.published_bytes >= self.dense_bytes


@functools.cache
def sync_cost(model: str, *, num_training_ranks: int, gpus_per_engine: int, changed_fraction: float) -> SyncCost:
    """Plan one version from FSDP2 ranks to engines of one tensor-parallel size and return what it costs.

    Args:
        model: A model or profile of ``rose.simulation.model_shapes``.
        num_training_ranks: Trainer ranks that publish, each its rows of every tensor; in a hybrid mesh those of one replica group.
        gpus_per_engine: Ranks of an engine.
        changed_fraction: Share of the values whose bits changed, 0 to 1.

    Raises:
        ConfigError: The model is unknown or cannot be cut so, or a number is out of range.
    """
    _check(num_training_ranks, gpus_per_engine, changed_fraction)
    ranks = _plan(model_shape(model), num_training_ranks, gpus_per_engine)
    size = functools.cache(lambda num_elements: expected_bytes(num_elements, changed_fraction, itemsize=ITEM_BYTES))
    streams = functools.cache(lambda num_elements: stream_bytes(num_elements, changed_fraction))
    blobs = [
        _count_blobs([(cell.targets, streams(cell.box.num_elements)) for cell in cells], _fill(cells))
        for cells in ranks
    ]
    sent = [(size(cell.box.num_elements), len(cell.targets)) for cells in ranks for cell in cells]
    return SyncCost(
        published_bytes=round(sum(num_bytes for num_bytes, _ in sent)),
        engine_bytes=round(sum(num_bytes * num_takers for num_bytes, num_takers in sent)),
        num_blobs=sum(sum(counts.values()) for counts in blobs),
        engine_blobs=max(_blobs_by_target(blobs).values(), default=0),
        num_cells=sum(map(len, ranks)),
        engine_cells=max(Counter(target for cells in ranks for cell in cells for target in cell.targets).values()),
        **_whole_figures(ranks, gpus_per_engine),
        changed_fraction=changed_fraction,
    )


@functools.cache
def paper_sync_cost(model: str, *, num_training_ranks: int, gpus_per_engine: int, changed_fraction: float) -> SyncCost:
    """Return what the same version costs in the manner of the paper (``PAPER_ASSUMPTIONS``); see ``sync_cost``.

    Raises:
        ConfigError: As ``sync_cost``.
    """
    _check(num_training_ranks, gpus_per_engine, changed_fraction)
    ranks = _plan(model_shape(model), num_training_ranks, gpus_per_engine)
    pulled: defaultdict[str, float] = defaultdict(float)
    sent = []
    for cells in ranks:
        shards = _whole_shards(cells)
        sent.append(sum(num_elements for num_elements, _ in shards) * changed_fraction * _COO_BYTES)
        for num_elements, takers in shards:
            for taker in takers:
                pulled[taker] += num_elements * changed_fraction * _COO_BYTES
    whole = _whole_figures(ranks, gpus_per_engine)
    return SyncCost(
        published_bytes=round(sum(sent)),
        engine_bytes=round(sum(pulled.values())),
        num_blobs=sum(math.ceil(num_bytes / PAPER_BUCKET_BYTES) for num_bytes in sent),
        engine_blobs=math.ceil(max(pulled.values()) / PAPER_PULL_BYTES),
        num_cells=0,
        engine_cells=0,
        **whole,
        changed_fraction=changed_fraction,
        overhead_s=math.ceil(whole["dense_bytes"] / PAPER_BUCKET_BYTES) * PAPER_BUCKET_S,
    )


def _check(num_training_ranks: int, gpus_per_engine: int, changed_fraction: float) -> None:
    if num_training_ranks < 1 or gpus_per_engine < 1 or not 0 <= changed_fraction <= 1:
        message = (
            f"a sync needs at least one training rank and one GPU an engine and a changed fraction of 0 to 1, got "
            f"{num_training_ranks}, {gpus_per_engine} and {changed_fraction}"
        )
        raise ConfigError(message)


@functools.cache
def _plan(shape: ModelShape, num_training_ranks: int, gpus_per_engine: int) -> tuple[tuple[Cell, ...], ...]:
    """Return each training rank's cells in order. All layers are cut alike, so one is planned and repeated."""
    small = attrs.evolve(shape, decoder=attrs.evolve(shape.decoder, num_layers=1))
    targets = [engine_layout(small, gpus_per_engine)]
    ranks = []
    for rank in range(num_training_ranks):
        cells = plan_source(rank, fsdp_layout(small, rank, num_training_ranks), targets, {})
        layer = [cell for cell in cells if cell.tensor.startswith(LAYER_PREFIX)]
        first = next((i for i, cell in enumerate(cells) if cell.tensor.startswith(LAYER_PREFIX)), len(cells))
        ranks.append((*cells[:first], *layer * shape.decoder.num_layers, *cells[first + len(layer) :]))
    return tuple(ranks)


def stream_bytes(num_elements: int, changed_fraction: float) -> float:
    """Return about how many bytes a cell's changes take before compression, which is what fills blobs."""
    if not changed_fraction:
        return 0.0
    mean_gap = (1 - changed_fraction) / changed_fraction
    gap_bytes = 1 + (0 if mean_gap < _SHORT_GAP else 0.5 if mean_gap < _MEDIUM_GAP else 1)
    each = gap_bytes + _CODE_BYTES + _ESCAPED_FRACTION * _ESCAPE_BYTES
    return min(float(num_elements * ITEM_BYTES), num_elements * changed_fraction * each)


def _fill(cells: Sequence[Cell]) -> float:
    """Return the bytes at which the encoder of these cells closes a blob."""
    shard_bytes = ITEM_BYTES * sum(cell.box.num_elements for cell in cells)
    num_streams = max(1, len({cell.targets for cell in cells}))
    return min(MAX_BLOB_BYTES, max(MIN_BLOB_BYTES, int(_BUFFER_FRACTION * shard_bytes / num_streams)))


def _count_blobs(payloads: Iterable[tuple[tuple[str, ...], float]], fill_bytes: float) -> dict[tuple[str, ...], int]:
    """Return targets -> blobs, as ``BlobWriter`` packs one rank's payloads."""
    counts: defaultdict[tuple[str, ...], int] = defaultdict(int)
    open_bytes: dict[tuple[str, ...], float] = {}
    for targets, num_bytes in payloads:
        if not num_bytes:
            continue
        if targets not in open_bytes:
            counts[targets] += 1
        open_bytes[targets] = open_bytes.get(targets, 0.0) + num_bytes
        if open_bytes[targets] >= fill_bytes:
            del open_bytes[targets]
    return dict(counts)


def _blobs_by_target(blobs: Iterable[dict[tuple[str, ...], int]]) -> dict[str, int]:
    totals: defaultdict[str, int] = defaultdict(int)
    for counts in blobs:
        for targets, num_blobs in counts.items():
            for target in targets:
                totals[target] += num_blobs
    return dict(totals)


def _whole_shards(cells: Iterable[Cell]) -> list[tuple[int, list[str]]]:
    """Return elements and takers of each trainer shard that the cells were cut from; a shard's cells follow each other."""
    shards = [list(group) for _, group in itertools.groupby(cells, key=lambda cell: cell.tensor)]
    return [
        (sum(cell.box.num_elements for cell in shard), sorted({target for cell in shard for target in cell.targets}))
        for shard in shards
    ]


def _whole_figures(ranks: Sequence[Sequence[Cell]], gpus_per_engine: int) -> dict[str, int]:
    """Return the figures of ``SyncCost`` that do not depend on what changed."""
    shard_bytes = [ITEM_BYTES * sum(cell.box.num_elements for cell in cells) for cells in ranks]
    return {
        "dense_bytes": sum(shard_bytes),
        "compare_bytes": 2 * max(shard_bytes),
        "engine_dense_bytes": ITEM_BYTES * sum(c.box.num_elements * len(c.targets) for cells in ranks for c in cells),
        "num_training_ranks": len(ranks),
        "gpus_per_engine": gpus_per_engine,
    }
