"""What a subscriber notices: damage on the way, damage in the engine's own weights, and updates that contradict themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from transfer_rig import SPECS, ArrayTrainer, Follower, Rig, bf16

from rose.backends.memory import MemoryTransport
from rose.errors import BlobNotFoundError, CorruptUpdateError, EngineFencedError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.interfaces.transport import Payload
from rose.testing import FaultyTransport, TransportFault, TransportFaultKind
from rose.transfer import delta
from rose.transfer.blobs import checksum_of
from rose.transfer.cells import BlobEntry
from rose.transfer.layout import rows_of, split_into_rows
from rose.transfer.manifest import Manifest
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update, read_manifest
from rose.transfer.staging import MAX_FETCHES
from rose.transfer.subscriber import ArraySink, Subscriber
from rose.types import WeightVersion


class Line:
    """A trainer of two plain tensors and an engine that is at version 0."""

    def __init__(self, **options: Any) -> None:
        self.store = MemoryTransport()
        self.arrays = {"a": bf16(1000), "b": bf16(20, 30)}
        self.arrays["a"][...] = 0x3F80
        self.publisher = Publisher(ArrayTrainer(self.arrays), self.store, run="run", **options)
        self.publisher.publish_sync()
        self.sink = ArraySink(ArrayTrainer(self.arrays).tensors())
        self.engine = Subscriber(self.sink, audit_every=2)
        self.stage()
        self.engine.activate(verify=True)

    def publish(self, *positions: int) -> None:
        """Publish a version in which these elements of ``a`` change."""
        self.arrays["a"][list(positions)] += 1
        self.publisher.publish_sync()

    def stage(self) -> None:
        update = plan_update(self.store, self.engine.version)
        assert update is not None
        self.engine.stage(update, self.store)

    def sync(self, *, verify: bool = False) -> None:
        self.stage()
        assert self.engine.activate(verify=verify).is_verified

    def assert_current(self) -> None:
        for name, bits in self.arrays.items():
            np.testing.assert_array_equal(self.sink.array(name), bits)

    def refuses(self, what: str, **options: Any) -> None:
        """Staging is refused, and nothing else happened."""
        before = {name: self.sink.array(name).copy() for name in self.arrays}
        state = (self.engine.version, self.engine.is_fenced)
        with pytest.raises(CorruptUpdateError, match=what):
            self.engine.stage(plan_update(self.store, self.engine.version), options.get("link", self.store))
        assert (self.engine.version, self.engine.is_fenced) == state
        for name, bits in before.items():
            np.testing.assert_array_equal(self.sink.array(name), bits)


BITS = pytest.mark.parametrize("bit", [0, 7, 15])


@BITS
def test_damage_where_the_update_writes_is_found_before_the_pause(bit: int) -> None:
    """The engine said which version it holds, not with which sums: the live cell is summed once, and does not fit."""
    line = Line()
    line.engine = Subscriber(line.sink, version=WeightVersion("run", 0))
    line.publish(5, 6)
    line.sink.array("a")[5] ^= 1 << bit
    line.refuses("a at .* would not be the published bits of run:1")


@BITS
def test_damage_where_the_update_writes_is_found_before_the_pause_with_kept_sums(bit: int) -> None:
    line = Line()
    line.publish(5, 6)
    line.sink.array("a")[5] ^= 1 << bit
    line.refuses("a at .* would not be the published bits of run:1")


def test_damage_where_patterns_are_overwritten_is_repaired_by_them() -> None:
    line = Line(is_overwrite=True)
    line.publish(5, 6)
    line.stage()
    line.sink.array("a")[5] ^= 1
    assert line.engine.activate(verify=True).is_verified
    line.assert_current()


@pytest.mark.parametrize("name", ["a", "b"])
def test_damage_elsewhere_is_found_by_the_audit_which_fences(name: str) -> None:
    line = Line()
    line.publish(5)
    line.sink.array(name).reshape(-1)[300] ^= 4
    line.sync()
    with pytest.raises(CorruptUpdateError, match=f"not the published bits of run:1: {name}$"):
        line.engine.audit()
    assert (line.engine.version, line.engine.is_fenced) == (None, True)
    line.publish(7)
    with pytest.raises(EngineFencedError):
        line.engine.stage(attrs.evolve(plan_update(line.store, WeightVersion("run", 1))), line.store)
    line.sync()
    line.assert_current()
    line.engine.audit()


@pytest.mark.parametrize("name", ["a", "b"])
def test_damage_elsewhere_is_found_in_the_pause_on_request(name: str) -> None:
    line = Line()
    line.publish(5)
    line.sink.array(name).reshape(-1)[300] ^= 4
    with pytest.raises(CorruptUpdateError, match=f"after activating run:1 .*: {name}$"):
        line.sync(verify=True)
    assert line.engine.is_fenced


def test_an_audit_of_sound_weights_or_of_none_is_quiet() -> None:
    line = Line()
    line.engine.audit()
    Subscriber(ArraySink(ArrayTrainer(line.arrays).tensors())).audit()
    assert line.engine.version == WeightVersion("run", 0)


def test_an_audit_is_due_every_so_many_activations() -> None:
    line = Line()
    due = []
    for n in range(5):
        line.publish(n)
        line.sync()
        due.append(line.engine.is_audit_due)
        if n == 2:
            line.engine.audit()
    assert due == [False, True, False, False, True], "staging audits when it is due"
    line.publish(9)
    line.sync(verify=True)
    assert not line.engine.is_audit_due, "verifying in the pause is an audit"
    never = Subscriber(line.sink, audit_every=0)
    never.stage(plan_update(line.store, None), line.store)
    never.activate(verify=False)
    assert not never.is_audit_due


def test_damage_is_found_by_the_audit_that_is_due_when_the_next_update_is_staged() -> None:
    line = Line()
    for n in range(2):
        line.publish(n)
        line.sync()
    line.sink.array("b")[3, 3] ^= 1
    line.publish(3)
    with pytest.raises(CorruptUpdateError, match="not the published bits of run:2: b"):
        line.stage()
    assert (line.engine.version, line.engine.is_fenced) == (None, True)
    line.sync()
    line.assert_current()


class _Counts(FaultyTransport):
    """Counts reads of blobs, and what is invalidated."""

    def __init__(self, inner: MemoryTransport, *faults: TransportFault) -> None:
        super().__init__(inner, faults)
        self.num_gets = 0
        self.invalidated: list[tuple[str, str | None]] = []

    def get(self, key: str) -> Payload:
        self.num_gets += "blob" in key
        return super().get(key)

    def invalidate(self, key: str, damaged: str | None = None) -> None:
        self.invalidated.append((key, damaged))


@pytest.mark.parametrize("kind", [TransportFaultKind.CORRUPT, TransportFaultKind.TRUNCATE, TransportFaultKind.TEAR])
def test_a_damaged_blob_is_fetched_again_a_few_times(kind: TransportFaultKind) -> None:
    line = Line()
    line.publish(5)
    link = _Counts(line.store, TransportFault(kind=kind, method="get", key="blob"))
    line.refuses(f"blob run/1/1/rank-0/blob-0 came damaged {MAX_FETCHES} times in a row", link=link)
    assert link.num_gets == MAX_FETCHES
    assert [key for key, _ in link.invalidated] == ["run/1/1/rank-0/blob-0"] * (MAX_FETCHES - 1)
    assert link.invalidated[0][1] != delta.digest(line.store.get("run/1/1/rank-0/blob-0"))
    once = _Counts(line.store, TransportFault(kind=kind, method="get", key="blob", call_index=0))
    line.engine.stage(plan_update(line.store, line.engine.version), once)
    assert (once.num_gets, len(once.invalidated)) == (2, 1)
    line.engine.activate(verify=True)
    line.assert_current()


def _respoken(line: Line, spoil: Callable[[Manifest], Manifest]) -> None:
    """Put another manifest in the place of the newest; its checksum is right."""
    key = line.store.read_pointer("current")
    line.store._store._blobs[key] = bytes(spoil(read_manifest(line.store, key)).to_bytes())


def _with_column(manifest: Manifest, name: str, index: int, value: Any) -> Manifest:
    column = np.array(getattr(manifest.columns, name))
    column[index] = value
    return attrs.evolve(manifest, columns=attrs.evolve(manifest.columns, **{name: column}))


def test_sums_that_the_changes_do_not_lead_to_are_refused() -> None:
    line = Line()
    line.publish(5)
    _respoken(line, lambda manifest: _with_column(manifest, "sums", 0, (1, 2)))
    line.refuses("a at .* its sum differs")


def test_a_sum_of_a_cell_that_is_said_to_be_unchanged_but_is_not_the_known_one() -> None:
    line = Line()
    line.publish(5)
    _respoken(line, lambda manifest: _with_column(manifest, "sums", 1, (1, 2)))
    line.refuses("b at .* its sum differs")


def test_a_blob_that_sends_another_form_than_the_manifest_says() -> None:
    line = Line()
    line.publish(5)
    _respoken(line, lambda manifest: _with_column(manifest, "codec", 0, delta.Codec.OVERWRITE))
    line.refuses("sends cell 0 as SPARSE, the manifest says otherwise")


def test_a_blob_that_lacks_a_cell() -> None:
    line = Line()
    line.publish(5)

    def add_b(manifest: Manifest) -> Manifest:
        changed = _with_column(manifest, "codec", 1, delta.Codec.SPARSE)
        changed = _with_column(changed, "num_changed", 1, 1)
        return _with_column(changed, "blob", 1, 0)

    _respoken(line, add_b)
    line.refuses(r"lacks cells \[1\]")


@pytest.mark.parametrize("first_cell", [1, 2, 1 << 40])
def test_a_blob_whose_cells_are_numbered_elsewhere(first_cell: int) -> None:
    line = Line()
    line.publish(5)
    _respoken(
        line,
        lambda manifest: attrs.evolve(
            manifest, blobs=tuple(attrs.evolve(blob, first_cell=first_cell) for blob in manifest.blobs)
        ),
    )
    line.refuses("blob run/1/1/rank-0/blob-0")


def test_a_blob_of_another_version_is_refused() -> None:
    line = Line()
    line.publish(5)
    line.publish(6)
    blobs = line.store._store._blobs
    blobs["run/2/2/rank-0/blob-0"] = blobs["run/1/1/rank-0/blob-0"]
    line.refuses("came damaged")


def test_a_blob_of_another_version_under_its_own_checksum_is_refused_by_the_sums() -> None:
    line = Line()
    line.publish(5)
    line.publish(6)
    old = line.store.get("run/1/1/rank-0/blob-0")
    entry = BlobEntry(key="run/1/1/rank-0/blob-0", length_bytes=len(old), checksum=checksum_of(old))
    _respoken(line, lambda manifest: attrs.evolve(manifest, blobs=(entry,)))
    line.refuses("its sum differs")


def test_a_lost_blob_is_told_as_such() -> None:
    line = Line()
    line.publish(5)
    line.store.delete(["run/1/1/rank-0/blob-0"])
    with pytest.raises(BlobNotFoundError):
        line.stage()
    assert line.engine.version == WeightVersion("run", 0)


def test_sparse_then_overwrite_then_sparse_in_one_chain() -> None:
    line = Line()
    for n, is_overwrite in enumerate((False, True, False)):
        line.publisher._encoder._is_overwrite = is_overwrite
        line.publish(5, 6 + n)
    codecs = [read_manifest(line.store, f"run/{n}/{n}/manifest").columns.codec[0] for n in (1, 2, 3)]
    assert codecs == [delta.Codec.SPARSE, delta.Codec.OVERWRITE, delta.Codec.SPARSE]
    line.sync(verify=True)
    line.assert_current()


def test_damage_between_stage_and_activation_is_found_on_request() -> None:
    line = Line()
    line.publish(5)
    line.stage()
    line.sink.array("a")[500] ^= 1
    with pytest.raises(CorruptUpdateError):
        line.engine.activate(verify=True)
    assert line.engine.is_fenced


CUBE = TensorSpec(name="cube", shape=(4, 6, 8), dtype="bfloat16")


def _box(*spans: tuple[int, int]) -> ShardSpec:
    return ShardSpec(offset=tuple(a for a, _ in spans), shape=tuple(b - a for a, b in spans))


def test_a_part_that_is_no_rows_at_equal_distances_is_cut_further() -> None:
    """A box cut on every side, out of a cell that is the whole cube: more than one level of rows."""
    box = _box((1, 3), (2, 5), (3, 6))
    assert len(split_into_rows(box, CUBE.shape)) == 2
    rig = Rig(world_size=1, specs=[CUBE])
    follower = rig.follow({"cube": (box,)})
    for _ in range(4):
        rig.publish()
        assert not follower.sync().is_verified
        follower.assert_current()
        rig.step(0.2)


def test_parts_that_make_up_a_cell_are_verified_even_where_they_are_cut_further() -> None:
    halves = (_box((0, 4), (0, 6), (0, 3)), _box((0, 4), (0, 2), (3, 8)), _box((0, 4), (2, 6), (3, 8)))
    rig = Rig(world_size=1, specs=[CUBE])
    follower = rig.follow({"cube": halves})
    for fraction in (0.0, 0.05, 1.0, 0.05):
        rig.step(fraction)
        rig.publish()
        assert follower.sync().is_verified
        follower.assert_current()
    follower.subscriber.audit()
    follower.sink._arrays["cube"][1][1][0, 1, 2] ^= 1
    with pytest.raises(CorruptUpdateError, match="cube"):
        follower.subscriber.audit()


def test_every_part_of_a_route_is_rows_at_equal_distances() -> None:
    for box in (_box((1, 3), (2, 5), (3, 6)), _box((0, 4), (2, 4), (0, 8)), _box((0, 4), (0, 6), (1, 2))):
        for part in split_into_rows(box, CUBE.shape):
            assert rows_of(part, CUBE.shape).num_elements == part.num_elements


def test_tied_names_are_checked_each() -> None:
    """Two copies of one tensor in an engine: damage in the second one is found under its own name."""
    store, arrays = MemoryTransport(), {"embed": bf16(8, 4)}
    publisher = Publisher(ArrayTrainer(arrays, {"head": "embed"}), store, run="run")
    publisher.publish_sync()
    spec = TensorSpec(name="embed", shape=(8, 4), dtype="bfloat16")
    sink = ArraySink({"embed": spec, "head": attrs.evolve(spec, name="head")})
    engine = Subscriber(sink)
    engine.stage(plan_update(store, None), store)
    engine.activate(verify=True)
    sink.array("head")[7, 3] ^= 1
    with pytest.raises(CorruptUpdateError, match=r"run:0: head$"):
        engine.audit()


def test_a_rank_with_half_of_a_tied_tensor() -> None:
    store, arrays = MemoryTransport(), {"embed": bf16(8, 4)}
    publisher = Publisher(ArrayTrainer(arrays, {"head": "embed"}), store, run="run")
    spec = TensorSpec(name="embed", shape=(8, 4), dtype="bfloat16")
    boxes = {"embed": (_box((0, 8), (0, 4)),), "head": (_box((4, 8), (0, 4)),)}
    sink = ArraySink({"embed": spec, "head": attrs.evolve(spec, name="head")}, boxes)
    engine = Subscriber(sink)
    for value in (0, 3, 9):
        arrays["embed"][5, 1] = value
        publisher.publish_sync()
        engine.stage(plan_update(store, engine.version), store)
        engine.activate(verify=True)
        np.testing.assert_array_equal(sink.array("embed"), arrays["embed"])
        np.testing.assert_array_equal(sink.array("head"), arrays["embed"][4:])


@pytest.mark.parametrize("num_threads", [1, 4])
def test_any_number_of_threads_ends_at_the_same_bits(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.transfer.encoder.MIN_BLOB_BYTES", 64)
    rig = Rig(world_size=3)
    follower = Follower(rig, ArraySink({spec.name: spec for spec in SPECS}))
    follower.subscriber = Subscriber(follower.sink, num_threads=num_threads)
    for _ in range(4):
        rig.publish()
        assert follower.sync().is_verified
        follower.assert_current()
        rig.step(0.3)


def test_a_map_is_read_once() -> None:
    line = Line()
    link = FaultyTransport(line.store, [TransportFault(kind=TransportFaultKind.FAIL, method="get", key="run/cells/")])
    line.publish(5)
    line.engine.stage(plan_update(line.store, line.engine.version), link)
    line.engine.activate(verify=True)
    line.assert_current()
