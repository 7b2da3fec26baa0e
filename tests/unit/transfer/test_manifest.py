"""Manifests: round trip, strictness, totals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from rose.errors import CorruptUpdateError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer import delta
from rose.transfer.manifest import CellRecord, Manifest
from rose.transfer.parts import Part
from rose.types import WeightVersion


def _cell(tensor: str, start: int, size: int, codec: str = delta.DENSE, num_changed: int = 0) -> CellRecord:
    return CellRecord(
        tensor=tensor,
        box=ShardSpec(offset=(start,), shape=(size,)),
        codec=codec,
        blob="" if codec == delta.NONE else "k/blob-0",
        offset_bytes=0,
        length_bytes=0 if codec == delta.NONE else 2 * size,
        payload_hash="p",
        state_hash="s",
        num_changed=num_changed,
    )


def _manifest(*cells: CellRecord) -> Manifest:
    return Manifest(
        version=WeightVersion("run", 3),
        base=WeightVersion("run", 2),
        base_key="run/2/0/manifest",
        anchor_key="run/0/0/manifest",
        tensors=(TensorSpec(name="a", shape=(4,), dtype="bfloat16"), TensorSpec(name="z", shape=(0,), dtype="int64")),
        aliases={"b": "a"},
        cells=cells or (_cell("a", 0, 3, delta.SPARSE, 2), _cell("a", 3, 1, delta.NONE)),
    )


def test_round_trip_and_totals() -> None:
    manifest = _manifest()
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert (manifest.bytes_dense, manifest.bytes_sent, manifest.num_elements, manifest.num_changed) == (8, 6, 4, 2)
    assert manifest.changed_fraction == 0.5
    assert manifest.codec_elements() == {"none": 1, "dense": 0, "sparse": 3}
    assert not manifest.is_anchor


@pytest.mark.parametrize(
    ("manifest", "what"),
    [
        (_manifest(_cell("a", 0, 3)), "does not cover a of shape .*3 of 4"),
        (_manifest(_cell("a", 0, 3), _cell("a", 2, 1)), "boxes overlap"),
        (_manifest(_cell("a", 0, 4), _cell("ghost", 0, 1)), "does not list: ghost"),
        (attrs.evolve(_manifest(), base=None), "an anchor is dense"),
    ],
)
def test_what_is_not_whole_is_refused(manifest: Manifest, what: str) -> None:
    with pytest.raises(CorruptUpdateError, match=what):
        Manifest.from_bytes(manifest.to_bytes())


def _respoken(spoil: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a manifest that was changed by someone who also fixed its checksum."""
    data = json.loads(_manifest().to_bytes()[32:])
    spoil(data)
    text = json.dumps(data).encode()
    return delta.digest(text).encode() + text


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda data: data.update(schema="rose.manifest/0"), "schema 'rose.manifest/1' was expected"),
        (lambda data: data.pop("tensors"), "tensors"),
        (lambda data: data.update(version="run"), "run:n"),
        (lambda data: data["cells"][0].__setitem__(5, -1), "row"),
        (lambda data: data["cells"][0].__setitem__(5, 1.0), "row"),
        (lambda data: data["cells"][0].__setitem__(9, 4), "row"),
        (lambda data: data["cells"][0].__setitem__(3, "zip"), "row"),
        (lambda data: data["cells"][0].__setitem__(0, 7), "row"),
        (lambda data: data["cells"][0].pop(), "row"),
    ],
)
def test_malformed_fields_are_refused(spoil: Callable[[dict[str, Any]], object], what: str) -> None:
    with pytest.raises(CorruptUpdateError, match=what):
        Manifest.from_bytes(_respoken(spoil))


def test_any_flipped_byte_is_noticed() -> None:
    payload = _manifest().to_bytes()
    for at in range(0, len(payload), 7):
        with pytest.raises(CorruptUpdateError):
            Manifest.from_bytes(payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :])
    with pytest.raises(CorruptUpdateError):
        Manifest.from_bytes(b"")


def test_parts_round_trip() -> None:
    part = Part(
        rank=1,
        is_full=False,
        tensors_hash="t",
        layout={"a": ShardSpec(offset=(0,), shape=(4,))},
        cells=(_cell("a", 0, 4, delta.NONE),),
        anchor_cells=(_cell("a", 0, 4),),
    )
    assert Part.from_bytes(part.to_bytes()) == part
    assert part.full_cells == part.anchor_cells
    with pytest.raises(CorruptUpdateError, match=r"rose.part/1"):
        Part.from_bytes(_manifest().to_bytes())
