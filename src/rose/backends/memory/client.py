"""A served store, seen from another process.

Invariants: one request at a time on one connection; after a failure the connection is thrown away, never reused half-read;
a lost connection is opened again once a request, which is safe because every operation may be repeated.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from rose.backends.memory import wire
from rose.backends.memory.wire import Op, Status
from rose.errors import BlobNotFoundError, TransportError, VersionConflictError


class StoreClient:
    """The operations of a store, over one persistent connection. Thread-safe.

    Args:
        host: Where the store is served.
        port: Its port.
        token: Its token.
        timeout_s: How long any one send or receive may take.
    """

    def __init__(self, host: str, port: int, token: str, *, timeout_s: float) -> None:
        self._host, self._port, self._token, self._timeout_s = host, port, token, timeout_s
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None

    def put(self, key: str, payload: bytes | memoryview) -> None:
        """Write once."""
        self._call(Op.PUT, key, memoryview(payload).cast("B"))

    def get(self, key: str) -> bytes:
        """Read."""
        return bytes(self._call(Op.GET, key)[1])

    def delete(self, keys: Sequence[str]) -> None:
        """Remove."""
        self._call(Op.DELETE, "", wire.pack_strings(keys))

    def read_pointer(self, name: str) -> str | None:
        """Read a pointer."""
        status, body = self._call(Op.READ_POINTER, name)
        return None if status is Status.NO else str(body, "utf-8")

    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Move a pointer.

        When the connection was lost in between, a pointer that holds ``value`` counts as set by this call; callers that
        race must use values of their own, as publishers do.
        """
        with self._lock:
            frame, was_repeated = self._exchange(Op.COMPARE_AND_SET, name, wire.pack_strings([expected, value]))
        status, _ = _read_answer(frame)
        return status is Status.OK or (was_repeated and self.read_pointer(name) == value)

    def close(self) -> None:
        """Close the connection; the next request would open it again."""
        with self._lock:
            self._drop()

    def _call(self, op: Op, name: str, body: bytes | memoryview = b"") -> tuple[Status, memoryview]:
        with self._lock:
            frame, _ = self._exchange(op, name, body)
        return _read_answer(frame)

    def _exchange(self, op: Op, name: str, body: bytes | memoryview = b"") -> tuple[memoryview, bool]:
        """Send and receive, once more when the connection turns out to be lost; says whether it was sent twice."""
        had_connection = self._sock is not None
        try:
            return self._once(op, name, body), False
        except TimeoutError as error:
            message = f"the store at {self._host}:{self._port} did not answer {op.name} within {self._timeout_s} s"
            raise TransportError(message) from error
        except OSError as error:
            lost = error
        if had_connection:
            try:
                return self._once(op, name, body), True
            except OSError as error:
                lost = error
        message = f"the store at {self._host}:{self._port} cannot be reached ({lost}); is its process alive?"
        raise TransportError(message) from lost

    def _once(self, op: Op, name: str, body: bytes | memoryview) -> memoryview:
        try:
            sock = self._connect()
            wire.send_frame(sock, wire.request_head(op, name), body)
            frame = wire.receive_frame(sock)
        except (OSError, TransportError):
            self._drop()
            raise
        if frame is None:
            self._drop()
            message = "the connection was closed"
            raise ConnectionResetError(message)
        return frame

    def _connect(self) -> socket.socket:
        if self._sock is None:
            sock = socket.create_connection((self._host, self._port), timeout=self._timeout_s)
            self._sock = sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.send_frame(sock, self._token.encode())
            if wire.receive_frame(sock) is None:
                message = "the store refused the token"
                raise ConnectionRefusedError(message)
        return self._sock

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _read_answer(frame: memoryview) -> tuple[Status, memoryview]:
    status, body = Status(frame[0]), frame[1:]
    if status is Status.NOT_FOUND:
        raise BlobNotFoundError(str(body, "utf-8"))
    if status is Status.CONFLICT:
        raise VersionConflictError(str(body, "utf-8"))
    if status is Status.BAD_REQUEST:
        message = f"the store refused a request: {str(body, 'utf-8')}"
        raise TransportError(message)
    return status, body
