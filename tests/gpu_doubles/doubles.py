"""Doubles of libraries that only run on a GPU: classes and functions with the recorded signatures and nothing else.

A double is made from behaviour that a test writes; it cannot have a name that the library lacks, is called only in ways that the
library's signature takes, and has no attribute that the library's class does not set.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "signatures.json").read_text())


def names_of(library: str, owner: str | None = None) -> dict[str, Any]:
    """Return what is recorded of a class (``owner``) or of a library's functions and constants."""
    files = RECORDED[library]["names"].values()
    if owner is None:
        return {name: what for names in files for name, what in names.items() if not isinstance(what, Mapping)}
    found = [names[owner] for names in files if owner in names]
    assert found, f"nothing is recorded of {library}'s {owner}"
    return dict(found[0])


def statuses(path: str = "control.py") -> list[str]:
    """Return the statuses of kvcached's answers."""
    return list(RECORDED["kvcached"]["names"][path]["statuses"])


def answer(**values: Any) -> dict[str, Any]:
    """Return an answer of kvcached's control interface with exactly its keys."""
    keys = RECORDED["kvcached"]["names"]["control.py"]["answer keys"]
    assert values.keys() <= set(keys), f"kvcached's answers have no {sorted(values.keys() - set(keys))}"
    return dict.fromkeys(keys) | values


def function(library: str, name: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes what the library's takes."""
    recorded = names_of(library).get(name)
    assert isinstance(recorded, list), f"{library} has no function {name}"
    return _checked(name, recorded, behaviour)


def make_class(library: str, owner: str, behaviours: Mapping[str, Callable[..., Any]]) -> type[Any]:
    """Return a class with the given behaviours; ``self`` is their first argument where it is the library's."""
    recorded = names_of(library, owner)
    members: dict[str, Any] = {"__module__": __name__}
    for name, behaviour in behaviours.items():
        what = recorded.get(name, "missing")
        assert what not in ("missing", "attribute"), f"{library}'s {owner} has no method {name}"
        if what == "property":
            members[name] = property(behaviour)
        elif what == "bound":
            members[name] = behaviour
        else:
            members[name] = _checked(f"{owner}.{name}", what, behaviour)
    attributes = frozenset(name for name, what in recorded.items() if what == "attribute")

    def set_attribute(self: Any, name: str, value: Any) -> None:
        assert name in attributes or name.startswith("double_"), f"{library}'s {owner} has no attribute {name}"
        object.__setattr__(self, name, value)

    members["__setattr__"] = set_attribute
    return type(owner, (), members)


def _checked(name: str, recorded: list[str], behaviour: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.Signature([_parameter(each, recorded) for each in recorded if each != "*"])

    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return behaviour(*args, **kwargs)

    call.__name__ = name.rpartition(".")[2]
    call.__signature__ = signature  # type: ignore[attr-defined] # what inspect looks at
    return call


def _parameter(text: str, recorded: list[str]) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    stars = [i for i, each in enumerate(recorded) if each.startswith("*") and not each.startswith("**")]
    if text.startswith("**"):
        kind = inspect.Parameter.VAR_KEYWORD
    elif text.startswith("*"):
        kind = inspect.Parameter.VAR_POSITIONAL
    elif stars and recorded.index(text) > stars[0]:
        kind = inspect.Parameter.KEYWORD_ONLY
    default = None if text.endswith("=") else inspect.Parameter.empty
    return inspect.Parameter(text.strip("*="), kind, default=default)
