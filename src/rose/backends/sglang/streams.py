"""One request under way: its connection, and the ways in which it ends.

Invariants:

* A stream ends once: by the server's last event, by ``cut``, or by an error.
* What came before a cut is handed out.
* A connection that breaks under a request that was aborted has ended it: SGLang fails over some aborts of requests that wait.
"""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import attrs

from rose.backends.openai.client import OK
from rose.backends.sglang.answers import refused_request
from rose.backends.sglang.client import SglangClient
from rose.backends.sglang.outputs import EventReader
from rose.errors import EngineError
from rose.types import EngineId

_TAIL_S = 1.0
_BROKEN = (aiohttp.ClientError, OSError, RuntimeError)
"""What reading from a connection that is gone raises; a ``TimeoutError`` is an ``OSError``."""


@attrs.define(eq=False)
class Stream:
    """See the module's text.

    Attributes:
        rid: The server's name of the request.
        engine_id: Named in errors.
        reader: Of its events; there is one once the request was looked at.
        is_aborted: Somebody ended it; what comes last is ``ABORTED``.
        lost: Why there will be no answer.
    """

    rid: str
    engine_id: EngineId
    reader: EventReader | None = None
    is_aborted: bool = False
    lost: EngineError | None = None
    _answer: aiohttp.ClientResponse | None = None
    _scope: asyncio.Timeout | None = None
    _is_cut: bool = False
    _leftover: bytes = b""
    _alarm: asyncio.TimerHandle | None = None

    @property
    def num_tokens(self) -> int:
        """Return how many tokens were handed out."""
        return 0 if self.reader is None else self.reader.num_tokens

    @property
    def is_with_scheduler(self) -> bool:
        """Return whether the server's scheduler surely has the request, so that an abort finds it."""
        return self.reader is not None and self.reader.num_events > 0

    async def begin(self, client: SglangClient, body: bytes) -> None:
        """Send the request and wait until its answer begins; a cut ends the wait.

        Raises:
            EngineError: What the server's refusal means, or its loss.
        """
        status, refusal = OK, b""
        try:
            async with asyncio.timeout(None) as self._scope:
                if self._is_cut:
                    return
                self._answer = await client.stream(body)
                status = self._answer.status
                if status != OK:
                    refusal = await self._answer.read()
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError among them
            if not self._was_ended():
                raise client.lost(error) from error
        finally:
            self._scope = None
        if status != OK:
            raise refused_request(status, refusal)

    async def next(self, client: SglangClient) -> bytes:
        """Return what came next; nothing once it was cut, or the connection ended after an abort.

        Raises:
            EngineError: The connection ended before the stream did.
        """
        if self._answer is None or self._is_cut:
            leftover, self._leftover = self._leftover, b""
            return leftover
        try:
            data = await self._answer.content.readany()
        except _BROKEN as error:
            if self._was_ended():
                return b""
            raise client.lost(error) from error
        if not data and not self._was_ended():
            message = (
                f"engine {self.engine_id} broke a stream off after {self.num_tokens} tokens: the connection was closed without a finish "
                "reason"
            )
            raise EngineError(message)
        return data

    def _was_ended(self) -> bool:
        """Return whether it was cut or aborted by now; somebody else may have done that meanwhile."""
        return self._is_cut or self.is_aborted

    def cut(self) -> None:
        """Close the connection, upon which the server drops the request wherever it is."""
        if self._is_cut:
            return
        self._is_cut = True
        if self._answer is not None:
            with contextlib.suppress(
                RuntimeError, aiohttp.ClientError, OSError
            ):  # somebody waits for it: nothing is there
                self._leftover = self._answer.content.read_nowait()
            self._answer.close()
        elif self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def cut_after(self, wait_s: float) -> None:
        """Cut it then, unless it has ended by itself."""
        if self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(wait_s, self.cut)

    async def finish(self) -> None:
        """Read the answer to its end, so that its connection can be used again; gives up soon."""
        if self._answer is None or self._is_cut or self.reader is None or self.reader.is_cut or self.reader.is_done:
            return
        with contextlib.suppress(*_BROKEN):
            async with asyncio.timeout(_TAIL_S):
                while data := await self._answer.content.readany():
                    self.reader.feed(data)

    def release(self) -> None:
        """Let go of the connection; it is closed unless the answer was read to its end."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._answer is not None:
            self._answer.release()
