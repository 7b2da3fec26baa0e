"""What a version costs: the planner's cells, the codec's sizes, beside a real publish of a small model."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest

from rose.backends.memory import MemoryTransport
from rose.backends.paced.shapes import DecoderShape
from rose.errors import ConfigError
from rose.simulation import model_shapes, sync
from rose.simulation.model_shapes import ModelShape, engine_layout, fsdp_layout, model_shape
from rose.simulation.scenario import LinkConfig
from rose.simulation.sync import paper_sync_cost, sync_cost
from rose.simulation.sync_times import SyncSpeeds, put_size, stage_s, sync_times, write_s
from rose.testing import FakeTrainer
from rose.transfer.blobs import BlobWriter
from rose.transfer.delta import Codec, EncodedCell
from rose.transfer.plan import plan_source
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update, read_manifest
from rose.transfer.subscriber import ArraySink, Subscriber

SMALL = ModelShape(
    name="small",
    decoder=DecoderShape(
        num_layers=2, hidden_size=256, num_heads=8, num_kv_heads=2, head_size=32, intermediate_size=384, vocab_size=1000
    ),
    has_qk_norm=True,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(model_shapes.MODEL_SHAPES, SMALL.name, SMALL)
    return SMALL.name


BIGGER = attrs.evolve(
    SMALL, name="bigger", decoder=attrs.evolve(SMALL.decoder, hidden_size=1024, intermediate_size=4096, vocab_size=8000)
)


class SmallSteps(FakeTrainer):
    """Moves about the given share of the patterns by one or a few ulps, as an optimizer does."""

    def step(self, fraction: float = 0.1) -> None:
        for bits in self._bits.values():
            flat = bits.reshape(-1)
            where = np.flatnonzero(self._rng.random(flat.size) < fraction)
            ulps = self._rng.geometric(0.7, where.size) * self._rng.choice((-1, 1), where.size)
            flat[where] += ulps.astype(flat.dtype)


@pytest.mark.parametrize("num_engine_ranks", [1, 2])
@pytest.mark.parametrize("fraction", [0.01, 0.1])
def test_a_real_publish_sends_and_a_real_engine_fetches_as_much(
    monkeypatch: pytest.MonkeyPatch, fraction: float, num_engine_ranks: int
) -> None:
    """Four trainer ranks publish twice for real; sizes within 6 %, blobs to the number, records within 15 %."""
    monkeypatch.setitem(model_shapes.MODEL_SHAPES, BIGGER.name, BIGGER)
    specs, layout, store = BIGGER.tensors(), engine_layout(BIGGER, num_engine_ranks), MemoryTransport()
    trainers = SmallSteps.group(4, specs)
    publishers = [Publisher(trainer, store, run="r", targets=[layout], num_threads=1) for trainer in trainers]
    subscribers = [Subscriber(ArraySink(trainers[0].tensors(), boxes)) for boxes in layout.ranks]
    for _ in range(2):
        with ThreadPoolExecutor(4) as threads:
            reports = list(threads.map(lambda publisher: publisher.publish_sync(), publishers))
        for subscriber in subscribers:
            update = plan_update(store, subscriber.version)
            assert update is not None
            subscriber.stage(update, store)
        fetched = [subscriber.activate(verify=True).fetched_bytes for subscriber in subscribers]
        for trainer in trainers:
            trainer.step(fraction)
    key = update.manifest_keys[-1]
    manifest, report = read_manifest(store, key), reports[0]
    cost = sync_cost(
        BIGGER.name,
        num_training_ranks=4,
        gpus_per_engine=num_engine_ranks,
        changed_fraction=report.changed_fraction,
    )
    assert manifest.version.n == 1
    assert cost.published_bytes == pytest.approx(manifest.bytes_sent, rel=0.06)
    assert cost.engine_bytes == pytest.approx(sum(fetched), rel=0.06)
    assert cost.dense_bytes == report.bytes_dense
    assert cost.num_cells == manifest.columns.num_cells
    assert cost.num_blobs == len(manifest.blobs)
    assert cost.manifest_bytes == pytest.approx(len(store.get(key)), rel=0.15)
    parts = [store.get(f"{key.removesuffix('manifest')}part-{rank}") for rank in range(4)]
    assert cost.part_bytes == pytest.approx(sum(map(len, parts)), rel=0.25)


def test_one_layer_repeated_is_every_layer_planned() -> None:
    """In count, sizes, targets and order, for ranks whose rows do not divide."""
    targets = [engine_layout(SMALL, 2)]
    for rank, cells in enumerate(sync._plan(SMALL, 5, 2)):
        planned = plan_source(rank, fsdp_layout(SMALL, rank, 5), targets, {})
        assert [(cell.box, cell.targets, cell.source_rank) for cell in cells] == [
            (cell.box, cell.targets, cell.source_rank) for cell in planned
        ]


def test_blobs_are_counted_as_the_writer_packs_them() -> None:
    """Payloads of 0 to 48 bytes for three sets of targets, in blobs of about 64 bytes."""
    payloads = [((f"t/{i % 3}",), i * 7 % 49) for i in range(100)]
    keys: list[str] = []
    taken: dict[int, tuple[str, ...]] = {}
    with ThreadPoolExecutor(1) as pool:
        writer = BlobWriter(MemoryTransport().put, "p", pool=pool, fill_bytes=64, max_pending=100, on_key=keys.append)
        for number, (targets, size) in enumerate(payloads):
            if size:
                bits = np.zeros(size, dtype=np.uint8)
                writer.add(
                    targets, number, EncodedCell(codec=Codec.DENSE, num_changed=size, state_sum=(0, 0), bits=bits)
                )
                taken[number] = targets
        _, blob_of_cell = writer.finish()
    blobs = {(taken[number], blob) for number, blob in blob_of_cell.items()}
    counted = sync._count_blobs(((targets, float(n)) for targets, n in payloads), 64)
    assert counted == Counter(targets for targets, _ in blobs)
    assert sum(counted.values()) == len(keys) > 20


def test_32b_over_32_ranks_to_tp4() -> None:
    cost = sync_cost("qwen3-32b", num_training_ranks=32, gpus_per_engine=4, changed_fraction=0.02)
    assert cost.dense_bytes == 65_524_246_528
    assert cost.compare_bytes == pytest.approx(2 * cost.dense_bytes / 32, rel=0.001)
    # 0.88 bytes for the place of a changed value, 0.3 for its difference; only norms are fetched by all four ranks
    assert cost.published_bytes == pytest.approx(1.184 * 0.02 * cost.dense_bytes / 2, rel=0.001)
    assert 0 < cost.engine_bytes - cost.published_bytes < 1e-4 * cost.published_bytes
    # about 6.5 MB of changes for each engine rank from each trainer rank and a buffer of 8 MB: one blob each, sometimes two;
    # one more for all of them
    assert 32 * 5 <= cost.num_blobs <= 32 * 9
    assert 32 * 2 <= cost.engine_blobs <= 32 * 3
    assert cost is sync_cost("qwen3-32b", num_training_ranks=32, gpus_per_engine=4, changed_fraction=0.02)


def test_the_ends_nothing_changed_and_everything_changed() -> None:
    none = sync_cost("qwen2.5-7b", num_training_ranks=8, gpus_per_engine=4, changed_fraction=0)
    assert (none.published_bytes, none.engine_bytes, none.num_blobs, none.engine_blobs) == (0, 0, 0, 0)
    every = sync_cost("qwen2.5-7b", num_training_ranks=8, gpus_per_engine=4, changed_fraction=1)
    assert every.published_bytes == pytest.approx(0.15 * every.dense_bytes, rel=0.001), (
        "a known place, a coded difference"
    )
    assert every.num_blobs > 0.75 * every.dense_bytes / (32 << 20)
    assert not none.is_dense


def test_impossible_syncs_are_refused() -> None:
    good = {"num_training_ranks": 8, "gpus_per_engine": 1, "changed_fraction": 0.01}
    for bad in ({"num_training_ranks": 0}, {"gpus_per_engine": 0}, {"changed_fraction": 1.5}):
        for cost in (sync_cost, paper_sync_cost):
            with pytest.raises(ConfigError, match="a sync needs"):
                cost("qwen3-8b", **{**good, **bad})
    with pytest.raises(ConfigError, match="no tensors are known"):
        sync_cost("gpt-5", **good)


def test_the_papers_way_sends_five_times_the_bytes_and_takes_about_20_seconds() -> None:
    options = {"num_training_ranks": 32, "gpus_per_engine": 4, "changed_fraction": 0.02}
    ours, paper = sync_cost("qwen3-32b", **options), paper_sync_cost("qwen3-32b", **options)
    assert paper.published_bytes == pytest.approx(6 * 0.02 * paper.dense_bytes / 2)
    assert paper.published_bytes == pytest.approx(5.07 * ours.published_bytes, rel=0.01)
    # o and down (38 % of the weights) are cut by columns: all four ranks pull their shards whole
    column_cut = sum(
        2 * spec.shape[0] * spec.shape[1]
        for spec in model_shape("qwen3-32b").tensors()
        if "o_proj" in spec.name or "down_proj" in spec.name
    )
    norms = sum(2 * spec.shape[0] for spec in model_shape("qwen3-32b").tensors() if len(spec.shape) == 1)
    assert paper.engine_bytes == pytest.approx(6 * 0.01 * (paper.dense_bytes + 3 * (column_cut + norms)))
    assert paper.num_blobs == 64
    assert sync_times(paper, LinkConfig(gbps=100.0, local_gbps=200.0)).total_s == pytest.approx(20, abs=0.3)
    assert sync_times(ours, LinkConfig(gbps=100.0, local_gbps=200.0)).total_s < 5


def test_times_are_the_arithmetic_of_their_parts() -> None:
    cost = attrs.evolve(
        sync_cost("qwen3-8b", num_training_ranks=8, gpus_per_engine=1, changed_fraction=0.02),
        published_bytes=1_000_000_000,
        engine_bytes=500_000_000,
        engine_dense_bytes=10_000_000_000,
        compare_bytes=4_000_000_000,
        num_blobs=17,
        engine_blobs=9,
        num_cells=0,
        engine_cells=0,
    )
    speeds = SyncSpeeds(encode_bytes_per_s=1e9, decode_values_per_s=1e8, memory_bytes_per_s=1e12, pause_s=0.5)
    found = sync_times(cost, LinkConfig(gbps=10, local_gbps=100, latency_s=0.01), speeds)
    assert found.encode_s == pytest.approx(4)
    assert found.put_s == pytest.approx(0.8 + 0.01 * (3 + 2), rel=1e-5), "17 rows about blobs beside"
    assert found.stage_s == pytest.approx(0.04 + 0.01 * (9 + 1) + 0.02 * 5e9 / 1e8)
    assert found.activate_s == pytest.approx(0.5 + 0.02 * 5e9 * 64 / 1e12 + 0.01)
    assert found.total_s == pytest.approx(found.encode_s + found.put_s + found.stage_s + found.activate_s)
    with_records = attrs.evolve(cost, num_cells=1000, engine_cells=500)
    more = sync_times(with_records, LinkConfig(gbps=10, local_gbps=100, latency_s=0.01), speeds)
    assert more.encode_s - found.encode_s == pytest.approx(1000 * (speeds.record_s + speeds.cell_s / 8))
    assert more.activate_s - found.activate_s == pytest.approx(500 * speeds.write_cell_s)
    record_bytes = put_size(with_records)[0] - put_size(cost)[0]
    assert record_bytes == 1000 * (sync.RECORD_BYTES + sync.PART_RECORD_BYTES)


def test_an_anchor_is_fetched_and_written_whole() -> None:
    cost = sync_cost("qwen3-8b", num_training_ranks=8, gpus_per_engine=1, changed_fraction=0.01)
    speeds = SyncSpeeds(record_s=0, cell_s=0, write_cell_s=0)
    wire_s = (cost.dense_bytes + cost.manifest_bytes) * 8 / 1e11
    assert stage_s(cost, speeds, gbps=100, latency_s=0, is_anchor=True) == pytest.approx(wire_s)
    assert write_s(cost, speeds, is_anchor=True) == pytest.approx(cost.dense_bytes / 2.3e12)
    assert put_size(cost, is_anchor=True)[0] == cost.dense_bytes + cost.part_bytes + cost.manifest_bytes
