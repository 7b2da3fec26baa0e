"""Loading configuration: TOML files or plain mappings into attrs classes, strictly.

Nothing is coerced: ``"false"`` is no boolean, ``1.9`` and ``true`` are no integers. The one widening is an integer
where a float is asked for. All problems of one document are reported together, one line each, each line usable alone.
"""

from __future__ import annotations

import enum
import math
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import attrs

from rose.errors import ConfigError

T = TypeVar("T")

_MAX_EXACT_FLOAT_INT = 2**53
_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    tuple: "an array",
    dict: "a table",
    type(None): "nothing",
}


def load(cls: type[T], source: Mapping[str, Any] | Path | str) -> T:
    """Read configuration into an attrs class.

    Args:
        cls: The attrs class. Its fields may be booleans, numbers, strings, paths, enums (by value), literals, nested
            attrs classes, ``tuple`` / ``Sequence`` / ``Mapping`` of those, optionals and unions of plain types.
        source: A mapping as ``tomllib`` gives it, or the path of a TOML file.

    Returns:
        An instance of ``cls``.

    Raises:
        ConfigError: An argument is of the wrong kind, the file cannot be read or parsed, a key is unknown or missing, or a value is of the wrong type or
            refused by its validator. One line a problem, each with the file and the key's path.
    """
    kind: Any = get_origin(cls) or cls
    if not isinstance(kind, type) or not attrs.has(kind):
        message = f"configuration is read into an attrs class, not {cls!r}"
        raise ConfigError(message)
    given: object = source
    if not isinstance(given, Mapping | Path | str):
        message = f"cannot read configuration from {given!r}; give a mapping or the path of a TOML file"
        raise ConfigError(message)
    if isinstance(source, Mapping):
        where, data = "", source
    else:
        where, data = f"{source}: ", _read(Path(source))
    problems: list[str] = []
    value = _structure(cls, data, "", problems)
    if problems:
        raise ConfigError("\n".join(f"{where}{problem}" for problem in problems))
    return cast("T", value)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot read the configuration file {path}: {error.strerror}; give the path of a TOML file"
        raise ConfigError(message) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{path} is not valid TOML: {error}"
        raise ConfigError(message) from error


class _WrongTypeError(Exception):
    """A value is not of the type that its place asks for; the message says allowed and got."""

    def __init__(self, allowed: str, got: object) -> None:
        kind = _KINDS.get(type(got), f"a {type(got).__name__}")
        shown = f" ({got!r})" if isinstance(got, bool | int | float | str) else ""
        is_nan = isinstance(got, float) and math.isnan(got)
        super().__init__("must be finite, got nan" if is_nan else f"expected {allowed}, got {kind}{shown}")


def _structure(cls: Any, value: object, path: str, problems: list[str]) -> Any:
    """Turn plain data into ``cls``; on a problem, note it and return a value of no use."""
    try:
        return _convert(cls, value, path, problems)
    except _WrongTypeError as error:
        problems.append(f"{path}: {error}" if path else str(error))
        return None


def _convert(cls: Any, value: object, path: str, problems: list[str]) -> Any:  # noqa: PLR0911 - one return a kind
    origin = get_origin(cls) or cls
    if origin is Any or isinstance(origin, TypeVar):
        return value
    if hasattr(origin, "__supertype__"):
        return _convert(origin.__supertype__, value, path, problems)
    if origin in (Union, types.UnionType):
        return _union(get_args(cls), value, path, problems)
    if origin is Literal:
        return _one_of(value, {allowed: allowed for allowed in get_args(cls)})
    if attrs.has(origin):
        return _attrs(origin, value, path, problems)
    if issubclass(origin, Mapping):
        return _mapping(cls, value, path, problems)
    if issubclass(origin, Sequence) and not issubclass(origin, str | bytes):
        return _sequence(cls, value, path, problems)
    return _scalar(origin, value)


def _scalar(cls: type, value: object) -> Any:
    if issubclass(cls, enum.Enum):
        return value if isinstance(value, cls) else _one_of(value, {member.value: member for member in cls})
    if issubclass(cls, Path):
        return value if isinstance(value, Path) else Path(_scalar(str, value))
    if cls is float:
        if type(value) is int and abs(value) <= _MAX_EXACT_FLOAT_INT:
            return float(value)
        if type(value) is float and math.isnan(value):
            raise _WrongTypeError(_KINDS[float], value)
    if type(value) is not cls:
        raise _WrongTypeError(_KINDS.get(cls, f"a {cls.__name__}"), value)
    return value


def _one_of(value: object, choices: Mapping[Any, Any]) -> Any:
    for allowed, result in choices.items():
        if type(allowed) is type(value) and allowed == value:
            return result
    raise _WrongTypeError("one of " + ", ".join(repr(allowed) for allowed in choices), value)


def _union(members: tuple[Any, ...], value: object, path: str, problems: list[str]) -> Any:
    """Take the first member that fits without a problem; a union with one real member reports as that member."""
    if value is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if len(members) == 1:
        return _convert(members[0], value, path, problems)
    exact = [member for member in members if member is type(value)]
    for member in exact or members:
        tried: list[str] = []
        result = _structure(member, value, path, tried)
        if not tried:
            return result
    names = (_KINDS.get(member, getattr(member, "__name__", str(member))) for member in members)
    raise _WrongTypeError(" or ".join(names), value)


def _sequence(cls: Any, value: object, path: str, problems: list[str]) -> Any:
    if not isinstance(value, list | tuple):
        raise _WrongTypeError(_KINDS[list], value)
    origin, arguments = get_origin(cls) or cls, get_args(cls)
    is_fixed = origin is tuple and bool(arguments) and arguments[-1] is not Ellipsis
    if is_fixed and len(arguments) != len(value):
        message = f"an array of {len(arguments)} values, not {len(value)}"
        raise _WrongTypeError(message, value)
    members = arguments if is_fixed else (arguments[:1] or (Any,)) * len(value)
    items = [
        _structure(member, item, f"{path}[{i}]", problems)
        for i, (member, item) in enumerate(zip(members, value, strict=True))
    ]
    return items if origin is list else tuple(items)


def _mapping(cls: Any, value: object, path: str, problems: list[str]) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _WrongTypeError(_KINDS[dict], value)
    key_type, value_type = get_args(cls) or (str, Any)
    return {
        _structure(key_type, key, _join(path, key), problems): _structure(value_type, item, _join(path, key), problems)
        for key, item in value.items()
    }


def _attrs(cls: type, value: object, path: str, problems: list[str]) -> Any:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise _WrongTypeError(_KINDS[dict], value)
    fields = {field.alias: field for field in attrs.fields(attrs.resolve_types(cls)) if field.init}
    before = len(problems)
    problems.extend(_unknown(key, fields, path) for key in value if key not in fields)
    arguments = {}
    for name, field in fields.items():
        if name in value:
            num_problems = len(problems)
            argument = _structure(field.type, value[name], _join(path, name), problems)
            if len(problems) == num_problems:
                arguments[name] = argument
        elif field.default is attrs.NOTHING:
            problems.append(f"{_join(path, name)}: this key is required and missing")
    refusals = _refusals(cls, arguments)
    if len(problems) == before and not refusals:
        try:
            return cls(**arguments)
        except (TypeError, ValueError) as error:
            refusals = [_validator_message(error)]
    problems.extend(f"{path}: {refusal}" if path else refusal for refusal in refusals)
    return None


def _refusals(cls: type, arguments: Mapping[str, Any]) -> list[str]:
    """Return what the fields' validators say, each asked alone; the class itself stops at the first."""
    bare: Any = object.__new__(cls)
    refusals = []
    for field in attrs.fields(cls):
        if field.validator is None or field.alias not in arguments or isinstance(field.converter, attrs.Converter):
            continue
        try:
            value = arguments[field.alias] if field.converter is None else field.converter(arguments[field.alias])
            object.__setattr__(bare, field.name, value)
            field.validator(bare, field, value)
        except AttributeError:  # it looks at other fields, which this instance may not have
            continue
        except (TypeError, ValueError) as error:
            refusals.append(_validator_message(error))
    return refusals


def _validator_message(error: Exception) -> str:
    """Return the message alone: attrs' own validators append the attribute and the validator to ``args``."""
    return str(error.args[0]) if error.args else type(error).__name__


def _unknown(key: object, fields: Mapping[str, Any], path: str) -> str:
    close = get_close_matches(str(key), fields, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{_join(path, key)}: unknown key; {hint}allowed: {', '.join(fields)}"


def _join(path: str, key: object) -> str:
    text = key if isinstance(key, str) and re.fullmatch(r"[\w-]+", key) else repr(key)
    return f"{path}.{text}" if path else text
