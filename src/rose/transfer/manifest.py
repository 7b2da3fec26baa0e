"""The manifest: what one version is made of, as JSON that guards itself.

Invariants: a manifest lists every cell of every tensor, the unchanged ones too, and its cells cover each element exactly
once; every cell carries the checksum of its whole new state; a record is preceded by the xxh3_128 of its own text.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose.errors import CorruptUpdateError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer import delta
from rose.transfer.layout import find_cover_problem, num_bytes
from rose.types import WeightVersion

SCHEMA = "rose.manifest/1"
_DIGEST_CHARS = 32


@attrs.frozen(kw_only=True)
class CellRecord:
    """One cell of one version.

    Attributes:
        tensor: Checkpoint name.
        box: The cell, in global coordinates.
        codec: ``none`` (unchanged, no payload), ``dense`` or ``sparse``.
        blob: Key of the blob that holds the payload; empty without one.
        offset_bytes: Where the payload starts in the blob.
        length_bytes: How long the payload is.
        payload_hash: xxh3_128 of the payload; empty without one.
        state_hash: xxh3_128 of the cell's new bits, row-major.
        num_changed: Elements whose bits differ from the base (all of them in an anchor).
    """

    tensor: str
    box: ShardSpec
    codec: str
    blob: str
    offset_bytes: int
    length_bytes: int
    payload_hash: str
    state_hash: str
    num_changed: int


@attrs.frozen(kw_only=True)
class Manifest:
    """One version: a delta from ``base``, or full weights (an anchor) when ``base`` is ``None``.

    Attributes:
        version: The version it leads to.
        base: The version it starts from.
        base_key: Manifest key of the base.
        anchor_key: Manifest key of the newest anchor at or before this version; its own key for an anchor.
        tensors: Every tensor, in the trainer's order.
        aliases: Tied names: alias -> the tensor whose bits it shares.
        cells: Every cell of every tensor.
    """

    version: WeightVersion
    base: WeightVersion | None
    base_key: str | None
    anchor_key: str
    tensors: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    cells: tuple[CellRecord, ...]

    @property
    def is_anchor(self) -> bool:
        """Return whether it holds full weights."""
        return self.base is None

    @property
    def bytes_dense(self) -> int:
        """Return the size of the full weights, in bytes."""
        return sum(num_bytes(spec) for spec in self.tensors)

    @property
    def bytes_sent(self) -> int:
        """Return the size of all payloads, in bytes."""
        return sum(cell.length_bytes for cell in self.cells)

    @property
    def num_elements(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(cell.box.num_elements for cell in self.cells)

    @property
    def num_changed(self) -> int:
        """Return the number of elements sent as changed."""
        return sum(cell.num_changed for cell in self.cells)

    @property
    def changed_fraction(self) -> float:
        """Return the share of elements that changed."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0

    def codec_elements(self) -> dict[str, int]:
        """Return codec -> elements of the cells sent with it."""
        return count_codec_elements(self.cells)

    def to_bytes(self) -> bytes:
        """Return the record that ``from_bytes`` reads."""
        return pack_record(
            {
                "schema": SCHEMA,
                "version": str(self.version),
                "base": None if self.base is None else str(self.base),
                "base_key": self.base_key,
                "anchor_key": self.anchor_key,
                "tensors": [[t.name, list(t.shape), t.dtype] for t in self.tensors],
                "aliases": dict(self.aliases),
                **cells_to_rows(self.cells),
            }
        )

    @classmethod
    def from_bytes(cls, payload: bytes) -> Manifest:
        """Read a manifest and check that it is whole.

        Raises:
            CorruptUpdateError: It is damaged, of another schema, or its cells do not cover every tensor exactly once.
        """
        data = unpack_record(payload, SCHEMA)
        cells = cells_from_rows(data)
        try:
            base = data["base"]
            manifest = cls(
                version=WeightVersion.parse(data["version"]),
                base=None if base is None else WeightVersion.parse(base),
                base_key=data["base_key"],
                anchor_key=data["anchor_key"],
                tensors=tuple(TensorSpec(name=n, shape=tuple(s), dtype=d) for n, s, d in data["tensors"]),
                aliases=dict(data["aliases"]),
                cells=cells,
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            message = f"the manifest has a missing or malformed field: {error!r}"
            raise CorruptUpdateError(message) from error
        manifest._check()
        return manifest

    def _check(self) -> None:
        boxes: defaultdict[str, list[ShardSpec]] = defaultdict(list)
        for cell in self.cells:
            boxes[cell.tensor].append(cell.box)
            if self.is_anchor and cell.box.num_elements and cell.codec != delta.DENSE:
                message = f"anchor {self.version} sends {cell.tensor} as {cell.codec}; an anchor is dense"
                raise CorruptUpdateError(message)
        for spec in self.tensors:
            problem = find_cover_problem(spec.shape, boxes.pop(spec.name, []))
            if problem is not None:
                message = f"manifest {self.version} does not cover {spec.name} of shape {spec.shape}: {problem}"
                raise CorruptUpdateError(message)
        if boxes:
            message = f"manifest {self.version} has cells of tensors it does not list: {', '.join(sorted(boxes))}"
            raise CorruptUpdateError(message)


def count_codec_elements(cells: Sequence[CellRecord]) -> dict[str, int]:
    """Return codec -> elements of the cells sent with it, every codec named."""
    counts = Counter(dict.fromkeys(delta.CODECS, 0))
    for cell in cells:
        counts[cell.codec] += cell.box.num_elements
    return dict(counts)


def pack_record(data: Mapping[str, Any]) -> bytes:
    """Return JSON text preceded by its own checksum."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return delta.digest(text).encode() + text


def unpack_record(payload: bytes, schema: str) -> dict[str, Any]:
    """Read a record back.

    Raises:
        CorruptUpdateError: The checksum does not match, or it is not a record of this schema.
    """
    claimed, text = payload[:_DIGEST_CHARS], payload[_DIGEST_CHARS:]
    if delta.digest(text).encode() != claimed:
        message = f"a {schema} record of {len(payload)} bytes is damaged: its checksum does not match"
        raise CorruptUpdateError(message)
    data = json.loads(text)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != schema:
        message = f"a record of schema {schema!r} was expected, got {found!r}; update the older side"
        raise CorruptUpdateError(message)
    return dict(data)


def cells_to_rows(cells: Sequence[CellRecord]) -> dict[str, Any]:
    """Return cells as compact rows beside the tables of names and blob keys that they index."""
    names = {name: i for i, name in enumerate(dict.fromkeys(cell.tensor for cell in cells))}
    blobs = {key: i for i, key in enumerate(dict.fromkeys(cell.blob for cell in cells))}
    rows = [
        [
            names[cell.tensor],
            list(cell.box.offset),
            list(cell.box.shape),
            cell.codec,
            blobs[cell.blob],
            cell.offset_bytes,
            cell.length_bytes,
            cell.payload_hash,
            cell.state_hash,
            cell.num_changed,
        ]
        for cell in cells
    ]
    return {"cell_tensors": list(names), "cell_blobs": list(blobs), "cells": rows}


def cells_from_rows(data: Mapping[str, Any]) -> tuple[CellRecord, ...]:
    """Read what ``cells_to_rows`` wrote.

    Raises:
        CorruptUpdateError: A row is malformed.
    """
    try:
        return tuple(_cell_from_row(row, data["cell_tensors"], data["cell_blobs"]) for row in data["cells"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        message = f"a cell row is malformed: {error!r}"
        raise CorruptUpdateError(message) from error


def _cell_from_row(row: Sequence[Any], names: Sequence[str], blobs: Sequence[str]) -> CellRecord:
    name, offset, shape, codec, blob, start, length, payload_hash, state_hash, num_changed = row
    box = ShardSpec(offset=tuple(offset), shape=tuple(shape))
    counts = (name, blob, start, length, num_changed, *box.offset, *box.shape)
    is_sound = all(type(count) is int and count >= 0 for count in counts) and num_changed <= box.num_elements
    if not is_sound or codec not in delta.CODECS:
        message = f"row {row!r}"
        raise ValueError(message)
    return CellRecord(
        tensor=names[name],
        box=box,
        codec=codec,
        blob=blobs[blob],
        offset_bytes=start,
        length_bytes=length,
        payload_hash=payload_hash,
        state_hash=state_hash,
        num_changed=num_changed,
    )
