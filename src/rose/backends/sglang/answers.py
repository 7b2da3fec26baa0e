"""What an SGLang server's answers mean, as ROSE's errors or plain data. Pure.

SGLang writes what went wrong in many forms: ``{"error": {"message"}}``, ``{"error": text}``, ``{"message"}``, ``{"detail"}``, plain text, with
its own source lines behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rose.backends.openai.client import OK, words
from rose.errors import EngineBusyError, EngineError, EngineLostError, EngineUnsupportedError, RequestRefusedError

_BUSY, _LOST, _NO_ROUTE = 429, (502, 503, 504), (404, 405)
_REFUSED = range(400, 500)
_SERVICE_UNAVAILABLE = 503


def plain(path: str, status: int, body: bytes) -> Mapping[str, Any]:
    """Return the answer to a command; one that is no JSON object is under ``answer``.

    Raises:
        EngineLostError: The server says that its engine does not answer.
        EngineUnsupportedError: It has no such route.
        EngineError: It refuses; in its own words.
    """
    if status != OK:
        raise _refusal(path, status, body)
    try:
        found = json.loads(body) if body else None
    except ValueError:  # some answers are sentences
        found = body.decode(errors="replace").strip()
    return found if isinstance(found, dict) else {"answer": found}


def _refusal(path: str, status: int, body: bytes) -> EngineError:
    message = f"SGLang answered {path} with status {status}: {first_line(words(body))}"
    if status in _NO_ROUTE:
        return EngineUnsupportedError(f"{message}; ROSE is written for SGLang 0.5.23")
    if status in _LOST:
        return EngineLostError(message)
    if status == _BUSY:
        return EngineBusyError(message)
    return EngineError(message)


def refused_request(status: int, body: bytes) -> EngineError:
    """Return what a refusal of ``/generate`` means, where the answer's own status tells."""
    message = f"SGLang answered with status {status}: {first_line(words(body))}"
    if status in (_BUSY, _SERVICE_UNAVAILABLE):
        return EngineBusyError(message)
    if status in _LOST:
        return EngineLostError(message)
    return RequestRefusedError(message) if status in _REFUSED else EngineError(message)


def told_in_stream(error: object) -> EngineError:
    """Return what an error event inside a stream means."""
    told = error if isinstance(error, Mapping) else {"message": error}
    return of_code(told.get("code"), str(told.get("message") or told))


def of_code(code: object, message: str) -> EngineError:
    """Return the error for a status that SGLang gives beside a message; its own kind of number is an ``EngineError``."""
    if code in (_BUSY, _SERVICE_UNAVAILABLE):
        return EngineBusyError(message)
    if isinstance(code, int) and code in _REFUSED:
        return RequestRefusedError(message)
    return EngineError(message)


def first_line(text: str) -> str:
    """Return a message without the source lines that SGLang puts behind it."""
    return text.strip().partition("\n\n")[0]
