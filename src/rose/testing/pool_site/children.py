"""The processes beside a site: executors, their lender, and the one that cleans up after all of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from rose.coserving.processes import process_start
from rose.errors import EngineLostError
from rose.testing.pool_site import reaper

_END_S = 20.0
_MAX_LINE_BYTES = 1 << 20


@attrs.define(eq=False)
class Child:
    """A command of ``rose`` that goes on, and tells in JSON lines on its standard output what it does.

    Attributes:
        name: Of its device, or what it is.
        process: It.
    """

    name: str
    process: asyncio.subprocess.Process
    _reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, name: str, *arguments: str) -> Child:
        """Start ``rose ARGUMENTS``; its standard error is the site's."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rose.cli.main", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
        return cls(name, process)

    async def told(self, key: str, *, event: str | None = None) -> Any:
        """Return ``key`` of the first line that has it, and whose event is that, if one is given.

        Raises:
            EngineLostError: The process ended before.
        """
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            said = json.loads(line)
            if key in said and event in (None, said.get("event")):
                self._reading = asyncio.create_task(self._read_on())
                return said[key]
        message = f"{self.name} ended with {await self.process.wait()} before it was up; the site's log says why"
        raise EngineLostError(message)

    async def end(self) -> None:
        """End it: SIGTERM, and SIGKILL where that does not help."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(_END_S):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def _read_on(self) -> None:
        """Take what it still says, so that it never waits for a reader."""
        assert self.process.stdout is not None
        while await self.process.stdout.read(_MAX_LINE_BYTES):
            pass


class Reaper:
    """A site's folder, and the process that removes it, and ends what is named to it, once the site has ended in whatever way."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rose-site-"))
        self._process = subprocess.Popen(
            [sys.executable, "-I", reaper.__file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def name(self, pid: int) -> None:
        """Have a process ended along with the site."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{pid} {process_start(pid)}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Let it do its work, to the end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def reaping() -> Iterator[Reaper]:
    """Give a reaper; closes it."""
    with contextlib.closing(Reaper()) as made:
        yield made
