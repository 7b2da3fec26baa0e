"""A local store behind a TCP port.

Invariants: the listening socket is bound once and kept, so a port that was handed out is never lost to another process;
a connection that does not begin with the token is closed unanswered; one client's failure ends its connection only.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import threading

from rose.backends.memory import wire
from rose.backends.memory.store import LocalStore
from rose.backends.memory.wire import Op, Status
from rose.errors import BlobNotFoundError, TransportError, VersionConflictError

_TOKEN_TIMEOUT_S = 10.0


class StoreServer:
    """Serves a store to other processes until closed.

    Args:
        store: The blobs.
        host: Address to listen on; must be loopback unless ``is_public``.
        port: Port, or 0 for a free one.
        is_public: Allow an address that other machines can reach.
    """

    def __init__(self, store: LocalStore, host: str, port: int, *, is_public: bool) -> None:
        if not is_public and not _is_loopback(host):
            message = f"{host!r} can be reached from other machines; pass is_public=True if that is meant"
            raise TransportError(message)
        self._store = store
        self.token = secrets.token_hex(16)
        try:
            self._listener = socket.create_server((host, port), backlog=128)
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
            if self._is_welcome(connection):
                while (frame := wire.receive_frame(connection)) is not None:
                    wire.send_frame(connection, *self._answer(frame))
        except (OSError, TransportError):
            pass  # the client is gone or speaks another protocol; it sees the connection end
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _is_welcome(self, connection: socket.socket) -> bool:
        connection.settimeout(_TOKEN_TIMEOUT_S)
        frame = wire.receive_frame(connection, wire.MAX_TOKEN_BYTES)
        if frame is None or not hmac.compare_digest(bytes(frame), self.token.encode()):
            return False
        connection.settimeout(None)
        wire.send_frame(connection, bytes([Status.OK]))
        return True

    def _answer(self, frame: memoryview) -> tuple[bytes, bytes]:
        try:
            status, body = self._apply(*wire.split_request(frame))
        except BlobNotFoundError as error:
            status, body = Status.NOT_FOUND, str(error).encode()
        except VersionConflictError as error:
            status, body = Status.CONFLICT, str(error).encode()
        except ValueError as error:
            status, body = Status.BAD_REQUEST, str(error).encode()
        return bytes([status]), body

    def _apply(self, op: Op, name: str, body: memoryview) -> tuple[Status, bytes]:
        if op is Op.PUT:
            self._store.put(name, body)
            return Status.OK, b""
        if op is Op.GET:
            return Status.OK, self._store.get(name)
        if op is Op.DELETE:
            self._store.delete([key for key in wire.unpack_strings(body) if key is not None])
            return Status.OK, b""
        if op is Op.READ_POINTER:
            value = self._store.read_pointer(name)
            return (Status.NO, b"") if value is None else (Status.OK, value.encode())
        expected, value = wire.unpack_strings(body)
        if value is None:
            message = "a pointer cannot be set to nothing"
            raise ValueError(message)
        return (Status.OK if self._store.compare_and_set(name, expected, value) else Status.NO), b""


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
