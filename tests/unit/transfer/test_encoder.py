"""One rank's encoder: the same bytes on any number of threads, what is kept and when, and how much memory that takes."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rose.errors import CorruptUpdateError, LayoutMismatchError, TransportError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer import kernels
from rose.transfer.delta import Codec
from rose.transfer.encoder import RankEncoder
from rose.transfer.layout import TargetLayout, bits_dtype, rows_of, whole_box
from rose.transfer.parts import Share
from rose.transfer.plan import plan_source

MIB = 1 << 20


class LazyBits:
    """Bits that are made when they are asked for, as a cast from masters is, a new copy each time."""

    def __init__(self, bits: np.ndarray) -> None:
        self.bits = bits
        self.shape, self.dtype = bits.shape, bits.dtype
        self.largest = 0

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        found = np.array(self.bits[index])
        self.largest = max(self.largest, found.nbytes)
        return found


class Side:
    """An encoder over a few tensors, and what it put."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        *,
        dtype: str = "bfloat16",
        targets: tuple[TargetLayout, ...] = (),
        max_cell_elements: int = 4 << 20,
        **options: Any,
    ) -> None:
        self.arrays = dict(arrays)
        self.specs = {n: TensorSpec(name=n, shape=a.shape, dtype=dtype) for n, a in arrays.items()}
        layout = {name: whole_box(spec.shape) for name, spec in self.specs.items()}
        self.cells = plan_source(0, layout, targets, {}, tensors=self.specs, max_cell_elements=max_cell_elements)
        self.encoder = RankEncoder(self.specs, layout, self.cells, **options)
        self.blobs: dict[str, bytes] = {}
        self.keys: list[str] = []
        self.put = self._put

    def _put(self, key: str, payload: Any) -> None:
        self.blobs[key] = bytes(payload)

    def encode(self, prefix: str = "p", *, is_full: bool = False, shards: Any = None) -> Share:
        return self.encoder.encode(shards or self.arrays, self.put, prefix, is_full=is_full, on_key=self.keys.append)

    def publish(self, prefix: str = "p") -> Share:
        share = self.encode(prefix)
        self.encoder.commit(self.arrays)
        return share

    def change(self, seed: int, fraction: float = 0.05) -> None:
        rng = np.random.default_rng(seed)
        for bits in self.arrays.values():
            flat = bits.reshape(-1)
            flat[rng.random(flat.size) < fraction] += bits.dtype.type(1)

    def sums(self) -> list[tuple[int, int]]:
        """Return the sums of the cells as they are now, computed in full."""
        found = []
        for cell in self.cells:
            index = tuple(slice(o, o + n) for o, n in zip(cell.box.offset, cell.box.shape, strict=True))
            rows = rows_of(cell.box, self.specs[cell.tensor].shape)
            bits = np.ascontiguousarray(self.arrays[cell.tensor][(*index, ...)]).reshape(rows.num_rows, rows.row_len)
            found.append(kernels.load().state_sum(bits, rows))
        return found


def _arrays(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"w": (60, 40), "v": (1000,), "s": (), "none": (0, 4)}
    return {name: rng.integers(0, 999, shape, dtype=np.uint16) for name, shape in shapes.items()}


TP2 = TargetLayout.tensor_parallel(
    "tp2",
    [TensorSpec(name=n, shape=a.shape, dtype="bfloat16") for n, a in _arrays().items()],
    num_ranks=2,
    split_dims={"w": 1, "v": 0},
)


def _sums(share: Share) -> list[tuple[int, int]]:
    return [share.columns.state_sum(n) for n in range(share.columns.num_cells)]


def test_any_number_of_threads_makes_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.transfer.encoder.MIN_BLOB_BYTES", 256)
    outcomes = []
    for num_threads in (1, 3):
        side = Side(_arrays(), targets=(TP2,), max_cell_elements=100, num_threads=num_threads)
        shares = []
        for n in range(3):
            shares.append(side.publish(f"p{n}"))
            side.change(n)
        blobs = [[(blob.key, blob.checksum) for blob in share.blobs] for share in shares]
        columns = [[array.tolist() for array in share.columns.arrays().values()] for share in shares]
        outcomes.append((side.keys, blobs, columns, side.blobs))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) > 20
    assert outcomes[0][0] == [key for blobs in outcomes[0][1] for key, _ in blobs], "keys in the order of blobs"


def test_nothing_is_kept_before_the_commit() -> None:
    side = Side(_arrays())
    side.encode()
    assert not side.encoder.has_base
    side.encoder.commit(side.arrays)
    assert side.encoder.has_base
    side.change(1)
    first = side.encode("a")
    second = side.encode("b")
    assert first.columns.num_changed.tolist() == second.columns.num_changed.tolist(), "encoding again finds them again"
    assert first.columns.num_changed.sum() > 0
    side.encoder.commit(side.arrays)
    assert side.encode("c").columns.num_changed.sum() == 0


def test_a_commit_without_an_encoding_is_nothing() -> None:
    side = Side(_arrays())
    side.encoder.commit(side.arrays)
    assert not side.encoder.has_base


def test_forgetting_sends_everything() -> None:
    side = Side(_arrays())
    side.publish()
    side.encoder.forget()
    assert not side.encoder.has_base
    share = side.publish("again")
    assert set(share.columns.codec.tolist()) == {Codec.DENSE}
    assert _sums(share) == side.sums()


@pytest.mark.parametrize("held_bytes", [0, 1 << 30])
@pytest.mark.parametrize("is_overwrite", [False, True])
def test_held_changes_and_bits_read_again_are_the_same_base(
    held_bytes: int, monkeypatch: pytest.MonkeyPatch, *, is_overwrite: bool
) -> None:
    """The commit takes changes that were held, or reads what was not held: three versions on, nothing has drifted."""
    monkeypatch.setattr("rose.transfer.encoder._HELD_FRACTION", 0.0)
    monkeypatch.setattr("rose.transfer.encoder.MIN_BLOB_BYTES", held_bytes)
    side = Side(_arrays(), targets=(TP2,), is_overwrite=is_overwrite)
    side.publish()
    for n in range(3):
        side.change(n)
        share = side.encode(f"v{n}")
        assert bool(side.encoder._held) is bool(held_bytes)
        side.encoder.commit(side.arrays)
        assert _sums(share) == side.sums()
        for name, bits in side.arrays.items():
            np.testing.assert_array_equal(side.encoder._last[name], bits)
    side.encoder.audit()


def test_an_anchor_beside_changes_leaves_the_changes_pending() -> None:
    side = Side(_arrays())
    side.publish()
    side.change(1)
    changes = side.encode("changes")
    anchor = side.encode("anchor", is_full=True)
    assert set(anchor.columns.codec.tolist()) == {Codec.DENSE}
    assert _sums(anchor) == _sums(changes) == side.sums()
    side.encoder.commit(side.arrays)
    assert side.encode("none").columns.num_changed.sum() == 0


def test_a_put_that_fails_keeps_the_base() -> None:
    side = Side(_arrays())
    side.publish()
    side.change(1)

    def refuse(key: str, payload: Any) -> None:
        message = f"{key} of {len(payload)} bytes"
        raise TransportError(message)

    side.put = refuse
    with pytest.raises(TransportError):
        side.encode("fails")
    side.encoder.commit(side.arrays)
    side.put = side._put
    assert side.encode("retry").columns.num_changed.sum() > 0


def test_an_audit_finds_a_flipped_bit_and_the_next_version_is_whole() -> None:
    side = Side(_arrays(), targets=(TP2,), num_threads=2)
    side.publish()
    side.encoder.audit()
    side.encoder._last["v"][777] ^= 1
    with pytest.raises(CorruptUpdateError, match=r"kept bits of v are damaged; the next version is sent whole"):
        side.encoder.audit()
    assert not side.encoder.has_base
    side.change(1)
    share = side.publish("next")
    assert set(share.columns.codec.tolist()) == {Codec.DENSE}
    assert _sums(share) == side.sums()
    side.encoder.audit()


def test_an_anchor_finds_a_flipped_bit_in_the_kept_bits() -> None:
    """The sums that moved by what was compared are not those of the weights: the comparison was with damaged bits."""
    side = Side(_arrays())
    side.publish()
    side.encoder._last["w"][3, 3] ^= 1
    side.change(1)
    side.encode("changes")
    with pytest.raises(CorruptUpdateError, match="kept sums of w are not those of the weights"):
        side.encode("anchor", is_full=True)
    assert not side.encoder.has_base


def test_lazy_shards_are_read_slice_by_slice() -> None:
    side = Side(_arrays(), max_cell_elements=200, num_threads=2)
    plain = Side(_arrays(), max_cell_elements=200)
    for n in range(2):
        lazy = {name: LazyBits(bits) for name, bits in side.arrays.items()}
        side.encoder.check(lazy)
        share = side.encode(f"p{n}", shards=lazy)
        side.encoder.commit(lazy)
        assert [blob.checksum for blob in share.blobs] == [blob.checksum for blob in plain.publish(f"p{n}").blobs]
        assert max(bits.largest for bits in lazy.values()) <= 200 * 2
        side.change(n)
        plain.change(n)


def test_several_threads_read_lazy_shards_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.transfer.units._BATCH_ELEMENTS", 8)
    barrier = threading.Barrier(2, timeout=10)

    class Meets(LazyBits):
        def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
            barrier.wait()
            return super().__getitem__(index)

    side = Side({"w": np.zeros((8, 8), dtype=np.uint16)}, max_cell_elements=8, num_threads=2)
    assert len(side.cells) == 8
    side.encode(shards={"w": Meets(side.arrays["w"])})


@pytest.mark.parametrize(
    ("shards", "what"),
    [
        ({}, "w is missing"),
        ({"w": np.zeros((2, 3), dtype=np.uint16), "x": np.zeros(1, dtype=np.uint16)}, "x is not in the layout"),
        ({"w": np.zeros((2, 3), dtype=np.uint32)}, "w is uint32"),
        ({"w": np.zeros((3, 2), dtype=np.uint16)}, r"w is uint16\(3, 2\), promised uint16\(2, 3\)"),
        ({"w": np.zeros((2, 3), dtype=np.int16)}, "w is int16"),
    ],
)
def test_shards_that_were_not_promised_are_named(shards: dict[str, np.ndarray], what: str) -> None:
    with pytest.raises(LayoutMismatchError, match=what):
        Side({"w": np.zeros((2, 3), dtype=np.uint16)}).encoder.check(shards)


def test_an_empty_shard_may_be_absent() -> None:
    layout = {"w": ShardSpec(offset=(4,), shape=(0,))}
    specs = {"w": TensorSpec(name="w", shape=(4,), dtype="bfloat16")}
    encoder = RankEncoder(specs, layout, ())
    encoder.check({})
    assert encoder.encode({}, lambda _key, _payload: None, "p", is_full=False, on_key=lambda _: None).blobs == ()
    encoder.commit({})
    assert encoder.has_base


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "float32", "int64"])
def test_sums_and_bases_of_every_width(dtype: str) -> None:
    rng = np.random.default_rng(0)
    side = Side({"w": rng.integers(0, 255, (50, 30), dtype=bits_dtype(dtype))}, dtype=dtype)
    side.publish()
    for n in range(3):
        side.change(n, fraction=0.02)
        assert _sums(side.publish(f"p{n}")) == side.sums()
    side.encoder.audit()


SHARD_BYTES = 64 * MIB


def _large(*, num_threads: int) -> Side:
    arrays = {f"w{i}": np.zeros((1024, 2048), dtype=np.uint16) for i in range(16)}
    side = Side(arrays, num_threads=num_threads, max_cell_elements=MIB // 4)
    side.put = lambda _key, _payload: None
    return side


def _peak_bytes(work: Any) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_changes_take_a_twentieth_of_the_shard_at_most() -> None:
    """64 MiB, 1 % changed: beside the last published bits, encode and commit hold less than 5 %."""
    side = _large(num_threads=1)
    side.publish()
    for name in side.arrays:
        side.arrays[name].reshape(-1)[::100] += np.uint16(1)
    lazy = {name: LazyBits(bits) for name, bits in side.arrays.items()}
    assert _peak_bytes(lambda: side.encode("p1", shards=lazy)) < 0.05 * SHARD_BYTES
    assert _peak_bytes(lambda: side.encoder.commit(lazy)) < 0.05 * SHARD_BYTES


def test_whole_cells_take_a_handful_of_blobs_at_most() -> None:
    """The first version too is a pipeline: cells ahead, one open blob, and blobs under way, however slow the store is."""
    side = _large(num_threads=1)
    side.put = lambda _key, _payload: time.sleep(0.01)
    blob_bytes = side.encoder._fill_bytes + MIB // 2
    lazy = {name: LazyBits(bits) for name, bits in side.arrays.items()}
    peak = _peak_bytes(lambda: side.encode("p0", shards=lazy))
    assert peak < 8 * blob_bytes
    assert _peak_bytes(lambda: side.encoder.commit(lazy)) < SHARD_BYTES + 2 * blob_bytes
