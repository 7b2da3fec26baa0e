"""Stores of weights on the command line: where they are, their tokens, sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.interfaces.transport import Transport

TOKEN_VARIABLE = "ROSE_UPSTREAM_TOKEN"  # noqa: S105 - the name of a variable
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?i?)B?")
_PLACE = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,5})(?::(?P<rest>.+))?")


def parse_size(text: str, *, option: str) -> int:
    """Read a number of bytes: ``1500``, ``40G`` (10^9), ``32GiB`` (2^30).

    Raises:
        ConfigError: It is none, or 0.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
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
    if found is None or found["rest"] is not None or int(found["port"]) >= 1 << 16:
        message = f"{option} {text!r} is no HOST:PORT"
        raise ConfigError(message)
    return found["host"].strip("[]"), int(found["port"])


def open_store(text: str, environment: Mapping[str, str], *, option: str) -> Transport:
    """Open the store that ``option`` names. The token is never an argument: every user of the machine can see those.

    Raises:
        ConfigError: It names nothing, or the token is missing.
    """
    from rose import registry  # noqa: PLC0415 - loads numpy

    kind, _, rest = text.partition(":")
    if kind == "mooncake" and rest:
        return registry.transport("mooncake", master=rest)
    found = _PLACE.fullmatch(rest)
    if kind != "memory" or found is None or int(found["port"]) >= 1 << 16:
        message = f"{option} {text!r} is neither memory:HOST:PORT[:TOKEN-FILE] nor mooncake:MASTER"
        raise ConfigError(message)
    token = read_token(Path(found["rest"])) if found["rest"] else environment.get(TOKEN_VARIABLE, "")
    if not token:
        message = (
            f"the token of {text!r} is missing; put it into a file (memory:HOST:PORT:FILE) or into {TOKEN_VARIABLE}"
        )
        raise ConfigError(message)
    return registry.transport("memory", host=found["host"].strip("[]"), port=int(found["port"]), token=token)


def read_token(path: Path) -> str:
    """Return the token that a file holds.

    Raises:
        ConfigError: It cannot be read, or holds none.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read a token from {path}: {error}"
        raise ConfigError(message) from error
    if not token:
        message = f"{path} holds no token"
        raise ConfigError(message)
    return token
