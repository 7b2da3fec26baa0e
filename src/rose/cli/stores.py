"""Stores of weights on the command line: where they are, their tokens, sizes."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.interfaces.transport import Transport

TOKEN_VARIABLE = "ROSE_UPSTREAM_TOKEN"  # noqa: S105 - the name of a variable
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?i?)B?")
_PLACE = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,5})(?::(?P<rest>.+))?")


def parse_size(text: str, *, option: str) -> int:
    """Read a number of bytes: ``1500``, ``40G`` (10^9), ``32GiB`` (2^30).

    Raises:
        ConfigError: It is none, or 0.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[found[2].lower()]) if found and found[2].lower() in _UNITS else 0
    if size <= 0:
        message = f"{option} {text!r} is no size; give a number over 0 with k, M, G, T, or Ki, Mi, Gi, Ti behind it"
        raise ConfigError(message)
    return size


def parse_place(text: str, *, option: str) -> tuple[str, int]:
    """Read ``HOST:PORT``; an IPv6 address stands in brackets.

    Raises:
        ConfigError: It is none.
    """
    found = _PLACE.fullmatch(text)
    if found is None or not _is_place(text):
        message = f"{option} {text!r} is no HOST:PORT"
        raise ConfigError(message)
    return found["host"].strip("[]"), int(found["port"])


def check_reach(host: str, *, is_public: bool) -> None:
    """Refuse to listen where other machines can reach it unless that is allowed.

    Raises:
        ConfigError: They can.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not (is_loopback or is_public):
        message = f"--listen {host} can be reached from other machines; add --public if that is meant"
        raise ConfigError(message)


def filled(text: str, *, option: str) -> str:
    """Return a text that may not be empty, as that of a variable that was never set would be.

    Raises:
        ConfigError: It is.
    """
    if not text.strip():
        message = f"{option} is empty; give one, or leave the option out where it has a default"
        raise ConfigError(message)
    return text


def filled_path(text: str, *, option: str) -> Path:
    """Return a path. Raises what ``filled`` raises: an empty one would be the current folder."""
    return Path(filled(text, option=option))


def open_store(
    text: str, environment: Mapping[str, str], *, option: str, options: Mapping[str, Any] | None = None
) -> Transport:
    """Open the store that ``option`` names. The token is never an argument: every user of the machine can see those.

    Args:
        text: ``memory:HOST:PORT[:TOKEN-FILE]`` or ``mooncake:HOST:PORT``.
        environment: Where the token is when no file is named.
        option: Named in complaints.
        options: Further options of a memory store.

    Raises:
        ConfigError: It names nothing, or the token is missing.
    """
    from rose import registry  # noqa: PLC0415 - loads numpy

    kind, _, rest = text.partition(":")
    if kind == "mooncake" and rest:
        if not _is_place(rest):
            message = f"{option} {text!r} is no mooncake:HOST:PORT; name the port of the master, for instance 50051"
            raise ConfigError(message)
        return registry.transport("mooncake", master=rest)
    found = _PLACE.fullmatch(rest)
    if kind != "memory" or found is None or int(found["port"]) >= 1 << 16:
        message = f"{option} {text!r} is neither memory:HOST:PORT[:TOKEN-FILE] nor mooncake:HOST:PORT"
        raise ConfigError(message)
    token = registry.read_token(found["rest"]) if found["rest"] else environment.get(TOKEN_VARIABLE, "")
    if not token:
        message = (
            f"the token of {text!r} is missing; put it into a file (memory:HOST:PORT:FILE) or into {TOKEN_VARIABLE}"
        )
        raise ConfigError(message)
    place = {"host": found["host"].strip("[]"), "port": int(found["port"])}
    return registry.transport("memory", **place, token=token, **(options or {}))


def _is_place(text: str) -> bool:
    found = _PLACE.fullmatch(text)
    return found is not None and found["rest"] is None and int(found["port"]) < 1 << 16
