"""The store that a job's trainer publishes to: served by it, or kept by others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rose import registry
from rose.backends.memory import MemoryTransport
from rose.hosts.http.server import parse_place
from rose.hosts.job.config import TransportConfig
from rose.interfaces import Transport


@contextlib.contextmanager
def open_store(config: TransportConfig) -> Iterator[Transport]:
    """Open the store as its trainer: one that it keeps itself is made and served.

    Raises:
        ConfigError: The address or the token's file is of no use.
        TransportError: The port is taken.
    """
    if config.address is not None:
        store = registry.open_transport(config.address)
    else:
        place = parse_place(config.listen or "")
        token = None if config.token_file is None else registry.read_or_make_token(config.token_file)
        owned = MemoryTransport()
        owned.serve(place.host, place.ports[0], is_public=not place.is_loopback, token=token)
        store = owned
    with contextlib.closing(store):
        yield store
