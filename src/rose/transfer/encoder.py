"""One trainer rank's side of the codec: compare with what was last published, encode, pack into blobs.

A pipeline over cells, in their order, on a few threads: read (and cast) a cell, compare and code it; pack, compress, checksum and put
a blob when enough cells for the same engines are there. What is held at any time is a handful of cells and blobs, beside the bits of
the last committed version.

Invariants: the kept bits are those of the last *committed* version, or there are none; encoding never changes them. The kept sums
are those of the kept bits: they move by what ``compare`` found, and ``audit`` computes them anew.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np

from rose.errors import CorruptUpdateError, LayoutMismatchError
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec
from rose.interfaces.transport import Payload
from rose.transfer import delta, kernels
from rose.transfer.blobs import MAX_BLOB_BYTES, MIN_BLOB_BYTES, BlobWriter
from rose.transfer.cells import Columns
from rose.transfer.delta import Bits, Codec, EncodedCell
from rose.transfer.kernels import Kernels, Rows
from rose.transfer.layout import bits_dtype, rows_of, slices_in
from rose.transfer.parts import Share
from rose.transfer.plan import Cell

_HELD_FRACTION = 0.01
"""Coded changes kept until the commit, as a share of the rank's bytes; what goes beyond is read again from the trainer."""
_BUFFER_FRACTION = 0.02
"""All open blobs together, as a share of the rank's bytes."""
_LOOK_AHEAD = 2
_BATCH_ELEMENTS = 1 << 20
"""Small cells are handed to a thread this many elements at a time."""


@attrs.frozen(kw_only=True, eq=False)
class _Slot:
    """Where one cell is: its index into the rank's box and its rows in the tensor."""

    cell: Cell
    index: tuple[slice, ...]
    rows: Rows

    def view(self, boxes: Mapping[str, Bits]) -> Bits:
        """Return the cell in the rank's box, as a view."""
        index: Any = (*self.index, ...)  # the ellipsis keeps a scalar a view
        view: Bits = boxes[self.cell.tensor][index]
        return view


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
            _Slot(
                cell=cell,
                index=slices_in(cell.box, layout[cell.tensor]),
                rows=rows_of(cell.box, tensors[cell.tensor].shape),
            )
            for cell in cells
        ]
        self._batches = _batches([slot.rows.num_elements for slot in self._slots])
        self._is_overwrite, self._loops = is_overwrite, loops or kernels.load()
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="rose-encode")
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix="rose-put")
        self._shard_bytes = sum(box.num_elements * self._dtypes[name].itemsize for name, box in layout.items())
        num_streams = max(1, len({cell.targets for cell in cells}))
        wanted = int(_BUFFER_FRACTION * self._shard_bytes / num_streams)
        self._fill_bytes = min(MAX_BLOB_BYTES, max(MIN_BLOB_BYTES, wanted))
        self._last: dict[str, Bits] | None = None
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
                if cell.streams is not None and (room := room - cell.num_bytes) > 0:
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
            self._last = {name: np.empty(box.shape, dtype=self._dtypes[name]) for name, box in self._layout.items()}
        last = self._last
        changed = range(len(self._slots)) if is_first else np.flatnonzero(pending.codec != Codec.NONE).tolist()

        def take(number: int) -> None:
            slot = self._slots[number]
            target = slot.view(last)
            flat, cell = delta.as_rows(target, slot.rows), held.get(number)
            if cell is None or cell.streams is None or not np.may_share_memory(flat, target):
                target[...] = shards[slot.cell.tensor][slot.index]
                return
            change = delta.decode(
                cell.streams, codec=cell.codec, dtype=flat.dtype, num_elements=flat.size, with_=self._loops
            )
            values = change.values
            if change.is_difference:
                values = self._loops.gather(flat, change.positions) + values
            self._loops.scatter(flat, change.positions, values)

        for _ in self._pool.map(take, changed):
            pass
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
        last = self._last

        def is_wrong(number: int) -> bool:
            slot = self._slots[number]
            bits = delta.as_rows(slot.view(last), slot.rows)
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
        """Yield the encoded cells in order, a few batches of them ahead of the caller."""
        ahead: deque[tuple[range, Future[list[EncodedCell]]]] = deque()
        batches = iter(self._batches)

        def encode(numbers: range) -> list[EncodedCell]:
            return [self._encode_cell(number, shards, is_whole=is_whole) for number in numbers]

        try:
            while True:
                for numbers in itertools.islice(batches, _LOOK_AHEAD * self._num_threads - len(ahead)):
                    ahead.append((numbers, self._pool.submit(encode, numbers)))
                if not ahead:
                    return
                numbers, work = ahead.popleft()
                yield from zip(numbers, work.result(), strict=True)
        finally:
            for _, work in ahead:
                work.cancel()

    def _encode_cell(self, number: int, shards: Mapping[str, ShardBits], *, is_whole: bool) -> EncodedCell:
        slot = self._slots[number]
        new = delta.as_rows(np.asarray(shards[slot.cell.tensor][slot.index]), slot.rows)
        old: Any = None
        if not is_whole and self._last is not None:
            old = delta.as_rows(slot.view(self._last), slot.rows)
        return delta.encode(
            new,
            old,
            slot.rows,
            old_sum=self._columns.state_sum(number),
            is_overwrite=self._is_overwrite,
            with_=self._loops,
        )


def _batches(sizes: Sequence[int]) -> list[range]:
    """Return neighbouring cells, so many at a time that a batch has about ``_BATCH_ELEMENTS``."""
    batches, start, filled = [], 0, 0
    for number, size in enumerate(sizes):
        filled += size
        if filled >= _BATCH_ELEMENTS:
            batches.append(range(start, number + 1))
            start, filled = number + 1, 0
    if start < len(sizes):
        batches.append(range(start, len(sizes)))
    return batches
