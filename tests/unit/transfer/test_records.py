"""Records: what was packed comes back, and anything else is refused with one error."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import xxhash

from rose.errors import CorruptUpdateError
from rose.transfer import records

HEADER = {"text": "ä", "number": 1 << 60, "none": None}
ARRAYS = {
    "bytes": np.arange(13, dtype="|u1"),
    "words": np.arange(6, dtype="<u2").reshape(2, 3),
    "signed": np.array([[-1], [1 << 40]], dtype="<i8"),
    "empty": np.empty((0, 2), dtype="<u8"),
    "scalar": np.array(7, dtype="<i4"),
}


def forge(text: bytes, rest: bytes = b"", length: int | None = None) -> bytes:
    """Return a record whose checksum is right, whatever it says."""
    start = -(-(24 + len(text)) // 8) * 8
    body = struct.pack("<Q", len(text) if length is None else length) + text
    body += bytes(start - 16 - len(body)) + rest
    return xxhash.xxh3_128_digest(body) + body


def forged(arrays: Any, rest: bytes = bytes(64)) -> bytes:
    return forge(json.dumps({"schema": "s/1", "header": {}, "arrays": arrays}).encode(), rest)


def test_round_trip() -> None:
    header, arrays = records.unpack(records.pack("s/1", HEADER, ARRAYS), "s/1")
    assert header == HEADER
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array, strict=True)


def test_strided_arrays_go_row_major() -> None:
    matrix = np.arange(12, dtype="<u2").reshape(3, 4).T[::2]
    _, arrays = records.unpack(records.pack("s/1", {}, {"m": matrix}), "s/1")
    np.testing.assert_array_equal(arrays["m"], matrix, strict=True)


def test_arrays_are_read_only_views() -> None:
    record = records.pack("s/1", {}, {"a": np.zeros(1000, dtype="<u8")})
    _, arrays = records.unpack(record, "s/1")
    assert np.shares_memory(arrays["a"], np.frombuffer(record, dtype=np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        arrays["a"][0] = 1


def test_the_same_content_is_the_same_bytes() -> None:
    assert records.pack("s/1", HEADER, ARRAYS) == records.pack("s/1", dict(HEADER), dict(ARRAYS))


def test_every_flipped_byte_is_noticed() -> None:
    record = bytes(records.pack("s/1", HEADER, ARRAYS))
    for at in range(len(record)):
        for bit in (1, 128):
            damaged = record[:at] + bytes([record[at] ^ bit]) + record[at + 1 :]
            with pytest.raises(CorruptUpdateError, match="checksum does not match"):
                records.unpack(damaged, "s/1")


def test_every_torn_record_is_noticed() -> None:
    record = bytes(records.pack("s/1", HEADER, ARRAYS))
    for length in range(len(record)):
        with pytest.raises(CorruptUpdateError, match=f"{length} bytes is damaged"):
            records.unpack(record[:length], "s/1")
    with pytest.raises(CorruptUpdateError):
        records.unpack(record + b"\0", "s/1")


def test_another_schema_is_named() -> None:
    with pytest.raises(CorruptUpdateError, match=r"schema 's/2' was expected, got 's/1'; update the older side"):
        records.unpack(records.pack("s/1", {}, {}), "s/2")


@pytest.mark.parametrize(
    "arrays",
    [
        {"a": ["<u8", [-1]]},
        {"a": ["<u8", [-1, -1]]},
        {"a": ["<u8", [1 << 62]]},
        {"a": ["<u8", [1 << 70]]},
        {"a": ["<u8", [0, 1 << 70]]},
        {"a": ["|u1", [1 << 32, 1 << 32]]},
        {"a": ["<u8", [9]]},
        {"a": ["<u8", [1.0]]},
        {"a": ["<u8", [True]]},
        {"a": ["<u8", ["1"]]},
        {"a": ["<u8", "12"]},
        {"a": ["<u8", 3]},
        {"a": ["<u8", None]},
        {"a": ["<u8", [1] * 65]},
        {"a": ["<f8", [1]]},
        {"a": ["|O", [1]]},
        {"a": ["O8", [1]]},
        {"a": [">u8", [1]]},
        {"a": ["|V8", [1]]},
        {"a": [["<u8"], [1]]},
        {"a": ["<u8"]},
        {"a": None},
        ["a"],
        None,
        7,
    ],
)
def test_hostile_tables_are_refused(arrays: Any) -> None:
    """A right checksum does not make a table right: whoever wrote it may be an attacker, or an older build."""
    with pytest.raises(CorruptUpdateError, match="malformed"):
        records.unpack(forged(arrays), "s/1")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"schema": "s/1"}',
        b'{"schema": "s/1", "header": 5, "arrays": {}}',
        b'{"schema": "s/1", "header": [1], "arrays": {}}',
        b'{"header": {}, "arrays": {}}',
        b"[" * 100_000,
    ],
)
def test_hostile_headers_are_refused(text: bytes) -> None:
    with pytest.raises(CorruptUpdateError):
        records.unpack(forge(text), "s/1")


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 62, (1 << 64) - 1])
def test_a_wrong_length_of_the_header_is_refused(length: int) -> None:
    text = b'{"schema": "s/1", "header": {}, "arrays": {"a": ["<u8", [1]]}}'
    with pytest.raises(CorruptUpdateError):
        records.unpack(forge(text, bytes(8), length), "s/1")


def test_no_text_is_run_and_no_object_made() -> None:
    """A pickle in place of the header is no more than bytes that are no JSON."""
    with pytest.raises(CorruptUpdateError, match="malformed"):
        records.unpack(forge(b"cos\nsystem\n(S'true'\ntR."), "s/1")
