"""Seeing things to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await something that must not be left half done; a cancellation takes effect afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # what it failed with is of no interest to a caller that is gone
        raise
