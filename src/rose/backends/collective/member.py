"""A dedicated engine's side: a transport that serves what the collective brought, and everything else from the origin.

Invariants: a blob is served from the collective only whole, with the checksum that its root announced, and once the origin has
it too; every failure of the collective, a missing root included, leaves a member that reads from the origin.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from rose import registry
from rose.backends.collective import messages
from rose.backends.collective.cache import BlobCache, FanOutCounts
from rose.backends.collective.group import Group, current_gpu, join_store
from rose.backends.collective.messages import RootAddress
from rose.backends.collective.over import OverOrigin
from rose.backends.memory import wire
from rose.backends.memory.buffers import fillable
from rose.errors import BackendUnavailableError, TransportError
from rose.interfaces.transport import Payload
from rose.transfer.delta import digest
from rose.types import TransportAddress

_logger = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0


def member_address(origin: TransportAddress, roots: Sequence[str]) -> TransportAddress:
    """Return the address under which dedicated engines join.

    Args:
        origin: ``Transport.address()`` of the store behind.
        roots: ``CollectiveMirror.root`` of every trainer rank.
    """
    options = json.dumps(dict(origin.options), sort_keys=True)
    return TransportAddress(
        name="collective",
        options=(("origin", origin.name), ("origin_options", options), ("roots", ",".join(roots))),
    )


class CollectiveMember(OverOrigin):
    """A member of the groups of all trainer ranks.

    Args:
        origin: Registered name of the store behind.
        origin_options: Its options, a JSON object.
        roots: ``CollectiveMirror.root`` of every trainer rank, with commas between.
        max_bytes: How much of what was brought is held.
        keep: How many of a run's newest versions are held.
        wait_s: How long a ``get`` waits for a blob that is on its way before it asks the origin.
        device: Index of this process's GPU for groups over NCCL; -1 is the current one of the thread that makes the member.

    Raises:
        ConfigError: A root is no root.
        TransportError: The origin cannot be reached.
    """

    def __init__(
        self,
        *,
        origin: str,
        origin_options: str = "{}",
        roots: str = "",
        max_bytes: int = 2 << 30,
        keep: int = 2,
        wait_s: float = 30.0,
        device: int = -1,
    ) -> None:
        addresses = [RootAddress.parse(root) for root in roots.split(",") if root]
        options = tuple(json.loads(origin_options).items())
        self._address = member_address(TransportAddress(name=origin, options=options), [str(a) for a in addresses])
        super().__init__(registry.open_transport(TransportAddress(name=origin, options=options)))
        self._cache = BlobCache(max_bytes, keep)
        self._wait_s = wait_s
        gpu = current_gpu() if device < 0 else device
        self._receivers = [_Receiver(address, self._cache, gpu) for address in addresses]

    def get(self, key: str) -> Payload:
        """Read a blob: what the collective brought or is bringing, else the origin's."""
        found = self._cache.find(key, self._wait_s)
        return super().get(key) if found is None else found

    def get_when_ready(self, key: str, timeout_s: float) -> Payload:
        """Read a blob as soon as the collective or the origin has it."""
        found = self._cache.find(key, min(timeout_s, self._wait_s))
        return super().get_when_ready(key, timeout_s) if found is None else found

    def invalidate(self, key: str, damaged: str | None = None) -> None:
        """Forget what the collective brought for a key, so that the next ``get`` asks the origin."""
        self._cache.drop([key], damaged)
        super().invalidate(key, damaged)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove blobs from the origin, and from what this member holds."""
        super().delete(keys)
        self._cache.drop(list(keys))

    def address(self) -> TransportAddress:
        """Return how another dedicated engine joins."""
        return self._address

    def counts(self) -> FanOutCounts:
        """Return what was served from where."""
        return self._cache.counts()

    def close(self) -> None:
        """Leave the groups and close the origin. Idempotent."""
        for receiver in self._receivers:
            receiver.close()
        self._origin.close()


class _Receiver:
    """Follows one root on a thread of its own; joins again when it was let go, or the root was away."""

    def __init__(self, root: RootAddress, cache: BlobCache, gpu: int | None) -> None:
        self._root, self._cache, self._gpu = root, cache, gpu
        self._group: Group | None = None
        self._pending: dict[str, bytes] = {}
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        self._has_joined = threading.Event()
        name = f"rose-collective-receive-{root.port}"
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
        self._thread.start()
        self._has_joined.wait(_JOIN_TIMEOUT_S)

    def close(self) -> None:
        """Leave: the connection's end wakes the thread, the group's end a broadcast under way."""
        self._closing.set()
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._leave_group()
        self._thread.join(timeout=_JOIN_TIMEOUT_S)

    def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                self._connection = connection = _connect(self._root)
                self._has_joined.set()
                pause_s = _FIRST_PAUSE_S
                with connection:
                    while not self._closing.is_set() and (message := messages.receive(connection)) is not None:
                        self._take(connection, message)
                reason = "it has let this member go"
            except (OSError, TransportError, KeyError) as error:
                reason = str(error)
            self._leave_group()
            for key in list(self._pending):
                self._settle(key, is_kept=False)
            self._has_joined.set()
            if not self._closing.is_set():
                _logger.warning(
                    "no part in the collective of %s, reading from the origin: %s", _place(self._root), reason
                )
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _take(self, connection: socket.socket, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "ping":
                messages.send(connection, "pong", number=message["number"])
            case "group":
                self._leave_group()
                self._join_group(message)
            case "blob":
                self._receive_blob(message["key"], message["length_bytes"], message["checksum"])
            case "keep":
                self._settle(message["key"], is_kept=True)
            case "refuse":
                self._settle(message["key"], is_kept=False)
            case "drop":
                self._cache.drop(message["keys"])
            case _:
                pass  # a later release may say more

    def _join_group(self, message: dict[str, Any]) -> None:
        try:
            self._group = Group(
                join_store(self._root.host, self._root.store_port, message["timeout_s"]),
                message["name"],
                rank=message["rank"],
                size=message["size"],
                backend=message["backend"],
                host=self._root.host,
                timeout_s=message["timeout_s"],
                device=self._gpu,
            )
        except (TransportError, BackendUnavailableError, RuntimeError) as error:
            _logger.warning("could not join %s, reading from the origin: %s", message["name"], error)

    def _receive_blob(self, key: str, length_bytes: int, checksum: str) -> None:
        if self._group is None:
            self._cache.fail(key)
            return
        self._cache.expect(key)
        data, view = fillable(max(2, length_bytes))
        try:
            self._group.broadcast(np.frombuffer(view, dtype=np.uint8)[:length_bytes])
        except TransportError as error:
            self._cache.fail(key)
            self._leave_group()
            if not self._closing.is_set():
                _logger.warning("%r did not arrive, reading from the origin: %s", key, error)
            return
        data = data[:length_bytes]  # a copy only of what is shorter than a filled object may be
        if digest(data) == checksum:
            self._pending[key] = data
        else:
            self._cache.fail(key)
            _logger.warning("%r arrived with other bytes than were sent; reading from the origin", key)

    def _settle(self, key: str, *, is_kept: bool) -> None:
        """Serve a blob that has arrived, now that the origin has it too, or forget it."""
        data = self._pending.pop(key, None)
        if data is not None and is_kept:
            self._cache.deliver(key, data)
        elif data is not None:
            self._cache.fail(key)

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _connect(root: RootAddress) -> socket.socket:
    connection = socket.create_connection((root.host, root.port), timeout=_JOIN_TIMEOUT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.send_frame(connection, root.token.encode())
        answer = messages.receive(connection)
    except BaseException:
        connection.close()
        raise
    if answer is None or answer.get("kind") != "welcome":
        connection.close()
        message = f"the trainer rank at {_place(root)} does not take this member; is the token of this launch of it?"
        raise TransportError(message)
    connection.settimeout(None)
    return connection


def _place(root: RootAddress) -> str:
    return f"{root.host}:{root.port}"
