"""Commands to ROSE's part of an SGLang server's step loop, over HTTP. What runs there: ``rose.backends.sglang_server.commands``.

All raise what ``rose.backends.sglang.calls.call`` raises.
"""

from __future__ import annotations

import math
from typing import Any

from rose.backends.sglang.calls import Http, call_first


async def set_kv_budget(http: Http, num_tokens: int) -> int:
    """Set the KV budget at once; requests over it end as evicted, youngest first. Returns the budget in force."""
    return int(await call_first(http, "set_kv_budget", num_tokens=num_tokens))


async def set_gate(http: Http, *, is_open: bool) -> None:
    """Open or close the step gate. Afterwards no step starts; one that runs already is not stopped."""
    await call_first(http, "set_gate", is_open=is_open)


async def set_running_cap(http: Http, num_requests: int) -> int:
    """Cap the requests that run at the same time; those above a lowered cap go on."""
    return int(await call_first(http, "set_running_cap", num_requests=num_requests))


async def rose_snapshot(http: Http) -> dict[str, Any]:
    """Return the engine's load, budget and states, as of now."""
    return dict(await call_first(http, "rose_snapshot"))


async def sleep(http: Http, *, keeps_weights: bool = True) -> dict[str, Any]:
    """End every request as evicted and release the engine's memory; see ``sglang_server.memory_calls``."""
    return dict(await call_first(http, "sleep", keeps_weights=keeps_weights))


async def wake(http: Http) -> dict[str, Any]:
    """Bring the engine's memory back; ``weight_bytes`` is ``None`` unless the weights are what they were."""
    return dict(await call_first(http, "wake"))


async def step_log(http: Http, since_s: float = -math.inf) -> list[list[float]]:
    """Return the device turns since a time of the device's clock, as rows of ``StepRecord``'s values."""
    rows = await call_first(http, "step_log", since_s=_finite(since_s))
    return [[math.nan if value is None else value for value in row] for row in rows]


async def pacing_report(http: Http, since_s: float = -math.inf) -> dict[str, Any]:
    """Return whether the engine's paced times may be believed."""
    return dict(await call_first(http, "pacing_report", since_s=_finite(since_s)))


def _finite(since_s: float) -> float | None:
    return since_s if math.isfinite(since_s) else None
