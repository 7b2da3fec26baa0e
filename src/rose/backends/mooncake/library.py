"""Loading Mooncake, and the settings that it takes from the process's environment.

The library has no arguments for these; it reads the environment when it starts. They are set only where the user has not:

* ``MC_RPC_TIMEOUT_MS``: how long a call to a master that hangs may take (the library's own value is 30 s);
* ``MC_TCP_STATUS_TIMEOUT_SEC``: how long a transfer to or from a frozen peer may take (the library waits for ever);
* ``MC_TCP_BIND_ADDRESS``: where this process listens (the library takes the first interface that is up).
"""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

from rose.errors import BackendUnavailableError, TransportError

RPC_TIMEOUT_S = 5
TRANSFER_TIMEOUT_S = 10
_REACH_S = 5.0


def prepare_environment(hostname: str) -> None:
    """Set what the library will read and the user has not set. The first transport of a process decides.

    Args:
        hostname: Address that this process is reached under; it listens there and nowhere else.
    """
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(1000 * RPC_TIMEOUT_S))
    os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", str(TRANSFER_TIMEOUT_S))
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", split_address(hostname)[0])


def load_library() -> Any:
    """Return the ``mooncake.store`` module.

    Raises:
        BackendUnavailableError: It or a library that it links cannot be loaded.
    """
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        message = (
            f"the mooncake transport cannot load Mooncake ({error}); install it with pip install 'rose-rl[mooncake]', "
            "or 'rose-rl[mooncake-cuda]' beside CUDA, "
            "and its system library with apt-get install libibverbs1"
        )
        raise BackendUnavailableError(message) from error


def check_reachable(master: str) -> None:
    """Ask for a plain connection first: the library tries for a minute and a half before it gives up.

    Raises:
        TransportError: Nobody listens there.
    """
    if "://" in master:
        return  # found through a metadata service
    try:
        host, port = split_address(master)
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except (OSError, ValueError) as error:
        message = f"cannot reach the Mooncake master at {master!r} ({error}); is mooncake_master running there?"
        raise TransportError(message) from error


def split_address(address: str) -> tuple[str, str]:
    """Return host (without brackets) and port of ``host:port``; the port is empty when there is none."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    if address.count(":") != 1:
        return address, ""
    host, _, port = address.partition(":")
    return host, port
