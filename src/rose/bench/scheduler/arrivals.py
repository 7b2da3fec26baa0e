"""Turns that arrive at random times at a fixed rate, whatever becomes of those before them; the same ones for everybody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from random import Random
from typing import Any

import attrs

from rose import checks

_NUM_PROMPTS = 64
_VOCABULARY = 150_000


@attrs.define(kw_only=True)
class Arrivals:
    """An open loop.

    Attributes:
        rate_per_s: Turns a second, on average.
        duration_s: How long turns arrive.
        prompt_tokens: The shortest and the longest prompt.
        seed: Of times and prompts.
        times_s: When each turn comes, since the start.
    """

    rate_per_s: float = attrs.field(validator=checks.number(above=0))
    duration_s: float = attrs.field(validator=checks.number(above=0))
    prompt_tokens: tuple[int, int] = (1024, 4096)
    seed: int = 0
    times_s: list[float] = attrs.field(init=False, factory=list)
    _prompts: list[tuple[int, ...]] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        rng = Random(self.seed)
        at_s = rng.expovariate(self.rate_per_s)
        while at_s < self.duration_s or not self.times_s:
            self.times_s.append(at_s)
            at_s += rng.expovariate(self.rate_per_s)
        for _ in range(_NUM_PROMPTS):
            self._prompts.append(tuple(rng.randrange(_VOCABULARY) for _ in range(rng.randint(*self.prompt_tokens))))

    def prompt(self, number: int) -> tuple[int, ...]:
        """Return the prompt of a turn."""
        return self._prompts[number % len(self._prompts)]


async def run_open_loop(arrivals: Arrivals, run_turn: Callable[[int], Coroutine[Any, Any, None]]) -> list[float]:
    """Start each turn at its time and wait for all; returns how late each was started, in seconds.

    Raises:
        RoseError: The first turn that failed; the others were cancelled.
    """
    loop = asyncio.get_running_loop()
    begun_s, late_s = loop.time(), []
    async with all_or_first_error() as turns:
        for number, at_s in enumerate(arrivals.times_s):
            await asyncio.sleep(begun_s + at_s - loop.time())
            late_s.append(max(0.0, loop.time() - begun_s - at_s))
            turns.create_task(run_turn(number))
    return late_s


@contextlib.asynccontextmanager
async def all_or_first_error() -> AsyncIterator[asyncio.TaskGroup]:
    """Give a task group whose first error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
