"""What an executor's clients can tell its rollout engine to do: one command a path below ``/v1``, JSON in and out."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from rose.backends.remote import wire
from rose.backends.wire import activation_to_wire, update_from_wire
from rose.errors import ConfigError, EngineLostError, EngineUnsupportedError
from rose.interfaces.serving import (
    PauseMode,
    ServingEngine,
    SupportsKvBudget,
    SupportsPrefixReset,
    SupportsSleep,
    SupportsStepGate,
    SupportsWeightChecksums,
)
from rose.types import RequestId

_ALL_TOKENS = 1 << 60
_T = TypeVar("_T")
Command = Callable[[ServingEngine, Any], Awaitable[Any]]


def _field(body: Any, name: str, kind: type[_T]) -> _T:
    """Return a field of a command's body.

    Raises:
        ConfigError: It is missing, or of another kind.
    """
    value = body.get(name) if isinstance(body, Mapping) else None
    if type(value) is not kind:
        message = f"the body needs {name!r}, of type {kind.__name__}"
        raise ConfigError(message)
    return value


async def _abort(engine: ServingEngine, body: Any) -> None:
    await engine.abort(RequestId(_field(body, "request_id", str)))


async def _pause(engine: ServingEngine, body: Any) -> None:
    mode = _field(body, "mode", str)
    if mode not in [known.value for known in PauseMode]:
        message = f"mode is keep or abort, not {mode!r}"
        raise ConfigError(message)
    await engine.pause(PauseMode(mode))


async def _resume(engine: ServingEngine, _: Any) -> None:
    await engine.resume()


async def _stage(engine: ServingEngine, body: Any) -> None:
    try:
        update = update_from_wire(body)
    except (ValueError, KeyError, TypeError) as error:
        message = f"this is no weight update: {error!r}"
        raise ConfigError(message) from error
    await engine.stage(update)


async def _activate(engine: ServingEngine, _: Any) -> dict[str, Any]:
    return activation_to_wire(await engine.activate())


async def _checksums(engine: ServingEngine, _: Any) -> dict[str, str]:
    if not isinstance(engine, SupportsWeightChecksums):
        raise _unable(engine, "prove its weights")
    return dict(await engine.weight_checksums())


async def _kv_budget(engine: ServingEngine, body: Any) -> int:
    if not isinstance(engine, SupportsKvBudget):
        raise _unable(engine, "change its KV budget")
    return await engine.set_kv_budget(_field(body, "num_tokens", int))


async def _set_gate(engine: ServingEngine, body: Any) -> None:
    if not isinstance(engine, SupportsStepGate):
        raise _unable(engine, "close its gate")
    await engine.set_gate(is_open=_field(body, "is_open", bool))


async def _prefix_reset(engine: ServingEngine, _: Any) -> None:
    if not isinstance(engine, SupportsPrefixReset):
        raise _unable(engine, "drop its prefix cache")
    await engine.reset_prefix_cache()


async def _sleep(engine: ServingEngine, body: Any) -> dict[str, Any]:
    if not isinstance(engine, SupportsSleep):
        raise _unable(engine, "sleep")
    return wire.record_to_wire(await engine.sleep(keeps_weights=_field(body, "keeps_weights", bool)))


async def _wake(engine: ServingEngine, _: Any) -> dict[str, Any]:
    if not isinstance(engine, SupportsSleep):
        raise _unable(engine, "sleep")
    return wire.record_to_wire(await engine.wake())


def _unable(engine: ServingEngine, what: str) -> EngineUnsupportedError:
    return EngineUnsupportedError(f"engine {engine.engine_id} cannot {what}")


COMMANDS: Mapping[str, Command] = {
    "abort": _abort,
    "pause": _pause,
    "resume": _resume,
    "stage": _stage,
    "activate": _activate,
    "checksums": _checksums,
    "kv-budget": _kv_budget,
    "gate": _set_gate,
    "prefix-reset": _prefix_reset,
    "sleep": _sleep,
    "wake": _wake,
}
"""Path below ``/v1`` -> what it does. All of them need a lease in force."""

LASTING = frozenset({"pause", "gate", "kv-budget"})
"""Commands whose effect would outlast the lease under which they were given."""


async def restore(engine: ServingEngine) -> None:
    """Undo lasting commands, for the next holder of a lease."""
    with contextlib.suppress(EngineLostError):
        await engine.resume()
        if isinstance(engine, SupportsStepGate):
            await engine.set_gate(is_open=True)
        if isinstance(engine, SupportsKvBudget):
            await engine.set_kv_budget(_ALL_TOKENS)
