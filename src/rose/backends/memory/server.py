"""A store behind a TCP port: the blobs of this process, or any other transport on behalf of others.

Invariants: the listening socket is bound once and kept, so a port that was handed out is never lost to another process;
a connection that does not begin with the token is closed unanswered; one client's failure, or its slowness, ends or slows its
connection only; what the store itself raises reaches the client as the same kind of error.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import threading
import time

from rose.backends.memory import wire
from rose.backends.memory.store import BlobStore
from rose.backends.memory.wire import Op, Status
from rose.errors import BlobNotFoundError, CorruptUpdateError, TransportError, VersionConflictError
from rose.interfaces.transport import Payload, SupportsInvalidate
from rose.transfer.cluster_wait import wait_for_blob
from rose.types import TransportAddress

_TOKEN_TIMEOUT_S = 10.0
_ACCEPT_PAUSE_S = 0.05
_WAIT_SLICE_S = 0.25
"""How long a wait may keep a closing server."""
_STATUS_OF = (
    (BlobNotFoundError, Status.NOT_FOUND),
    (VersionConflictError, Status.CONFLICT),
    (CorruptUpdateError, Status.CORRUPT),
    (TransportError, Status.FAILED),
)


class StoreServer:
    """Serves a store to other processes until closed.

    Args:
        store: The blobs; any ``Transport`` will do.
        host: Address to listen on; must be loopback unless ``is_public``.
        port: Port, or 0 for a free one.
        is_public: Allow an address that other machines can reach.
        token: What clients must know; a new one by default. One that is kept lets clients outlive a restart of the server.
        stall_s: A client that takes nothing of an answer for this long is let go.

    Raises:
        TransportError: The address is not loopback, or cannot be listened on.
    """

    def __init__(
        self,
        store: BlobStore,
        host: str,
        port: int,
        *,
        is_public: bool,
        token: str | None = None,
        stall_s: float = 60.0,
    ) -> None:
        if not is_public and not _is_loopback(host):
            message = f"{host!r} can be reached from other machines; pass is_public=True if that is meant"
            raise TransportError(message)
        self._store = store
        self._stall_s = stall_s
        self.token = token or secrets.token_hex(16)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            message = f"cannot listen on {host}:{port}: {error}; choose another port, or 0 for a free one"
            raise TransportError(message) from error
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, name=f"rose-store-{self.port}", daemon=True)
        self._acceptor.start()

    def address(self) -> TransportAddress:
        """Return how another process opens the store."""
        options = (("host", self.host), ("port", self.port), ("token", self.token))
        return TransportAddress(name="memory", options=options)

    def close(self) -> None:
        """Stop listening and end every connection. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            live = list(self._connections.items())
        _shut(self._listener)
        for connection, _ in live:
            _shut(connection)
        self._acceptor.join()
        self._listener.close()
        for _, thread in live:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_ACCEPT_PAUSE_S)  # no free descriptor, perhaps: asking at once would take a whole core
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="rose-store-client", daemon=True)
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that vanished says no goodbye
            if self._is_welcome(connection):
                while self._answer_one(connection):
                    pass
        except (OSError, TransportError):
            pass  # the client is gone, stands still or speaks another protocol; it sees the connection end
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _is_welcome(self, connection: socket.socket) -> bool:
        wire.set_limits(connection, send_s=self._stall_s, receive_s=_TOKEN_TIMEOUT_S)
        frame = wire.receive_frame(connection, wire.MAX_TOKEN_BYTES)
        if frame is None or not hmac.compare_digest(bytes(frame), self.token.encode()):
            return False
        wire.set_limits(connection, send_s=self._stall_s, receive_s=None)
        wire.send_frame(connection, bytes([Status.OK]))
        return True

    def _answer_one(self, connection: socket.socket) -> bool:
        """Answer the next request; returns whether there was one."""
        try:
            request = wire.receive_request(connection)
        except ValueError as error:
            wire.send_frame(connection, bytes([Status.BAD_REQUEST]), str(error).encode())
            return True
        if request is None:
            return False
        status, body = self._answer(*request)
        wire.send_frame(connection, bytes([status]), body)
        return True

    def _answer(self, op: Op, name: str, body: memoryview) -> tuple[Status, Payload]:
        try:
            return self._apply(op, name, body)
        except (BlobNotFoundError, VersionConflictError, CorruptUpdateError, TransportError) as error:
            status = next(status for kind, status in _STATUS_OF if isinstance(error, kind))
            return status, str(error).encode()
        except ValueError as error:
            return Status.BAD_REQUEST, str(error).encode()

    def _apply(self, op: Op, name: str, body: memoryview) -> tuple[Status, Payload]:
        if op is Op.GET:
            return Status.OK, self._store.get(name)
        if op is Op.GET_WHEN_READY:
            return Status.OK, self._wait(name, wire.unpack_seconds(body))
        if op is Op.READ_POINTER:
            value = self._store.read_pointer(name)
            return (Status.NO, b"") if value is None else (Status.OK, value.encode())
        return (Status.OK if self._change(op, name, body) else Status.NO), b""

    def _change(self, op: Op, name: str, body: memoryview) -> bool:
        """Carry out an operation that answers with no bytes; returns whether it took effect."""
        if op is Op.PUT:
            self._store.put(name, wire.owned_bytes(body))
            return True
        if op is Op.DELETE:
            self._store.delete([key for key in wire.unpack_strings(body) if key is not None])
            return True
        if op is Op.INVALIDATE:
            (damaged,) = wire.unpack_strings(body)
            if isinstance(self._store, SupportsInvalidate):
                self._store.invalidate(name, damaged)
            return True
        expected, value = wire.unpack_strings(body)
        if value is None:
            message = "a pointer cannot be set to nothing"
            raise ValueError(message)
        return self._store.compare_and_set(name, expected, value)

    def _wait(self, key: str, timeout_s: float) -> Payload:
        """Wait in slices, so that a server that closes waits for nobody's blob."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            try:
                return wait_for_blob(self._store, key, min(left_s, _WAIT_SLICE_S))
            except BlobNotFoundError:
                if self._is_closed or left_s <= _WAIT_SLICE_S:
                    raise


def _shut(sock: socket.socket) -> None:
    """Wake whoever waits on the socket; an end that is already closed is fine."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
