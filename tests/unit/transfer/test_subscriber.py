"""The subscriber: staging, chains, fencing, tied names, and what is refused without effect."""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np
import pytest
from transfer_rig import HEADER_BYTES, SPECS, ArrayTrainer, Follower, Rig, bf16

from rose.backends.memory import MemoryTransport
from rose.errors import (
    BlobNotFoundError,
    CorruptUpdateError,
    EngineFencedError,
    LayoutMismatchError,
    TransferError,
    VersionConflictError,
)
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.testing import FaultyTransport, TransportFault, TransportFaultKind
from rose.transfer.layout import TargetLayout
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update, read_manifest
from rose.transfer.subscriber import ArraySink, Subscriber, WeightSink
from rose.types import WeightUpdate, WeightVersion


def _update(rig: Rig, *numbers: int) -> WeightUpdate:
    keys = tuple(f"run/{n}/{n}/manifest" for n in numbers)
    return WeightUpdate(target=WeightVersion("run", numbers[-1]), manifest_keys=keys, address=rig.store.address())


def _published(num_versions: int, **options: object) -> Rig:
    rig = Rig(**options)
    for _ in range(num_versions):
        rig.publish()
        rig.step(0.2)
    return rig


def test_a_chain_is_applied_in_order_and_verified() -> None:
    rig = _published(4)
    rig.publish()
    follower = rig.follow()
    follower.subscriber.stage(_update(rig, 0, 1, 2, 3, 4))
    assert follower.subscriber.version is None
    assert not follower.sink.array("w").any()
    activation = follower.subscriber.activate(verify=True)
    assert (activation.version.n, activation.is_verified) == (4, True)
    follower.assert_current()
    follower.subscriber.close()


def test_the_sink_is_a_weight_sink() -> None:
    assert isinstance(ArraySink({}), WeightSink)


def test_what_was_sent_is_compared_without_being_asked() -> None:
    """Anchors and deltas alike lead to the published sums before they are written; asking adds what was not sent."""
    rig = _published(2)
    follower = rig.follow()
    assert follower.sync(verify=False).is_verified
    rig.publish()
    assert follower.sync(verify=False).is_verified
    follower.assert_current()


def test_a_chain_must_start_where_the_sink_is() -> None:
    rig = _published(4)
    follower = rig.follow()
    with pytest.raises(VersionConflictError, match="starts from run:0, the engine is at None"):
        follower.subscriber.stage(_update(rig, 1), rig.store)
    with pytest.raises(VersionConflictError, match="chain breaks"):
        follower.subscriber.stage(_update(rig, 0, 2), rig.store)
    with pytest.raises(VersionConflictError, match="ends at run:1"):
        follower.subscriber.stage(attrs.evolve(_update(rig, 0, 1), target=WeightVersion("run", 3)), rig.store)
    with pytest.raises(TransferError, match="no update is staged"):
        follower.subscriber.activate(verify=True)
    assert follower.subscriber.version is None
    assert not follower.subscriber.is_fenced


def test_duplicates_are_acknowledged_and_older_ones_refused() -> None:
    rig = _published(3)
    follower = rig.follow()
    follower.sync()
    before = follower.sink.array("w").copy()
    follower.subscriber.stage(_update(rig, 2), rig.store)
    activation = follower.subscriber.activate(verify=True)
    assert (activation.version.n, activation.fetched_bytes) == (2, 0)
    with pytest.raises(VersionConflictError, match="leads to run:0, the engine is already at run:2"):
        follower.subscriber.stage(_update(rig, 0), rig.store)
    np.testing.assert_array_equal(follower.sink.array("w"), before)


def test_an_engine_that_loaded_a_published_checkpoint_starts_from_it() -> None:
    """Told the version of its bits, a subscriber takes the next delta, and verification holds it to its word."""
    rig = _published(1)
    known = rig.follow()
    known.sync()
    rig.publish()
    honest = Subscriber(known.sink, version=WeightVersion("run", 0))
    honest.stage(_update(rig, 1), rig.store)
    assert honest.activate(verify=True).is_verified
    rig.step(0.01)
    rig.publish()
    sink = ArraySink(rig.trainers[0].tensors())
    lying = Subscriber(sink, version=WeightVersion("run", 1))
    with pytest.raises(CorruptUpdateError, match="the update or the engine's own weights are damaged"):
        lying.stage(_update(rig, 2), rig.store)
    assert not sink.array("w").any(), "refused before the first write"


def test_the_last_stage_counts() -> None:
    rig = _published(3)
    follower = rig.follow()
    follower.subscriber.stage(_update(rig, 0), rig.store)
    follower.subscriber.stage(_update(rig, 0, 1), rig.store)
    assert follower.subscriber.activate(verify=True).version.n == 1
    follower.subscriber.stage(_update(rig, 2), rig.store)
    follower.subscriber.drop_staged()
    with pytest.raises(TransferError, match="no update is staged"):
        follower.subscriber.activate(verify=True)


def test_a_stage_that_was_overtaken_is_refused() -> None:
    """What was staged from version 0 is not written over version 1."""
    rig = _published(3)
    follower = rig.follow()
    follower.subscriber.stage(_update(rig, 0), rig.store)
    follower.subscriber.activate(verify=True)
    follower.subscriber.stage(_update(rig, 1, 2), rig.store)
    overtaken = follower.subscriber._staged
    follower.subscriber.stage(_update(rig, 1), rig.store)
    follower.subscriber.activate(verify=True)
    follower.subscriber._staged = overtaken
    with pytest.raises(VersionConflictError, match="starts from run:0, the engine is at run:1"):
        follower.subscriber.activate(verify=True)
    assert (follower.subscriber.version.n, follower.subscriber.is_fenced) == (1, False)


@pytest.mark.parametrize("kind", [TransportFaultKind.CORRUPT, TransportFaultKind.TRUNCATE, TransportFaultKind.DROP])
@pytest.mark.parametrize("key", ["manifest", "blob"])
def test_damage_on_the_way_changes_nothing(kind: TransportFaultKind, key: str) -> None:
    rig = _published(2)
    follower = rig.follow()
    follower.subscriber.stage(_update(rig, 0), rig.store)
    follower.subscriber.activate(verify=True)
    before = {name: follower.sink.array(name).copy() for name in follower.sink.tensors()}
    faulty = FaultyTransport(rig.store, [TransportFault(kind=kind, method="get", key=key)])
    with pytest.raises(BlobNotFoundError if kind is TransportFaultKind.DROP else CorruptUpdateError):
        follower.subscriber.stage(_update(rig, 1), faulty)
    assert (follower.subscriber.version, follower.subscriber.is_fenced) == (WeightVersion("run", 0), False)
    for name, bits in before.items():
        np.testing.assert_array_equal(follower.sink.array(name), bits)
    follower.sync()


class BreaksAt(ArraySink):
    """A sink whose n-th write fails, or writes something else."""

    def __init__(self, at: int, *, is_silent: bool) -> None:
        super().__init__({spec.name: spec for spec in SPECS})
        self.at, self.is_silent, self.num_writes = at, is_silent, 0

    def write_dense(self, name: str, box: ShardSpec, bits: np.ndarray) -> None:
        self.num_writes += 1
        if self.num_writes == self.at:
            if not self.is_silent:
                message = "the device is gone"
                raise RuntimeError(message)
            bits = bits ^ 1
        super().write_dense(name, box, bits)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_failure_while_writing_fences_until_an_anchor(*, is_silent: bool) -> None:
    rig = _published(3)
    follower = Follower(rig, BreaksAt(2, is_silent=is_silent))
    follower.subscriber.stage(_update(rig, 0), rig.store)
    with pytest.raises(CorruptUpdateError if is_silent else RuntimeError):
        follower.subscriber.activate(verify=True)
    assert follower.subscriber.is_fenced
    assert follower.subscriber.version is None
    with pytest.raises(EngineFencedError, match="send an update that starts with an anchor"):
        follower.subscriber.stage(_update(rig, 1), rig.store)
    follower.subscriber.stage(_update(rig, 0, 1, 2), rig.store)
    activation = follower.subscriber.activate(verify=False)
    assert activation.is_verified, "leaving the fence is always verified"
    assert (follower.subscriber.version, follower.subscriber.is_fenced) == (WeightVersion("run", 2), False)


def test_a_cell_that_did_not_change_is_verified_too() -> None:
    """A sink that lost bits between versions is found out by the next update, though it sends none of them."""
    rig = Rig(
        specs=[TensorSpec(name="a", shape=(4,), dtype="bfloat16"), TensorSpec(name="b", shape=(4,), dtype="float32")]
    )
    follower = rig.follow()
    rig.publish()
    follower.sync()
    follower.sink.array("b")[1] ^= 1
    rig.publish()
    with pytest.raises(CorruptUpdateError, match="not the published bits: b"):
        follower.sync()
    assert follower.subscriber.is_fenced


def test_misfits_are_named_before_a_blob_is_fetched() -> None:
    rig = _published(1)
    sink = ArraySink(
        {
            "w": TensorSpec(name="w", shape=(10, 41), dtype="bfloat16"),
            "norm": TensorSpec(name="norm", shape=(7,), dtype="bfloat16"),
            "scale": TensorSpec(name="scale", shape=(), dtype="bfloat16"),
            "more": TensorSpec(name="more", shape=(1,), dtype="bfloat16"),
        }
    )
    no_blobs = FaultyTransport(rig.store, [TransportFault(kind=TransportFaultKind.FAIL, method="get", key="blob")])
    with pytest.raises(LayoutMismatchError) as caught:
        Subscriber(sink).stage(_update(rig, 0), no_blobs)
    for part in ("w is", "norm is", "more is missing", "none is unknown"):
        assert part in str(caught.value)
    assert "scale" not in str(caught.value)


def test_ranks_of_an_unknown_layout_get_their_share() -> None:
    """Without its layout at the publisher, an engine rank takes parts of cells; what it cannot check it does not claim."""
    rig = Rig(world_size=3)
    layout = TargetLayout.tensor_parallel("tp2", SPECS, num_ranks=2, split_dims={"w": 1, "norm": 0})
    followers = [rig.follow(held) for held in layout.ranks]
    for _ in range(4):
        rig.publish()
        for follower in followers:
            assert not follower.sync().is_verified
            follower.assert_current()
        rig.step(0.2)


def test_a_known_layout_is_fetched_exactly_and_verified() -> None:
    layout = TargetLayout.tensor_parallel("tp2", SPECS, num_ranks=2, split_dims={"w": 1, "norm": 0})
    rig = Rig(world_size=3, targets=[layout])
    followers = [rig.follow(held) for held in layout.ranks]
    rig.publish()
    for follower, held in zip(followers, layout.ranks, strict=True):
        activation = follower.sync()
        assert activation.is_verified
        payload = held["w"][0].num_elements * 2 + held["norm"][0].num_elements * 4 + 2
        num_blobs = 4  # of two trainer ranks, rows for this engine rank and rows for both; the third has rows only
        assert 0 <= activation.fetched_bytes - payload <= num_blobs * HEADER_BYTES


def test_a_cell_over_several_boxes_of_one_rank_is_verified_whole() -> None:
    rig = Rig(world_size=1)
    halves = (ShardSpec(offset=(0, 0), shape=(10, 15)), ShardSpec(offset=(0, 15), shape=(10, 25)))
    follower = rig.follow({"w": halves})
    rig.publish()
    assert follower.sync().is_verified
    rig.step()
    rig.publish()
    assert follower.sync().is_verified
    follower.assert_current()


class Tied:
    """Case W01: embed_tokens [8, 4] in bfloat16 whose head is the same parameter; row 5 changes."""

    specs: ClassVar = {n: TensorSpec(name=n, shape=(8, 4), dtype="bfloat16") for n in ("embed", "lm_head")}
    ties: ClassVar = {"lm_head": "embed"}

    def __init__(self) -> None:
        self.store = MemoryTransport()
        self.embed = bf16(8, 4)
        self.embed[...] = np.arange(32).reshape(8, 4)
        self.publisher = Publisher(ArrayTrainer({"embed": self.embed}, self.ties), self.store, run="run")
        self.publisher.publish_sync()

    def change_row_5(self) -> None:
        self.embed[5] = [101, 102, 103, 104]

    def follow(self, sink: ArraySink, version: int, aliases: dict[str, str] | None = None) -> Subscriber:
        subscriber = Subscriber(sink, aliases=aliases)
        update = plan_update(self.store, None)
        assert update is not None
        assert update.target.n == version
        subscriber.stage(update, self.store)
        subscriber.activate(verify=True)
        return subscriber

    def check(self, *arrays: np.ndarray) -> None:
        want = np.arange(32, dtype=np.uint16).reshape(8, 4)
        want[5] = [101, 102, 103, 104]
        for array in arrays:
            np.testing.assert_array_equal(array, want)


@pytest.mark.parametrize("names", [("embed",), ("embed", "lm_head"), ("lm_head",)])
def test_tied_weights_travel_once_and_reach_every_name(names: tuple[str, ...]) -> None:
    """Case W01, variants A (one tensor) and B (two): 4 elements on the wire, all names hold the new row."""
    tied = Tied()
    sink = ArraySink({name: tied.specs[name] for name in names})
    subscriber = tied.follow(sink, 0)
    tied.change_row_5()
    report = tied.publisher.publish_sync()
    assert report.num_changed == 4
    assert report.bytes_sent <= 4 * 2 + 4 + HEADER_BYTES
    assert len(read_manifest(tied.store, "run/1/1/manifest").blobs) == 1
    update = plan_update(tied.store, subscriber.version)
    assert update is not None
    subscriber.stage(update, tied.store)
    assert subscriber.activate(verify=True).is_verified
    tied.check(*(sink.array(name) for name in names))


class CountsWrites(ArraySink):
    num_sparse = 0

    def write_sparse(self, name: str, box: ShardSpec, positions: np.ndarray, values: np.ndarray) -> None:
        self.num_sparse += 1
        super().write_sparse(name, box, positions, values)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_payload_with_both_tied_names(*, is_equal: bool) -> None:
    """Case W01: identical bits under both names are applied once, different ones refused naming both."""
    store = MemoryTransport()
    arrays = {"embed": bf16(8, 4), "lm_head": bf16(8, 4)}
    publisher = Publisher(ArrayTrainer(arrays), store, run="run")
    publisher.publish_sync()
    sink = CountsWrites({"embed": Tied.specs["embed"]})
    subscriber = Subscriber(sink, aliases=Tied.ties)
    subscriber.stage(plan_update(store, None), store)
    subscriber.activate(verify=True)
    arrays["embed"][5] = [101, 102, 103, 104]
    arrays["lm_head"][5] = [101, 102, 103, 104 if is_equal else 105]
    publisher.publish_sync()
    update = plan_update(store, subscriber.version)
    if is_equal:
        subscriber.stage(update, store)
        assert subscriber.activate(verify=True).is_verified
        assert sink.num_sparse == 1
        assert sink.array("embed")[5].tolist() == [101, 102, 103, 104]
    else:
        with pytest.raises(LayoutMismatchError, match="lm_head and embed are tied but carry different bits"):
            subscriber.stage(update, store)
        assert subscriber.version == WeightVersion("run", 0)
        assert not sink.array("embed").any()
