"""The bytes between a client and a served store.

A frame is a length (u64, little-endian) and that many bytes. A connection's first frame is the token; the server answers
``OK`` or closes. Then requests and answers alternate:

* request: operation (u8), name length (u32), name (UTF-8), body;
* answer: status (u8), body.

Bodies: ``put`` the payload; ``delete`` no name, then keys as length-prefixed strings; ``compare_and_set`` the expected value
as an optional string, then the new value; ``get_when_ready`` the time to wait in seconds (f64); ``invalidate`` an optional
string. Nothing is pickled; a frame over its limit is refused before it is read.

A large body is received into the very object that the caller then owns (``buffers``), and never copied.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Sequence

from rose.backends.memory import buffers
from rose.errors import TransportError
from rose.interfaces.transport import Payload

MAX_FRAME_BYTES = 1 << 32
MAX_TOKEN_BYTES = 256
JOIN_BYTES = 1 << 16
"""Up to this size a frame is sent, or received, in one piece, since a copy costs less than another system call."""

_SEND_BYTES = 1 << 20
"""Large bodies are sent in pieces that a core's cache still holds when the receiver takes them."""
_FRAME = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_REQUEST = struct.Struct("<BI")
_SECONDS = struct.Struct("<d")
_TIMEVAL = struct.Struct("@ll")
_ABSENT = 0xFFFFFFFF


class Op(enum.IntEnum):
    """Operations."""

    PUT = 1
    GET = 2
    DELETE = 3
    READ_POINTER = 4
    COMPARE_AND_SET = 5
    GET_WHEN_READY = 6
    INVALIDATE = 7


class Status(enum.IntEnum):
    """How a request ended."""

    OK = 0
    NO = 1
    NOT_FOUND = 2
    CONFLICT = 3
    BAD_REQUEST = 4
    FAILED = 5
    CORRUPT = 6


def set_limits(sock: socket.socket, *, send_s: float, receive_s: float | None) -> None:
    """Make a socket blocking, with limits on how long it may stand still in one direction.

    The kernel keeps the limits, not Python: a socket with a timeout of Python's cannot receive a large body in one call.

    Args:
        sock: The socket.
        send_s: Without progress for this long a send raises ``BlockingIOError``.
        receive_s: The same for receiving; ``None`` waits for ever.
    """
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_s or 0.0))


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))


def send_frame(sock: socket.socket, *parts: Payload) -> None:
    """Send one frame made of the parts."""
    header = _FRAME.pack(sum(map(len, parts)))
    if not parts or len(parts[-1]) <= JOIN_BYTES:
        sock.sendall(b"".join((header, *parts)))
        return
    sock.sendall(b"".join((header, *parts[:-1])))
    body = memoryview(parts[-1])
    for start in range(0, len(body), _SEND_BYTES):
        sock.sendall(body[start : start + _SEND_BYTES])


def receive_frame(sock: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> memoryview | None:
    """Receive one frame; ``None`` when the peer closed between frames.

    Raises:
        TransportError: The frame is over the limit, or the connection ended inside it.
    """
    size = _receive_size(sock, max_bytes)
    return None if size is None else memoryview(_receive(sock, size))


def receive_request(sock: socket.socket) -> tuple[Op, str, memoryview] | None:
    """Receive one request; ``None`` when the peer closed before it. A large body is an object of its own.

    Raises:
        TransportError: The frame is over the limit, or the connection ended inside it.
        ValueError: It is no request; the whole frame has been received.
    """
    size = _receive_size(sock, MAX_FRAME_BYTES)
    if size is None:
        return None
    if size <= JOIN_BYTES:
        return split_request(memoryview(_receive(sock, size)))
    head = _receive(sock, _REQUEST.size)
    _, name_bytes = _REQUEST.unpack(head)
    left = size - _REQUEST.size
    if name_bytes > min(left, JOIN_BYTES):
        message = f"a name of {name_bytes} bytes in a frame of {size}"
        raise TransportError(message)
    name = _receive(sock, name_bytes)
    body = memoryview(_receive(sock, left - name_bytes))
    op, text, _ = split_request(memoryview(head + name))
    return op, text, body


def receive_answer(sock: socket.socket) -> tuple[Status, memoryview] | None:
    """Receive one answer; ``None`` when the peer closed before it. A large body is an object of its own.

    Raises:
        TransportError: The frame is over the limit, is no answer, or the connection ended inside it.
    """
    size = _receive_size(sock, MAX_FRAME_BYTES)
    if size is None:
        return None
    if 0 < size <= JOIN_BYTES:
        frame = memoryview(_receive(sock, size))
        status, body = frame[0], frame[1:]
    else:
        status = _receive(sock, 1)[0] if size else -1
        body = memoryview(_receive(sock, max(size - 1, 0)))
    try:
        return Status(status), body
    except ValueError as error:
        message = f"the answer begins with {status}, which is no status; does a store listen there?"
        raise TransportError(message) from error


def _receive_size(sock: socket.socket, max_bytes: int) -> int | None:
    header = sock.recv(_FRAME.size, socket.MSG_WAITALL)
    if not header:
        return None
    if len(header) < _FRAME.size:
        header += _receive(sock, _FRAME.size - len(header))
    (size,) = _FRAME.unpack(header)
    if size > max_bytes:
        message = f"a frame of {size} bytes is over the limit of {max_bytes}"
        raise TransportError(message)
    return int(size)


def _receive(sock: socket.socket, size: int) -> bytes:
    """Receive exactly ``size`` bytes."""
    if size > JOIN_BYTES:
        data, view = buffers.fillable(size)
        _fill(sock, view)
        return data
    data = sock.recv(size, socket.MSG_WAITALL) if size else b""
    while len(data) < size:
        piece = sock.recv(size - len(data), socket.MSG_WAITALL)
        if not piece:
            raise _ended()
        data += piece
    return data


def _fill(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        count = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise _ended()
        view = view[count:]


def _ended() -> TransportError:
    message = "the connection ended inside a frame"
    return TransportError(message)


def owned_bytes(body: memoryview) -> bytes:
    """Return a body as ``bytes``: the very object that it was received into where it is one, else a copy."""
    base = body.obj
    return base if isinstance(base, bytes) and len(base) == len(body) else bytes(body)


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


def pack_seconds(seconds: float) -> bytes:
    """Return a time."""
    return _SECONDS.pack(seconds)


def unpack_seconds(body: memoryview) -> float:
    """Read what ``pack_seconds`` wrote.

    Raises:
        ValueError: It is no time.
    """
    if len(body) != _SECONDS.size or not (seconds := float(_SECONDS.unpack(body)[0])) >= 0:
        message = f"{len(body)} bytes are no time of at least 0 seconds"
        raise ValueError(message)
    return seconds


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
