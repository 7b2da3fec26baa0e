"""Ports for programs that take a number, not a socket.

The kernel gives outgoing connections ports of its ephemeral range, at any time: one that was free there a moment ago may be
taken when a program comes to listen on it. So ports are drawn outside that range, as long as there are some.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_RANGE = (32_768, 60_999)  # Linux's own
_FIRST, _LAST = 10_000, 65_535  # below are the usual ports of services
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


def free_ports(count: int) -> list[int]:
    """Draw ports on which nothing listens on loopback and which the kernel gives to no connection; where the ephemeral range leaves too few, of all.

    They are not held: a later draw, of any process, may give one again before it is used, which is unlikely.

    Args:
        count: How many; they differ.

    Raises:
        OSError: There are not so many.
    """
    candidates = _candidates(count)
    found: list[int] = []
    with contextlib.ExitStack() as held:
        # The system's randomness: processes that seed the global generator alike would draw the same ports.
        for port in random.SystemRandom().sample(candidates, len(candidates)):
            if len(found) == count:
                break
            sock = socket.socket()
            if _is_bound(sock, port):
                held.enter_context(sock)
                found.append(port)
            else:
                sock.close()
    if len(found) < count:
        message = f"{count} free ports were asked for, but of {candidates.start}-{candidates.stop - 1} only {len(found)} are free"
        raise OSError(errno.EADDRNOTAVAIL, message)
    return found


def _candidates(count: int) -> range:
    """Return the ports below the ephemeral range; those above it when there are too few below, and all when there are too few there, too."""
    low, high = ephemeral_range()
    for candidates in (range(_FIRST, low), range(max(high + 1, _FIRST), _LAST + 1)):
        if len(candidates) >= count:
            return candidates
    return range(_FIRST, _LAST + 1)


def ephemeral_range() -> tuple[int, int]:
    """Return the first and the last port that the kernel gives to connections; Linux's default where it does not say."""
    try:
        low, high = map(int, _RANGE_FILE.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return _DEFAULT_RANGE
    return low, high


def _is_bound(sock: socket.socket, port: int) -> bool:
    """Bind without ``SO_REUSEADDR``, so that whatever has the port counts; returns whether that went well."""
    try:
        sock.bind(("127.0.0.1", port))
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True
