"""Answers that come piece by piece: JSON lines, or server-sent events as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

from aiohttp import web

from rose.backends.remote.wire import compact
from rose.errors import RoseError
from rose.pool.wire import error_to_plain

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


async def answer_stream(request: web.Request, items: AsyncIterable[Any], content_type: str) -> web.StreamResponse:
    """Send plain data as it comes; an error before the first item is raised, a later one is the last item.

    Args:
        request: What is answered.
        items: The data; the source is not closed here.
        content_type: ``NDJSON`` or ``SSE``, which ends with ``[DONE]``.
    """
    response: web.StreamResponse | None = None
    is_sse = content_type == SSE
    try:
        async for item in items:
            response = response or await _begin(request, content_type)
            await response.write(_encoded(item, is_sse=is_sse))
    except RoseError as error:
        if response is None:
            raise
        await response.write(_encoded(error_to_plain(error), is_sse=is_sse))
    response = response or await _begin(request, content_type)
    if is_sse:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _begin(request: web.Request, content_type: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": content_type, "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


def _encoded(item: Any, *, is_sse: bool) -> bytes:
    text = compact(item).encode()
    return b"data: " + text + b"\n\n" if is_sse else text + b"\n"
