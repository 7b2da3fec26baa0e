"""A client's WebSocket to a pool, which comes back when it breaks.

Invariants:

* There is at most one connection. Whoever needs to know is told when one opens; nothing is sent before that.
* Retries wait, longer each time up to a bound, stretched at random. After ``reconnect_s`` without a connection, ``on_down`` hears of it,
  once for each such time.
* What the pool refuses for good (no such token, no such route) is not tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from rose.backends.remote.wire import bearer, compact
from rose.errors import ConfigError, RoseError, TransportError
from rose.pool import direct

_FIRST_S = 0.05
_LONGEST_S = 2.0
_PING_S = 15.0
_CLOSE_S = 2.0
_REFUSED = frozenset({400, 401, 403, 404})


class Link:
    """The connection of one client process.

    Args:
        url: Of the pool's service.
        token: The bearer token, if it asks for one.
        session_id: The client's own name, the same for every connection.
        on_message: Called with each message.
        on_open: Awaited when a connection opened, before any message is read.
        on_down: Called when there was none for ``reconnect_s``, or there will be none.
        reconnect_s: How long is tried.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        session_id: str,
        on_message: Callable[[list[Any]], None],
        on_open: Callable[[], Awaitable[None]],
        on_down: Callable[[RoseError], None],
        reconnect_s: float,
    ) -> None:
        self._url = url
        self._headers = {direct.SESSION_HEADER: session_id, **bearer(token)}
        self._on_message = on_message
        self._on_open = on_open
        self._on_down = on_down
        self._reconnect_s = reconnect_s
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()
        self.num_connections = 0
        self.last_error: RoseError | None = None

    async def run(self) -> None:
        """Keep connected until ``close``."""
        loop = asyncio.get_running_loop()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._reconnect_s)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            down_since_s, wait_s = loop.time(), _FIRST_S
            while not self._closing.is_set():
                num_before = self.num_connections
                why = self.last_error = await self._connect(session)
                if self.num_connections > num_before:
                    down_since_s, wait_s = loop.time(), _FIRST_S
                is_long = loop.time() - down_since_s >= self._reconnect_s
                if not self._closing.is_set() and (isinstance(why, ConfigError) or is_long):
                    self._on_down(why)
                    down_since_s = loop.time()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s * random.uniform(0.5, 1.0)):
                        await self._closing.wait()
                wait_s = min(_LONGEST_S, 2 * wait_s)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._opened.is_set()

    async def wait_until_open(self) -> None:
        """Return once there is a connection."""
        await self._opened.wait()

    async def send(self, message: list[Any]) -> None:
        """Send if there is a connection; what is not sent is made up for by ``on_open``."""
        socket = self._socket
        if socket is not None and not socket.closed:
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await socket.send_str(compact(message))

    async def close(self) -> None:
        """Say good-bye and stop. ``run`` ends."""
        self._closing.set()
        if self._socket is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._socket.close()

    async def _connect(self, session: aiohttp.ClientSession) -> RoseError:
        """Connect and read until the connection ends; returns why."""
        try:
            async with session.ws_connect(
                self._url + direct.PATH, heartbeat=_PING_S, compress=0, max_msg_size=0
            ) as socket:
                self._socket = socket
                self.num_connections += 1
                await self._on_open()
                self._opened.set()
                async for frame in socket:
                    self._on_message(json.loads(frame.data))
                reason = f"the pool closed the connection ({socket.close_code})"
        except aiohttp.WSServerHandshakeError as error:
            if error.status in _REFUSED:
                return ConfigError(
                    f"the pool at {self._url} refuses this client: {error.status} {error.message}; check URL and token"
                )
            reason = f"it answered with status {error.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        except (ValueError, TypeError, KeyError, IndexError) as error:
            reason = f"what it says is not understood: {error!r}; is it of the same version?"
        finally:
            self._socket = None
            self._opened.clear()
        return TransportError(f"the pool at {self._url} cannot be reached ({reason}); is the process alive?")
