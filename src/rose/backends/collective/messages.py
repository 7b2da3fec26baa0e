"""What a root and its members say to each other beside the group, and where they meet.

Frames over one plain connection a member (``rose.backends.memory.wire``), each a JSON object; nothing is pickled:

1. [MEMBER] connects and sends the token; [ROOT] answers ``welcome``.
2. [ROOT] ``ping`` with a number; [MEMBER] ``pong`` with it. Who does not answer in time is let go.
3. [ROOT] ``group`` with its name, size and the member's rank; both sides make it.
4. [ROOT] ``blob`` with key, length and checksum, then broadcasts the bytes over the group.
5. [ROOT] ``keep`` with the key once the origin has the blob too, ``refuse`` when the origin did not take it.
6. [ROOT] ``drop`` with keys that were deleted.

A member takes messages in their order. One that cannot take part in a broadcast closes its end of the group.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import attrs

from rose.backends.memory import wire
from rose.errors import ConfigError, TransportError

MAX_MESSAGE_BYTES = 1 << 20


@attrs.frozen(kw_only=True)
class RootAddress:
    """Where a root takes members: host, port of its connections, port of the groups' meeting place, token."""

    host: str
    port: int
    store_port: int
    token: str

    def __str__(self) -> str:
        """Return ``host/port/port/token``, which a hostname of any kind does not confuse."""
        return f"{self.host}/{self.port}/{self.store_port}/{self.token}"

    @classmethod
    def parse(cls, text: str) -> RootAddress:
        """Read what ``str`` wrote.

        Raises:
            ConfigError: It is no such text.
        """
        try:
            host, port, store_port, token = text.split("/")
            return cls(host=host, port=int(port), store_port=int(store_port), token=token)
        except ValueError as error:
            message = f"{text!r} is no root of a collective; take CollectiveMirror.root of each trainer rank"
            raise ConfigError(message) from error


def send(sock: socket.socket, kind: str, **fields: Any) -> None:
    """Send one message."""
    wire.send_frame(sock, json.dumps({"kind": kind, **fields}).encode())


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """Receive one message; ``None`` when the peer has closed.

    Raises:
        TransportError: It is no message.
    """
    frame = wire.receive_frame(sock, MAX_MESSAGE_BYTES)
    if frame is None:
        return None
    try:
        message = json.loads(bytes(frame))
    except ValueError as error:
        text = f"{len(frame)} bytes from the peer are no message of a collective"
        raise TransportError(text) from error
    if not isinstance(message, dict):
        text = f"the peer sent {type(message).__name__} instead of a message"
        raise TransportError(text)
    return message
