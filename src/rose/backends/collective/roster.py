"""A root's members: who is connected, and who of them answers.

Invariants: the sender's thread alone writes to members; a member that is let go has its connection closed, from which it
learns that it is out.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from typing import Any

from rose.backends.collective import messages
from rose.backends.memory import wire
from rose.errors import TransportError

_TOKEN_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.1


class Roster:
    """Takes members on one address.

    Args:
        host: Address to listen on; members reach it under the same.

    Attributes:
        port: Where members connect.
        token: What they must know.
    """

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self._newcomers: list[socket.socket] = []
        self._members: list[socket.socket] = []
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, name="rose-collective-accept", daemon=True)
        self._acceptor.start()

    @property
    def has_newcomers(self) -> bool:
        """Return whether somebody waits to be taken in."""
        with self._lock:
            return bool(self._newcomers)

    @property
    def num_members(self) -> int:
        """Return how many members there are, newcomers aside."""
        return len(self._members)

    def roll_call(self, timeout_s: float) -> int:
        """Take newcomers in, let go of whoever does not answer within ``timeout_s``; return how many remain."""
        with self._lock:
            self._members += self._newcomers
            self._newcomers = []
        number = secrets.randbits(32)
        self.tell("ping", number=number)
        deadline = time.monotonic() + timeout_s
        for member in list(self._members):
            if not _answers(member, number, deadline):
                self._let_go(member)
        return self.num_members

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message to every member."""
        for member in list(self._members):
            self._tell_one(member, kind, fields)

    def tell_ranks(self, kind: str, **fields: Any) -> None:
        """Send a message to every member, each with its rank (from 1)."""
        for rank, member in enumerate(list(self._members), start=1):
            self._tell_one(member, kind, {**fields, "rank": rank})

    def close(self) -> None:
        """Let everybody go. Idempotent."""
        with self._lock:
            self._is_closed = True
            leaving, self._newcomers = self._newcomers, []
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for member in [*leaving, *self._members]:
            member.close()
        self._members = []
        self._acceptor.join(timeout=_TOKEN_TIMEOUT_S)

    def _tell_one(self, member: socket.socket, kind: str, fields: dict[str, Any]) -> None:
        try:
            member.settimeout(_SEND_TIMEOUT_S)
            messages.send(member, kind, **fields)
        except OSError:
            self._let_go(member)

    def _let_go(self, member: socket.socket) -> None:
        self._members.remove(member)
        member.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_ACCEPT_PAUSE_S)  # no free descriptor, or a caller that is gone already: others may come
                continue
            try:
                self._welcome(connection)
            except (OSError, TransportError):
                connection.close()  # gone, too slow, or it speaks another protocol

    def _welcome(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_TOKEN_TIMEOUT_S)
        frame = wire.receive_frame(connection, wire.MAX_TOKEN_BYTES)
        if frame is None or not hmac.compare_digest(bytes(frame), self.token.encode()):
            connection.close()
            return
        with self._lock:  # whoever has read the welcome is in the next roll call
            if self._is_closed:
                connection.close()
            else:
                messages.send(connection, "welcome")
                self._newcomers.append(connection)


def _answers(member: socket.socket, number: int, deadline: float) -> bool:
    """Read until the answer to this very call; a late one to an earlier call does not count."""
    try:
        while True:
            member.settimeout(max(0.01, deadline - time.monotonic()))
            answer = messages.receive(member)
            if answer is None:
                return False
            if answer.get("number") == number:
                return True
    except (OSError, TransportError):
        return False
