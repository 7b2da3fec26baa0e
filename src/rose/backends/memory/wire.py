"""The bytes between a client and a served store.

A frame is a length (u64, little-endian) and that many bytes. A connection's first frame is the token; the server answers
``OK`` or closes. Then requests and answers alternate:

* request: operation (u8), name length (u32), name (UTF-8), body;
* answer: status (u8), body.

Bodies: ``put`` the payload; ``delete`` no name, then keys as length-prefixed strings; ``compare_and_set`` the expected value
as an optional string, then the new value. Nothing is pickled; a frame over its limit is refused before it is read.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Sequence

from rose.errors import TransportError

MAX_FRAME_BYTES = 1 << 32
MAX_TOKEN_BYTES = 256

_FRAME = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_REQUEST = struct.Struct("<BI")
_ABSENT = 0xFFFFFFFF


class Op(enum.IntEnum):
    """Operations."""

    PUT = 1
    GET = 2
    DELETE = 3
    READ_POINTER = 4
    COMPARE_AND_SET = 5


class Status(enum.IntEnum):
    """How a request ended."""

    OK = 0
    NO = 1
    NOT_FOUND = 2
    CONFLICT = 3
    BAD_REQUEST = 4


def send_frame(sock: socket.socket, *parts: bytes | memoryview) -> None:
    """Send one frame made of the parts."""
    sizes = [len(part) for part in parts]
    small = [part for part, size in zip(parts, sizes, strict=True) if size <= 1 << 16]
    header = _FRAME.pack(sum(sizes))
    if len(small) == len(parts):
        sock.sendall(b"".join((header, *parts)))
        return
    sock.sendall(header)
    for part in parts:
        sock.sendall(part)


def receive_frame(sock: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> memoryview | None:
    """Receive one frame; ``None`` when the peer closed between frames.

    Raises:
        TransportError: The frame is over the limit, or the connection ended inside it.
    """
    header = bytearray(_FRAME.size)
    first = sock.recv_into(header)
    if first == 0:
        return None
    _fill(sock, memoryview(header)[first:])
    (size,) = _FRAME.unpack(header)
    if size > max_bytes:
        message = f"a frame of {size} bytes is over the limit of {max_bytes}"
        raise TransportError(message)
    body = memoryview(bytearray(size))
    _fill(sock, body)
    return body


def _fill(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        count = sock.recv_into(view)
        if count == 0:
            message = "the connection ended inside a frame"
            raise TransportError(message)
        view = view[count:]


def request_head(op: Op, name: str) -> bytes:
    """Return the head of a request; its body follows."""
    encoded = name.encode()
    return _REQUEST.pack(op, len(encoded)) + encoded


def split_request(frame: memoryview) -> tuple[Op, str, memoryview]:
    """Return operation, name and body.

    Raises:
        ValueError: It is no request.
    """
    if len(frame) < _REQUEST.size:
        message = f"{len(frame)} bytes are no request"
        raise ValueError(message)
    op, size = _REQUEST.unpack_from(frame)
    body = frame[_REQUEST.size :]
    if size > len(body):
        message = f"a name of {size} bytes does not fit the frame"
        raise ValueError(message)
    return Op(op), str(body[:size], "utf-8"), body[size:]


def pack_strings(values: Sequence[str | None]) -> bytes:
    """Return optional strings, each behind its length."""
    packed = bytearray()
    for value in values:
        if value is None:
            packed += _LENGTH.pack(_ABSENT)
        else:
            encoded = value.encode()
            packed += _LENGTH.pack(len(encoded)) + encoded
    return bytes(packed)


def unpack_strings(body: memoryview) -> list[str | None]:
    """Read what ``pack_strings`` wrote.

    Raises:
        ValueError: A length does not fit.
    """
    values: list[str | None] = []
    at = 0
    while at < len(body):
        if at + _LENGTH.size > len(body):
            message = f"a string's length is cut off at byte {at}"
            raise ValueError(message)
        (size,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if size == _ABSENT:
            values.append(None)
            continue
        if at + size > len(body):
            message = f"a string of {size} bytes at byte {at} does not fit"
            raise ValueError(message)
        values.append(str(body[at : at + size], "utf-8"))
        at += size
    return values
