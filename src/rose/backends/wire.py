"""Plain-data forms of what crosses the border between a driver and its engine process. Nothing is pickled.

A utility answers ``{"value": ...}`` or ``{"error": [type, message]}``, so that ROSE's own exceptions keep their type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rose import errors
from rose.types import Activation, TransportAddress, WeightUpdate, WeightVersion


def answers(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Make a function return an answer; ROSE's errors become data, all others pass."""

    @functools.wraps(function)
    def answering(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return {"value": function(*args, **kwargs)}
        except errors.RoseError as error:
            return {"error": [type(error).__name__, str(error)]}

    return answering


def unwrap(answer: dict[str, Any]) -> Any:
    """Return an answer's value.

    Raises:
        RoseError: The error that the answer carries, in its own type.
    """
    if "error" not in answer:
        return answer["value"]
    name, message = answer["error"]
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.RoseError)):
        kind = errors.EngineError
    raise kind(message)


def update_to_wire(update: WeightUpdate) -> dict[str, Any]:
    """Return an update as plain data."""
    return {
        "target": str(update.target),
        "manifest_keys": list(update.manifest_keys),
        "transport": update.address.name,
        "options": [[name, value] for name, value in update.address.options],
    }


def update_from_wire(data: dict[str, Any]) -> WeightUpdate:
    """Return the update that ``update_to_wire`` rendered."""
    options = tuple((str(name), value) for name, value in data["options"])
    return WeightUpdate(
        target=WeightVersion.parse(data["target"]),
        manifest_keys=tuple(data["manifest_keys"]),
        address=TransportAddress(name=data["transport"], options=options),
    )


def activation_to_wire(activation: Activation) -> dict[str, Any]:
    """Return an activation as plain data."""
    return {
        "version": str(activation.version),
        "stage_s": activation.stage_s,
        "pause_s": activation.pause_s,
        "fetched_bytes": activation.fetched_bytes,
        "is_verified": activation.is_verified,
    }


def activation_from_wire(data: dict[str, Any]) -> Activation:
    """Return the activation that ``activation_to_wire`` rendered."""
    return Activation(
        version=WeightVersion.parse(data["version"]),
        stage_s=float(data["stage_s"]),
        pause_s=float(data["pause_s"]),
        fetched_bytes=int(data["fetched_bytes"]),
        is_verified=bool(data["is_verified"]),
    )
