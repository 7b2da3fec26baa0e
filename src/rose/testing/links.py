"""A link between two sites, for tests and benchmarks: its rate, its delay, and what goes wrong on it.

``LinkProxy`` is a TCP proxy in this process: rate, one-way delay, lost connections, a damaged byte. ``rose.testing.namespaces``
has a link that the kernel shapes. Both are emulations; whoever gives figures taken on one says so.

Invariants of the proxy: bytes keep their order; all connections share one rate a direction; what waits inside is bounded, so a slow
receiver slows the sender; after a cut nothing more of that connection arrives.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
import threading
import time
from collections import deque
from types import TracebackType
from typing import Self

import attrs

from rose.testing.namespaces import NamespacePair, why_unavailable

__all__ = ["LinkProxy", "NamespacePair", "why_unavailable"]

_PIECE_BYTES = 1 << 16
_MIN_QUEUE_BYTES = 1 << 20
_BURST_S = 0.01
_DELIVERY_S = 5.0
_UNSHAPED_BYTES_PER_S = 1e9
_RESET = struct.pack("@ii", 1, 0)  # close by a reset, without sending what is left


def _await_delivery(sock: socket.socket) -> None:
    """Wait until the other end has all that was sent, or takes nothing for some seconds."""
    left, deadline_s = bytearray(4), time.monotonic() + _DELIVERY_S
    while time.monotonic() < deadline_s:
        fcntl.ioctl(sock, termios.TIOCOUTQ, left)
        if not any(left):
            return
        time.sleep(_BURST_S / 10)


class _Rate:
    """When bytes have left a sender of a given rate. Thread-safe."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def departure_s(self, num_bytes: int) -> float:
        """Take the line for so many bytes; return when the last of them has left, on the monotonic clock."""
        now_s = time.monotonic()
        if self.bytes_per_s is None:
            return now_s
        with self._lock:
            self._free_s = max(self._free_s, now_s - _BURST_S) + num_bytes / self.bytes_per_s
            return max(self._free_s, now_s)


@attrs.define(eq=False)
class _Direction:
    """One direction of the whole link: its rate, what has crossed it, and what is to go wrong next."""

    rate: _Rate
    delay_s: float
    bytes_carried: int = 0
    cut_at: int | None = None
    corrupt_at: int | None = None
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def carry(self, piece: bytearray) -> tuple[bytearray, bool]:
        """Count a piece and apply what is due; returns what still crosses and whether the connection is cut after it."""
        with self.lock:
            start = self.bytes_carried
            is_cut = False
            if self.cut_at is not None and start + len(piece) >= self.cut_at:
                is_cut, piece, self.cut_at = True, piece[: self.cut_at - start], None
            if self.corrupt_at is not None and start <= self.corrupt_at < start + len(piece):
                piece[self.corrupt_at - start] ^= 0x01
                self.corrupt_at = None
            self.bytes_carried += len(piece)
            return piece, is_cut


class _Pipe:
    """What is in flight in one direction of one connection."""

    def __init__(self, max_bytes: int) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[tuple[float, bytearray | None]] = deque()
        self._size_bytes, self._max_bytes = 0, max_bytes
        self._dropped = threading.Event()

    def push(self, due_s: float, piece: bytearray | None) -> None:
        """Add a piece, ``None`` for the end; waits while the pipe is full."""
        with self._changed:
            while self._size_bytes >= self._max_bytes and not self._dropped.is_set():
                self._changed.wait()
            self._pieces.append((due_s, piece))
            self._size_bytes += len(piece or b"")
            self._changed.notify_all()

    def pop(self) -> bytearray | None:
        """Wait for the next piece and for its time; ``None`` is the end."""
        with self._changed:
            while not self._pieces and not self._dropped.is_set():
                self._changed.wait()
            if self._dropped.is_set():
                return None
            due_s, piece = self._pieces.popleft()
            self._size_bytes -= len(piece or b"")
            self._changed.notify_all()
        is_dropped = self._dropped.wait(max(due_s - time.monotonic(), 0.0))
        return None if is_dropped else piece

    def close(self) -> None:
        """Drop what is in flight."""
        self._dropped.set()
        with self._changed:
            self._changed.notify_all()


class LinkProxy:
    """Stands between clients and a server: clients connect to ``host:port`` of the proxy instead.

    "Down" is from the server to the clients.

    Args:
        target_host: Where the server listens.
        target_port: Its port.
        bytes_per_s: Rate of each direction, shared by all connections; ``None`` for none but the machine's.
        delay_s: One-way delay of each direction.

    Attributes:
        host: Where the proxy listens: loopback.
        port: Its port.
    """

    host = "127.0.0.1"

    def __init__(
        self, target_host: str, target_port: int, *, bytes_per_s: float | None = None, delay_s: float = 0.0
    ) -> None:
        self._target = (target_host, target_port)
        self._down = _Direction(rate=_Rate(bytes_per_s), delay_s=delay_s)
        self._up = _Direction(rate=_Rate(bytes_per_s), delay_s=delay_s)
        self._max_queue_bytes = max(_MIN_QUEUE_BYTES, int((bytes_per_s or _UNSHAPED_BYTES_PER_S) * delay_s * 2))
        self._lock = threading.Lock()
        self._live: dict[int, tuple[socket.socket, socket.socket, _Pipe, _Pipe]] = {}
        self._cut: set[int] = set()
        self._num_connections = 0
        self._timers: list[threading.Timer] = []
        self._listener: socket.socket | None = socket.create_server((self.host, 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._accept_on(self._listener)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @property
    def bytes_down(self) -> int:
        """Return how many bytes have been taken from the server towards clients."""
        return self._down.bytes_carried

    @property
    def bytes_up(self) -> int:
        """Return how many bytes have been taken from clients towards the server."""
        return self._up.bytes_carried

    @property
    def num_connections(self) -> int:
        """Return how many connections there have been."""
        return self._num_connections

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Change the rate of both directions from now on."""
        self._down.rate.bytes_per_s = self._up.rate.bytes_per_s = bytes_per_s

    def cut(self) -> None:
        """Lose every connection now; new ones are taken."""
        with self._lock:
            live = list(self._live)
        for number in live:
            self._end(number, is_cut=True)

    def cut_after_bytes(self, num_bytes: int) -> None:
        """Lose the connection that carries the byte ``num_bytes`` down from now, once, right before the byte after it."""
        with self._down.lock:
            self._down.cut_at = self._down.bytes_carried + num_bytes

    def cut_after_s(self, delay_s: float) -> None:
        """Lose every connection after so many seconds."""
        timer = threading.Timer(delay_s, self.cut)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def corrupt_byte(self, after_bytes: int) -> None:
        """Flip one bit of the byte that comes down after ``after_bytes`` more."""
        with self._down.lock:
            self._down.corrupt_at = self._down.bytes_carried + after_bytes

    def refuse(self) -> None:
        """Take no new connections; those there are go on."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def accept(self) -> None:
        """Take new connections again, on the same port."""
        if self._listener is None:
            self._listener = socket.create_server((self.host, self.port), backlog=512)
            self._accept_on(self._listener)

    def close(self) -> None:
        """End the link. Idempotent."""
        self.refuse()
        for timer in self._timers:
            timer.cancel()
        self.cut()

    def _accept_on(self, listener: socket.socket) -> None:
        threading.Thread(target=self._accept, args=(listener,), name="rose-link-accept", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=10.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self._begin(client, server)

    def _begin(self, client: socket.socket, server: socket.socket) -> None:
        down, up = _Pipe(self._max_queue_bytes), _Pipe(self._max_queue_bytes)
        with self._lock:
            number = self._num_connections
            self._num_connections += 1
            self._live[number] = (client, server, down, up)
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for target, args in (
            (self._take, (number, server, down, self._down)),
            (self._take, (number, client, up, self._up)),
            (self._give, (number, client, down)),
            (self._give, (number, server, up)),
        ):
            threading.Thread(target=target, args=args, name=f"rose-link-{number}", daemon=True).start()

    def _take(self, number: int, source: socket.socket, pipe: _Pipe, direction: _Direction) -> None:
        """Read what a sender sends, at the link's rate."""
        while True:
            try:
                piece = source.recv(_PIECE_BYTES)
            except OSError:
                piece = b""
            if not piece:
                pipe.push(time.monotonic() + direction.delay_s, None)
                return
            crossing, is_cut = direction.carry(bytearray(piece))
            left_s = direction.rate.departure_s(len(piece))
            pipe.push(left_s + direction.delay_s, crossing)
            if is_cut:
                self._cut.add(number)
                pipe.push(left_s + direction.delay_s, None)
                return
            time.sleep(max(left_s - time.monotonic(), 0.0))

    def _give(self, number: int, sink: socket.socket, pipe: _Pipe) -> None:
        """Write what has crossed; the end of one direction ends the connection."""
        try:
            while (piece := pipe.pop()) is not None:
                sink.sendall(piece)
            if number in self._cut:  # a reset would throw away what the kernel has not delivered
                _await_delivery(sink)
        except (OSError, ValueError):
            pass  # the receiver is gone, or the connection has ended meanwhile
        self._end(number, is_cut=number in self._cut)

    def _end(self, number: int, *, is_cut: bool) -> None:
        with self._lock:
            ended = self._live.pop(number, None)
        if ended is None:
            return
        client, server, *pipes = ended
        for pipe in pipes:
            pipe.close()
        for sock in (client, server):
            with contextlib.suppress(OSError):
                if is_cut:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
