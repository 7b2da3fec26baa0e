"""Turns, results and readings of a pool as plain JSON data. Nothing is pickled.

Names are the fields' own. Enums cross as their values (numbered ones as their names), weight versions as ``run:n``, a turn's ``versions`` as
``{"at_least": n}``, ``{"exactly": n}`` or nothing. What is at its default may be left out.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import attrs

from rose.backends.remote.wire import error_from_wire, error_to_wire
from rose.errors import RequestRefusedError, RoseError, TurnFailedError, VersionUnavailableError
from rose.types import AnyVersion, AtLeast, Exactly, Hop, Sampling, Turn, TurnResult, VersionConstraint, WeightVersion

T = TypeVar("T")
_CONSTRAINTS: Mapping[str, type[AtLeast | Exactly]] = {"at_least": AtLeast, "exactly": Exactly}


def to_plain(value: Any) -> Any:  # noqa: PLR0911 - one return a kind
    """Return a value object as plain data."""
    if isinstance(value, enum.Enum):
        return value.name.lower() if isinstance(value, int) else value.value
    if isinstance(value, WeightVersion):
        return str(value)
    if isinstance(value, AnyVersion | AtLeast | Exactly):
        return constraint_to_plain(value)
    if attrs.has(type(value)):
        return {field.name: to_plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [item if type(item) in {int, float, str} else to_plain(item) for item in value]
    return value


def from_plain(cls: Any, data: Any) -> Any:  # noqa: PLR0911 - one return a kind
    """Return the value object of type ``cls`` that ``to_plain`` rendered; fields that it does not know are ignored.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: It is none.
    """
    origin = get_origin(cls) or cls
    if origin in (Union, types.UnionType):
        return _from_union(get_args(cls), data)
    if origin is WeightVersion:
        return WeightVersion.parse(data)
    if origin is int and isinstance(data, str):  # a key
        return int(data)
    if isinstance(origin, type) and attrs.has(origin):
        hints = _hints(origin)
        known = {field.name for field in attrs.fields(origin)}
        return origin(**{name: from_plain(hints[name], value) for name, value in data.items() if name in known})
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return origin[data.upper()] if issubclass(origin, int) else origin(data)
    if origin is tuple:
        item = get_args(cls)[0]
        return tuple(data) if item in {int, float, str} else tuple(from_plain(item, each) for each in data)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = get_args(cls)
        return {from_plain(key, name): from_plain(item, each) for name, each in data.items()}
    return data


def constraint_to_plain(versions: VersionConstraint) -> dict[str, int] | None:
    """Return which versions a turn asks for as plain data."""
    if isinstance(versions, AnyVersion):
        return None
    return next({name: versions.n} for name, cls in _CONSTRAINTS.items() if isinstance(versions, cls))


def constraint_from_plain(data: Any) -> VersionConstraint:
    """Return the constraint that ``constraint_to_plain`` rendered.

    Raises:
        ValueError: It is none.
    """
    if data is None or data == {}:
        return AnyVersion()
    if not isinstance(data, Mapping) or len(data) != 1 or not set(data) <= set(_CONSTRAINTS):
        message = f'versions is {{"at_least": n}}, {{"exactly": n}} or left out, not {data!r}'
        raise ValueError(message)
    name, n = next(iter(data.items()))
    return _CONSTRAINTS[name](n)


def turn_to_wire(turn: Turn) -> dict[str, Any]:
    """Return a turn as plain data, without what is at its default."""
    return _without_defaults(turn)


def turn_from_wire(data: Any) -> Turn:
    """Return the turn that ``turn_to_wire`` rendered.

    Raises:
        RequestRefusedError: A field is unknown, missing or of the wrong kind.
    """
    try:
        fields = dict(data)
        prompt_ids, sampling = fields.pop("prompt_ids"), _sampling(fields.pop("sampling"))
        versions = constraint_from_plain(fields.pop("versions", None))
        return Turn(prompt_ids=prompt_ids, sampling=sampling, versions=versions, **other_fields(fields))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        message = f"this is no turn: {reason}; it needs trajectory_id, group_id, prompt_ids and sampling (max_tokens)"
        raise RequestRefusedError(message) from error


def other_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a turn but its prompt, sampling and versions from plain data.

    Raises:
        TypeError, ValueError: A field is unknown, or no such value.
    """
    hints = _hints(Turn)
    unknown = set(data) - set(hints)
    if unknown:
        message = f"unknown: {', '.join(sorted(unknown))}"
        raise ValueError(message)
    if missing := {"trajectory_id", "group_id"} - set(data):
        message = f"missing: {', '.join(sorted(missing))}"
        raise ValueError(message)
    return {name: from_plain(hints[name], value) for name, value in data.items()}


def error_to_plain(error: RoseError) -> dict[str, Any]:
    """Return an error as it crosses, with the hops of a turn that failed and whether asking again helps; what it had made stays behind."""
    data = error_to_wire(error)
    if isinstance(error, VersionUnavailableError):
        data["is_retryable"] = error.is_retryable
    return {**data, "hops": to_plain(error.hops)} if isinstance(error, TurnFailedError) else data


def error_from_plain(data: Any, status: int = 500) -> RoseError:
    """Return the error that ``error_to_plain`` rendered; see ``error_from_wire``."""
    error = error_from_wire(data, status)
    if isinstance(error, TurnFailedError) and isinstance(data, Mapping):
        error = type(error)(str(error), from_plain(tuple[Hop, ...], data.get("hops", ())))
        if isinstance(error, VersionUnavailableError):
            error.is_retryable = data.get("is_retryable") is True
    return error


def result_from_wire(data: Any) -> TurnResult:
    """Return the result that ``to_plain`` rendered."""
    return cast("TurnResult", from_plain(TurnResult, data))


def _sampling(data: Any) -> Sampling:
    if not isinstance(data, Mapping):
        message = f"sampling is an object, not {data!r:.80}"
        raise TypeError(message)
    if unknown := set(data) - set(_hints(Sampling)):
        message = f"unknown in sampling: {', '.join(sorted(unknown))}"
        raise ValueError(message)
    if "max_tokens" not in data:
        message = "sampling has no max_tokens"
        raise ValueError(message)
    return Sampling(**data)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _from_union(options: tuple[Any, ...], data: Any) -> Any:
    if data is None:
        return None
    real = [option for option in options if option is not type(None)]
    return from_plain(real[0], data) if len(real) == 1 else data


def _without_defaults(value: Any) -> dict[str, Any]:
    """Return an attrs object's fields as plain data, those at their defaults left out."""
    plain: dict[str, Any] = {}
    for field in attrs.fields(type(value)):
        given = getattr(value, field.name)
        default = field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type] # attrs types it as a function
            default = default.factory()
        if given != default:
            plain[field.name] = _without_defaults(given) if field.name == "sampling" else to_plain(given)
    return plain
