"""Blobs: sections and cells round trip, whatever contradicts itself is refused, compression is kept only where it pays."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zstandard

from rose.errors import CorruptUpdateError, TransportError
from rose.transfer import delta, records
from rose.transfer.blobs import SCHEMA, BlobCell, BlobWriter, OpenBlob, checksum_of, pack_blob, read_blob
from rose.transfer.cells import BlobEntry
from rose.transfer.delta import EncodedCell
from rose.transfer.kernels import Rows

SIZES = {3: (1000, 2), 4: (40, 2), 9: (700, 4), 10: (33, 1), 11: (1, 8)}


def _cell(num_elements: int, itemsize: int, *, num_changed: int | None, is_overwrite: bool = False) -> EncodedCell:
    rng = np.random.default_rng(num_elements)
    dtype = np.dtype(f"<u{itemsize}")
    old = rng.integers(0, 100, (1, num_elements), dtype=dtype)
    rows = Rows(num_rows=1, row_len=num_elements, start=0, stride=num_elements)
    if num_changed is None:
        return delta.encode(old, None, rows)
    new = old.copy()
    new[0, rng.choice(num_elements, num_changed, replace=False)] += dtype.type(3)
    encoded = delta.encode(new, old, rows, is_overwrite=is_overwrite)
    assert encoded.streams is not None
    return encoded


def _cells() -> dict[int, EncodedCell]:
    return {
        3: _cell(1000, 2, num_changed=90),
        4: _cell(40, 2, num_changed=None),
        9: _cell(700, 4, num_changed=20, is_overwrite=True),
        10: _cell(33, 1, num_changed=3),
        11: _cell(1, 8, num_changed=None),
    }


def _open(blob: bytes | bytearray, key: str = "k") -> OpenBlob:
    return OpenBlob.of(blob, BlobEntry(key=key, length_bytes=len(blob), checksum=checksum_of(blob)))


def _read(blob: bytes | bytearray, sizes: Callable[[int], tuple[int, int]] = SIZES.__getitem__) -> list[BlobCell]:
    return list(read_blob(_open(blob), sizes))


def test_cells_come_back_in_their_order() -> None:
    wanted = _cells()
    found = _read(pack_blob(wanted))
    assert [cell.number for cell in found] == list(wanted)
    for cell in found:
        want = wanted[cell.number]
        assert (cell.codec, cell.num_changed) == (want.codec, want.num_changed)
        if want.streams is None:
            assert bytes(cell.dense) == want.bits.tobytes()
        else:
            for kind in ("gaps", "lows", "codes", "escapes"):
                assert bytes(getattr(cell.streams, kind)) == bytes(getattr(want.streams, kind)), kind
            assert cell.streams.shift == want.streams.shift


def test_the_same_cells_are_the_same_bytes() -> None:
    assert pack_blob(_cells()) == pack_blob(_cells())


def test_a_blob_costs_a_few_hundred_bytes() -> None:
    assert len(pack_blob({11: _cell(1, 8, num_changed=None)})) < 500


def _sections(blob: bytes | bytearray) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return records.unpack(blob, SCHEMA)


def test_a_section_is_compressed_only_where_that_saves() -> None:
    rows = Rows(num_rows=1, row_len=60_000, start=0, stride=60_000)
    old = np.zeros((1, 60_000), dtype="<u2")
    steady, noisy = old.copy(), old.copy()
    steady[0, ::100] = 1
    noisy[0, ::3] = np.random.default_rng(0).integers(1, 1 << 16, 20_000, dtype="<u2")
    for new, name, is_smaller in ((steady, "gaps", True), (noisy, "codes", False)):
        encoded = delta.encode(new, old, rows, is_overwrite=True)
        header, arrays = _sections(pack_blob({0: encoded}))
        assert (arrays[name].size < header[name]) is is_smaller
        assert arrays[name].size <= header[name]
    header, arrays = _sections(pack_blob({0: delta.encode(steady, None, rows)}))
    assert arrays["dense"].size == steady.nbytes, "raw bits are never compressed"


def test_another_blob_or_a_damaged_one_is_refused() -> None:
    blob = bytes(pack_blob(_cells()))
    entry = BlobEntry(key="k", length_bytes=len(blob), checksum=checksum_of(blob))
    OpenBlob.of(blob, entry)
    other = bytes(pack_blob({4: _cell(40, 2, num_changed=None)}))
    for payload in (other, blob[:-1], blob + b"\0", b"", blob[:20], bytes(len(blob))):
        with pytest.raises(CorruptUpdateError, match="promised are"):
            OpenBlob.of(payload, entry)
    for at in range(0, len(blob), 5):
        with pytest.raises(CorruptUpdateError):
            OpenBlob.of(blob[:at] + bytes([blob[at] ^ 4]) + blob[at + 1 :], entry)


def _rewritten(blob: bytes | bytearray, **changes: Any) -> bytearray:
    """Return a blob that someone changed who also fixed the checksum; ``header_x`` changes what is claimed of x."""
    header, arrays = _sections(blob)
    arrays = dict(arrays)
    for key, value in changes.items():
        if key.startswith("header_"):
            header[key.removeprefix("header_")] = value
        elif value is ...:
            del arrays[key]
        else:
            arrays[key] = value
    return records.pack(SCHEMA, header, arrays)


def _row(**changes: int) -> np.ndarray:
    """Return the table of a blob of cell 3 alone with some numbers changed."""
    names = ("number", "codec", "num_changed", "shift", "num_gaps", "num_escapes")
    _, arrays = _sections(pack_blob({3: _cells()[3]}))
    table = np.array(arrays["cells"])
    for name, value in changes.items():
        table[0, names.index(name)] = value
    return table


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": 0},
        {"codec": 1},
        {"codec": 3},
        {"codec": 4},
        {"codec": -1},
        {"num_changed": 0},
        {"num_changed": -1},
        {"num_changed": 80},
        {"num_changed": 1001},
        {"num_changed": 1 << 62},
        {"shift": 4},
        {"shift": 8},
        {"shift": 1},
        {"shift": -8},
        {"shift": 1 << 40},
        {"num_gaps": -1},
        {"num_gaps": 89},
        {"num_gaps": 1 << 62},
        {"num_escapes": -1},
        {"num_escapes": 1},
        {"num_escapes": 1 << 62},
        {"number": 5},
        {"number": -1},
        {"number": 1 << 40},
    ],
)
def test_hostile_rows_are_refused(changes: dict[str, int]) -> None:
    blob = _rewritten(pack_blob({3: _cells()[3]}), cells=_row(**changes))
    with pytest.raises(CorruptUpdateError, match="malformed"):
        _read(blob)


def test_the_unspoilt_row_is_read() -> None:
    assert len(_read(_rewritten(pack_blob({3: _cells()[3]}), cells=_row()))) == 1


def _sparse_blob() -> bytearray:
    return pack_blob({3: _cells()[3]})


@pytest.mark.parametrize(
    "changes",
    [
        {"cells": ...},
        {"cells": np.zeros((1, 5), dtype="<i8")},
        {"cells": np.zeros(6, dtype="<i8")},
        {"cells": np.zeros((1, 6, 1), dtype="<i8")},
        {"gaps": ...},
        {"dense": ...},
        {"dense": np.zeros(1, dtype=np.uint8)},
        {"gaps": np.zeros(0, dtype=np.uint8)},
        {"gaps": np.zeros(91, dtype=np.uint8)},
        {"gaps": np.zeros(90, dtype="<u2")},
        {"gaps": np.zeros((90, 1), dtype=np.uint8)},
        {"codes": np.zeros(45, dtype="<u8")},
        {"header_gaps": 89},
        {"header_gaps": None},
        {"header_gaps": "90"},
        {"header_codes": 1 << 60},
    ],
)
def test_hostile_sections_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptUpdateError, match="malformed"):
        _read(_rewritten(_sparse_blob(), **changes))


def test_raw_bits_of_the_wrong_width_are_refused() -> None:
    blob = pack_blob({4: _cells()[4]})
    with pytest.raises(CorruptUpdateError, match="malformed"):
        _read(_rewritten(blob, dense=np.zeros(80, dtype="<u2")))
    with pytest.raises(CorruptUpdateError, match="malformed"):
        _read(blob, {4: (40, 4)}.__getitem__)


@pytest.mark.parametrize("claims", ["the truth", "what is expected", "nothing"])
def test_a_decompression_bomb_is_refused_before_it_goes_off(claims: str) -> None:
    """A frame of 64 MB in 2 kB in place of 90 bytes of gaps: no more than what the cells need is ever allocated."""
    bomb = zstandard.ZstdCompressor(level=19, write_content_size=claims == "the truth").compress(bytes(64 << 20))
    if claims == "what is expected":
        # frame header descriptor with a single segment and a one-byte content size, then the blocks of the bomb
        start = 4 + zstandard.frame_header_size(bomb) - 4
        bomb = bomb[:4] + bytes([0x20, 90]) + bomb[start:]
    blob = _rewritten(_sparse_blob(), gaps=np.frombuffer(bomb, dtype=np.uint8))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptUpdateError, match="malformed"):
            _read(blob)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_cell_that_lies_about_its_compressed_streams_is_refused() -> None:
    garbage = np.frombuffer(b"\x28\xb5\x2f\xfd" + bytes(20), dtype=np.uint8)
    with pytest.raises(CorruptUpdateError, match="malformed"):
        _read(_rewritten(_sparse_blob(), gaps=garbage))


class _Puts:
    """Counts what is under way; may wait, or fail at one key."""

    def __init__(self, *, fail_at: str = "") -> None:
        self.blobs: dict[str, bytes] = {}
        self.fail_at, self.gate = fail_at, threading.Event()
        self.gate.set()

    def __call__(self, key: str, payload: Any) -> None:
        self.gate.wait(10)
        if key == self.fail_at:
            message = "the store is full"
            raise TransportError(message)
        self.blobs[key] = bytes(payload)


def _writer(put: _Puts, pool: ThreadPoolExecutor, keys: list[str], **options: int) -> BlobWriter:
    limits = {"fill_bytes": 100, "max_pending": 2, **options}
    return BlobWriter(put, "p", pool=pool, on_key=keys.append, **limits)


def test_blobs_fill_by_who_needs_them_and_are_numbered_as_they_fill() -> None:
    put, keys = _Puts(), []
    with ThreadPoolExecutor(2) as pool:
        writer = _writer(put, pool, keys)
        small, large = _cell(30, 2, num_changed=None), _cell(60, 2, num_changed=None)
        writer.add(("a",), 0, small)
        writer.add(("b",), 1, large)
        writer.add(("a",), 2, small)
        writer.add((), 3, small)
        entries, blob_of_cell = writer.finish()
    assert keys == ["p/blob-0", "p/blob-1", "p/blob-2"] == [entry.key for entry in entries]
    assert blob_of_cell == {0: 1, 1: 0, 2: 1, 3: 2}
    for entry in entries:
        assert entry.length_bytes == len(put.blobs[entry.key])
        OpenBlob.of(put.blobs[entry.key], entry)


def test_no_more_blobs_wait_than_were_allowed() -> None:
    put, keys = _Puts(), []
    put.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        writer = _writer(put, pool, keys, max_pending=2)
        feeding = threading.Thread(target=lambda: [writer.add((), n, _cell(60, 2, num_changed=None)) for n in range(5)])
        feeding.start()
        feeding.join(0.2)
        assert feeding.is_alive(), "the third blob has to wait for the first"
        assert len(keys) == 3
        put.gate.set()
        feeding.join(10)
        entries, _ = writer.finish()
    assert len(entries) == 5


def test_a_put_that_fails_is_told_and_abandoned() -> None:
    put, keys = _Puts(fail_at="p/blob-0"), []
    with ThreadPoolExecutor(1) as pool:
        writer = _writer(put, pool, keys)
        for number in range(2):
            writer.add((), number, _cell(60, 2, num_changed=None))
        with pytest.raises(TransportError, match="full"):
            writer.finish()
        writer.abandon()
    assert keys == ["p/blob-0", "p/blob-1"], "both are known, so that they can be cleaned up"


def test_columns_of_a_matrix_are_packed_row_major() -> None:
    """One element a row: what lies in memory between them is no part of the cell."""
    matrix = np.arange(12, dtype="<u2").reshape(4, 3)
    rows = Rows(num_rows=4, row_len=1, start=1, stride=3)
    (cell,) = _read(pack_blob({0: delta.encode(matrix[:, 1:2], None, rows)}), {0: (4, 2)}.__getitem__)
    assert np.frombuffer(cell.dense, dtype="<u2").tolist() == [1, 4, 7, 10]
