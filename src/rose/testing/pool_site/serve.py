"""The site's process: its standard input has commands, its standard output answers, each a JSON object a line.

Invariants: nothing but answers reaches the standard output, whatever libraries print; the end of the input, SIGTERM, SIGINT and the death of
the process that started this one all end the site.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from rose.errors import RoseError
from rose.testing.pool_site.options import SiteOptions, parse

_LOOK_S = 0.5
_CLOSE_S = 60.0
_CHUNK_BYTES = 1 << 16
_EXIT_USER_ERROR = 2


def main(arguments: Sequence[str]) -> int:
    """Run a site to its end; returns the exit code."""
    parent = os.getppid()
    try:
        options = parse(arguments)
    except RoseError as error:
        return _complain(error)
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        asyncio.run(_serve(options, out, parent))
    except RoseError as error:
        _write(out, {"error": str(error)})
        return _complain(error)
    return 0


def _complain(error: RoseError) -> int:
    for line in str(error).splitlines():
        sys.stderr.write(f"pool site: error: {line}\n")
    return _EXIT_USER_ERROR


async def _serve(options: SiteOptions, out: int, parent: int) -> None:
    """Serve until the end comes, also while engines still start."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    ended = asyncio.Event()
    working = asyncio.create_task(_work(options, out, lines))
    working.add_done_callback(lambda _: ended.set())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    reading = threading.Thread(target=_read, args=(loop, lines, ended), name="pool-site-commands", daemon=True)
    reading.start()
    watching = asyncio.create_task(_watch(parent, ended))
    await ended.wait()
    watching.cancel()
    working.cancel()  # once: what follows is the closing, which must not be cut short
    done, _ = await asyncio.wait({working}, timeout=_CLOSE_S)
    if not done:
        sys.stderr.write(f"pool site: it did not close within {_CLOSE_S:g} s; what is left is killed\n")
        os._exit(1)
    if not working.cancelled():
        working.result()


async def _watch(parent: int, ended: asyncio.Event) -> None:
    """Notice when the process that started this one is no more: others may have inherited its end of the pipe."""
    while os.getppid() == parent:  # noqa: ASYNC110 - the kernel says so
        await asyncio.sleep(_LOOK_S)
    ended.set()


async def _work(options: SiteOptions, out: int, lines: asyncio.Queue[bytes]) -> None:
    from rose.testing.pool_site.commands import Commands  # noqa: PLC0415 - loads aiohttp
    from rose.testing.pool_site.live import open_site  # noqa: PLC0415 - loads aiohttp

    async with open_site(options) as site:
        commands = Commands(site)
        _write(out, commands.ready())
        while True:
            line = await lines.get()
            if line.strip():
                _write(out, await commands.answer(_decoded(line)))


def _decoded(line: bytes) -> Any:
    """Return a line's object; one that is none is no command either."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _read(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[bytes], ended: asyncio.Event) -> None:
    """Put each line of the standard input into the queue; its end is the site's."""
    rest = b""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        while chunk := _read_some():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(ended.set)


def _read_some() -> bytes:
    """Read from the file itself: at the interpreter's end nobody may hold the lock of ``sys.stdin``."""
    try:
        return os.read(0, _CHUNK_BYTES)
    except OSError:
        return b""


def _write(out: int, answer: Any) -> None:
    rest = json.dumps(answer).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):
        while rest:
            rest = rest[os.write(out, rest) :]
