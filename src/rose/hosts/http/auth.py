"""Bearer tokens: who calls, and what they may do. The server knows digests only."""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
from aiohttp import web

from rose import checks
from rose.hosts.http.errors import error_response

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN_PATHS = ("/health",)
_SCHEME = "bearer "


class Access(enum.Enum):
    """What a token allows.

    ``read``: look, as dashboards do. ``job``: use what was lent, beside that. ``control``: everything.
    """

    READ = "read"
    JOB = "job"
    CONTROL = "control"


@attrs.frozen(kw_only=True)
class TokenConfig:
    """One token that a server accepts.

    Attributes:
        name: Whose it is; a job's token has the job's name.
        sha256: The token's SHA-256 in hex (``printf %s "$TOKEN" | sha256sum``), never the token.
        access: What it allows.
    """

    name: str = attrs.field(validator=checks.text(r"[\w.-]+"))
    sha256: str = attrs.field(validator=checks.text(r"[0-9a-fA-F]{64}"), repr=False)
    access: Access = Access.JOB


@attrs.frozen
class Caller:
    """Who sent a request. Where no tokens are configured, an unnamed one that may do everything."""

    name: str = ""
    access: Access = Access.CONTROL


_CALLER: ContextVar[Caller] = ContextVar("rose_caller")


def guard(tokens: Sequence[TokenConfig]) -> Any:
    """Return a middleware that finds out who calls and refuses those without a token, where tokens are configured."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        header = request.headers.get("Authorization", "")
        sender = _identify(header, tokens) if tokens else Caller()
        if sender is None and request.path not in _OPEN_PATHS:
            message = "this needs a bearer token: Authorization: Bearer ..."
            if header.lower().startswith(_SCHEME):
                message = "unknown token: none of the tokens that this service lists has its sha256"
            answer = error_response(401, "unauthorized", message)
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        _CALLER.set(sender or Caller(access=Access.READ))
        return await handler(request)

    return check


def _identify(header: str, tokens: Sequence[TokenConfig]) -> Caller | None:
    """Return whose token it is. All are compared, so that the time tells nothing."""
    if not header.lower().startswith(_SCHEME):
        return None
    given = header[len(_SCHEME) :].strip().encode(errors="surrogateescape")  # as the server decodes headers
    digest = hashlib.sha256(given).hexdigest()
    found = [token for token in tokens if hmac.compare_digest(token.sha256.lower(), digest)]
    return Caller(found[0].name, found[0].access) if found else None


def caller() -> Caller:
    """Return who sent the request that is being handled."""
    return _CALLER.get()


def require(*allowed: Access) -> Caller:
    """Return who sent the request that is being handled if they may; ``control`` may everything.

    Raises:
        HTTPForbidden: They may not.
    """
    sender = caller()
    if sender.access is not Access.CONTROL and sender.access not in allowed:
        names = " or ".join(access.value for access in (*allowed, Access.CONTROL))
        message = f"the token of {sender.name!r} has access {sender.access.value}; this needs one with access {names}"
        raise web.HTTPForbidden(reason=message)
    return sender
