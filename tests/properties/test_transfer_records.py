"""Records that someone rewrote and gave the right checksum: read, or refused with the one error, never anything else."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.backends.memory import MemoryTransport
from rose.errors import CorruptUpdateError, RoseError
from rose.testing import FakeTrainer
from rose.transfer import records
from rose.transfer.blobs import SCHEMA as BLOB_SCHEMA
from rose.transfer.blobs import OpenBlob, checksum_of, read_blob
from rose.transfer.cells import MAP_SCHEMA, BlobEntry, CellMap
from rose.transfer.manifest import SCHEMA as MANIFEST_SCHEMA
from rose.transfer.manifest import Manifest
from rose.transfer.parts import SCHEMA as PART_SCHEMA
from rose.transfer.parts import Part
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.transfer.subscriber import ArraySink, Subscriber
from rose.types import WeightVersion

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([1 << 31, 1 << 63, 1 << 70, -(1 << 63), 0.5, "", "a", "run:1", [], {}, [[]], [1, 2], {"a": 1}]),
)


def _publish() -> MemoryTransport:
    store, trainer = MemoryTransport(), FakeTrainer()
    publisher = Publisher(trainer, store, run="run")
    publisher.publish_sync()
    trainer.step(0.3)
    publisher.publish_sync(anchor=True)
    return store


STORE = _publish()
BLOBS = dict(STORE._store._blobs)
MAP_KEY = next(key for key in BLOBS if "/cells/" in key)
KEYS = {
    "run/1/1/manifest": MANIFEST_SCHEMA,
    "run/1/1/part-0": PART_SCHEMA,
    MAP_KEY: MAP_SCHEMA,
    "run/1/1/rank-0/blob-0": BLOB_SCHEMA,
}


def _spots(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in plain data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path] * bool(path) + [spot for key, value in items for spot in _spots(value, (*path, key))]


def _replace(data: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


@st.composite
def rewritten(draw: st.DrawFn, key: str) -> bytes:
    """The record of a key, with a value of its header or an element, the shape or the type of an array replaced."""
    header, arrays = records.unpack(BLOBS[key], KEYS[key])
    header, changed = json.loads(json.dumps(header)), {name: np.array(array) for name, array in arrays.items()}
    for _ in range(draw(st.integers(1, 3))):
        spots = _spots(header)
        if spots and draw(st.booleans()):
            _replace(header, draw(st.sampled_from(spots)), copy.deepcopy(draw(SCALARS)))
            continue
        name = draw(st.sampled_from(sorted(changed)))
        array = changed[name]
        how = draw(st.sampled_from(["element", "shorter", "flat", "type", "gone"]))
        if how == "element" and array.size:
            limits = np.iinfo(array.dtype)
            value = draw(st.one_of(st.sampled_from([limits.min, limits.max]), st.integers(-2, 5)))
            array.reshape(-1)[draw(st.integers(0, array.size - 1))] = np.array(value).astype(array.dtype)
        elif how == "shorter":
            changed[name] = array[: len(array) // 2]
        elif how == "flat":
            changed[name] = array.reshape(-1)
        elif how == "type":
            changed[name] = array.astype(draw(st.sampled_from(["<u8", "<i8", "<u4", "<u2", "|u1"])))
        elif how == "gone" and len(changed) > 1:
            del changed[name]
    return bytes(records.pack(KEYS[key], header, changed))


def _read(key: str, payload: bytes) -> None:
    if KEYS[key] == BLOB_SCHEMA:
        entry = BlobEntry(key=key, length_bytes=len(payload), checksum=checksum_of(payload))
        cells = CellMap.from_bytes(BLOBS[MAP_KEY]).cells
        widths = {"model.norm.weight": 4, "model.scale": 4}
        list(
            read_blob(
                OpenBlob.of(payload, entry), lambda n: (cells[n].box.num_elements, widths.get(cells[n].tensor, 2))
            )
        )
    else:
        {MANIFEST_SCHEMA: Manifest, PART_SCHEMA: Part, MAP_SCHEMA: CellMap}[KEYS[key]].from_bytes(payload)


@settings(max_examples=300)
@given(st.data())
def test_any_rewritten_record_is_read_or_refused(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(KEYS)))
    payload = data.draw(rewritten(key))
    try:
        _read(key, payload)
    except CorruptUpdateError as error:
        assert str(error)  # noqa: PT017 - any other error is the failure


@settings(max_examples=150)
@given(st.data())
def test_any_rewritten_record_leaves_the_engine_as_it_was(data: st.DataObject) -> None:
    """A rewritten manifest, map or blob (the manifest then promises its checksum) is staged soundly or refused whole."""
    store = MemoryTransport()
    store._store._blobs.update(BLOBS)
    store.compare_and_set("current", None, "run/0/0/manifest")
    trainer = FakeTrainer()
    sink = ArraySink(trainer.tensors())
    engine = Subscriber(sink)
    engine.stage(plan_update(store, None), store)
    engine.activate(verify=True)
    before = {name: sink.array(name).copy() for name in sink.tensors()}
    store.compare_and_set("current", "run/0/0/manifest", "run/1/1/manifest")
    engine._routes.clear()
    key = data.draw(st.sampled_from(["run/1/1/manifest", MAP_KEY, "run/1/1/rank-0/blob-0"]))
    payload = data.draw(rewritten(key))
    store._store._blobs[key] = payload
    if "blob" in key:
        header, arrays = records.unpack(BLOBS["run/1/1/manifest"], MANIFEST_SCHEMA)
        header["blobs"][0][1:3] = [len(payload), checksum_of(payload)]
        store._store._blobs["run/1/1/manifest"] = bytes(records.pack(MANIFEST_SCHEMA, header, arrays))
    try:
        update = plan_update(store, WeightVersion("run", 0))
        if update is not None:
            engine.stage(update, store)
    except RoseError as error:
        assert str(error)  # noqa: PT017 - any other error is the failure
    assert engine.version == WeightVersion("run", 0)
    for name, bits in before.items():
        np.testing.assert_array_equal(sink.array(name), bits)
