"""Any bits survive the codec, and any set of boxes is cut into cells that cover each element once."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rose.backends.memory import MemoryTransport
from rose.interfaces.trainer import ShardSpec, TensorSpec, Trainer
from rose.transfer import delta
from rose.transfer.blobs import BlobCell, OpenBlob, checksum_of, pack_blob, read_blob
from rose.transfer.cells import BlobEntry
from rose.transfer.delta import Codec, EncodedCell
from rose.transfer.kernels import Rows
from rose.transfer.layout import TargetLayout, find_cover_problem, intersect, slices_in, whole_box
from rose.transfer.plan import plan_source
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.transfer.staging import restrict
from rose.transfer.subscriber import ArraySink, Subscriber

DTYPES = st.sampled_from(["<u1", "<u2", "<u4", "<u8"])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40)


@st.composite
def old_and_new(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays that differ in anything from nothing to everything."""
    old = draw(hnp.arrays(draw(DTYPES), draw(SHAPES), elements=st.integers(0, 3)))
    is_changed = np.random.default_rng(draw(st.integers(0, 99))).random(old.shape) < draw(st.floats(0, 1))
    return old, np.where(is_changed, old + 1, old).astype(old.dtype)


def encode(new: np.ndarray, old: np.ndarray, *, is_overwrite: bool) -> EncodedCell:
    rows = Rows(num_rows=1, row_len=new.size, start=0, stride=new.size)
    return delta.encode(new.reshape(1, -1), old.reshape(1, -1), rows, is_overwrite=is_overwrite)


def over(blob: bytearray, size: int, itemsize: int) -> list[BlobCell]:
    """Read a blob of one cell back."""
    entry = BlobEntry(key="k", length_bytes=len(blob), checksum=checksum_of(blob))
    return list(read_blob(OpenBlob.of(blob, entry), lambda _: (size, itemsize)))


@given(old_and_new(), st.booleans())
def test_codec_and_blob_round_trip(pair: tuple[np.ndarray, np.ndarray], is_overwrite: bool) -> None:  # noqa: FBT001
    old, new = pair
    encoded = encode(new, old, is_overwrite=is_overwrite)
    assert encoded.num_changed == np.count_nonzero(new != old)
    assert encoded.num_bytes <= new.nbytes
    if encoded.codec is Codec.NONE:
        np.testing.assert_array_equal(new, old)
        return
    (cell,) = over(pack_blob({0: encoded}), new.size, new.itemsize)
    assert (cell.codec, cell.num_changed) == (encoded.codec, encoded.num_changed)
    if cell.streams is None:
        np.testing.assert_array_equal(np.frombuffer(cell.dense, dtype=new.dtype).reshape(new.shape), new)
        return
    change = delta.decode(cell.streams, codec=cell.codec, dtype=new.dtype, num_elements=new.size)
    assert change.positions.tolist() == np.flatnonzero(new != old).tolist()
    patched = old.copy().reshape(-1)
    patched[change.positions] = change.values + (patched[change.positions] if change.is_difference else 0)
    np.testing.assert_array_equal(patched.reshape(new.shape), new)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TensorSpec, list[dict[str, ShardSpec]], list[TargetLayout]]:
    """A tensor, its rows cut unevenly over trainer ranks, and engine ranks with boxes anywhere."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    spec = TensorSpec(name="w", shape=shape, dtype="bfloat16")
    edges = sorted([0, *draw(st.lists(st.integers(0, shape[0]), max_size=3)), shape[0]])
    rest = shape[1:]
    sources = [
        {"w": ShardSpec(offset=(a, *(0 for _ in rest)), shape=(b - a, *rest))} for a, b in itertools.pairwise(edges)
    ]

    def box() -> ShardSpec:
        spans = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        return ShardSpec(offset=tuple(a for a, _ in spans), shape=tuple(b - a for a, b in spans))

    targets = [
        TargetLayout(
            layout_id=f"t{i}", tensors=(spec,), ranks=tuple({"w": (box(),)} for _ in range(draw(st.integers(1, 2))))
        )
        for i in range(draw(st.integers(0, 2)))
    ]
    return spec, sources, targets


@given(layouts())
def test_cells_cover_each_element_once_and_each_target_exactly(
    case: tuple[TensorSpec, list[dict[str, ShardSpec]], list[TargetLayout]],
) -> None:
    spec, sources, targets = case
    plan = [cell for rank, layout in enumerate(sources) for cell in plan_source(rank, layout, targets, {})]
    assert find_cover_problem(spec.shape, [cell.box for cell in plan]) is None
    assert all(cell.box.num_elements for cell in plan)
    for target in targets:
        for rank, held in enumerate(target.ranks):
            cells = [cell for cell in plan if f"{target.layout_id}/{rank}" in cell.targets]
            assert sum(cell.box.num_elements for cell in cells) == held["w"][0].num_elements
            assert all(intersect(cell.box, held["w"][0]) == cell.box for cell in cells)


@given(old_and_new(), st.data())
def test_a_part_of_a_change_is_the_change_of_the_part(pair: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    old, new = pair
    spans = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in new.shape]
    index = tuple(slice(10 + a, 10 + b) for a, b in spans)
    part = ShardSpec(offset=tuple(s.start for s in index), shape=tuple(s.stop - s.start for s in index))
    cell = ShardSpec(offset=(10,) * new.ndim, shape=new.shape)
    encoded = encode(new, old, is_overwrite=True)
    if encoded.codec is Codec.NONE or not part.num_elements:
        return
    whole: delta.Dense | delta.Sparse = delta.Dense(bits=new)
    if encoded.streams is not None:
        whole = delta.decode(encoded.streams, codec=encoded.codec, dtype=new.dtype, num_elements=new.size)
    change = restrict(whole, cell, part)
    local = tuple(slice(a, b) for a, b in spans)
    patched = old[(*local, ...)].copy()
    if isinstance(change, delta.Dense):
        patched = change.bits
    elif change.positions.size:
        patched.reshape(-1)[change.positions] = change.values
    np.testing.assert_array_equal(patched, new[local])


@settings(max_examples=60)
@given(layouts(), st.data())
def test_any_ranks_reach_any_engine_boxes(
    case: tuple[TensorSpec, list[dict[str, ShardSpec]], list[TargetLayout]], data: st.DataObject
) -> None:
    """Whatever the cuts on both sides, known to the publisher or not, the engine's boxes end bit-equal, version by version."""
    spec, sources, targets = case
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    bits = rng.integers(0, 1 << 16, spec.shape, dtype=np.uint16)
    known = targets if data.draw(st.booleans()) else []
    store = MemoryTransport()
    publishers = [
        Publisher(OneBox(rank, sources, spec, bits), store, run="r", targets=known) for rank in range(len(sources))
    ]
    engines = [ArraySink({"w": spec}, rank) for target in targets for rank in target.ranks]
    subscribers = [Subscriber(sink) for sink in engines]
    for fraction in (0.0, 0.1, 0.9):
        at = rng.random(spec.shape) < fraction
        bits[at] += rng.integers(1, 1 << 12, int(at.sum()), dtype=np.uint16)
        with ThreadPoolExecutor(len(publishers)) as threads:
            list(threads.map(lambda publisher: publisher.publish_sync(), publishers))
        for sink, subscriber in zip(engines, subscribers, strict=True):
            subscriber.stage(plan_update(store, subscriber.version), store)
            is_verified = subscriber.activate(verify=True).is_verified
            assert is_verified or not known
            for box in sink.boxes()["w"]:
                np.testing.assert_array_equal(sink.read("w", box), bits[slices_in(box, whole_box(spec.shape))])


class OneBox(Trainer):
    """A rank that holds one box of one tensor."""

    def __init__(self, rank: int, sources: list[dict[str, ShardSpec]], spec: TensorSpec, bits: np.ndarray) -> None:
        self.rank, self.world_size = rank, len(sources)
        self._layout, self._spec, self._bits = sources[rank], spec, bits

    def tensors(self) -> dict[str, TensorSpec]:
        return {"w": self._spec}

    def layout(self) -> dict[str, ShardSpec]:
        return self._layout

    def shards(self) -> dict[str, np.ndarray]:
        return {"w": self._bits[slices_in(self._layout["w"], whole_box(self._spec.shape))]}
