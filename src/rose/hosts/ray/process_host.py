"""A ``rose`` command that runs on a node as a process of its own, beside the actor that watches it.

Invariants: the process is asked to end (SIGTERM) when the host is closed, and by the kernel when the host's process is gone; one that ended by
itself is started again, later and later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import deque
from typing import Any

from rose import registry
from rose.errors import TransportError
from rose.hosts.ray.specs import ProcessSpec
from rose.policies.node_placement import PartRole
from rose.types import TransportAddress

_logger = logging.getLogger(__name__)
_START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 20.0
_NUM_KEPT_LINES = 20
_RESTART_MAX_S = 60.0
_READY = {PartRole.EXECUTOR: ("url", "event"), PartRole.RELAY: ("name", "port")}
_EXTRA = {PartRole.EXECUTOR: ("--json",), PartRole.RELAY: ()}


class ProcessHost:
    """Has one process."""

    def __init__(self, spec: ProcessSpec, *, host: str, node_id: str = "", restart_s: float = 1.0) -> None:
        """Describe it; nothing is started.

        Args:
            spec: Of the process.
            host: Address of this node, for ``{host}`` in the arguments.
            node_id: Where this is.
            restart_s: How long to wait before a process that ended is started again, at first; doubles up to a minute.
        """
        self._restart_s = restart_s
        self._spec = spec
        self._host = host
        self._node_id = node_id
        self._process: asyncio.subprocess.Process | None = None
        self._said: dict[str, Any] = {}
        self._last_lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._readers: list[asyncio.Task[None]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def ready(self) -> dict[str, Any]:
        """Return what the process said when it was ready, once it is; start it where it does not run.

        Returns:
            Of ``rose serve``: ``url`` and ``engine_id``; of ``rose relay``: the address of its store.

        Raises:
            TransportError: It ended before; the message has its last words.
        """
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                await self._start()
            if self._keeper is None:
                self._keeper = asyncio.create_task(self._keep())
            return dict(self._said)

    async def address(self) -> TransportAddress:
        """Return the address of a relay's store, once it serves."""
        return registry.read_address(await self.ready())

    async def node(self) -> str:
        """Return the node that it runs on."""
        return self._node_id

    async def close(self) -> None:
        """End the process. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        async with self._lock:
            await self._end()

    async def _keep(self) -> None:
        """Start the process again whenever it has ended."""
        wait_s = self._restart_s
        while True:
            process = self._process
            if process is not None and process.returncode is None:
                await process.wait()
            await asyncio.sleep(wait_s)
            try:
                await self.ready()
            except TransportError as error:
                _logger.warning("%s", error)
                wait_s = min(2 * wait_s, _RESTART_MAX_S)
            else:
                wait_s = self._restart_s

    async def _start(self) -> None:
        await self._end()
        self._said.clear()
        self._last_lines.clear()
        arguments = [each.replace("{host}", self._host) for each in self._spec.arguments]
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rose.hosts.ray.tied", str(os.getpid()), *arguments, *_EXTRA[self._spec.role]),
            env={**os.environ, **self._spec.environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        is_ready = asyncio.get_running_loop().create_future()
        self._readers = [
            asyncio.create_task(self._listen(process.stdout, is_ready)),
            asyncio.create_task(self._listen(process.stderr, None)),
        ]
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await asyncio.wait({is_ready, *self._readers[:1]}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        if not is_ready.done():
            is_ready.cancel()
            await asyncio.sleep(0.1)  # for its last words
            await self._end()
            words = " | ".join(self._last_lines)
            message = (
                f"`rose {' '.join(arguments)}` on node {self._node_id} did not get ready: {words or 'it said nothing'}"
            )
            raise TransportError(message)

    async def _listen(self, stream: asyncio.StreamReader | None, is_ready: asyncio.Future[None] | None) -> None:
        assert stream is not None  # noqa: S101 - both are pipes
        async for line in stream:
            text = line.decode(errors="replace").rstrip()
            said: Any = None
            with contextlib.suppress(ValueError):
                said = json.loads(text)
            is_it = isinstance(said, dict) and all(key in said for key in _READY[self._spec.role])
            if is_ready is not None and is_it and not is_ready.done():
                self._said = {key: value for key, value in said.items() if key != "event"}
                is_ready.set_result(None)
            elif not isinstance(said, dict) or "text" in said:
                self._last_lines.append(text if said is None else str(said["text"]) if isinstance(said, dict) else text)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._readers = []
