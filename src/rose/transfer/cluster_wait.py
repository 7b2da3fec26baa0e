"""Waiting for a blob on any transport: at once where it can wait by itself, by asking again where it cannot."""

from __future__ import annotations

import time
from typing import Protocol

from rose.errors import BlobNotFoundError
from rose.interfaces.transport import Payload, SupportsWait

_PAUSE_MIN_S = 0.002
_PAUSE_MAX_S = 0.05


class Readable(Protocol):
    """The one ability that waiting needs; every ``Transport`` has it."""

    def get(self, key: str) -> Payload:
        """Read a blob, or raise ``BlobNotFoundError``."""


def wait_for_blob(transport: Readable, key: str, timeout_s: float) -> Payload:
    """Read a blob as soon as it is there. Blocking.

    Args:
        transport: Where it will be.
        key: Its key.
        timeout_s: How long to wait; 0 is a plain ``get``.

    Raises:
        BlobNotFoundError: It did not come in time.
        TransportError: The transport failed.
    """
    if isinstance(transport, SupportsWait):
        return transport.get_when_ready(key, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    pause_s = _PAUSE_MIN_S
    while True:
        try:
            return transport.get(key)
        except BlobNotFoundError:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)
