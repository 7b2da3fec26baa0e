"""Self-checking binary records: a JSON header and named integer arrays. Nothing in one is ever executed or unpickled.

A record is its xxh3_128 (16 bytes), the length of the JSON text (8 bytes, little-endian), the text, and the arrays one after the
other, each on an 8-byte boundary. Arrays are read without a copy.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import xxhash

from rose.errors import CorruptUpdateError
from rose.interfaces.transport import Payload

Array = np.ndarray[Any, np.dtype[Any]]

_DIGEST_BYTES = 16
_PREFIX = struct.Struct("<Q")
_ALIGNMENT = 8
_KINDS = frozenset({"<u8", "<i8", "<u4", "<i4", "<u2", "|u1"})


def pack(schema: str, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytearray:
    """Return a record; arrays must be of a little-endian integer type of 1, 2, 4 or 8 bytes."""
    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    table = {name: [array.dtype.str, list(array.shape)] for name, array in plain.items()}
    text = json.dumps({"schema": schema, "header": header, "arrays": table}, separators=(",", ":")).encode()
    start = _aligned(_DIGEST_BYTES + _PREFIX.size + len(text))
    record = bytearray(start + sum(_aligned(array.nbytes) for array in plain.values()))
    _PREFIX.pack_into(record, _DIGEST_BYTES, len(text))
    record[_DIGEST_BYTES + _PREFIX.size : _DIGEST_BYTES + _PREFIX.size + len(text)] = text
    view = np.frombuffer(record, dtype=np.uint8)
    for array in plain.values():
        view[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        start += _aligned(array.nbytes)
    record[:_DIGEST_BYTES] = xxhash.xxh3_128_digest(memoryview(record)[_DIGEST_BYTES:])
    return record


def unpack(record: Payload, schema: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the header and the arrays, which are read-only views of the record.

    Raises:
        CorruptUpdateError: The checksum does not match, or it is no record of this schema.
    """
    view = memoryview(record).toreadonly()
    if len(view) < _DIGEST_BYTES + _PREFIX.size or xxhash.xxh3_128_digest(view[_DIGEST_BYTES:]) != view[:_DIGEST_BYTES]:
        message = f"a {schema} record of {len(view)} bytes is damaged: its checksum does not match"
        raise CorruptUpdateError(message)
    try:
        (length,) = _PREFIX.unpack_from(view, _DIGEST_BYTES)
        start = _DIGEST_BYTES + _PREFIX.size
        data = json.loads(bytes(view[start : start + length]))
        found = data["schema"]
        if found == schema:
            return dict(data["header"]), _read_arrays(view, _aligned(start + length), data["arrays"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        message = f"a {schema} record of {len(view)} bytes is malformed: {error!r}"
        raise CorruptUpdateError(message) from error
    message = f"a record of schema {schema!r} was expected, got {found!r}; update the older side"
    raise CorruptUpdateError(message)


def _read_arrays(view: memoryview, start: int, table: Mapping[str, Any]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for name, (kind, shape) in table.items():
        if kind not in _KINDS or any(type(size) is not int or size < 0 for size in shape):
            message = f"array {name!r} of type {kind!r} and shape {shape!r}"
            raise ValueError(message)
        array = np.frombuffer(view, dtype=np.dtype(kind), count=prod(shape), offset=start).reshape(shape)
        arrays[name] = array
        start += _aligned(array.nbytes)
    return arrays


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
