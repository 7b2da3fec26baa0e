"""Commands to ROSE's plugin inside an SGLang server, over HTTP. ``rose.backends.sglang_server.wire`` says how they travel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from rose.backends.sglang_server.wire import COMMAND_PREFIX, PATH
from rose.backends.wire import unwrap
from rose.errors import EngineError, EngineLostError, EngineUnsupportedError, RoseError

_HOW_TO_INSTALL = (
    "the server does not run ROSE's plugin: install rose-rl into the environment that SGLang runs in and start the server again (where "
    "SGLANG_PLUGINS is set, it must list 'rose')"
)


class Http(Protocol):
    """Calls of one server; failures are ROSE's errors."""

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a body, return the answer's."""

    async def get(self, path: str) -> Mapping[str, Any]:
        """Return the answer's body."""


async def call(http: Http, command: str, **given: Any) -> dict[str, Any]:
    """Have a command carried out; returns the answer, each rank's value under ``ranks``.

    Raises:
        EngineUnsupportedError: The server does not run ROSE's plugin, or is one that cannot be commanded in this.
        RoseError: What a rank answered instead of a value; what only some ranks answered comes from the first of them.
    """
    action = COMMAND_PREFIX + json.dumps({"command": command, **given})
    try:
        reply = await http.post(PATH, {"action": action})
    except (EngineLostError, TimeoutError):
        raise
    except RoseError as error:
        if "Unsupported action" not in str(error):
            raise
        raise EngineUnsupportedError(_HOW_TO_INSTALL) from error
    text = str(reply.get("message", ""))
    try:
        answer = json.loads(text)
        ranks = list(answer["ranks"])
    except (ValueError, TypeError, KeyError) as error:
        message = f"the server's answer to {command} is none of ROSE's plugin: {text[:200]!r}"
        raise EngineError(message) from error
    values = [unwrap(one) for one in sorted(ranks, key=lambda one: "error" not in one)]
    return {**answer, "ranks": values}


async def call_first(http: Http, command: str, **given: Any) -> Any:
    """Have a command carried out; returns the first rank's value. Errors as of ``call``."""
    return (await call(http, command, **given))["ranks"][0]
