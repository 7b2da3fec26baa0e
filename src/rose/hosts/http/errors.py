"""Errors as JSON: ROSE's own under their names, the server's under theirs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from rose.backends.remote.wire import error_to_wire, status_of
from rose.errors import RoseError

_logger = logging.getLogger(__name__)
_GONE = 499
"""Status of an answer to a client that closed its connection; no standard one fits."""


def error_response(status: int, kind: str, message: str) -> web.Response:
    """Return an error answer of the server itself."""
    return web.json_response({"error": {"type": kind, "message": message}}, status=status)


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn what a handler raises into an answer; what is no expected error is logged and answered as 500."""
    try:
        return await handler(request)
    except RoseError as error:
        return web.json_response(error_to_wire(error), status=status_of(error))
    except web.HTTPException as error:
        return error_response(error.status, _snake(type(error).__name__.removeprefix("HTTP")), error.reason)
    except Exception as error:
        if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
            return error_response(_GONE, "client_gone", "nobody reads this")  # raised, it would be logged as an error
        _logger.exception("%s %s failed", request.method, request.path)
        return error_response(500, "internal_error", f"{type(error).__name__}: {error}; see the server's log")


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
