"""One trainer rank's side of the codec: compare with what was last published, encode, pack into blobs.

A pipeline over cells, in their order, on a few threads: read (and cast) a cell, compare and code it; pack, compress, checksum and put
a blob when enough cells for the same engines are there. What is held at any time is a handful of cells and blobs, beside the bits of
the last committed version. Shards that keep their base themselves (``rose.transfer.resident``) are compared by their own comparer,
all cells of one in a row, on the thread that asks.

Invariants: the kept bits are those of the last *committed* version, or there are none; encoding never changes them. The kept sums
are those of the kept bits: they move by what ``compare`` found, and ``audit`` computes them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from rose.errors import CorruptUpdateError, LayoutMismatchError
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec
from rose.interfaces.transport import Payload
from rose.transfer import delta, kernels
from rose.transfer.blobs import MAX_BLOB_BYTES, MIN_BLOB_BYTES, BlobWriter
from rose.transfer.cells import Columns
from rose.transfer.delta import Bits, Codec, EncodedCell
from rose.transfer.kernels import Comparison, Kernels
from rose.transfer.layout import bits_dtype, rows_of, slices_in
from rose.transfer.parts import Share
from rose.transfer.plan import Cell
from rose.transfer.resident import Comparer, Part, ResidentBase, SupportsResidentBase
from rose.transfer.units import SideBySide, Slot, Unit, plan_units

_HELD_FRACTION = 0.01
"""Coded changes kept until the commit, as a share of the rank's bytes; what goes beyond is read again from the trainer."""
_BUFFER_FRACTION = 0.02
"""All open blobs together, as a share of the rank's bytes."""
_LOOK_AHEAD = 2


class RankEncoder:
    """Encodes the cells of one rank against the bits of the last committed version.

    Args:
        tensors: Every tensor of the model.
        layout: The boxes this rank holds.
        cells: This rank's cells.
        num_threads: How many cells are worked on at a time.
        is_overwrite: Send new patterns instead of differences.
        loops: The inner loops; the fastest there are by default.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorSpec],
        layout: Mapping[str, ShardSpec],
        cells: Sequence[Cell],
        *,
        num_threads: int = 1,
        is_overwrite: bool = False,
        loops: Kernels | None = None,
    ) -> None:
        self._dtypes = {name: bits_dtype(tensors[name].dtype) for name in layout}
        self._layout = dict(layout)
        self._slots = [
            Slot(
                cell=cell,
                index=slices_in(cell.box, layout[cell.tensor]),
                rows=rows_of(cell.box, tensors[cell.tensor].shape),
            )
            for cell in cells
        ]
        self._units = plan_units(self._slots, self._dtypes)
        self._unit_of = {number: i for i, unit in enumerate(self._units) for number in unit.numbers}
        self._is_overwrite, self._loops = is_overwrite, loops or kernels.load()
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="rose-encode")
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix="rose-put")
        self._shard_bytes = sum(box.num_elements * self._dtypes[name].itemsize for name, box in layout.items())
        num_streams = max(1, len({cell.targets for cell in cells}))
        wanted = int(_BUFFER_FRACTION * self._shard_bytes / num_streams)
        self._fill_bytes = min(MAX_BLOB_BYTES, max(MIN_BLOB_BYTES, wanted))
        self._last: dict[str, Bits | ResidentBase] | None = None
        self._columns = Columns.empty(len(self._slots))
        self._pending: Columns | None = None
        self._held: dict[int, EncodedCell] = {}

    @property
    def has_base(self) -> bool:
        """Return whether there are committed bits to compare with."""
        return self._last is not None

    @property
    def cell_elements(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the number of elements of each cell."""
        return np.array([slot.rows.num_elements for slot in self._slots], dtype=np.int64)

    def check(self, shards: Mapping[str, ShardBits]) -> None:
        """Check that the shards are what the layout promised.

        Raises:
            LayoutMismatchError: They are not; names every such tensor.
        """
        problems = [f"{name} is not in the layout" for name in shards if name not in self._layout]
        for name, box in self._layout.items():
            bits = shards.get(name)
            if bits is None:
                if box.num_elements:
                    problems.append(f"{name} is missing")
            elif (tuple(bits.shape), bits.dtype) != (box.shape, self._dtypes[name]):
                problems.append(f"{name} is {bits.dtype}{bits.shape}, promised {self._dtypes[name]}{box.shape}")
        if problems:
            message = f"the trainer's shards are not what its layout promised: {'; '.join(problems)}"
            raise LayoutMismatchError(message)

    def encode(
        self,
        shards: Mapping[str, ShardBits],
        put: Callable[[str, Payload], None],
        prefix: str,
        *,
        is_full: bool,
        on_key: Callable[[str], None],
    ) -> Share:
        """Encode every cell and put the payloads.

        Args:
            shards: This rank's bits now; they must not change until ``commit``.
            put: Writes a blob.
            prefix: What the blobs' keys begin with.
            is_full: Send whole cells instead of changes. Without committed bits all cells are sent whole.
            on_key: Takes every key before it is written.
        """
        writer = BlobWriter(
            put,
            prefix,
            pool=self._writers,
            fill_bytes=self._fill_bytes,
            max_pending=_LOOK_AHEAD * self._num_threads,
            on_key=on_key,
        )
        is_whole = is_full or self._last is None
        columns = Columns.empty(len(self._slots))
        held: dict[int, EncodedCell] = {}
        room = _HELD_FRACTION * self._shard_bytes + MIN_BLOB_BYTES
        try:
            for number, cell in self._encoded(shards, is_whole=is_whole):
                columns.codec[number], columns.num_changed[number] = cell.codec, cell.num_changed
                columns.set_sum(number, cell.state_sum)
                if cell.codec is not Codec.NONE:
                    writer.add(self._slots[number].cell.targets, number, cell)
                is_held = cell.streams is not None and self._resident(number) is None
                if is_held and (room := room - cell.num_bytes) > 0:
                    held[number] = cell
            blobs, blob_of_cell = writer.finish()
        except BaseException:
            writer.abandon()
            raise
        for number, blob in blob_of_cell.items():
            columns.blob[number] = blob
        if not is_whole or self._last is None:
            self._pending, self._held = columns, held
        elif self._pending is not None:
            self._compare_sums(self._pending, columns)
        return Share(columns=columns, blobs=blobs)

    def commit(self, shards: Mapping[str, ShardBits]) -> None:
        """Take the bits that were encoded last as published; only cells that changed are written."""
        pending, held = self._pending, self._held
        self._pending, self._held = None, {}
        if pending is None:
            return
        is_first = self._last is None
        if self._last is None:
            self._last = {name: self._new_base(name, box, shards.get(name)) for name, box in self._layout.items()}
        is_changed = (np.ones(len(self._slots), dtype=bool) if is_first else pending.codec != Codec.NONE).tolist()

        def take_all(unit: Unit) -> None:
            for number in unit.numbers:
                if is_changed[number]:
                    self._take(number, shards, held)

        for _ in self._pool.map(take_all, self._units):
            pass
        for base in self._last.values():
            if not isinstance(base, np.ndarray):
                base.settle()
        self._columns = pending

    def forget(self) -> None:
        """Drop the committed bits: what is published is no longer known to be them."""
        self._last, self._pending, self._held = None, None, {}

    def audit(self) -> None:
        """Compute every sum of the committed bits anew.

        Raises:
            CorruptUpdateError: One is not the kept one, so the kept bits are damaged; they are forgotten. Names the tensors.
        """
        if self._last is None:
            return

        def is_wrong(number: int) -> bool:
            slot, base = self._slots[number], self._resident(number)
            if base is not None:
                return base.state_sum(slot.index, slot.rows) != self._columns.state_sum(number)
            bits = delta.as_rows(self._kept(slot), slot.rows)
            return self._loops.state_sum(bits, slot.rows) != self._columns.state_sum(number)

        wrong = [
            self._slots[n].cell.tensor for n, bad in enumerate(self._pool.map(is_wrong, range(len(self._slots)))) if bad
        ]
        if wrong:
            self.forget()
            message = f"the kept bits of {', '.join(dict.fromkeys(wrong))} are damaged; the next version is sent whole"
            raise CorruptUpdateError(message)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)
        self._writers.shutdown(wait=False)

    def _compare_sums(self, kept: Columns, fresh: Columns) -> None:
        wrong = np.flatnonzero((kept.sums != fresh.sums).any(axis=1))
        if wrong.size:
            names = dict.fromkeys(self._slots[number].cell.tensor for number in wrong.tolist())
            self.forget()
            message = (
                f"the kept sums of {', '.join(names)} are not those of the weights; the next version is sent whole"
            )
            raise CorruptUpdateError(message)

    def _encoded(self, shards: Mapping[str, ShardBits], *, is_whole: bool) -> Iterator[tuple[int, EncodedCell]]:
        """Yield the encoded cells in order, those of resident bases from their comparers, the others from our own threads."""
        elsewhere = {} if is_whole else self._compared_elsewhere(shards)
        with closing(self._encoded_here(shards, elsewhere, is_whole=is_whole)) as here:
            if not elsewhere:
                yield from enumerate(here)
                return
            for number, slot in enumerate(self._slots):
                if number in elsewhere:
                    found = next(elsewhere[number])
                    yield number, self._coded(number, found, shards[slot.cell.tensor])
                else:
                    yield number, next(here)

    def _compared_elsewhere(self, shards: Mapping[str, ShardBits]) -> dict[int, Iterator[Comparison]]:
        """Return which cells have a resident base and a shard that can be compared with it, each with its comparer's answers."""
        if all(isinstance(base, np.ndarray) for base in (self._last or {}).values()):
            return {}
        parts: dict[int, list[Part]] = {}
        comparers: dict[int, Comparer] = {}
        which: dict[int, int] = {}
        known = {name: one for name, one in shards.items() if isinstance(one, SupportsResidentBase)}
        for number, slot in enumerate(self._slots):
            shard, base = known.get(slot.cell.tensor), self._resident(number)
            if shard is not None and base is not None:
                which[number] = key = id(shard.comparer)
                comparers[key] = shard.comparer
                parts.setdefault(key, []).append(Part(shard=shard, base=base, index=slot.index, rows=slot.rows))
        answers = {key: one.compare(parts[key], is_overwrite=self._is_overwrite) for key, one in comparers.items()}
        return {number: answers[key] for number, key in which.items()}

    def _encoded_here(
        self, shards: Mapping[str, ShardBits], elsewhere: Collection[int], *, is_whole: bool
    ) -> Generator[EncodedCell, None, None]:
        """Yield the encoded cells that are not compared elsewhere, in order, a few units of them ahead of the caller."""
        under_way: dict[int, Future[list[EncodedCell | None]]] = {}
        done: dict[int, EncodedCell | None] = {}
        num_submitted = 0
        work = partial(self._encode_unit, shards=shards, elsewhere=elsewhere, is_whole=is_whole)
        try:
            for number in range(len(self._slots)):
                if number in elsewhere:
                    continue
                wanted = self._unit_of[number]
                while num_submitted < min(wanted + _LOOK_AHEAD * self._num_threads, len(self._units)):
                    under_way[num_submitted] = self._pool.submit(work, self._units[num_submitted])
                    num_submitted += 1
                if wanted in under_way:
                    done |= zip(self._units[wanted].numbers, under_way.pop(wanted).result(), strict=True)
                cell = done.pop(number)
                yield cell if cell is not None else self._encode_cell(number, shards, is_whole=is_whole)
        finally:
            for future in under_way.values():
                future.cancel()

    def _encode_unit(
        self, unit: Unit, *, shards: Mapping[str, ShardBits], elsewhere: Collection[int], is_whole: bool
    ) -> list[EncodedCell | None]:
        if elsewhere and any(number in elsewhere for number in unit.numbers):
            return [
                None if number in elsewhere else self._encode_cell(number, shards, is_whole=is_whole)
                for number in unit.numbers
            ]
        if unit.columns is None or is_whole or self._last is None:
            return [self._encode_cell(number, shards, is_whole=is_whole) for number in unit.numbers]
        return self._encode_columns(unit.columns, unit.numbers, shards[unit.columns.tensor], self._last)

    def _encode_columns(
        self, columns: SideBySide, numbers: Sequence[int], shard: ShardBits, last: Mapping[str, Bits | ResidentBase]
    ) -> list[EncodedCell | None]:
        """Compare cells that lie side by side in one pass, a slab of rows at a time, as a shard may have to be cast.

        A cell that is to be sent whole is ``None`` where its bits would be a copy: many of them at once would take much memory.
        """
        pairs = (
            (delta.as_rows(np.asarray(shard[slab]), rows), delta.as_rows(last[columns.tensor][slab], rows))
            for slab, rows in columns.slabs()
        )
        cells = [self._slots[number].rows for number in numbers]
        found = self._loops.compare_columns(pairs, cells, is_overwrite=self._is_overwrite)
        is_copy = not isinstance(shard, np.ndarray)
        return [
            None if one.num_changed and one.streams is None and is_copy else self._coded(number, one, shard)
            for number, one in zip(numbers, found, strict=True)
        ]

    def _coded(self, number: int, found: Comparison, shard: ShardBits) -> EncodedCell:
        slot = self._slots[number]
        return delta.coded(
            found,
            old_sum=self._columns.state_sum(number),
            is_overwrite=self._is_overwrite,
            read=lambda: delta.as_rows(np.asarray(shard[slot.index]), slot.rows),
        )

    def _encode_cell(self, number: int, shards: Mapping[str, ShardBits], *, is_whole: bool) -> EncodedCell:
        slot = self._slots[number]
        new = delta.as_rows(np.asarray(shards[slot.cell.tensor][slot.index]), slot.rows)
        old: Any = None
        if not is_whole and self._last is not None:
            old = delta.as_rows(self._kept(slot), slot.rows)
        return delta.encode(
            new,
            old,
            slot.rows,
            old_sum=self._columns.state_sum(number),
            is_overwrite=self._is_overwrite,
            with_=self._loops,
        )

    def _take(self, number: int, shards: Mapping[str, ShardBits], held: Mapping[int, EncodedCell]) -> None:
        """Make a cell's committed bits those of the shard: by the changes that were coded, where they are held."""
        slot, base = self._slots[number], self._resident(number)
        if base is not None:
            base.take(shards[slot.cell.tensor], slot.index)
            return
        target = self._kept(slot)
        flat, cell = delta.as_rows(target, slot.rows), held.get(number)
        if cell is None or cell.streams is None or not np.may_share_memory(flat, target):
            target[...] = shards[slot.cell.tensor][slot.index]
            return
        change = delta.decode(
            cell.streams, codec=cell.codec, dtype=flat.dtype, num_elements=flat.size, with_=self._loops
        )
        write = self._loops.add if change.is_difference else self._loops.scatter
        write(flat, change.positions, change.values)

    def _new_base(self, name: str, box: ShardSpec, shard: ShardBits | None) -> Bits | ResidentBase:
        if isinstance(shard, SupportsResidentBase) and box.num_elements:
            return shard.new_base()
        return np.empty(box.shape, dtype=self._dtypes[name])

    def _resident(self, number: int) -> ResidentBase | None:
        """Return the base of a cell that is not in our own memory; ``None`` where it is, or where there is none."""
        base = None if self._last is None else self._last[self._slots[number].cell.tensor]
        return None if isinstance(base, np.ndarray) else base

    def _kept(self, slot: Slot) -> Bits:
        """Return the committed bits of a cell: a view, or a copy of what is kept elsewhere."""
        assert self._last is not None  # noqa: S101 - asked for where there are some
        base = self._last[slot.cell.tensor]
        return slot.view(base) if isinstance(base, np.ndarray) else base[slot.index]
