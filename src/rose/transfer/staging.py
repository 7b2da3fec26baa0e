"""From manifests to writes: which cells a sink needs, fetched, verified and decoded. Nothing here touches the sink's weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from rose.errors import CorruptUpdateError, LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.interfaces.transport import Transport
from rose.transfer import delta
from rose.transfer.layout import bits_dtype, intersect, slices_in
from rose.transfer.manifest import CellRecord, Manifest
from rose.transfer.sink import WeightSink


@attrs.frozen(kw_only=True)
class Write:
    """One write to a sink: ``box`` is the part of a cell that the sink holds under ``name``."""

    name: str
    box: ShardSpec
    change: delta.Dense | delta.Sparse

    def apply(self, sink: WeightSink) -> None:
        """Write in place."""
        if isinstance(self.change, delta.Dense):
            sink.write_dense(self.name, self.box, self.change.bits)
        else:
            sink.write_sparse(self.name, self.box, self.change.positions, self.change.values)


@attrs.frozen(kw_only=True)
class StateCheck:
    """What the sink must hold of one cell after activation; ``parts`` are the boxes it holds of it."""

    name: str
    box: ShardSpec
    dtype: str
    state_hash: str
    parts: tuple[ShardSpec, ...]

    @property
    def is_complete(self) -> bool:
        """Return whether the sink holds the whole cell, so that its checksum can be compared."""
        return sum(part.num_elements for part in self.parts) == self.box.num_elements

    def holds(self, sink: WeightSink) -> bool:
        """Compare the checksum of what the sink holds with the published one."""
        if self.parts == (self.box,):
            return delta.digest(sink.read(self.name, self.box)) == self.state_hash
        bits = np.empty(self.box.shape, dtype=bits_dtype(self.dtype))
        for part in self.parts:
            bits[slices_in(part, self.box)] = sink.read(self.name, part)
        return delta.digest(bits) == self.state_hash


def route_names(
    manifest: Manifest, tensors: Mapping[str, TensorSpec], aliases: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return tensor of the manifest -> the sink's names that take its bits.

    Tied names (``aliases`` of the engine and those of the manifest) take one copy; a payload that carries a tied pair
    twice is accepted when both are the same bits.

    Raises:
        LayoutMismatchError: Names are unknown or missing, shapes or dtypes differ, or tied names carry different bits;
            the message names every such tensor.
    """
    ties = {**manifest.aliases, **aliases}
    carried = {spec.name: spec for spec in manifest.tensors}
    twice = {alias: name for alias, name in ties.items() if alias in carried and name in carried}
    problems = [f"{alias} and {name} are tied but carry different bits" for alias, name in twice.items()
                if _states(manifest, alias) != _states(manifest, name)]  # fmt: skip
    wire_names = {ties.get(name, name): name for name in carried if name not in twice}
    takers: defaultdict[str, list[str]] = defaultdict(list)
    for name, spec in tensors.items():
        wire_name = wire_names.get(ties.get(name, name))
        if wire_name is None:
            problems.append(f"{name} is missing from the update")
            continue
        takers[wire_name].append(name)
        sent = carried[wire_name]
        if (sent.shape, sent.dtype) != (spec.shape, spec.dtype):
            problems.append(f"{name} is {spec.dtype}{spec.shape} here, {sent.dtype}{sent.shape} in the update")
    problems += [f"{name} is unknown to this engine" for name in wire_names.values() if name not in takers]
    if problems:
        message = f"update {manifest.version} does not fit this engine: {'; '.join(problems)}"
        raise LayoutMismatchError(message)
    return {name: tuple(names) for name, names in takers.items()}


def _states(manifest: Manifest, name: str) -> set[tuple[ShardSpec, str]]:
    return {(cell.box, cell.state_hash) for cell in manifest.cells if cell.tensor == name}


def held_parts(
    cell: CellRecord, routes: Mapping[str, tuple[str, ...]], boxes: Mapping[str, Sequence[ShardSpec]]
) -> dict[str, tuple[ShardSpec, ...]]:
    """Return sink name -> the parts of the cell that this rank holds; empty when it needs none of it."""
    held = {}
    for name in routes.get(cell.tensor, ()):
        parts = tuple(part for box in boxes.get(name, ()) if (part := intersect(cell.box, box)) is not None)
        if parts:
            held[name] = parts
    return held


def fetch_writes(
    manifest: Manifest,
    routes: Mapping[str, tuple[str, ...]],
    boxes: Mapping[str, Sequence[ShardSpec]],
    transport: Transport,
) -> tuple[list[Write], int]:
    """Fetch the blobs this rank needs of one version, verify and decode them.

    Returns:
        The writes, and the bytes fetched.

    Raises:
        CorruptUpdateError: A payload's length or checksum does not match, or it does not decode.
        BlobNotFoundError: A blob is gone.
    """
    dtypes = {spec.name: bits_dtype(spec.dtype) for spec in manifest.tensors}
    by_blob: defaultdict[str, list[tuple[CellRecord, dict[str, tuple[ShardSpec, ...]]]]] = defaultdict(list)
    for cell in manifest.cells:
        if cell.codec != delta.NONE and (held := held_parts(cell, routes, boxes)):
            by_blob[cell.blob].append((cell, held))
    writes: list[Write] = []
    fetched_bytes = 0
    for key, wanted in by_blob.items():
        blob = memoryview(transport.get(key))
        fetched_bytes += len(blob)
        for cell, held in wanted:
            payload = _payload(cell, blob)
            change = delta.decode(
                payload,
                codec=cell.codec,
                dtype=dtypes[cell.tensor],
                shape=cell.box.shape,
                num_changed=cell.num_changed,
            )
            for name, parts in held.items():
                writes += [Write(name=name, box=part, change=restrict(change, cell.box, part)) for part in parts]
    return writes, fetched_bytes


def state_checks(
    manifest: Manifest, routes: Mapping[str, tuple[str, ...]], boxes: Mapping[str, Sequence[ShardSpec]]
) -> list[StateCheck]:
    """Return what this rank must hold once it is at the manifest's version."""
    dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
    return [
        StateCheck(name=name, box=cell.box, dtype=dtypes[cell.tensor], state_hash=cell.state_hash, parts=parts)
        for cell in manifest.cells
        for name, parts in held_parts(cell, routes, boxes).items()
    ]


def restrict(change: delta.Dense | delta.Sparse, cell: ShardSpec, part: ShardSpec) -> delta.Dense | delta.Sparse:
    """Return the part of a cell's change that lies in a smaller box of it."""
    if part == cell:
        return change
    index = slices_in(part, cell)
    if isinstance(change, delta.Dense):
        return delta.Dense(bits=change.bits[index])
    coordinates = np.unravel_index(change.positions, cell.shape)
    inside = np.ones(change.positions.size, dtype=bool)
    for axis, cut in zip(coordinates, index, strict=True):
        inside &= (axis >= cut.start) & (axis < cut.stop)
    local = [axis[inside] - cut.start for axis, cut in zip(coordinates, index, strict=True)]
    return delta.Sparse(positions=np.ravel_multi_index(local, part.shape), values=change.values[inside])


def _payload(cell: CellRecord, blob: memoryview) -> memoryview:
    payload = blob[cell.offset_bytes : cell.offset_bytes + cell.length_bytes]
    if len(payload) != cell.length_bytes or delta.digest(payload) != cell.payload_hash:
        message = (
            f"payload of {cell.tensor} at {cell.box.offset} in blob {cell.blob} is damaged: "
            f"{len(payload)} of {cell.length_bytes} bytes, checksum {delta.digest(payload)}, promised {cell.payload_hash}"
        )
        raise CorruptUpdateError(message)
    return payload
