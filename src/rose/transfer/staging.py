"""From manifests to writes: which cells a sink needs, fetched, verified, decoded and resolved to new patterns.

Nothing here writes to the sink. The live weights are read where changes are differences, so that what is staged overwrites only, and
so that the sum of every cell is known to come out right *before* the engine is paused: the kept sum of the cell, moved by the changes
from the patterns that are really there, must be the sum that the manifest promises, and the new patterns alone must have the sum that
the blob promises (the first would not see a wrong live pattern under a difference). What is not read is not verified; an audit does that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np

from rose.errors import CorruptUpdateError, LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.interfaces.transport import SupportsInvalidate, Transport
from rose.transfer import delta, kernels
from rose.transfer.blobs import BlobCell, OpenBlob, read_blob
from rose.transfer.cells import BlobEntry, CellMap
from rose.transfer.delta import Bits, Codec, Dense, Sparse, add_sums
from rose.transfer.kernels import Rows, Sum
from rose.transfer.layout import bits_dtype, rows_of, slices_in, split_into_rows
from rose.transfer.manifest import Manifest, tensor_sums
from rose.transfer.sink import WeightSink

MAX_FETCHES = 3
"""How often a damaged blob is fetched before the update is given up."""

Place = tuple[str, ShardSpec]
"""A name of the sink and a box that it holds of a cell."""


@attrs.frozen(kw_only=True)
class HeldCell:
    """What a sink holds of one cell, under one of its names.

    Attributes:
        number: The cell's number in the map.
        name: The sink's name.
        cell: The cell.
        parts: The boxes the sink holds of it.
        is_summed: Whether the parts are all of the cell, so that their sums can be compared with the promised one.
    """

    number: int
    name: str
    cell: ShardSpec
    parts: tuple[ShardSpec, ...]
    is_summed: bool


@attrs.frozen(kw_only=True, eq=False)
class Routes:
    """What a sink takes of a cell map, found once a map.

    Attributes:
        cell_map: The map.
        held: Cells of which the sink holds something, by number.
        is_complete: Whether the sink holds each of these whole.
    """

    cell_map: CellMap
    held: Mapping[int, tuple[HeldCell, ...]]

    @property
    def is_complete(self) -> bool:
        """Return whether the sum of every cell that the sink holds can be compared."""
        return all(one.is_summed for cells in self.held.values() for one in cells)


def find_routes(cell_map: CellMap, sink: WeightSink, aliases: Mapping[str, str]) -> Routes:
    """Find which cells of a map go to which boxes of a sink.

    Tied names (``aliases`` of the engine and those of the map) take one copy.

    Raises:
        LayoutMismatchError: Names are unknown or missing, or shapes or dtypes differ; names every such tensor.
    """
    takers = _takers(cell_map, sink.tensors(), aliases)
    shapes = {spec.name: spec.shape for spec in cell_map.tensors}
    geometry, boxes = cell_map.geometry, sink.boxes()
    held: defaultdict[int, list[HeldCell]] = defaultdict(list)
    for tensor, names in takers.items():
        for name in names:
            parts: defaultdict[int, list[ShardSpec]] = defaultdict(list)
            for box in boxes.get(name, ()):
                for number, offset, shape in zip(
                    *(found.tolist() for found in geometry.common(tensor, box)), strict=True
                ):
                    part = ShardSpec(offset=tuple(offset), shape=tuple(shape))
                    parts[number] += split_into_rows(part, shapes[tensor])
            for number, pieces in parts.items():
                cell = geometry[number].box
                is_whole = sum(piece.num_elements for piece in pieces) == cell.num_elements
                one = HeldCell(number=number, name=name, cell=cell, parts=tuple(pieces), is_summed=is_whole)
                held[number].append(one)
    return Routes(cell_map=cell_map, held={number: tuple(held[number]) for number in sorted(held)})


def check_tied(manifest: Manifest, cell_map: CellMap, aliases: Mapping[str, str]) -> None:
    """Check that tensors that are tied and carried twice carry the same bits.

    Raises:
        LayoutMismatchError: They do not; names them.
    """
    ties = {**cell_map.aliases, **aliases}
    carried = {spec.name for spec in cell_map.tensors}
    twice = {alias: name for alias, name in ties.items() if alias in carried and name in carried}
    if not twice:
        return
    sums = tensor_sums(cell_map, manifest.columns)
    problems = [f"{alias} and {name} are tied but carry different bits" for alias, name in twice.items()
                if sums[alias] != sums[name]]  # fmt: skip
    if problems:
        message = f"update {manifest.version} does not fit this engine: {'; '.join(problems)}"
        raise LayoutMismatchError(message)


def _takers(
    cell_map: CellMap, tensors: Mapping[str, TensorSpec], aliases: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return tensor of the map -> the sink's names that take its bits."""
    ties = {**cell_map.aliases, **aliases}
    carried = {spec.name: spec for spec in cell_map.tensors}
    twice = {alias for alias, name in ties.items() if alias in carried and name in carried}
    wire_names = {ties.get(name, name): name for name in carried if name not in twice}
    takers: defaultdict[str, list[str]] = defaultdict(list)
    problems = []
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
        message = f"the update does not fit this engine: {'; '.join(problems)}"
        raise LayoutMismatchError(message)
    return {name: tuple(names) for name, names in takers.items()}


class Stage:
    """The weights that an engine rank would have, over those that it has: what the updates of a chain overwrite.

    Args:
        sink: The live weights; read, never written.
        sums: Known sums of what the sink holds now, by place.
        num_threads: How many blobs are fetched and decoded at a time.
    """

    def __init__(self, sink: WeightSink, sums: Mapping[Place, Sum], *, num_threads: int) -> None:
        self._sink, self._num_threads = sink, num_threads
        self._loops = kernels.load()
        self.sums: dict[Place, Sum] = dict(sums)
        self.changes: dict[Place, Dense | Sparse] = {}
        self.fetched_bytes = 0

    def add(self, manifest: Manifest, routes: Routes, transport: Transport, *, later: Sequence[Manifest] = ()) -> None:
        """Fetch and resolve one version.

        Args:
            manifest: The version.
            routes: What the sink takes of it.
            transport: Where its blobs are.
            later: The versions of the chain after it; cells that one of them sends whole are left to it.

        Raises:
            CorruptUpdateError: A payload is damaged, or the state it leads to is not the promised one.
            BlobNotFoundError: A blob is gone.
        """
        numbers = np.fromiter(routes.held, dtype=np.int64, count=len(routes.held))
        for other in later:
            numbers = numbers[other.columns.codec[numbers] != Codec.DENSE]
        wanted: defaultdict[int, set[int]] = defaultdict(set)
        for number, blob in zip(numbers.tolist(), manifest.columns.blob[numbers].tolist(), strict=True):
            if blob >= 0:
                wanted[blob].add(number)
        self._check_unchanged(manifest, routes, numbers)
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="rose-fetch") as pool:
            jobs = [
                pool.submit(self._take_blob, manifest, routes, manifest.blobs[blob], cells, transport)
                for blob, cells in wanted.items()
            ]
            try:
                self.fetched_bytes += sum(job.result() for job in jobs)
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise

    def _check_unchanged(self, manifest: Manifest, routes: Routes, numbers: Bits) -> None:
        for number in numbers[manifest.columns.codec[numbers] == Codec.NONE].tolist():
            for cell in routes.held[number]:
                known = [self.sums.get((cell.name, part)) for part in cell.parts]
                if cell.is_summed and None not in known:
                    self._check_sum(manifest, cell, [one for one in known if one is not None])

    def _take_blob(
        self, manifest: Manifest, routes: Routes, entry: BlobEntry, numbers: set[int], transport: Transport
    ) -> int:
        cells, specs = routes.cell_map.cells, {spec.name: spec for spec in routes.cell_map.tensors}

        def sizes(local: int) -> tuple[int, int]:
            cell = cells[entry.first_cell + local]
            return cell.box.num_elements, bits_dtype(specs[cell.tensor].dtype).itemsize

        missing = set(numbers)
        for found in read_blob(fetch_blob(transport, entry), sizes):
            number = entry.first_cell + found.number
            if number not in numbers:
                continue
            missing.discard(number)
            if manifest.columns.codec[number] != found.codec:
                message = f"blob {entry.key} sends cell {number} as {found.codec.name}, the manifest says otherwise"
                raise CorruptUpdateError(message)
            spec = specs[cells[number].tensor]
            change = _change(found, cells[number].box, spec)
            promised = None if found.streams is None else found.streams.values_sum
            for held in routes.held[number]:
                self._take_cell(manifest, held, change, spec, promised)
        if missing:
            message = f"blob {entry.key} lacks cells {sorted(missing)[:5]}, which the manifest says it carries"
            raise CorruptUpdateError(message)
        return entry.length_bytes

    def _take_cell(
        self, manifest: Manifest, held: HeldCell, change: Dense | Sparse, spec: TensorSpec, promised: Sum | None
    ) -> None:
        """Resolve what the sink holds of a cell; ``promised`` is the sum of the new patterns alone, of a sparse change."""
        sums = []
        for part in held.parts:
            place = (held.name, part)
            before = self.changes.get(place)
            fresh, moved = self._resolve(place, restrict(change, held.cell, part), spec, is_summed=held.is_summed)
            if promised is not None and part == held.cell and isinstance(fresh, Sparse):
                self._check_values(manifest, held, fresh, promised)
            self.changes[place] = _overlay(before, fresh) if isinstance(fresh, Sparse) else fresh
            if held.is_summed:
                self.sums[place] = moved
                sums.append(moved)
        if held.is_summed:
            self._check_sum(manifest, held, sums)

    def _check_sum(self, manifest: Manifest, held: HeldCell, sums: Sequence[Sum]) -> None:
        if add_sums(*sums) != manifest.columns.state_sum(held.number):
            message = (
                f"{held.name} at {held.cell.offset}+{held.cell.shape} would not be the published bits of "
                f"{manifest.version}: its sum differs, so the update or the engine's own weights are damaged"
            )
            raise CorruptUpdateError(message)

    def _check_values(self, manifest: Manifest, held: HeldCell, change: Sparse, promised: Sum) -> None:
        """Compare the new patterns alone: a wrong live pattern under a difference moves the sum of the cell as the right one would."""
        size = change.values.size
        rows = Rows(num_rows=1, row_len=size, start=0, stride=size)
        if self._loops.state_sum(change.values.reshape(1, size), rows) != promised:
            message = (
                f"{held.name} at {held.cell.offset}+{held.cell.shape} would not be the published bits of {manifest.version}: "
                "its sum differs where it changes, so the update or the engine's own weights are damaged"
            )
            raise CorruptUpdateError(message)

    def _resolve(
        self, place: Place, change: Dense | Sparse, spec: TensorSpec, *, is_summed: bool
    ) -> tuple[Dense | Sparse, Sum]:
        """Return the change as new patterns, made of the live ones and those of the chain so far, and the sum of the place after it."""
        part = place[1]
        if isinstance(change, Dense):
            rows = rows_of(part, spec.shape) if is_summed else None
            total = (0, 0) if rows is None else self._loops.state_sum(delta.as_rows(change.bits, rows), rows)
            return change, total
        before = self.changes.get(place)
        old = self._patterns(place, change.positions, before)
        new = old + change.values if change.is_difference else change.values
        total = (0, 0)
        if is_summed:
            rows = rows_of(part, spec.shape)
            base = self.sums.get(place) or self._live_sum(place, spec)
            total = add_sums(base, self._loops.changes_sum(change.positions, old, new, rows))
        return Sparse(positions=change.positions, values=new, is_difference=False), total

    def _live_sum(self, place: Place, spec: TensorSpec) -> Sum:
        """Return the sum of what the sink holds; only asked for places that no earlier version of the chain has touched."""
        rows = rows_of(place[1], spec.shape)
        return self._loops.state_sum(delta.as_rows(self._sink.read(*place), rows), rows)

    def _patterns(self, place: Place, positions: Bits, before: Dense | Sparse | None) -> Bits:
        if isinstance(before, Dense):
            flat: Bits = before.bits.reshape(-1)
            return flat[positions]
        old = self._sink.gather(*place, positions)
        if before is not None and before.positions.size:
            where = np.searchsorted(before.positions, positions)
            where[where == before.positions.size] = 0
            is_known = before.positions[where] == positions
            old[is_known] = before.values[where[is_known]]
        return old


def fetch_blob(transport: Transport, entry: BlobEntry) -> OpenBlob:
    """Fetch a blob and compare its checksum with the promised one; a damaged one is fetched again.

    Raises:
        CorruptUpdateError: It is still damaged at the last try.
        BlobNotFoundError: It is gone.
    """
    for attempt in range(1, MAX_FETCHES + 1):
        payload = transport.get(entry.key)
        try:
            return OpenBlob.of(payload, entry)
        except CorruptUpdateError as error:
            if attempt == MAX_FETCHES:
                message = f"blob {entry.key} came damaged {MAX_FETCHES} times in a row: {error}"
                raise CorruptUpdateError(message) from error
        if isinstance(transport, SupportsInvalidate):
            transport.invalidate(entry.key, delta.digest(payload))
    raise AssertionError  # the loop always ends by itself


def restrict(change: Dense | Sparse, cell: ShardSpec, part: ShardSpec) -> Dense | Sparse:
    """Return the part of a cell's change that lies in a smaller box of it."""
    if part == cell:
        return change
    index = slices_in(part, cell)
    if isinstance(change, Dense):
        return Dense(bits=change.bits[index])
    coordinates = np.unravel_index(change.positions, cell.shape)
    inside = np.ones(change.positions.size, dtype=bool)
    for axis, cut in zip(coordinates, index, strict=True):
        inside &= (axis >= cut.start) & (axis < cut.stop)
    local = [axis[inside] - cut.start for axis, cut in zip(coordinates, index, strict=True)]
    return Sparse(
        positions=np.ravel_multi_index(local, part.shape),
        values=change.values[inside],
        is_difference=change.is_difference,
    )


def _change(found: BlobCell, box: ShardSpec, spec: TensorSpec) -> Dense | Sparse:
    dtype = bits_dtype(spec.dtype)
    if found.dense is not None:
        return Dense(bits=np.frombuffer(found.dense, dtype=dtype).reshape(box.shape))
    assert found.streams is not None  # noqa: S101 - one of the two is there
    return delta.decode(found.streams, codec=found.codec, dtype=dtype, num_elements=box.num_elements)


def _overlay(before: Dense | Sparse | None, change: Sparse) -> Dense | Sparse:
    """Return an earlier change and a later one, both as new patterns, as one."""
    if before is None:
        return change
    if isinstance(before, Dense):
        bits = before.bits.copy()
        bits.reshape(-1)[change.positions] = change.values
        return Dense(bits=bits)
    kept = ~np.isin(before.positions, change.positions, assume_unique=True)
    positions = np.concatenate([before.positions[kept], change.positions])
    order = np.argsort(positions, kind="stable")
    values = np.concatenate([before.values[kept], change.values])[order]
    return Sparse(positions=positions[order], values=values, is_difference=False)
