"""An SGLang server that is started for one engine, and ends with it.

Invariants:

* The server lives no longer than this process: a keeper process ends it when the pipe to it closes, however this process ends.
* Until the server has made a token (``SglangOptions.has_warm_up``), and from its end on, every call raises ``EngineLostError``.
* A start that fails or is cancelled leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rose.backends.sglang import keeper
from rose.backends.sglang.engine import SglangEngine
from rose.backends.sglang.options import SglangOptions
from rose.config import load
from rose.errors import EngineError, EngineLostError
from rose.interfaces import Clock

_LOOK_S = 0.25
_PORT_TAKEN = "address already in use"
_END_S = 10.0
_TAIL_CHARS = 2000


class LaunchedSglang(SglangEngine):
    """One server of SGLang on this machine.

    Args:
        options: The server to start.
        clock: For the time stamps of snapshots.
    """

    def __init__(self, options: SglangOptions, *, clock: Clock | None = None) -> None:
        version = None if options.initial_version is None else str(options.initial_version)
        super().__init__(
            "http://127.0.0.1:0",
            engine_id=options.engine_id,
            version=version,
            timeout_s=options.timeout_s,
            update_timeout_s=options.update_timeout_s,
            clock=clock,
        )
        self.options = options
        self._lost = "it was not started"
        self._keeper: asyncio.subprocess.Process | None = None
        self._end: asyncio.Task[None] | None = None
        self._log: Path | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, clock: Clock) -> Self:
        """Make an engine, not started yet, from fields of ``SglangOptions`` as plain data.

        Raises:
            ConfigError: One line a wrong field.
        """
        return cls(load(SglangOptions, options), clock=clock)

    @property
    def pid(self) -> int:
        """Return the id of the process that keeps the server."""
        if self._keeper is None:
            message = f"engine {self.engine_id} was not started"
            raise EngineLostError(message)
        return self._keeper.pid

    @property
    def log_path(self) -> Path | None:
        """Return where the server's output is, once it was started."""
        return self._log

    async def start(self) -> None:
        """Start the server, load the model and make a token; returns when the engine serves.

        Raises:
            EngineLostError: It did not start; the message has the end of its output.
        """
        if self._keeper is not None:
            message = f"engine {self.engine_id} was started already; close it first"
            raise EngineError(message)
        try:
            async with asyncio.timeout(self.options.start_timeout_s):
                await self._launch_until_up()
                if self.options.has_warm_up:
                    await self._warm_up()
        except TimeoutError as error:
            message = f"engine {self.engine_id} did not start within {self.options.start_timeout_s} s: {self._tail()}"
            await self.close()
            raise EngineLostError(message) from error
        except BaseException:
            await self.close()
            raise
        self._lost = None

    async def _launch_until_up(self) -> None:
        """Start the server on a free port; on another one, should somebody else have taken that meanwhile."""
        while True:
            await self._launch()
            try:
                await self._until_up()
            except EngineLostError:
                if _PORT_TAKEN not in self._tail():
                    raise
            else:
                return

    async def _launch(self) -> None:
        port = _free_port()
        await self._client.close()
        self.url = f"http://127.0.0.1:{port}"
        self._connect()
        environment = self.options.server_environment(os.environ)
        folder = environment["TMPDIR"] = tempfile.mkdtemp(prefix="rose-sglang-")
        self._log = Path(self.options.log_path or _temporary_log())
        try:
            with self._log.open("wb") as log:
                self._keeper = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", keeper.__file__, folder, *self.options.command(port)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            message = f"engine {self.engine_id} did not start: {error}"
            raise EngineLostError(message) from error
        self._end = asyncio.create_task(self._watch_process(self._keeper), name=f"end of {self.engine_id}")

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        self._lost = f"its server ended with status {status}; see {self._log}"
        self._end_streams(EngineLostError(f"engine {self.engine_id} is gone: {self._lost}"))

    async def _until_up(self) -> None:
        while True:
            with contextlib.suppress(EngineError):
                await self._control.beat()
                return
            if self._end is None or self._end.done():
                message = f"engine {self.engine_id} did not start: {self._tail()}"
                raise EngineLostError(message)
            await asyncio.sleep(_LOOK_S)

    async def _warm_up(self) -> None:
        """Make a token: the first step may take seconds, in which no heartbeat is answered."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        await self._client.post("/generate", body, timeout_s=self.options.start_timeout_s)

    def _tail(self) -> str:
        """Return the end of the server's output."""
        try:
            text = "" if self._log is None else self._log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"its output cannot be read: {error}"
        return f"the end of {self._log}:\n{text[-_TAIL_CHARS:].strip()}"

    async def close(self) -> None:
        """End the server and everything of it. Idempotent."""
        has_served = self._lost is None
        await super().close()
        process, self._keeper = self._keeper, None
        if process is None:
            return
        if self._lost is None or self._end is None or not self._end.done():
            self._lost = "it was closed"
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()
        if self._end is not None:
            await asyncio.wait({self._end})
        self._lost = "it was closed"
        if has_served and self._log is not None and self.options.log_path is None:
            self._log.unlink(missing_ok=True)


def _temporary_log() -> str:
    descriptor, path = tempfile.mkstemp(prefix="rose-sglang-", suffix=".log")
    os.close(descriptor)
    return path


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as place:
        return int(place.getsockname()[1])
