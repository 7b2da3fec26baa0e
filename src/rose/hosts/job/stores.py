"""The store that a job's trainer publishes to: kept by it, by the pool, or by others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rose import registry
from rose.backends.memory import MemoryTransport
from rose.errors import ConfigError
from rose.hosts.http.server import parse_place
from rose.hosts.job.config import JobConfig, TransportConfig
from rose.interfaces import Transport
from rose.pool.store_offer import StoreOffer


@contextlib.contextmanager
def open_store(config: TransportConfig) -> Iterator[Transport]:
    """Open the store as its keeper: one that is kept in memory is made and served.

    Raises:
        ConfigError: The address or the token's file is of no use.
        TransportError: The port is taken.
    """
    if config.address is not None:
        store = registry.open_transport(config.address)
    else:
        place = parse_place(config.place)
        token = None if config.token_file is None else registry.read_or_make_token(config.token_file)
        owned = MemoryTransport()
        owned.serve(place.host, place.ports[0], is_public=not place.is_loopback, token=token)
        store = owned
    with contextlib.closing(store):
        yield store


@contextlib.contextmanager
def offer_store(config: JobConfig) -> Iterator[StoreOffer | None]:
    """Give what the pool of a job tells its trainers of the store; a store that the pool keeps is served meanwhile.

    Raises:
        ConfigError: The address, the token's file or the model's configuration is of no use.
        TransportError: The port is taken.
    """
    transport = config.transport
    if transport.address is None and transport.keeper != "pool":
        yield None
        return
    model = _model_numbers(config.model.path) if transport.targets else {}
    if transport.address is not None:
        yield StoreOffer(address=registry.read_address(transport.address), targets=transport.targets, model=model)
        return
    with open_store(transport) as store:
        yield StoreOffer(address=store.address(), targets=transport.targets, model=model)


def _model_numbers(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        message = f"transport.targets needs the numbers of the model, but {path} cannot be read: {error}"
        raise ConfigError(message) from error
