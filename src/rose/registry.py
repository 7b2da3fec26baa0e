"""Names to backends, through entry points: ROSE's own backends and those of other distributions alike.

A distribution offers a backend by an entry point in one of the groups ``rose.serving``, ``rose.trainers``,
``rose.transports`` or ``rose.devices``. Nothing is imported until a backend is asked for by name.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, cast, get_args

from rose.errors import BackendUnavailableError, ConfigError
from rose.interfaces import Device, ServingEngine, Trainer, Transport
from rose.types import TransportAddress

_ADDRESS_EXAMPLE = '{"name": "memory", "host": "10.1.0.9", "port": 7001, "token_file": "relay.token"}'

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


def check_name(role: Role, name: str) -> None:
    """Check that a backend of that name is installed, without importing it.

    Raises:
        ConfigError: No installed distribution offers it, or two do.
    """
    _find(role, name)


def load(role: Role, name: str) -> type:
    """Import and return the class of a backend.

    Args:
        role: ``serving``, ``trainers``, ``transports`` or ``devices``.
        name: The entry point's name, for example ``vllm``.

    Raises:
        ConfigError: No installed distribution offers that name, two offer it, or what it names is not of the role.
        BackendUnavailableError: The backend is there, but a library that it needs is not; names the extra to install.
    """
    return _loaded(role, _find(role, name))


def load_class(role: Role, path: str) -> type:
    """Import and return the class of a backend that no distribution offers yet. For a path that the user gave, never another process.

    Args:
        role: As of ``load``.
        path: ``module:Class``.

    Raises:
        ConfigError: There is no such module or class, or it is not of the role.
        BackendUnavailableError: A library that it needs is not there.
    """
    entry_point = EntryPoint(name=path, value=path, group=f"rose.{role}")
    try:
        return _loaded(role, entry_point)
    except BackendUnavailableError:
        raise
    except (ImportError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        message = f"cannot import {path!r} ({error}); give module:Class, with the module's folder on PYTHONPATH"
        raise ConfigError(message) from error


def _loaded(role: Role, entry_point: EntryPoint) -> type:
    name = entry_point.name
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


def open_transport(address: TransportAddress | Mapping[str, Any] | str) -> Transport:
    """Open the store that another process describes.

    Args:
        address: What ``Transport.address()`` gives there, or what ``read_address`` reads, such as the line that ``rose relay`` prints.

    Raises:
        ConfigError: It is no address; or what ``load`` raises.
    """
    known = address if isinstance(address, TransportAddress) else read_address(address)
    return transport(known.name, **dict(known.options))


def read_address(text: Mapping[str, Any] | str) -> TransportAddress:
    """Read an address from JSON text, or from the object in it: ``name`` of the transport, and its options beside that.

    ``token_file`` stands for a ``token`` that is in a file of this machine.

    Raises:
        ConfigError: It is none, or the token cannot be read.
    """
    try:
        fields = json.loads(text) if isinstance(text, str) else dict(text)
    except ValueError as error:
        message = (
            f"the address of a store is no JSON: {error}; give the line that `rose relay` prints, or a TransportAddress"
        )
        raise ConfigError(message) from error
    name = fields.pop("name", None) if isinstance(fields, dict) else None
    wrong = sorted(key for key, value in fields.items() if not isinstance(value, str | int | float)) if name else []
    if not isinstance(name, str) or wrong:
        reason = f"{', '.join(wrong)} must be text, numbers or booleans" if wrong else "it names no transport"
        message = f"this is no address of a store: {reason}; it looks like {_ADDRESS_EXAMPLE}"
        raise ConfigError(message)
    path = fields.pop("token_file", None)
    if path is not None:
        fields["token"] = read_token(str(path))
    return TransportAddress(name=name, options=tuple(fields.items()))


def read_token(path: str | Path) -> str:
    """Return the token that a file holds.

    Raises:
        ConfigError: It cannot be read, or holds none.
    """
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read a token from {path}: {error}"
        raise ConfigError(message) from error
    if not token:
        message = f"{path} holds no token"
        raise ConfigError(message)
    return token


def read_or_make_token(path: str | Path) -> str:
    """Return the token that a file holds; where there is no file, one is drawn and written, readable by its owner alone.

    Raises:
        ConfigError: It cannot be read or written, or holds none.
    """
    if Path(path).exists():
        return read_token(path)
    token = os.urandom(16).hex()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
    except OSError as error:
        message = f"cannot write the token to {path}: {error.strerror}; give a path that can be written"
        raise ConfigError(message) from error
    return token


def _make(role: Role, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return construct(role, name, load(role, name), args, options)


def construct(role: Role, name: str, backend: type, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Make a backend of a class that was loaded under ``name``.

    Raises:
        ConfigError: It does not take these arguments; says which it takes.
    """
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
