from __future__ import annotations

import pytest

from rose.backends.memory import MemoryTransport
from rose.errors import BlobNotFoundError
from rose.interfaces.trainer import TensorSpec
from rose.policies.retention import RetentionConfig
from rose.testing import FakeTrainer
from rose.transfer.lineage import LineageReader, sum_text
from rose.transfer.publisher import Publisher
from rose.transfer.sums import trainer_sums
from rose.types import WeightVersion

SPECS = (
    TensorSpec(name="w", shape=(2000, 8), dtype="bfloat16"),
    TensorSpec(name="scale", shape=(), dtype="float32"),
)


class Reads(MemoryTransport):
    """Counts the manifests that are read."""

    num_manifests = 0

    def get(self, key):
        self.num_manifests += key.endswith(("manifest", "anchor"))
        return super().get(key)


@pytest.fixture
def store():
    transport = Reads()
    yield transport
    transport.close()


def publish(store, num_versions, *, run="job", keep=8, seed=0):
    """Publish versions of a small model; returns the trainer's own sums at each of them, as text."""
    trainer = FakeTrainer(specs=SPECS, seed=seed)
    publisher = Publisher(trainer, store, run=run, retention=RetentionConfig(keep=keep, max_chain=keep))
    sums = []
    for _ in range(num_versions):
        publisher.publish_sync()
        sums.append({name: sum_text(total) for name, total in trainer_sums(trainer).items()})
        trainer.step()
    return sums


def test_every_version_leads_to_the_trainers_own_sums(store):
    sums = publish(store, 4)
    reader = LineageReader(store)
    for n in (3, 0, 2, 1):
        lineage = reader.trace(WeightVersion("job", n))
        assert lineage.checksums == sums[n]
        assert lineage.chain == tuple(WeightVersion("job", i) for i in range(n + 1))
        assert [spec.name for spec in lineage.tensors] == list(sums[n])
        assert lineage.manifest_key.startswith(f"job/{n}/")
        assert lineage.sent_bytes > 0
    assert sums[0] != sums[3]


def test_manifests_are_read_once_and_no_further_back_than_is_asked_for(store):
    publish(store, 6)
    reader = LineageReader(store)
    store.num_manifests = 0
    with pytest.raises(BlobNotFoundError):
        reader.trace(WeightVersion("job", 6))
    assert store.num_manifests == 1
    reader.trace(WeightVersion("job", 5))
    reader.trace(WeightVersion("job", 3))
    assert store.num_manifests <= 7
    before = store.num_manifests
    reader.trace(WeightVersion("job", 5))
    assert store.num_manifests == before


def test_a_version_that_retention_deleted_says_so(store):
    publish(store, 12, keep=2)
    reader = LineageReader(store)
    with pytest.raises(
        BlobNotFoundError, match="the manifest of version job:0 was deleted by retention; kept are job:"
    ) as raised:
        reader.trace(WeightVersion("job", 0))
    assert "job:11" in str(raised.value)
    assert reader.trace(WeightVersion("job", 11)).checksums


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (WeightVersion("job", 9), "version job:9 was never published here: the newest is job:1"),
        (WeightVersion("other", 0), "the store holds run 'job' now; what run 'other' published was deleted"),
    ],
)
def test_versions_that_are_not_there(store, version, why):
    publish(store, 2)
    with pytest.raises(BlobNotFoundError, match=why):
        LineageReader(store).trace(version)


def test_an_empty_store(store):
    with pytest.raises(BlobNotFoundError, match="nothing is published under pointer 'current'"):
        LineageReader(store).trace(WeightVersion("job", 0))


def test_sums_are_32_hex_digits():
    assert sum_text((1, 2**64 - 1)) == "0" * 15 + "1" + "f" * 16
