"""The publisher: versions, anchors, retries after failures, and what stays invisible."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from transfer_rig import (
    HEADER_BYTES,
    ArrayTrainer,
    Rig,
    bf16,
    cells_of,
    is_bits_and_headers,
    manifest_of,
    publish_together,
)

from rose.backends.memory import MemoryTransport
from rose.errors import (
    BlobNotFoundError,
    CorruptUpdateError,
    DeadlineExceededError,
    LayoutMismatchError,
    TransferError,
    TransportError,
    VersionConflictError,
)
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.testing import FakeTrainer, FaultyTransport, TransportFault, TransportFaultKind
from rose.transfer import records
from rose.transfer.delta import Codec
from rose.transfer.housekeeping import Decision
from rose.transfer.layout import TargetLayout, split_evenly
from rose.transfer.publisher import Publisher, PublishReport
from rose.transfer.relay import current_version, plan_update, read_map
from rose.types import WeightVersion


def _held_versions(store: MemoryTransport) -> set[int]:
    """Return the versions of which blobs are there; the cell map is of no version."""
    names = [key.split("/")[1] for key in store._store._blobs]
    return {int(name) for name in names if name != "cells"}


def test_versions_count_up_from_an_anchor() -> None:
    rig = Rig(world_size=3)
    first = rig.publish()
    assert (first.version, first.is_anchor) == (WeightVersion("run", 0), True)
    assert first.bytes_dense == 10 * 40 * 2 + 7 * 4 + 2
    assert is_bits_and_headers(first, num_blobs=3)
    assert first.codec_elements == {"none": 0, "dense": 408, "sparse": 0, "overwrite": 0}
    rig.step(0.05)
    second = rig.publish()
    assert (second.version, second.is_anchor) == (WeightVersion("run", 1), False)
    assert 0 < second.bytes_sent < second.bytes_dense / 4 + 3 * HEADER_BYTES
    assert 0 < second.changed_fraction < 0.1
    assert current_version(rig.store) == WeightVersion("run", 1)


def test_only_rank_0_reports_the_whole_model() -> None:
    reports = publish_together(Rig(world_size=3).publishers)
    assert [report.is_whole_model for report in reports] == [True, False, False]
    assert sum(report.num_elements for report in reports[1:]) < reports[0].num_elements


def test_an_empty_delta_is_a_version() -> None:
    rig = Rig()
    follower = rig.follow()
    rig.publish()
    follower.sync()
    report = rig.publish()
    assert (report.bytes_sent, report.num_changed, report.version.n) == (0, 0, 1)
    activation = follower.sync()
    assert (activation.version.n, activation.fetched_bytes, activation.is_verified) == (1, 0, True)


async def test_publish_does_not_block_the_loop() -> None:
    rig = Rig(world_size=2)
    reports = await asyncio.gather(*(publisher.publish() for publisher in rig.publishers))
    assert [report.version.n for report in reports] == [0, 0]


def test_rows_go_to_who_holds_them_and_no_further() -> None:
    """Case W13: rows 2, 3, 9 of 10 change; trainer ranks hold 3, 3, 3, 1 rows, engine ranks 5 and 5."""
    spec = TensorSpec(name="w", shape=(10, 8), dtype="bfloat16")
    target = TargetLayout.tensor_parallel("tp2", [spec], num_ranks=2, split_dims={"w": 0})
    rig = Rig(world_size=4, specs=[spec], targets=[target])
    followers = [rig.follow(rank) for rank in target.ranks]
    rig.publish()
    for follower in followers:
        follower.sync()
    for trainer in rig.trainers:
        trainer._bits["w"][[2, 3, 9]] ^= 1
    reports = publish_together(rig.publishers)
    assert [report.num_changed for report in reports] == [24, 8, 0, 8]
    manifest = manifest_of(rig, 1)
    changes = zip(cells_of(rig, manifest), manifest.columns.num_changed.tolist(), strict=True)
    assert [(cell.box.offset[0], n) for cell, n in changes if n] == [(0, 8), (3, 8), (9, 8)]
    sizes = [blob.length_bytes for blob in manifest.blobs]
    assert [follower.sync().fetched_bytes for follower in followers] == [sizes[0] + sizes[1], sizes[2]]
    assert max(sizes) < 24 + HEADER_BYTES
    for follower in followers:
        follower.assert_current()
    assert followers[1].sink.array("w")[4].tolist() == rig.trainers[0].full()["w"][9].tolist()


def test_w10_ranks_with_nothing_take_part() -> None:
    """Case W10: 24 ranks over [128] (21 x 6, 2, 0, 0), shapes [0, 4], [] and [3] over all; all round-trip."""
    specs = [
        TensorSpec(name="q_norm", shape=(128,), dtype="bfloat16"),
        TensorSpec(name="empty", shape=(0, 4), dtype="bfloat16"),
        TensorSpec(name="scalar", shape=(), dtype="bfloat16"),
        TensorSpec(name="three", shape=(3,), dtype="bfloat16"),
    ]
    rig = Rig(world_size=24, specs=specs)
    for trainer in rig.trainers:
        trainer._bits["scalar"][...] = 0x3FC0
    assert [trainer.layout()["q_norm"].shape[0] for trainer in rig.trainers] == [6] * 21 + [2, 0, 0]
    reports = publish_together(rig.publishers)
    assert [report.bytes_sent for report in reports[22:]] == [0, 0]
    assert [report.version.n for report in reports] == [0] * 24
    assert reports[0].bytes_dense == 2 * (128 + 1 + 3)
    assert is_bits_and_headers(reports[0], num_blobs=22)
    manifest = manifest_of(rig, 0)
    cell_map = read_map(rig.store, manifest.map_key)
    assert [spec.name for spec in cell_map.tensors] == ["q_norm", "empty", "scalar", "three"]
    assert sum(cell.box.shape[0] for cell in cell_map.cells if cell.tensor == "three") == 3
    assert len(manifest.blobs) == 22
    follower = rig.follow()
    follower.sync()
    follower.assert_current()
    assert follower.sink.array("scalar").shape == ()
    assert follower.sink.array("scalar").tobytes() == bytes.fromhex("c03f")
    assert split_evenly(128, 24)[23] == (128, 0)


def test_a_failed_publish_leaves_nothing_and_is_retried_as_the_same_version() -> None:
    """A transport failure on one rank fails all ranks at once; the retry encodes against what is really visible."""
    store = MemoryTransport()
    fault = TransportFault(kind=TransportFaultKind.FAIL, method="put", key="run/1/1/rank-1")
    rig = Rig(world_size=2, store=store, transports=[store, FaultyTransport(store, [fault])])
    follower = rig.follow()
    rig.publish()
    follower.sync()
    rig.step(0.2)
    errors = publish_together(rig.publishers)
    assert isinstance(errors[1], TransportError)
    assert isinstance(errors[0], TransferError)
    assert "rank 1: TransportError" in str(errors[0])
    assert plan_update(store, follower.subscriber.version) is None
    rig.step(0.2)
    assert rig.publish().version.n == 1
    follower.sync()
    follower.assert_current()


def test_ranks_meet_again_after_one_could_not_even_begin() -> None:
    """A rank that fails before it knows the version must not stay one attempt behind the others for ever."""
    store = MemoryTransport()
    fault = TransportFault(kind=TransportFaultKind.FAIL, method="read_pointer", call_index=0)
    rig = Rig(world_size=2, store=store, transports=[store, FaultyTransport(store, [fault])], timeout_s=0.2)
    errors = publish_together(rig.publishers)
    assert isinstance(errors[0], DeadlineExceededError)
    assert isinstance(errors[1], TransportError)
    assert rig.publish().version.n == 0


async def test_a_cancelled_publish_ends_only_when_its_thread_is_done_with_the_weights() -> None:
    store = MemoryTransport()
    slow = TransportFault(kind=TransportFaultKind.DELAY, method="put", key="blob", delay_s=0.1)
    trainer = ArrayTrainer({"w": bf16(4)})
    work = asyncio.ensure_future(Publisher(trainer, FaultyTransport(store, [slow]), run="r").publish())
    await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert current_version(store) == WeightVersion("r", 0)


def test_a_lost_answer_to_the_pointer_is_found_out_later() -> None:
    """The compare-and-set went through but its caller saw a failure: the version stands, the next one is whole."""

    class LosesAnswer(FaultyTransport):
        def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
            was_set = self.inner.compare_and_set(name, expected, value)
            if "run/1/" in value:
                message = "the answer was lost"
                raise TransportError(message)
            return was_set

    store = MemoryTransport()
    rig = Rig(world_size=2, store=store, transports=[LosesAnswer(store), store])
    follower = rig.follow()
    rig.publish()
    follower.sync()
    rig.step()
    outcome = publish_together(rig.publishers)
    assert isinstance(outcome[0], TransportError)
    assert isinstance(outcome[1], PublishReport | TransferError)
    rig.step()
    report = rig.publish()
    assert report.version.n == 2
    follower.sync()
    follower.assert_current()


def test_a_trainer_that_breaks_is_heard_of_by_the_other_ranks() -> None:
    """Any error of one rank, not only ours, ends the publish of all at once rather than at the time-out."""
    rig = Rig(world_size=2, timeout_s=60.0)

    def out_of_memory() -> dict[str, np.ndarray]:
        message = "out of memory"
        raise MemoryError(message)

    rig.trainers[1].shards = out_of_memory
    errors = publish_together(rig.publishers)
    assert isinstance(errors[1], MemoryError)
    assert "rank 1: MemoryError: out of memory" in str(errors[0])


def test_a_missing_rank_is_named_when_time_is_up() -> None:
    rig = Rig(world_size=3, timeout_s=0.2)
    errors = publish_together(rig.publishers[:2])
    assert all(isinstance(error, DeadlineExceededError | TransferError) for error in errors)
    assert "[2]" in str(errors[0])
    assert current_version(rig.store) is None


def test_another_run_takes_over_and_the_first_notices() -> None:
    store = MemoryTransport()
    first, second = Rig(store=store, run="a"), Rig(store=store, run="b", seed=1)
    first.publish()
    follower = second.follow()
    follower.sync()
    second.publish()
    assert current_version(store) == WeightVersion("b", 0)
    follower.sync()
    follower.assert_current()
    for error in publish_together(first.publishers):
        assert isinstance(error, VersionConflictError)
        assert "another run" in str(error)


def test_a_second_launch_under_the_same_name_goes_on_or_is_refused() -> None:
    """Versions of a name never go back; a second launch starts with full weights at the next number."""
    store = MemoryTransport()
    Rig(store=store).publish()
    report = Rig(store=store, seed=3).publish()
    assert (report.version.n, report.is_anchor) == (1, True)


def test_parts_of_an_attempt_that_was_given_up_are_not_mixed_with_those_of_a_new_launch() -> None:
    """A launch dies before its first version, with rank 1's part in the store; the next one takes the same name."""
    store = MemoryTransport()
    publish_together(Rig(store=store, timeout_s=0.1).publishers[1:])
    again = Rig(store=store, seed=1)
    errors = publish_together(again.publishers)
    assert isinstance(errors[0], TransferError)
    assert current_version(store) is None
    again.publish()
    follower = again.follow()
    follower.sync()
    follower.assert_current()


def test_a_store_that_lost_everything_gets_full_weights_at_the_next_version() -> None:
    rig = Rig()
    follower = rig.follow()
    rig.publish()
    follower.sync()
    rig.store._store._blobs.clear()
    rig.store._store._pointers.clear()
    report = rig.publish()
    assert (report.version.n, report.is_anchor) == (1, True)
    follower.sync()
    follower.assert_current()


def test_anchors_are_put_beside_changes_and_old_blobs_retired() -> None:
    rig = Rig(anchor_every=4, keep=2)
    follower = rig.follow()
    reports = []
    for _ in range(10):
        reports.append(rig.publish())
        follower.sync()
        follower.assert_current()
        rig.step()
    assert [report.is_anchor for report in reports] == [n % 4 == 0 for n in range(10)]
    assert all(report.bytes_sent < report.bytes_dense + 2 * HEADER_BYTES for report in reports[1:])
    assert 0 < reports[4].bytes_anchor - reports[4].bytes_dense < 2 * HEADER_BYTES
    assert _held_versions(rig.store) == {8, 9}
    late = rig.follow()
    assert plan_update(rig.store, None).manifest_keys == ("run/8/8/anchor", "run/9/9/manifest")
    late.sync()
    assert late.subscriber.version == WeightVersion("run", 9)


def test_the_only_anchor_is_kept_though_its_first_answer_was_lost() -> None:
    """Rank 0 did not see version 0 succeed; version 1 is its first success, yet no anchor: nothing may be retired."""

    class LosesFirstAnswer(FaultyTransport):
        def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
            was_set = self.inner.compare_and_set(name, expected, value)
            if expected is None:
                message = "the answer was lost"
                raise TransportError(message)
            return was_set

    class SlowToHear(FaultyTransport):
        def get(self, key: str) -> bytes:
            if key.endswith("/failed"):
                message = "not heard"
                raise BlobNotFoundError(message)
            return self.inner.get(key)

    store = MemoryTransport()
    rig = Rig(world_size=2, store=store, transports=[LosesFirstAnswer(store), SlowToHear(store)], keep=1)
    outcome = publish_together(rig.publishers)
    assert isinstance(outcome[0], TransportError)
    assert isinstance(outcome[1], PublishReport)
    for _ in range(4):
        rig.step()
        rig.publish()
    late = rig.follow()
    late.sync()
    late.assert_current()


def test_a_retirement_that_fails_does_not_fail_the_publish() -> None:
    """The version is visible by then; the blobs go the next time."""
    store = MemoryTransport()
    fault = TransportFault(kind=TransportFaultKind.FAIL, method="delete", call_index=0)
    rig = Rig(world_size=1, store=store, transports=[FaultyTransport(store, [fault])], anchor_every=2, keep=1)
    for _ in range(4):
        rig.publish()
        rig.step()
    assert _held_versions(store) == {2, 3}


@pytest.mark.parametrize("kind", [TransportFaultKind.FAIL, TransportFaultKind.DROP, TransportFaultKind.TEAR])
def test_a_decision_that_cannot_be_read_does_not_fail_a_visible_version(kind: TransportFaultKind) -> None:
    store = MemoryTransport()
    fault = TransportFault(kind=kind, method="get", key="/keep", call_index=0)
    rig = Rig(world_size=2, store=store, transports=[store, FaultyTransport(store, [fault])], anchor_every=3, keep=1)
    for n in range(5):
        assert rig.publish().version.n == n
        rig.step()
    assert _held_versions(store) == {3, 4}


def test_an_audit_that_finds_damage_makes_the_next_share_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Memory of rank 1 went bad: its kept bits are not trusted again, and who takes the next version has the right bits."""
    rig = Rig(world_size=2, audit_every=2)
    follower = rig.follow()
    rig.publish()
    follower.sync()
    rig.publishers[1]._encoder._last["w"][0, 0] ^= 1
    rig.publish()
    assert "rank 1: the kept bits of w are damaged; the next version is sent whole" in caplog.text
    rig.step(0.02)
    rig.publish()
    manifest = manifest_of(rig, 2)
    codecs = zip(cells_of(rig, manifest), manifest.columns.codec.tolist(), strict=True)
    assert {cell.box.offset for cell, codec in codecs if codec == Codec.DENSE and cell.tensor == "w"} == {(5, 0)}
    follower.sync()
    follower.assert_current()


def test_decisions_are_read_strictly() -> None:
    sound = Decision(delete=(1, 2), is_anchor_due=True)
    assert Decision.from_bytes(sound.to_bytes()) == sound
    for header in (
        {},
        {"delete": None, "is_anchor_due": True},
        {"delete": ["1"], "is_anchor_due": True},
        {"delete": []},
    ):
        with pytest.raises(CorruptUpdateError):
            Decision.from_bytes(records.pack("rose.keep/1", header, {}))


def test_an_anchor_that_a_rank_does_not_know_to_be_due_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank could not read the decision: the version goes on without an anchor, and the next one has it."""
    rig = Rig(anchor_every=1)
    rig.publish()
    with monkeypatch.context() as patch:
        patch.setattr(rig.publishers[1]._housekeeper, "follow", lambda *_: False)
        assert not rig.publish().is_anchor
    assert "no anchor this time: ranks [1] put no full weights" in caplog.text
    assert rig.publish().is_anchor


def test_an_anchor_that_was_asked_for_is_not_left_out() -> None:
    rig = Rig()
    rig.publish()
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(rig.publishers[0].publish_sync, anchor=True)
        threads.submit(rig.publishers[1].publish_sync).exception()
        assert "ranks [1] put no full weights" in str(asked.exception())


def test_a_closed_publisher_has_no_threads() -> None:
    rig = Rig(world_size=1)
    rig.publish()
    rig.publishers[0].close()
    rig.publishers[0].close()
    assert rig.publishers[0]._encoder._pool._shutdown


def test_an_anchor_on_request() -> None:
    rig = Rig()
    rig.publish()
    rig.step()
    report = rig.publish(anchor=True)
    assert report.is_anchor
    assert 0 < report.bytes_anchor - report.bytes_dense < 2 * HEADER_BYTES
    late = rig.follow()
    late.sync()
    late.assert_current()


def test_ranks_that_disagree_are_refused() -> None:
    store = MemoryTransport()
    trainers = [FakeTrainer(0, 2), FakeTrainer(1, 2, specs=[TensorSpec(name="x", shape=(2,), dtype="bfloat16")])]
    errors = publish_together([Publisher(t, store, run="run", timeout_s=5.0) for t in trainers])
    assert isinstance(errors[0], LayoutMismatchError)
    assert "[1]" in str(errors[0])
    assert isinstance(errors[1], TransferError)
    assert current_version(store) is None


def test_ranks_that_do_not_cover_are_refused() -> None:
    class Half(ArrayTrainer):
        def layout(self) -> dict[str, ShardSpec]:
            return {"w": ShardSpec(offset=(0,), shape=(2,))}

    with pytest.raises(LayoutMismatchError, match=r"shards are not.* w is uint16\(4,\)"):
        Publisher(Half({"w": bf16(4)}), MemoryTransport(), run="r").publish_sync()
    half = Half({"w": bf16(4)})
    half.shards = lambda: {"w": half.arrays["w"][:2]}
    with pytest.raises(LayoutMismatchError, match="boxes hold 2 of 4"):
        Publisher(half, MemoryTransport(), run="r").publish_sync()


def test_a_target_that_does_not_fit_is_refused_before_anything_is_put() -> None:
    store = MemoryTransport()
    target = TargetLayout.whole("x", [TensorSpec(name="v", shape=(4,), dtype="bfloat16")])
    with pytest.raises(LayoutMismatchError, match=r"v, required by x.*w of the trainer is unknown to x"):
        Publisher(ArrayTrainer({"w": bf16(4)}), store, run="r", targets=[target])
    assert not store._store._blobs


def test_large_payloads_are_split_over_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.transfer.encoder.MAX_BLOB_BYTES", 64)
    monkeypatch.setattr("rose.transfer.encoder.MIN_BLOB_BYTES", 64)
    specs = [TensorSpec(name=f"w{i}", shape=(20,), dtype="bfloat16") for i in range(5)]
    rig = Rig(specs=specs, world_size=1)
    rig.publish()
    follower = rig.follow()
    follower.sync()
    follower.assert_current()
    manifest = manifest_of(rig, 0)
    assert manifest.columns.blob.tolist() == [0, 0, 1, 1, 2], "40 bytes each, full at 64"
    assert [blob.key for blob in manifest.blobs] == [f"run/0/0/rank-0/blob-{i}" for i in range(3)]


def test_the_weights_may_change_after_publish_returns() -> None:
    """The last published bits are a copy: a later in-place step shows as a change."""
    trainer = ArrayTrainer({"w": bf16(100)})
    publisher = Publisher(trainer, MemoryTransport(), run="r")
    publisher.publish_sync()
    trainer.arrays["w"][3] = 7
    assert publisher.publish_sync().num_changed == 1
    np.testing.assert_array_equal(publisher.publish_sync().num_changed, 0)


@pytest.mark.parametrize("kind", [TransportFaultKind.TEAR, TransportFaultKind.CORRUPT, TransportFaultKind.DROP])
def test_a_map_that_came_to_harm_is_written_anew(kind: TransportFaultKind) -> None:
    """Without the map nobody could read any version: it is read back before the pointer moves."""
    store = MemoryTransport()
    fault = TransportFault(kind=kind, method="put", key="run/cells/", call_index=0)
    rig = Rig(world_size=2, store=store, transports=[FaultyTransport(store, [fault]), store])
    rig.publish()
    late = rig.follow()
    late.sync()
    late.assert_current()


def test_a_map_that_cannot_be_written_fails_the_publish() -> None:
    store = MemoryTransport()
    fault = TransportFault(kind=TransportFaultKind.CORRUPT, method="put", key="run/cells/")
    rig = Rig(world_size=2, store=store, transports=[FaultyTransport(store, [fault]), store])
    errors = publish_together(rig.publishers)
    assert isinstance(errors[0], CorruptUpdateError)
    assert "came back damaged 3 times in a row" in str(errors[0])
    assert current_version(store) is None


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_map_that_was_lost_later_comes_back_with_the_next_anchor(*, is_gone: bool) -> None:
    rig = Rig(anchor_every=2)
    rig.publish()
    (key,) = (key for key in rig.store._store._blobs if key.startswith("run/cells/"))
    if is_gone:
        rig.store.delete([key])
    else:
        rig.store._store._blobs[key] = b"damaged"
    rig.publish()
    with pytest.raises(BlobNotFoundError if is_gone else CorruptUpdateError):
        rig.follow().sync()
    rig.step()
    rig.publish()
    late = rig.follow()
    late.sync()
    late.assert_current()
