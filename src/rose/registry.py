"""Names to backends, through entry points: ROSE's own backends and those of other distributions alike.

A distribution offers a backend by an entry point in one of the groups ``rose.serving``, ``rose.trainers``,
``rose.transports`` or ``rose.devices``. Nothing is imported until a backend is asked for by name.
"""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, cast, get_args

from rose.errors import BackendUnavailableError, ConfigError
from rose.interfaces import Device, ServingEngine, Trainer, Transport
from rose.types import TransportAddress

Role = Literal["serving", "trainers", "transports", "devices"]

_INTERFACES: dict[Role, type] = {
    "serving": ServingEngine,
    "trainers": Trainer,
    "transports": Transport,
    "devices": Device,
}

_SINGULAR: dict[Role, str] = {
    "serving": "serving",
    "trainers": "trainer",
    "transports": "transport",
    "devices": "device",
}


def names(role: Role) -> tuple[str, ...]:
    """Return the names of the installed backends of a role, sorted. Imports none of them.

    Raises:
        ConfigError: There is no such role.
    """
    return tuple(sorted(_entry_points(role)))


def load(role: Role, name: str) -> type:
    """Import and return the class of a backend.

    Args:
        role: ``serving``, ``trainers``, ``transports`` or ``devices``.
        name: The entry point's name, for example ``vllm``.

    Raises:
        ConfigError: No installed distribution offers that name, two offer it, or what it names is not of the role.
        BackendUnavailableError: The backend is there, but a library that it needs is not; names the extra to install.
    """
    entry_point = _find(role, name)
    try:
        backend = entry_point.load()
    except BackendUnavailableError:
        raise
    except ImportError as error:
        if (error.name or "").partition(".")[0] == entry_point.module.partition(".")[0]:
            raise
        raise BackendUnavailableError(_unavailable(role, entry_point, error)) from error
    except AttributeError as error:
        message = f"the entry point {entry_point.value!r} of {role} backend {name!r} names nothing: {error}"
        raise ConfigError(message) from error
    interface = _INTERFACES[role]
    if not (isinstance(backend, type) and issubclass(backend, interface)):
        message = f"{_SINGULAR[role]} backend {name!r} ({entry_point.value}) is not a subclass of {interface.__name__}"
        raise ConfigError(message)
    return backend


def serving_engine(name: str, /, **options: Any) -> ServingEngine:
    """Make a serving engine by name; ``options`` go to its class. Raises what ``load`` raises."""
    return cast("ServingEngine", _make("serving", name, (), options))


def trainer(name: str, /, *args: Any, **options: Any) -> Trainer:
    """Make a trainer by name, for example ``trainer("fsdp", model)``. Raises what ``load`` raises."""
    return cast("Trainer", _make("trainers", name, args, options))


def transport(name: str, /, **options: Any) -> Transport:
    """Make a transport by name; ``options`` go to its class. Raises what ``load`` raises."""
    return cast("Transport", _make("transports", name, (), options))


def device(name: str, /, **options: Any) -> Device:
    """Make a device by name; ``options`` go to its class. Raises what ``load`` raises."""
    return cast("Device", _make("devices", name, (), options))


def open_transport(address: TransportAddress) -> Transport:
    """Open the store that another process's ``Transport.address()`` describes."""
    return transport(address.name, **dict(address.options))


def _make(role: Role, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    backend = load(role, name)
    parameters = inspect.signature(backend)
    try:
        parameters.bind(*args, **options)
    except TypeError as error:
        message = (
            f"{_SINGULAR[role]} backend {name!r} cannot be made with these options: {error}; it takes {parameters}"
        )
        raise ConfigError(message) from error
    return backend(*args, **options)


def _entry_points(role: Role) -> dict[str, list[EntryPoint]]:
    if role not in _INTERFACES:
        message = f"there is no backend role {role!r}; roles are {', '.join(get_args(Role))}"
        raise ConfigError(message)
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry_point in entry_points(group=f"rose.{role}"):
        found.setdefault(entry_point.name, {}).setdefault(entry_point.value, entry_point)
    return {name: list(offers.values()) for name, offers in found.items()}


def _find(role: Role, name: str) -> EntryPoint:
    installed = _entry_points(role)
    offers = installed.get(name, [])
    if not offers:
        close = get_close_matches(name, installed, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        message = f"no {_SINGULAR[role]} backend is called {name!r}; {hint}installed: {', '.join(sorted(installed)) or 'none'}"
        raise ConfigError(message)
    if len(offers) > 1:
        values = ", ".join(offer.value for offer in offers)
        message = f"{_SINGULAR[role]} backend {name!r} is offered more than once ({values}); uninstall all but one distribution"
        raise ConfigError(message)
    return offers[0]


def _unavailable(role: Role, entry_point: EntryPoint, error: ImportError) -> str:
    what = f"{_SINGULAR[role]} backend {entry_point.name!r} needs a library that cannot be imported ({error})"
    distribution = entry_point.dist
    if distribution is None:
        return what
    stem = entry_point.name.partition("-")[0]
    offered = distribution.metadata.get_all("Provides-Extra") or []
    extras = [extra for extra in offered if extra.partition("-")[0] == stem]
    commands = " or ".join(f"pip install '{distribution.metadata['Name']}[{extra}]'" for extra in extras)
    return f"{what}; {commands}" if extras else f"{what}; install it beside {distribution.metadata['Name']}"
