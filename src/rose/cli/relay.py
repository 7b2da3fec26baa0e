"""``rose relay``: one copy of the weights per serving cluster, as a process."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rose.cli.parsers import add_parser
from rose.cli.signals import told_by_signals
from rose.cli.stores import TOKEN_VARIABLE, check_reach, filled, filled_path, open_store, parse_place, parse_size
from rose.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from rose.backends.memory import StoreServer
    from rose.interfaces.transport import Transport
    from rose.transfer.cluster import ClusterRelay

_CHECK_S = 5.0
_CHECK_POLL_S = 0.1
_CLOSE_POLL_S = 0.1
_REFUSED = "refused the token"

_DESCRIPTION = """\
Fetch each version of the weights once over the link to the trainer's cluster, and serve it to all engines of this one.

Prints one JSON line with the address that engines open by rose.open_transport ("token" in it unless --token-file is given) and, once
SIGTERM or Ctrl-C has ended it, one with what crossed the link.
"""

_EXAMPLES = """\
examples:
  ROSE_UPSTREAM_TOKEN=... rose relay --upstream memory:10.0.0.5:7000 --max-bytes 40G
  rose relay --upstream memory:10.0.0.5:7000:trainer.token --listen 127.0.0.1:7001 --token-file relay.token --max-bytes 40G
  rose relay --upstream mooncake:10.0.0.5:50051 --max-bytes 40G

"""


@attrs.frozen(kw_only=True)
class _Settings:
    """The checked options."""

    upstream: str
    host: str
    port: int
    is_public: bool
    max_bytes: int
    token_file: Path | None
    pointer: str
    is_following: bool


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``relay`` to the command line."""
    parser = add_parser(
        commands,
        "relay",
        summary="one copy of the weights per serving cluster",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    parser.add_argument(
        "--upstream",
        required=True,
        metavar="WHERE",
        help=f"memory:HOST:PORT[:TOKEN-FILE] (the token is in the file, or in {TOKEN_VARIABLE}) or mooncake:HOST:PORT",
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default %(default)s: any free port"
    )
    parser.add_argument("--public", action="store_true", help="allow to listen where other machines can reach it")
    parser.add_argument("--max-bytes", required=True, metavar="N", help="memory for copies, for instance 40G or 32GiB")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the token of this relay: read from it, or written to it if missing",
    )
    parser.add_argument("--pointer", default="current", help="pointer of the publisher to follow (default %(default)s)")
    parser.add_argument("--no-follow", action="store_true", help="fetch only what engines ask for")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes; returns the exit code."""
    max_bytes = parse_size(arguments.max_bytes, option="--max-bytes")
    host, port = parse_place(arguments.listen, option="--listen")
    check_reach(host, is_public=arguments.public)
    pointer = filled(arguments.pointer, option="--pointer")
    token_file = None if arguments.token_file is None else filled_path(arguments.token_file, option="--token-file")
    settings = _Settings(
        upstream=arguments.upstream,
        host=host,
        port=port,
        is_public=arguments.public,
        max_bytes=max_bytes,
        token_file=token_file,
        pointer=pointer,
        is_following=not arguments.no_follow,
    )
    with told_by_signals() as stopped:
        if settings.upstream.startswith("memory:"):  # the other kind is asked when it is opened
            _check_upstream(settings, stopped)
        _serve(settings, stopped)
    return 0


def _serve(settings: _Settings, stopped: threading.Event) -> None:
    from rose.backends.memory import StoreServer  # noqa: PLC0415 - loads numpy
    from rose.transfer.cluster import ClusterRelay  # noqa: PLC0415 - loads numpy

    upstream = open_store(settings.upstream, os.environ, option="--upstream")
    relay = ClusterRelay(upstream, max_bytes=settings.max_bytes)
    try:
        token = _token(settings.token_file)
        server = StoreServer(relay, settings.host, settings.port, is_public=settings.is_public, token=token)
        try:
            relay.advertise(server.address())
            if settings.is_following and not stopped.is_set():
                relay.follow(pointer=settings.pointer)
            _print({"name": "memory", **_shown(server.address().options, settings.token_file)})
            stopped.wait()
        finally:
            _end(relay, server, upstream)
        stats = relay.stats
        _print({**attrs.asdict(stats), "redundancy": stats.redundancy})
    finally:
        relay.close()
        upstream.close()


def _check_upstream(settings: _Settings, stopped: threading.Event) -> None:
    """Read the pointer once, so that a wrong token or name is told at once; what may pass is tried again for a few seconds.

    Returns early when a signal came.

    Raises:
        ConfigError: The store cannot be read.
    """
    store = open_store(settings.upstream, os.environ, option="--upstream", options={"timeout_s": _CHECK_S})
    found: list[TransportError] = []
    arguments = (store, settings.pointer, stopped, found)
    checker = threading.Thread(target=_read_once, args=arguments, name="rose-relay-check", daemon=True)
    checker.start()
    while checker.is_alive() and not stopped.is_set():
        checker.join(_CHECK_POLL_S)
    store.close()
    if found and not stopped.is_set():
        reason = str(found[0])
        if _REFUSED in reason:
            reason = f"the store refused the token; put the store's own into {TOKEN_VARIABLE} or into a file (memory:HOST:PORT:FILE)"
        message = f"--upstream {settings.upstream}: {reason}"
        raise ConfigError(message) from found[0]


def _read_once(store: Transport, pointer: str, stopped: threading.Event, found: list[TransportError]) -> None:
    deadline_s = time.monotonic() + _CHECK_S
    while True:
        try:
            store.read_pointer(pointer)
        except TransportError as error:
            if _is_lasting(error) or time.monotonic() >= deadline_s:
                found.append(error)
                return
        else:
            return
        if stopped.wait(_CHECK_POLL_S):
            return


def _is_lasting(error: TransportError) -> bool:
    """Return whether waiting cannot help: there is no such host, or the token is wrong."""
    cause = error.__cause__
    is_unknown = isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN
    return is_unknown or _REFUSED in str(error)


def _end(relay: ClusterRelay, server: StoreServer, upstream: Transport) -> None:
    """End what is served and followed, also when the origin answers nobody; a name that is being looked up is waited for.

    Closing the origin's transport ends what waits for it. A request that had passed the relay's last look at the interruption,
    but not reached the transport, would open it again, so it is closed until nothing is left.
    """
    relay.interrupt()
    with ThreadPoolExecutor(1, "rose-relay-end") as threads:
        ending = threads.submit(_close_both, relay, server)
        is_over = False
        while not is_over:
            upstream.close()
            is_over = bool(wait([ending], timeout=_CLOSE_POLL_S).done)
        ending.result()


def _close_both(relay: ClusterRelay, server: StoreServer) -> None:
    try:
        relay.close()
    finally:
        server.close()


def _token(path: Path | None) -> str | None:
    """Return this relay's own token, from its file, which is made when missing; ``None`` for a new one without a file."""
    from rose import registry  # noqa: PLC0415 - loads numpy

    return None if path is None else registry.read_or_make_token(path)


def _shown(options: tuple[tuple[str, Any], ...], token_file: Path | None) -> dict[str, Any]:
    """Return an address's options as they are printed: with the file's name in place of the token, where there is one."""
    shown = dict(options)
    if token_file is not None:
        del shown["token"]
        shown["token_file"] = str(token_file.resolve())
    return shown


def _print(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
