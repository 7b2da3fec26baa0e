"""``rose relay``: one copy of the weights per serving cluster, as a process."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rose.cli.stores import TOKEN_VARIABLE, open_store, parse_place, parse_size, read_token
from rose.errors import ConfigError

_DESCRIPTION = """\
Fetch each version of the weights once over the link to the trainer's cluster, and serve it to all engines of this one.

Prints one JSON line with the address that engines open ("token" in it unless --token-file is given) and, once SIGTERM or
Ctrl-C has ended it, one with what crossed the link.
"""

_EXAMPLES = """\
examples:
  ROSE_UPSTREAM_TOKEN=... rose relay --upstream memory:10.0.0.5:7000 --max-bytes 40G
  rose relay --upstream memory:10.0.0.5:7000:trainer.token --listen 127.0.0.1:7001 --token-file relay.token --max-bytes 40G
  rose relay --upstream mooncake:10.0.0.5:50051 --max-bytes 40G

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``relay`` to the command line."""
    parser = commands.add_parser(
        "relay",
        help="one copy of the weights per serving cluster",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--upstream",
        required=True,
        metavar="WHERE",
        help=f"memory:HOST:PORT[:TOKEN-FILE] (the token is in the file, or in {TOKEN_VARIABLE}) or mooncake:MASTER",
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default %(default)s: any free port"
    )
    parser.add_argument("--public", action="store_true", help="allow to listen where other machines can reach it")
    parser.add_argument("--max-bytes", required=True, metavar="N", help="memory for copies, for instance 40G or 32GiB")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the token of this relay: read from it, or written to it if missing",
    )
    parser.add_argument("--pointer", default="current", help="pointer of the publisher to follow (default %(default)s)")
    parser.add_argument("--no-follow", action="store_true", help="fetch only what engines ask for")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes; returns the exit code."""
    from rose.backends.memory import StoreServer  # noqa: PLC0415 - loads numpy
    from rose.transfer.cluster import ClusterRelay  # noqa: PLC0415 - loads numpy

    max_bytes = parse_size(arguments.max_bytes, option="--max-bytes")
    host, port = parse_place(arguments.listen, option="--listen")
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    upstream = open_store(arguments.upstream, os.environ, option="--upstream")
    relay = ClusterRelay(upstream, max_bytes=max_bytes)
    try:
        token = _token(arguments.token_file)
        server = StoreServer(relay, host, port, is_public=arguments.public, token=token)
        try:
            relay.advertise(server.address())
            if not arguments.no_follow:
                relay.follow(pointer=arguments.pointer)
            _print({"name": "memory", **_shown(server.address().options, arguments.token_file)})
            stopped.wait()
        finally:
            relay.interrupt()
            upstream.close()  # ends what waits for the origin, which the server would wait for
            server.close()
        stats = relay.stats
        _print({**attrs.asdict(stats), "redundancy": stats.redundancy})
    finally:
        relay.close()
        upstream.close()
    return 0


def _token(path: Path | None) -> str | None:
    """Return this relay's own token, from its file, which is made when missing; ``None`` for a new one without a file."""
    if path is None:
        return None
    if path.exists():
        return read_token(path)
    token = os.urandom(16).hex()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
    except OSError as error:
        message = f"cannot write the token to {path}: {error.strerror}; give a path that can be written"
        raise ConfigError(message) from error
    return token


def _shown(options: tuple[tuple[str, Any], ...], token_file: Path | None) -> dict[str, Any]:
    """Return an address's options as they are printed: with the file's name in place of the token, where there is one."""
    shown = dict(options)
    if token_file is not None:
        del shown["token"]
        shown["token_file"] = str(token_file)
    return shown


def _print(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
