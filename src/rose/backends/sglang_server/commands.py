"""Commands to the step loop of a running SGLang engine; ``rose.backends.sglang_server.wire`` says how they come.

| command | arguments | value |
|---|---|---|
| ``set_kv_budget`` | ``num_tokens`` | the budget in force; requests over it end as ``rose:evicted``, youngest first |
| ``set_gate`` | ``is_open`` | ``is_open``; a step that runs already is not stopped |
| ``set_running_cap`` | ``num_requests`` | the cap; requests above a lowered one are not evicted |
| ``rose_snapshot`` | | load, budget, pause, gate, what was released |
| ``sleep`` | ``keeps_weights`` | ``num_requests`` that ended as evicted, ``released_bytes`` of rank 0 |
| ``wake`` | | ``weight_bytes`` of rank 0 that are what they were, or null |
| ``step_log`` | ``since_s`` | rows of ``StepRecord``'s values; not a number is null |
| ``pacing_report`` | ``since_s`` | whether paced times may be believed; empty without a device |

Invariants: every rank carries a command out in the same iteration, between steps; a wrong command is an error in the answer
and changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rose.backends.sglang_server import memory_calls
from rose.backends.sglang_server.stepping import Stepping
from rose.backends.sglang_server.wire import attempt
from rose.errors import EngineUnsupportedError

ATTRIBUTE = "rose_commands"
"""Of SGLang's scheduler: its ``Commands``, where it can be stepped."""

NAMES = frozenset(
    {
        "set_kv_budget",
        "set_gate",
        "set_running_cap",
        "rose_snapshot",
        "sleep",
        "wake",
        "step_log",
        "pacing_report",
    }
)


def find(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a command, if it is one of these."""
    try:
        arguments = dict(json.loads(text))
    except (TypeError, ValueError):
        return None
    name = arguments.pop("command", None)
    return (name, arguments) if isinstance(name, str) and name in NAMES else None


def answer(scheduler: Any, name: str, arguments: Mapping[str, Any]) -> str:
    """Carry a command out on one scheduler; never raises. Returns the answer."""

    def run() -> Any:
        commands: Commands | None = getattr(scheduler, ATTRIBUTE, None)
        if commands is None:
            message = (
                "this SGLang scheduler cannot be stepped by ROSE; start the server with --disable-overlap-schedule"
            )
            raise EngineUnsupportedError(message)
        return plain(commands.run(name, arguments))

    return json.dumps({"ranks": [attempt(run)]})


class Commands:
    """Carries commands out on one scheduler."""

    def __init__(self, stepping: Stepping, set_cap: Callable[[int], int]) -> None:
        """Command ``stepping``; ``set_cap`` sets SGLang's cap of running requests."""
        self._stepping = stepping
        self._set_cap = set_cap

    def run(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Carry out one of ``NAMES``; returns its value.

        Raises:
            ValueError, TypeError: The arguments are wrong.
        """
        return getattr(self, f"_do_{name}")(**arguments)

    def _do_set_kv_budget(self, num_tokens: int) -> int:
        return self._stepping.set_kv_budget(_whole("num_tokens", num_tokens))

    def _do_set_gate(self, is_open: bool) -> bool:  # noqa: FBT001 - called by name, with what JSON had
        self._stepping.is_open = _flag("is_open", is_open)
        return is_open

    def _do_set_running_cap(self, num_requests: int) -> int:
        return self._set_cap(_whole("num_requests", num_requests))

    def _do_rose_snapshot(self) -> dict[str, Any]:
        return snapshot(self._stepping)

    def _do_sleep(self, keeps_weights: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - as above
        return memory_calls.fall_asleep(self._stepping, keeps_weights=_flag("keeps_weights", keeps_weights))

    def _do_wake(self) -> dict[str, Any]:
        return memory_calls.wake(self._stepping)

    def _do_step_log(self, since_s: float | None = None) -> list[list[float]]:
        governor = self._stepping.control.governor
        since = -math.inf if since_s is None else since_s
        return [] if governor is None else [list(attrs.astuple(record)) for record in governor.log.records(since)]

    def _do_pacing_report(self, since_s: float | None = None) -> dict[str, Any]:
        governor = self._stepping.control.governor
        if governor is None:
            return {}
        report = governor.log.report(-math.inf if since_s is None else since_s, getattr(governor, "owed_s", 0.0))
        return attrs.asdict(report) | {"device": getattr(governor.device, "description", governor.device.device_id)}


def snapshot(stepping: Stepping) -> dict[str, Any]:
    """Return the engine's load as plain data, in engine tokens."""
    num_running, num_waiting = stepping.get_request_counts()
    governor = stepping.control.governor
    hold = getattr(governor, "last_hold", None)
    return {
        "num_running": num_running,
        "num_waiting": num_waiting,
        "kv_used_tokens": stepping.num_kv_tokens_used,
        "kv_total_tokens": stepping.num_kv_tokens,
        "kv_budget_tokens": stepping.num_kv_tokens - stepping.reserve.num_held,
        "num_evicted": stepping.num_evicted,
        "num_prompt_tokens": stepping.num_prompt_tokens,  # of requests that started
        "num_cached_tokens": stepping.num_cached_tokens,  # of these, found in the prefix cache
        "is_paused": bool(stepping.scheduler._engine_paused),  # noqa: SLF001 - SGLang's own state
        "is_gate_open": stepping.is_open,
        "is_asleep": stepping.is_asleep,
        "is_frozen": governor is not None and governor.is_frozen,
        "hold": None if hold is None else hold.value,
        "released_tags": sorted(memory_calls.released(stepping.scheduler)),
    }


def plain(value: Any) -> Any:
    """Return a value that JSON can carry: numbers that are none become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        message = f"{name} is a whole number from 0 on, not {value!r}"
        raise ValueError(message)
    return int(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        message = f"{name} is true or false, not {value!r}"
        raise TypeError(message)
    return value
