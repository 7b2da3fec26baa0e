"""A served store, seen from another process.

Invariants: one request at a time on one connection, and as many connections as there are requests at a time, so that a long
wait or a large blob holds up nobody else; after a failure a connection is thrown away, never reused half-read; a lost
connection is opened again once a request, which is safe because every operation may be repeated; a request that began before a
``close`` neither goes on after it, nor opens a connection, nor leaves one behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from rose.backends.memory import wire
from rose.backends.memory.wire import Op, Status
from rose.errors import BlobNotFoundError, CorruptUpdateError, TransportError, VersionConflictError
from rose.interfaces.transport import Payload

T = TypeVar("T")
_MAX_IDLE = 8
_MAX_WAIT_S = 10.0
_MAX_POLL_MS = 1e9


class StoreClient:
    """The operations of a store, over a few persistent connections. Thread-safe.

    Args:
        host: Where the store is served.
        port: Its port.
        token: Its token.
        timeout_s: How long a send or a receive may stand still.
    """

    def __init__(self, host: str, port: int, token: str, *, timeout_s: float) -> None:
        self._host, self._port, self._token, self._timeout_s = host, port, token, timeout_s
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._num_closes = 0

    def put(self, key: str, payload: Payload) -> None:
        """Write once."""
        self._call(Op.PUT, key, memoryview(payload).cast("B"))

    def get(self, key: str) -> bytes:
        """Read."""
        return wire.owned_bytes(self._call(Op.GET, key)[1])

    def get_when_ready(self, key: str, timeout_s: float) -> bytes:
        """Read as soon as it is there. A long wait is several requests, each shorter than what counts as standing still."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            wait_s = min(left_s, _MAX_WAIT_S, self._timeout_s / 2)
            try:
                return wire.owned_bytes(self._call(Op.GET_WHEN_READY, key, wire.pack_seconds(wait_s))[1])
            except BlobNotFoundError:
                if wait_s >= left_s:
                    raise

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
        status, _, was_repeated = self._exchange(Op.COMPARE_AND_SET, name, wire.pack_strings([expected, value]))
        return status is Status.OK or (was_repeated and self.read_pointer(name) == value)

    def invalidate(self, key: str, damaged: str | None = None) -> None:
        """Forget a copy."""
        self._call(Op.INVALIDATE, key, wire.pack_strings([damaged]))

    def close(self) -> None:
        """Close the connections, which ends requests that wait or connect, though none that looks the host's name up; the next request would open one again."""
        with self._lock:
            self._num_closes += 1
            for sock in self._busy:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # whoever uses it closes it
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    def _call(self, op: Op, name: str, body: Payload = b"") -> tuple[Status, memoryview]:
        status, answer, _ = self._exchange(op, name, body)
        return status, answer

    def _exchange(self, op: Op, name: str, body: Payload = b"") -> tuple[Status, memoryview, bool]:
        """Send and receive, once more when the connection turns out to be lost; says whether it was sent twice."""
        answer, was_repeated = self._ask(op, name, body)
        _check(*answer)  # what the store itself answers is no trouble with reaching it
        return *answer, was_repeated

    def _ask(self, op: Op, name: str, body: Payload) -> tuple[tuple[Status, memoryview], bool]:
        num_closes, sock = self._begin()
        was_idle = sock is not None
        try:
            return self._once(sock, num_closes, op, name, body), False
        except (TimeoutError, BlockingIOError) as error:
            message = f"the store at {self._host}:{self._port} did not answer {op.name} within {self._timeout_s} s"
            raise TransportError(message) from error
        except OSError as error:
            lost = error
        if was_idle and num_closes == self._num_closes:
            self._drop_idle()  # those beside it are as old
            try:
                return self._once(None, num_closes, op, name, body), True
            except OSError as error:
                lost = error
        message = f"the store at {self._host}:{self._port} cannot be reached ({lost}); is its process alive?"
        raise TransportError(message) from lost

    def _once(
        self, sock: socket.socket | None, num_closes: int, op: Op, name: str, body: Payload
    ) -> tuple[Status, memoryview]:
        sock = sock or self._connect(num_closes)
        try:
            wire.send_frame(sock, wire.request_head(op, name), body)
            answer = _arrived(wire.receive_answer(sock), "the connection was closed")
        except BaseException:
            self._throw_away(sock)
            raise
        self._give_back(sock, num_closes)
        return answer

    def _connect(self, num_closes: int) -> socket.socket:
        sock = self._reach(num_closes)
        try:
            wire.set_limits(sock, send_s=self._timeout_s, receive_s=self._timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.send_frame(sock, self._token.encode())
            _arrived(wire.receive_frame(sock), "the store refused the token")
        except BaseException:
            self._throw_away(sock)
            raise
        return sock

    def _reach(self, num_closes: int) -> socket.socket:
        """Connect to the first of the host's addresses that answers."""
        lost = OSError("the host has no address")
        for family, kind, protocol, _, place in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:  # a family that this machine does not speak
                lost = error
                continue
            try:
                self._begin_connecting(sock, place, num_closes)
                self._await_connected(sock)
            except BaseException as error:
                self._throw_away(sock)
                if not isinstance(error, OSError):
                    raise
                lost = error
            else:
                return sock
            if num_closes != self._num_closes:
                message = "it was closed while it connected"
                raise ConnectionAbortedError(message) from lost
        raise lost

    def _begin_connecting(self, sock: socket.socket, place: Any, num_closes: int) -> None:
        """Begin, unless closed. To make it known and to begin are one step under the lock, since a shutdown before the beginning has no effect."""
        sock.settimeout(0.0)
        with self._lock:
            if num_closes != self._num_closes:
                raise ConnectionAbortedError
            self._busy.add(sock)
            code = sock.connect_ex(place)
        if code not in {0, errno.EINPROGRESS}:
            raise OSError(code, os.strerror(code))

    def _await_connected(self, sock: socket.socket) -> None:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        if not poll.poll(min(self._timeout_s * 1000, _MAX_POLL_MS)):
            message = "timed out"
            raise TimeoutError(message)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def _begin(self) -> tuple[int, socket.socket | None]:
        """Begin a request: say after how many closes, and which connection it may use, if there is one."""
        with self._lock:
            sock = self._idle.pop() if self._idle else None
            if sock is not None:
                self._busy.add(sock)
            return self._num_closes, sock

    def _give_back(self, sock: socket.socket, num_closes: int) -> None:
        with self._lock:
            self._busy.discard(sock)
            if num_closes == self._num_closes and len(self._idle) < _MAX_IDLE:
                self._idle.append(sock)
                return
        sock.close()

    def _throw_away(self, sock: socket.socket) -> None:
        with self._lock:
            self._busy.discard(sock)
        sock.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()


def _arrived(frame: T | None, otherwise: str) -> T:
    if frame is None:
        raise ConnectionResetError(otherwise)
    return frame


def _check(status: Status, body: memoryview) -> None:
    """Raise the error that an answer stands for."""
    kinds = {Status.NOT_FOUND: BlobNotFoundError, Status.CONFLICT: VersionConflictError,
             Status.CORRUPT: CorruptUpdateError, Status.FAILED: TransportError}  # fmt: skip
    if status in kinds:
        raise kinds[status](str(body, "utf-8"))
    if status is Status.BAD_REQUEST:
        message = f"the store refused a request: {str(body, 'utf-8')}"
        raise TransportError(message)
