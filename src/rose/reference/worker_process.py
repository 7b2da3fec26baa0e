"""A child process that answers JSON lines, seen from asyncio.

Life cycle
    1. [PARENT] ``start`` runs ``python -m module`` with pipes; the child finds the same modules as the parent.
    2. [PARENT] ``ask`` writes one JSON line; several may be under way.
    3. [CHILD] answers every line, in order, with one line ``{"ok": value}`` or ``{"error": text}``. Its standard error is free text.
    4. [PARENT] ``close`` closes the child's standard input; the child ends by itself, or is ended after ``timeout_s``.

Invariants: every answer goes to the oldest unanswered question; when the child ends, all unanswered and all later questions
fail with its name, its exit code and its last error lines, also when its own children live on and hold its pipes open; a
cancelled question never shifts the answers of the others. A child is in a process group of its own: an interrupt from the
terminal reaches the parent alone, which closes it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, cast

from rose.errors import RoseError

_NUM_KEPT_ERROR_LINES = 20
_LAST_WORDS_S = 0.5


class WorkerProcess(asyncio.SubprocessProtocol):
    """The parent's end of one child. Make it with ``start``."""

    def __init__(self, name: str, error_type: type[RoseError]) -> None:
        self.name = name
        self._error_type = error_type
        self._transport: asyncio.SubprocessTransport | None = None
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._unread = bytearray()
        self._error_text = bytearray()
        self._ended = asyncio.Event()

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str] = (),
        *,
        name: str,
        error_type: type[RoseError],
        environ: Mapping[str, str] | None = None,
    ) -> WorkerProcess:
        """Start ``python -m module``; failures of the child are raised as ``error_type``."""
        paths = os.pathsep.join(path for path in sys.path if path)
        loop = asyncio.get_running_loop()
        _, worker = await loop.subprocess_exec(
            lambda: cls(name, error_type),
            *(sys.executable, "-m", module, *arguments),
            process_group=0,
            env={**os.environ, "PYTHONPATH": paths, **(environ or {})},
        )
        return worker

    @property
    def pid(self) -> int:
        """Return the child's process id."""
        return cast("asyncio.SubprocessTransport", self._transport).get_pid()

    @property
    def has_ended(self) -> bool:
        """Return whether the child is gone."""
        return self._ended.is_set()

    def post(self, request: object) -> asyncio.Future[Any]:
        """Send one request; the future becomes its answer, or fails as ``ask`` says."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._transport is None or self.has_ended:
            future.set_exception(self._error_type(self._death_notice()))
            return future
        self._waiting.append(future)
        pipe = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))
        pipe.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")
        return future

    async def ask(self, request: object) -> Any:
        """Send one request and wait for its answer.

        Raises:
            RoseError: Of the type given to ``start``: the child answered with an error, or is gone.
        """
        return await self.post(request)

    async def close(self, timeout_s: float = 10.0) -> None:
        """End the child; idempotent."""
        if self._transport is None:
            return
        pipe = self._transport.get_pipe_transport(0)
        if pipe is not None:
            pipe.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            self.kill()
            await self._ended.wait()
        finally:
            self._transport.close()

    def kill(self) -> None:
        """End the child at once."""
        if self._transport is not None and self._transport.get_returncode() is None:
            self._transport.kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (called by the event loop)."""
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Collect answers and error text (called by the event loop)."""
        if fd != 1:
            self._error_text += data
            del self._error_text[:-65536]
            return
        self._unread += data
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        for line in lines:
            self._answer(line)

    def process_exited(self) -> None:
        """Give the last output a moment, then wait no longer for the pipes (called by the event loop)."""
        if self._transport is not None:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail whatever is still unanswered (called by the event loop after the last output)."""
        del exc
        self._ended.set()
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(self._error_type(self._death_notice()))

    def _answer(self, line: bytearray) -> None:
        try:
            reply, future = json.loads(line), self._waiting.popleft()
        except (ValueError, IndexError):  # no answer, or none was asked for: nothing that follows can be trusted
            self._error_text += b"it wrote to its answers: " + line[:200] + b"\n"
            self.kill()
            return
        if future.done():
            return
        if "error" in reply:
            future.set_exception(self._error_type(f"{self.name}: {reply['error']}"))
        else:
            future.set_result(reply["ok"])

    def _death_notice(self) -> str:
        code = None if self._transport is None else self._transport.get_returncode()
        lines = self._error_text.decode(errors="replace").strip().splitlines()[-_NUM_KEPT_ERROR_LINES:]
        said = "\n".join(lines) or "(it wrote nothing to standard error)"
        return f"{self.name} ended with code {code}; its last lines:\n{said}"


def take_over_stdout() -> TextIO:
    """Return a private stream for answers; from here on ``print`` and libraries in this child write to standard error."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers
