"""Commands to ROSE's part of an SGLang server, over HTTP. What runs there: ``rose.backends.sglang_server.commands``.

Invariant: an answer is that of this very call; each call has an id, and answers to other calls are not taken for it.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from rose.errors import EngineError, EngineUnsupportedError

_NUM_LOOKS = 20
_PAUSE_S = 0.02


class Http(Protocol):
    """A server's address. Its errors are ROSE's."""

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post JSON and return the JSON that comes back."""

    async def get(self, path: str) -> Any:
        """Return the JSON at ``path``."""


async def rose_call(http: Http, command: str, **arguments: Any) -> Any:
    """Have a command carried out and return its value.

    Raises:
        EngineUnsupportedError: The server runs without ROSE's plug-in, or cannot be stepped by it.
        EngineError: The command failed; the server is as before.
    """
    call_id = uuid.uuid4().hex
    key = "rose:" + json.dumps({"command": command, "id": call_id, **arguments})
    await http.post("/set_internal_state", {"server_args": {key: 1}})
    for _ in range(_NUM_LOOKS):
        answer = (await _rose_state(http)).get(command)
        if answer is not None and answer.get("id") == call_id:
            if "error" in answer:
                message = f"SGLang's {command} failed: {answer['error']}"
                raise EngineError(message)
            return answer["value"]
        await asyncio.sleep(_PAUSE_S)
    message = f"SGLang took the command {command} and gave no answer; is another client calling it at the same time?"
    raise EngineError(message)


async def _rose_state(http: Http) -> Mapping[str, Any]:
    states = (await http.get("/server_info")).get("internal_states") or [{}]
    state = states[0].get("rose")
    if state is None:
        message = (
            "this SGLang server cannot be commanded by ROSE: install rose-rl in its environment (entry point sglang.srt.plugins) "
            "and start it with --disable-overlap-schedule"
        )
        raise EngineUnsupportedError(message)
    return dict(state)


async def set_kv_budget(http: Http, num_tokens: int) -> int:
    """Set the KV budget at once; requests over it end as evicted, youngest first. Returns the budget in force."""
    return int(await rose_call(http, "set_kv_budget", num_tokens=num_tokens))


async def set_gate(http: Http, *, is_open: bool) -> None:
    """Open or close the step gate. Afterwards no step starts; one that runs already is not stopped."""
    await rose_call(http, "set_gate", is_open=is_open)


async def set_running_cap(http: Http, num_requests: int) -> int:
    """Cap the requests that run at the same time; those above a lowered cap go on."""
    return int(await rose_call(http, "set_running_cap", num_requests=num_requests))


async def rose_snapshot(http: Http) -> dict[str, Any]:
    """Return the engine's load, budget and states, as of now."""
    return dict((await _rose_state(http))["rose_snapshot"])


async def sleep(http: Http, *, keeps_weights: bool = True) -> dict[str, Any]:
    """End every request as evicted and release the engine's memory; see ``sglang_server.memory_calls``."""
    return dict(await rose_call(http, "sleep", keeps_weights=keeps_weights))


async def wake(http: Http) -> dict[str, Any]:
    """Bring the engine's memory back; ``weight_bytes`` is ``None`` unless the weights are what they were."""
    return dict(await rose_call(http, "wake"))


async def step_log(http: Http, since_s: float | None = None) -> list[list[float | None]]:
    """Return the device turns since a time of the device's clock, as rows of ``StepRecord``'s values."""
    return [list(row) for row in await rose_call(http, "step_log", since_s=since_s)]


async def pacing_report(http: Http, since_s: float | None = None) -> dict[str, Any]:
    """Return whether the engine's paced times may be believed."""
    return dict(await rose_call(http, "pacing_report", since_s=since_s))
