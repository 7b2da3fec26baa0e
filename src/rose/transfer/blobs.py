"""Blobs: the payloads of neighbouring cells that go to the same engine ranks, packed and compressed as one record.

A blob names its cells itself (numbers of one rank's cells, in its own order), so that it can be read before the manifest is there.
Streams of one kind of all its cells lie together, since they compress alike; zstd level 1, a section at a time, kept only where it
saves. Raw bits of dense cells are one more section, never compressed. The record's own checksum is what the manifest promises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import zstandard

from rose.errors import CorruptUpdateError
from rose.interfaces.transport import Payload
from rose.transfer import records
from rose.transfer.cells import BlobEntry
from rose.transfer.delta import Codec, EncodedCell, byte_view
from rose.transfer.kernels import Array, ChangeStreams, Sum

SCHEMA = "rose.blob/2"
MAX_BLOB_BYTES = 32 << 20
MIN_BLOB_BYTES = 1 << 20

_LEVEL = 1
_WORTHWHILE = 0.98
_MIN_COMPRESSED_BYTES = 64
_STREAMS = ("gaps", "lows", "codes", "escapes")
_local = threading.local()


@attrs.frozen(kw_only=True, eq=False)
class BlobCell:
    """One cell of a blob: its number among the rank's cells, and its streams or its raw bytes."""

    number: int
    codec: Codec
    num_changed: int
    streams: ChangeStreams | None
    dense: memoryview | None


def pack_blob(cells: Mapping[int, EncodedCell]) -> bytearray:
    """Return the blob of some cells, by their numbers; none of them unchanged."""
    streams = [cell.streams for cell in cells.values() if cell.streams is not None]
    sections = {kind: b"".join([getattr(part, kind) for part in streams]) for kind in _STREAMS}
    dense = [np.frombuffer(byte_view(cell.bits), np.uint8) for cell in cells.values() if cell.bits is not None]
    counts = [
        (
            number,
            cell.codec,
            cell.num_changed,
            cell.streams.shift if cell.streams else 0,
            len(cell.streams.gaps) if cell.streams else 0,
            len(cell.streams.escapes) if cell.streams else 0,
        )
        for number, cell in cells.items()
    ]
    sums = [(cell.streams and cell.streams.values_sum) or (0, 0) for cell in cells.values()]
    return records.pack(
        SCHEMA,
        {kind: len(section) for kind, section in sections.items()},
        {
            "cells": np.array(counts, dtype="<i8").reshape(len(cells), 6),
            "values": np.array(sums, dtype="<u8").reshape(len(cells), 2),
            **{kind: np.frombuffer(_compressed(section), dtype=np.uint8) for kind, section in sections.items()},
            "dense": np.concatenate(dense) if dense else np.empty(0, dtype=np.uint8),
        },
    )


@attrs.frozen(kw_only=True, eq=False)
class OpenBlob:
    """A blob whose checksum was found right."""

    key: str
    header: Mapping[str, Any]
    arrays: Mapping[str, Array]

    @classmethod
    def of(cls, payload: Payload, entry: BlobEntry) -> OpenBlob:
        """Check a blob against what the manifest says of it.

        Raises:
            CorruptUpdateError: It is another blob, or damaged.
        """
        if len(payload) != entry.length_bytes or checksum_of(payload) != entry.checksum:
            message = (
                f"{len(payload)} bytes with checksum {checksum_of(payload)}, "
                f"promised are {entry.length_bytes} with {entry.checksum}"
            )
            raise CorruptUpdateError(message)
        header, arrays = records.unpack(payload, SCHEMA)
        return cls(key=entry.key, header=header, arrays=arrays)


def read_blob(blob: OpenBlob, sizes: Callable[[int], tuple[int, int]]) -> Iterator[BlobCell]:
    """Read a blob's cells; streams are views of decompressed sections.

    Args:
        blob: The blob.
        sizes: Gives the elements and the bytes an element of the cell of a number.

    Raises:
        CorruptUpdateError: The blob contradicts the sizes of its cells.
    """
    header, arrays = blob.header, blob.arrays
    try:
        rows = [_checked(row, *sizes(max(row[0], 0))) for row in arrays["cells"].tolist()]
        starts = dict.fromkeys((*_STREAMS, "dense"), 0)
        for kind in starts:
            if arrays[kind].dtype != np.uint8 or arrays[kind].ndim != 1:
                message = f"section {kind!r} is {arrays[kind].dtype}{arrays[kind].shape}, not bytes"
                raise ValueError(message)  # noqa: TRY301 - like any other malformed field
        values = arrays["values"].tolist()
        if arrays["values"].dtype != np.uint64 or arrays["values"].shape != (len(rows), 2):
            message = f"{arrays['values'].shape} sums of values for {len(rows)} cells"
            raise ValueError(message)  # noqa: TRY301 - like any other malformed field
        totals = {kind: sum(row.lengths[kind] for row in rows) for kind in starts}
        sections = {kind: _decompressed(arrays[kind], header[kind], totals[kind]) for kind in _STREAMS}
        sections["dense"] = _decompressed(arrays["dense"], arrays["dense"].size, totals["dense"])
    except (KeyError, IndexError, TypeError, ValueError, zstandard.ZstdError) as error:
        message = f"blob {blob.key} is malformed: {error!r}"
        raise CorruptUpdateError(message) from error
    for row, (first, second) in zip(rows, values, strict=True):
        parts = {}
        for kind, length in row.lengths.items():
            parts[kind] = sections[kind][starts[kind] : starts[kind] + length]
            starts[kind] += length
        yield row.cell(parts, (first, second))


class BlobWriter:
    """Collects encoded cells by who needs them and puts them as blobs, on the threads of a pool.

    Blobs are numbered in the order in which they fill, so that a reader may follow them one after the other.

    Args:
        put: Writes a blob under a key.
        prefix: What the keys begin with.
        pool: Packs, compresses and puts.
        fill_bytes: A blob is put once its cells have this many bytes before compression.
        max_pending: How many blobs may wait or be under way; ``add`` blocks beyond that.
        on_key: Takes every key before it is written, so that a failed attempt can be cleaned up.
    """

    def __init__(
        self,
        put: Callable[[str, Payload], None],
        prefix: str,
        *,
        pool: ThreadPoolExecutor,
        fill_bytes: int,
        max_pending: int,
        on_key: Callable[[str], None],
    ) -> None:
        self._put, self._prefix, self._pool, self._on_key = put, prefix, pool, on_key
        self._fill_bytes = fill_bytes
        self._room = threading.Semaphore(max_pending)
        self._open: dict[tuple[str, ...], dict[int, EncodedCell]] = {}
        self._open_bytes: dict[tuple[str, ...], int] = {}
        self._entries: list[Future[BlobEntry]] = []
        self._blob_of_cell: dict[int, int] = {}

    def add(self, targets: tuple[str, ...], number: int, cell: EncodedCell) -> None:
        """Take a cell that has a payload."""
        self._open.setdefault(targets, {})[number] = cell
        self._open_bytes[targets] = self._open_bytes.get(targets, 0) + cell.num_bytes
        if self._open_bytes[targets] >= self._fill_bytes:
            self._close(targets)

    def finish(self) -> tuple[tuple[BlobEntry, ...], dict[int, int]]:
        """Put what is still open and wait; returns the blobs, and the index of its blob for every cell's number.

        Raises what ``put`` raised.
        """
        for targets in list(self._open):
            self._close(targets)
        return tuple(entry.result() for entry in self._entries), self._blob_of_cell

    def abandon(self) -> None:
        """Wait for what is under way, whatever comes of it, and drop the rest."""
        self._open.clear()
        for entry in self._entries:
            entry.cancel()
            if not entry.cancelled():
                entry.exception()

    def _close(self, targets: tuple[str, ...]) -> None:
        cells = self._open.pop(targets)
        self._open_bytes.pop(targets)
        index = len(self._entries)
        self._blob_of_cell.update(dict.fromkeys(cells, index))
        key = f"{self._prefix}/blob-{index}"
        self._on_key(key)
        self._room.acquire()
        work = self._pool.submit(self._write, key, cells)
        work.add_done_callback(lambda _: self._room.release())
        self._entries.append(work)

    def _write(self, key: str, cells: Mapping[int, EncodedCell]) -> BlobEntry:
        blob = pack_blob(cells)
        self._put(key, blob)
        return BlobEntry(key=key, length_bytes=len(blob), checksum=checksum_of(blob))


def checksum_of(blob: Payload) -> str:
    """Return the checksum that a blob carries itself."""
    return bytes(memoryview(blob)[:16]).hex()


@attrs.frozen(kw_only=True)
class _Row:
    number: int
    codec: Codec
    num_changed: int
    shift: int
    lengths: Mapping[str, int]

    def cell(self, parts: Mapping[str, memoryview], values_sum: Sum) -> BlobCell:
        if self.codec is Codec.DENSE:
            return BlobCell(
                number=self.number, codec=self.codec, num_changed=self.num_changed, streams=None, dense=parts["dense"]
            )
        streams = ChangeStreams(
            num_changed=self.num_changed,
            shift=self.shift,
            values_sum=values_sum,
            **{kind: parts[kind] for kind in _STREAMS},
        )
        return BlobCell(number=self.number, codec=self.codec, num_changed=self.num_changed, streams=streams, dense=None)


def _checked(row: list[int], num_elements: int, itemsize: int) -> _Row:
    number, code, num_changed, shift, num_gaps, num_escapes = row
    codec = Codec(code)
    is_coded = codec is not Codec.DENSE
    is_sound = (
        codec is not Codec.NONE
        and number >= 0
        and 0 < num_changed <= num_elements
        and shift in (0, 4, 8)
        and 0 <= num_gaps <= num_changed + num_elements // 255 + 1
        and 0 <= num_escapes <= num_changed * itemsize
    )
    if not is_sound:
        message = f"cell {number} of {num_elements} elements: {row!r}"
        raise ValueError(message)
    has_nibbles = codec is Codec.SPARSE and itemsize <= 2  # noqa: PLR2004 - see the streams of rose.transfer.kernels
    num_codes = -(-num_changed // 2) if has_nibbles else num_changed * itemsize
    lengths = {
        "gaps": num_gaps,
        "lows": -(-num_changed * shift // 8),
        "codes": num_codes,
        "escapes": num_escapes,
        "dense": 0,
    }
    raw = {**dict.fromkeys(lengths, 0), "dense": num_elements * itemsize}
    return _Row(number=number, codec=codec, num_changed=num_changed, shift=shift, lengths=lengths if is_coded else raw)


def _compressed(section: bytes) -> bytes:
    if len(section) < _MIN_COMPRESSED_BYTES:
        return section
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    smaller: bytes = _local.compressor.compress(section)
    return smaller if len(smaller) < _WORTHWHILE * len(section) else section


def _decompressed(section: Array, claimed: Any, expected: int) -> memoryview:
    if claimed != expected:
        message = f"a section claims {claimed!r} bytes, its cells need {expected}"
        raise ValueError(message)
    if section.size == expected:
        return section.data
    if zstandard.frame_content_size(section.data) != expected:
        message = f"a section does not hold {expected} bytes"
        raise ValueError(message)
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    whole: bytes = _local.decompressor.decompress(section, max_output_size=expected)
    return memoryview(whole)
