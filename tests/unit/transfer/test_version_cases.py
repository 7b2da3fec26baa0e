"""The version and transport cases V01, V03, V04, V05 and V07, each under its own id. V08, V10, V11 and V13 are the pool's."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from transfer_rig import SPECS, ArrayTrainer, Follower, Rig, bf16

from rose.backends.memory import MemoryTransport
from rose.errors import (
    BlobNotFoundError,
    CorruptUpdateError,
    EngineFencedError,
    VersionConflictError,
)
from rose.interfaces.trainer import ShardSpec
from rose.testing import FaultyTransport, TransportFault, TransportFaultKind
from rose.transfer import records
from rose.transfer.blobs import SCHEMA as BLOB_SCHEMA
from rose.transfer.blobs import checksum_of
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update, read_manifest
from rose.transfer.staging import MAX_FETCHES
from rose.transfer.subscriber import ArraySink, Subscriber
from rose.types import Activation, WeightUpdate, WeightVersion


def v(n: int) -> WeightVersion:
    return WeightVersion("run", n)


def _update(rig: Rig, *numbers: int) -> WeightUpdate:
    keys = tuple(f"run/{n}/{n}/manifest" for n in numbers)
    return WeightUpdate(target=v(numbers[-1]), manifest_keys=keys, address=rig.store.address())


class BreakableSink(ArraySink):
    """Fails every write from the n-th on, once told."""

    writes_left: int | None = None

    def write_sparse(self, name: str, box: ShardSpec, positions: np.ndarray, values: np.ndarray) -> None:
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                message = "the process is gone"
                raise RuntimeError(message)
        super().write_sparse(name, box, positions, values)


@pytest.mark.parametrize("fails_at", ["stage", "activation"])
def test_v01_an_engine_that_missed_a_version_is_brought_up_from_where_it_really_is(fails_at: str) -> None:
    """Three engines at version 1; version 2 fails on engine 1; version 3 ends all three at the same bits."""
    rig = Rig()
    engines = [Follower(rig, BreakableSink({spec.name: spec for spec in SPECS})) for _ in range(3)]
    for _ in range(2):
        rig.publish()
        for engine in engines:
            engine.sync()
        rig.step(0.3)
    rig.publish()
    engines[0].sync()
    engines[2].sync()
    if fails_at == "stage":
        link = FaultyTransport(
            rig.store, [TransportFault(kind=TransportFaultKind.CORRUPT, method="get", key="rank-1/blob")]
        )
        with pytest.raises(CorruptUpdateError):
            engines[1].subscriber.stage(_update(rig, 2), link)
        assert (engines[1].subscriber.version, engines[1].subscriber.is_fenced) == (v(1), False)
    else:
        engines[1].sink.writes_left = 0
        with pytest.raises(RuntimeError):
            engines[1].sync()
        engines[1].sink.writes_left = None
        assert (engines[1].subscriber.version, engines[1].subscriber.is_fenced) == (None, True)
    rig.step(0.3)
    rig.publish()
    keys = []
    for engine in engines:
        update = plan_update(rig.store, engine.subscriber.version)
        keys.append([key.split("/")[1] for key in update.manifest_keys])
        engine.subscriber.stage(update, rig.store)
        assert engine.subscriber.activate(verify=True).is_verified
        engine.assert_current()
    assert keys == [["3"], ["2", "3"] if fails_at == "stage" else ["0", "1", "2", "3"], ["3"]]


def test_v03_duplicate_late_and_skipped_versions_change_nothing() -> None:
    """Deliver 1, 3, 2, 2, 3, 1, each a delta on the one before."""
    rig = Rig()
    for _ in range(4):
        rig.publish()
        rig.step(0.3)
    engine, cold = rig.follow(), rig.follow()
    engine.subscriber.stage(_update(rig, 0), rig.store)
    engine.subscriber.activate(verify=True)

    def deliver(n: int) -> Activation:
        engine.subscriber.stage(_update(rig, n), rig.store)
        return engine.subscriber.activate(verify=True)

    applied = [deliver(1)]
    before = {spec.name: engine.sink.array(spec.name).copy() for spec in SPECS}
    with pytest.raises(VersionConflictError, match="starts from run:2, the engine is at run:1"):
        deliver(3)
    for name, bits in before.items():
        np.testing.assert_array_equal(engine.sink.array(name), bits)
    applied += [deliver(2), deliver(2), deliver(3)]
    with pytest.raises(VersionConflictError, match="leads to run:1, the engine is already at run:3"):
        deliver(1)
    assert [activation.version.n for activation in applied] == [1, 2, 2, 3]
    assert [activation.fetched_bytes > 0 for activation in applied] == [True, True, False, True]
    cold.sync()
    for spec in SPECS:
        np.testing.assert_array_equal(engine.sink.array(spec.name), cold.sink.array(spec.name))


class _TwoTensors:
    """A and B are [0 .. 7] repeated; index 3 of each becomes 77 in version 1; an engine dies between the two writes."""

    def __init__(self, *, is_overwrite: bool) -> None:
        self.store = MemoryTransport()
        self.old = np.tile(np.arange(8, dtype=np.uint16), 100)
        self.arrays = {"A": self.old.copy(), "B": self.old.copy()}
        trainer = ArrayTrainer(self.arrays)
        publisher = Publisher(trainer, self.store, run="run", is_overwrite=is_overwrite)
        publisher.publish_sync()
        self.sink = BreakableSink(trainer.tensors())
        self.engine = Subscriber(self.sink, num_threads=1)
        self.stage()
        self.engine.activate(verify=True)
        for bits in self.arrays.values():
            bits[3] = 77
        publisher.publish_sync()
        self.stage()
        self.sink.writes_left = 1
        with pytest.raises(RuntimeError):
            self.engine.activate(verify=False)
        self.sink.writes_left = None
        assert (self.sink.array("A")[3], self.sink.array("B")[3]) == (77, 3)

    def stage(self, known: WeightVersion | None = None) -> None:
        self.engine.stage(plan_update(self.store, known or self.engine.version), self.store)

    def assert_new(self) -> None:
        for name, bits in self.arrays.items():
            np.testing.assert_array_equal(self.sink.array(name), bits)


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_v04_a_half_written_update_is_not_applied_twice(*, is_overwrite: bool) -> None:
    """The engine knows that it is fenced: the same delta is refused, full weights end at the new bits."""
    case = _TwoTensors(is_overwrite=is_overwrite)
    with pytest.raises(EngineFencedError):
        case.stage(known=v(0))
    case.stage()
    assert case.engine.activate(verify=False).is_verified
    case.assert_new()


def test_v04_a_restart_that_claims_the_old_version_over_half_written_weights_is_found_out() -> None:
    case = _TwoTensors(is_overwrite=False)
    case.engine = Subscriber(case.sink, version=v(0))
    with pytest.raises(CorruptUpdateError, match="A at"):
        case.stage()
    assert case.sink.array("A")[3] == 77, "never 77 + 74, and never the old one again"
    case.engine = Subscriber(case.sink)
    case.stage()
    case.engine.activate(verify=True)
    case.assert_new()


def test_v04_overwrites_may_be_retried_over_half_written_weights() -> None:
    case = _TwoTensors(is_overwrite=True)
    case.engine = Subscriber(case.sink, version=v(0))
    try:
        case.stage()
    except CorruptUpdateError:  # its live sum is of neither version, which is as good a reason to start anew
        case.engine = Subscriber(case.sink)
        case.stage()
    assert case.engine.activate(verify=True).is_verified
    case.assert_new()


class _Flip(FaultyTransport):
    """Flips bit 0 of one byte of every blob."""

    def __init__(self, inner: MemoryTransport, at: int) -> None:
        super().__init__(inner)
        self.at, self.num_gets = at, 0

    def get(self, key: str) -> bytes:
        payload = bytearray(self.inner.get(key))
        if "blob" in key:
            self.num_gets += 1
            payload[self.at % len(payload)] ^= 1
        return bytes(payload)


def test_v05_a_flipped_bit_anywhere_in_a_payload_is_found_before_any_write() -> None:
    """Checksum, length of the header, header, table, positions, values: wherever it is, nothing changes and the blob is named."""
    rig = Rig(world_size=1)
    engine = rig.follow()
    rig.publish()
    engine.sync()
    rig.step(0.1)
    rig.publish()
    before = {spec.name: engine.sink.array(spec.name).copy() for spec in SPECS}
    (blob,) = read_manifest(rig.store, "run/1/1/manifest").blobs
    for at in (0, 15, 16, 20, 23, 24, 60, *range(80, blob.length_bytes, 23), blob.length_bytes - 1):
        link = _Flip(rig.store, at)
        with pytest.raises(CorruptUpdateError, match=f"blob run/1/1/rank-0/blob-0 came damaged {MAX_FETCHES} times"):
            engine.subscriber.stage(_update(rig, 1), link)
        assert link.num_gets == MAX_FETCHES
    assert (engine.subscriber.version, engine.subscriber.is_fenced) == (v(0), False)
    for name, bits in before.items():
        np.testing.assert_array_equal(engine.sink.array(name), bits)
    engine.sync()
    engine.assert_current()


@pytest.mark.parametrize("section", ["gaps", "lows", "codes"])
@pytest.mark.parametrize("value", [0, 1, 0x7F, 0xFE, 0xFF])
def test_v05_damage_before_the_checksum_was_taken_is_found_too(section: str, value: int) -> None:
    """Bad memory of the sender: positions beyond the tensor, other positions, other values, all under right checksums."""
    store, arrays = MemoryTransport(), {"w": bf16(1000), "next": bf16(64)}
    publisher = Publisher(ArrayTrainer(arrays), store, run="run")
    publisher.publish_sync()
    sink = ArraySink(ArrayTrainer(arrays).tensors())
    engine = Subscriber(sink)
    engine.stage(plan_update(store, None), store)
    engine.activate(verify=True)
    arrays["w"][[30, 700, 999]] = 2
    publisher.publish_sync()
    key = "run/1/1/rank-0/blob-0"
    header, parts = records.unpack(store.get(key), BLOB_SCHEMA)
    parts = {name: np.array(part) for name, part in parts.items()}
    if parts[section][-1] == value:
        pytest.skip("this is what was sent")
    parts[section][-1] = value
    blob = bytes(records.pack(BLOB_SCHEMA, header, parts))
    store._store._blobs[key] = blob
    manifest = read_manifest(store, "run/1/1/manifest")
    entry = attrs.evolve(manifest.blobs[0], checksum=checksum_of(blob))
    store._store._blobs["run/1/1/manifest"] = bytes(attrs.evolve(manifest, blobs=(entry,)).to_bytes())
    with pytest.raises(CorruptUpdateError):
        engine.stage(plan_update(store, v(0)), store)
    assert engine.version == v(0)
    assert not any(sink.array(name).any() for name in arrays)


def _held_versions(rig: Rig) -> set[int]:
    names = [key.split("/")[1] for key in rig.store._store._blobs]
    return {int(name) for name in names if name != "cells"}


def test_v07_a_late_engine_finds_its_payload_while_that_is_in_the_window() -> None:
    """The engines that are done first delete nothing: what the third one planned it can still stage."""
    rig = Rig(anchor_every=2, keep=2)
    engines = [rig.follow() for _ in range(3)]
    rig.publish()
    for engine in engines:
        engine.sync()
    rig.step()
    rig.publish()
    planned = plan_update(rig.store, engines[2].subscriber.version)
    for engine in engines[:2]:
        engine.sync()
    rig.step()
    rig.publish()
    engines[2].subscriber.stage(planned, rig.store)
    assert engines[2].subscriber.activate(verify=True).version == v(1)
    engines[2].sync()
    engines[2].assert_current()


def test_v07_what_left_the_window_is_told_as_gone_and_full_weights_follow() -> None:
    rig = Rig(anchor_every=2, keep=2)
    engine = rig.follow()
    rig.publish()
    engine.sync()
    rig.step()
    rig.publish()
    planned = plan_update(rig.store, v(0))
    for _ in range(5):
        rig.step()
        rig.publish()
        assert len(_held_versions(rig)) <= 3, "K versions and one"
    counting = FaultyTransport(rig.store, [TransportFault(kind=TransportFaultKind.DELAY, method="get")])
    with pytest.raises(BlobNotFoundError):
        engine.subscriber.stage(planned, counting)
    assert counting.num_met == (1,), "gone is gone: it is not asked for again and again"
    assert (engine.subscriber.version, engine.subscriber.is_fenced) == (v(0), False)
    update = plan_update(rig.store, v(0))
    assert update.manifest_keys[0].endswith("/anchor")
    engine.sync()
    engine.assert_current()
