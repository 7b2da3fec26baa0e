"""Validators of attrs fields. Each refuses with a ``ValueError`` of one line: the field, what it may be, what it got."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import attrs

_MAX_SHOWN_CHARS = 60


@attrs.frozen
class Check:
    """A validator: ``allowed`` completes the sentence "the field must be ..."."""

    allowed: str
    is_allowed: Callable[[Any], bool]

    def __call__(self, _instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        """Refuse a value that is not allowed.

        Raises:
            ValueError: One line with the field, what is allowed and what was given.
        """
        if not self.is_allowed(value):
            message = f"{attribute.name} must be {self.allowed}, got {shown(value)}"
            raise ValueError(message)


def shown(value: object) -> str:
    """Return a short text of one line for a value of any type."""
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"


def instance(*classes: type) -> Check:
    """Check for an instance of one of ``classes``."""
    names = " or ".join(cls.__name__ for cls in classes)
    return Check(f"an instance of {names}", lambda value: isinstance(value, classes))


def text(pattern: str | None = None) -> Check:
    """Check for a string that, as a whole, matches ``pattern``."""
    if pattern is None:
        return Check("a string", lambda value: isinstance(value, str))
    rule = re.compile(pattern)
    return Check(f"a string like {pattern}", lambda value: isinstance(value, str) and bool(rule.fullmatch(value)))


def boolean() -> Check:
    """Check for ``True`` or ``False``."""
    return Check("True or False", lambda value: isinstance(value, bool))


def integer(at_least: int | None = None) -> Check:
    """Check for a plain integer; booleans are none."""
    bound = "" if at_least is None else f" >= {at_least}"
    lowest = -math.inf if at_least is None else at_least
    return Check(f"an integer{bound}", lambda value: type(value) is int and value >= lowest)


def number(*, above: float | None = None, at_least: float | None = None, at_most: float | None = None) -> Check:
    """Check for a finite integer or float within bounds; booleans are none."""
    bounds = [
        f"{sign} {bound}" for sign, bound in ((">", above), (">=", at_least), ("<=", at_most)) if bound is not None
    ]

    def is_allowed(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        is_high_enough = (above is None or value > above) and (at_least is None or value >= at_least)
        return is_high_enough and (at_most is None or value <= at_most)

    return Check(" ".join(["a finite number", " and ".join(bounds)]).rstrip(), is_allowed)


def optional(check: Check) -> Check:
    """Check for ``None`` or what ``check`` allows."""
    return Check(f"{check.allowed} or None", lambda value: value is None or check.is_allowed(value))


def token_ids(min_len: int = 0) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Check for a tuple of plain integers; quick, since prompts are long."""

    def check(_instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        wrong: str | None = None
        if type(value) is not tuple:
            wrong = shown(value)
        elif not set(map(type, value)) <= {int}:
            place = next(i for i, token in enumerate(value) if type(token) is not int)
            wrong = f"{shown(value[place])} at place {place}"
        elif len(value) < min_len:
            wrong = f"{len(value)} of them"
        if wrong is not None:
            some = f"at least {min_len} token ids" if min_len else "token ids"
            message = f"{attribute.name} must be {some}, plain integers (an array's tolist() gives them), got {wrong}"
            raise ValueError(message)

    return check
