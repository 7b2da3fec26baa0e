"""Where a job's pool is, as a framework's processes are told."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import attrs

from rose import checks
from rose.backends.remote.client import HttpClient
from rose.errors import ConfigError, RoseError, TransportError
from rose.interfaces import Transport
from rose.pool.remote_pool import RemotePool
from rose.pool.store_offer import StoreOffer
from rose.registry import open_transport, read_token
from rose.sync import RolloutPool as SyncPool

_URL_VARIABLE, _TOKEN_VARIABLE = "ROSE_POOL", "ROSE_POOL_TOKEN_FILE"
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class PoolPlace:
    """The address of a pool's service.

    Attributes:
        url: ``http://HOST:PORT``, as ``rose pool`` prints it.
        token: The bearer token, where it asks for one.
    """

    url: str = attrs.field(validator=checks.text(r"https?://[^\s/]+(/\S*)?"))
    token: str | None = attrs.field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        url: str | None = None,
        token_file: Path | str | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        option: str = _URL_VARIABLE,
    ) -> Self:
        """Read the place from a framework's configuration, or else from ``ROSE_POOL`` and ``ROSE_POOL_TOKEN_FILE``.

        Args:
            url: What the configuration says; nothing for ``None`` or an empty text.
            token_file: A file with the bearer token.
            environ: Where the variables are looked up.
            option: How the user names the address in that framework; complaints say so.

        Raises:
            ConfigError: Nobody said, what was said is no address, or the token cannot be read.
        """
        place = url or environ.get(_URL_VARIABLE)
        if not place:
            message = (
                f"no pool was named: set {option} to the address that `rose pool job.toml` prints, for instance http://127.0.0.1:7100"
                + ("" if option == _URL_VARIABLE else f" (or the variable {_URL_VARIABLE})")
            )
            raise ConfigError(message)
        path = token_file or environ.get(_TOKEN_VARIABLE)
        token = read_token(path) if path else None
        try:
            return cls(url=place.rstrip("/"), token=token)
        except ValueError as error:
            message = f"{option} = {place!r} is no address of a pool; give http://HOST:PORT, as `rose pool` prints it"
            raise ConfigError(message) from error

    def connect(self, **options: Any) -> RemotePool:
        """Return the pool's face for this process and event loop, to be used as an async context manager."""
        return RemotePool(self.url, token=self.token, **options)

    def connect_sync(self, **options: Any) -> SyncPool:
        """Return the pool's blocking face, open."""
        return SyncPool.connect(self.url, token=self.token, **options)

    def check(self, *, timeout_s: float = 10.0) -> Mapping[str, Any]:
        """Ask the pool how it is; blocks, and may be called from anywhere. Returns what ``GET /v1/pool`` answers.

        Raises:
            TransportError: No pool answers there.
            ConfigError: It does not let this process in.
        """
        try:
            answer: Mapping[str, Any] = self.call("GET", "/v1/pool", timeout_s=timeout_s)
        except ConfigError as error:
            message = f"the pool at {self.url} does not let this process in ({error}): name the file with its token where the address is given, or in {_TOKEN_VARIABLE}"
            raise ConfigError(message) from error
        except RoseError as error:
            message = f"no pool answers at {self.url} ({error}): start it with `rose pool job.toml`, or give the address that it printed"
            raise TransportError(message) from error
        return answer

    def open_store(self, *, timeout_s: float = 30.0) -> tuple[Transport, StoreOffer]:
        """Open the store that the pool names, for a trainer; blocks. Returns it and what the pool said of it.

        Raises:
            ConfigError: The pool knows of no store.
            TransportError: Pool or store cannot be reached.
        """
        offer = StoreOffer.from_wire(self.call("GET", "/v1/store", timeout_s=timeout_s))
        return open_transport(offer.address), offer

    def call(self, method: str, path: str, body: object = None, *, timeout_s: float) -> Any:
        """Call the pool's service once and wait for the answer, also where an event loop runs.

        Raises:
            RoseError: What it answered; ``TransportError`` when it cannot be reached within ``timeout_s``.
        """
        return in_thread(self._call(method, path, body, timeout_s))

    async def _call(self, method: str, path: str, body: object, timeout_s: float) -> Any:
        client = HttpClient(self.url, token=self.token, timeout_s=timeout_s, unreachable=TransportError)
        try:
            return await client.call(method, path, body)
        finally:
            await client.close()


def in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop and a thread of its own, and wait for it."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            failed.append(error)

    thread = threading.Thread(target=run, name="rose-call", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
