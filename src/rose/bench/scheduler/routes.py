"""Ways to an engine, each as its users go it: token ids in, token ids and log-probs out."""

from __future__ import annotations

import contextlib
import itertools
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import aiohttp

from rose.backends.remote import RemoteEngine
from rose.bench.scheduler.http_engine import MODEL
from rose.errors import EngineError
from rose.pool.remote_pool import RemotePool
from rose.types import EngineRequest, RequestId, Sampling, Turn

_IDLE_S = 30.0
TURNS = 8
"""Turns of a trajectory, where a way knows of trajectories."""


class Route(ABC):
    """One way. Use it on one event loop."""

    @abstractmethod
    async def run_turn(self, number: int, prompt_ids: tuple[int, ...], max_tokens: int) -> int:
        """Run a turn; returns how many tokens came.

        Raises:
            RoseError: It failed.
        """

    async def close(self) -> None:
        """Close the connections."""


class StreamRoute(Route):
    """A ``POST`` whose answer is a stream of events, to an engine or to whatever stands before engines; a thin client on aiohttp.

    Args:
        urls: Where; turns take them in turn.
    """

    path: str

    def __init__(self, *urls: str) -> None:
        self._urls = itertools.cycle(f"{url}{self.path}" for url in urls)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Content-Type": "application/json"},
        )

    @abstractmethod
    def body(self, prompt_ids: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
        """Return what is asked."""

    @abstractmethod
    def take(self, event: Any, tokens: list[int], logprobs: list[float]) -> None:
        """Add what an event brings."""

    async def run_turn(self, number: int, prompt_ids: tuple[int, ...], max_tokens: int) -> int:  # noqa: ARG002
        """Run a turn."""
        url, tokens, logprobs = next(self._urls), list[int](), list[float]()
        body = json.dumps(self.body(prompt_ids, max_tokens), separators=(",", ":")).encode()
        try:
            async with self._session.post(url, data=body) as answer:
                if answer.status != 200:  # noqa: PLR2004
                    _fail(url, f"{answer.status}: {(await answer.text())[:200]}")
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            _fail(url, str(event["error"]))
                        self.take(event, tokens, logprobs)
        except aiohttp.ClientError as error:
            _fail(url, str(error), error)
        return len(tokens) if len(tokens) == len(logprobs) else 0

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


def _fail(url: str, what: str, cause: Exception | None = None) -> NoReturn:
    message = f"{url} answered {what}"
    raise EngineError(message) from cause


class CompletionsRoute(StreamRoute):
    """``/v1/completions`` as ``vllm serve`` has it."""

    path = "/v1/completions"

    def body(self, prompt_ids: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
        """Return what is asked."""
        asked = {"model": MODEL, "prompt": prompt_ids, "max_tokens": max_tokens, "temperature": 1.0}
        return {**asked, "stream": True, "logprobs": 1, "return_token_ids": True}

    def take(self, event: Any, tokens: list[int], logprobs: list[float]) -> None:
        """Add what an event brings."""
        choice = event["choices"][0]
        tokens += choice["token_ids"]
        logprobs += choice["logprobs"]["token_logprobs"]


class GenerateRoute(StreamRoute):
    """``/generate`` as SGLang has it."""

    path = "/generate"

    def body(self, prompt_ids: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
        """Return what is asked."""
        sampling = {"max_new_tokens": max_tokens, "temperature": 1.0}
        return {"input_ids": prompt_ids, "sampling_params": sampling, "stream": True, "return_logprob": True}

    def take(self, event: Any, tokens: list[int], logprobs: list[float]) -> None:
        """Add what an event brings."""
        tokens += event["output_ids"]
        logprobs += [value for value, _, _ in event["meta_info"]["output_token_logprobs"]]


class RemoteRoute(Route):
    """ROSE's own client of an executor, straight to the engines."""

    def __init__(self, *urls: str) -> None:
        self._engines = [RemoteEngine(url) for url in urls]
        self._next: Callable[[], RemoteEngine] = itertools.cycle(self._engines).__next__

    async def run_turn(self, number: int, prompt_ids: tuple[int, ...], max_tokens: int) -> int:
        """Run a turn."""
        sampling = Sampling(max_tokens=max_tokens)
        request = EngineRequest(request_id=RequestId(f"r{number}"), prompt_ids=prompt_ids, sampling=sampling)
        return sum([len(chunk.token_ids) async for chunk in self._next().generate(request)])

    async def close(self) -> None:
        """Close the connections."""
        async with contextlib.AsyncExitStack() as stack:
            for engine in self._engines:
                stack.push_async_callback(engine.close)


class PoolRoute(Route):
    """``RolloutPool.connect``: the pool decides, the turn streams from the engine. The turns are those of trajectories of ``TURNS`` each."""

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool
        self._names = itertools.count()
        self._at_rest: deque[tuple[str, int]] = deque()

    async def run_turn(self, number: int, prompt_ids: tuple[int, ...], max_tokens: int) -> int:
        """Run the next turn of the trajectory that has rested longest, or the first one of another."""
        name, num_turns = self._at_rest.popleft() if self._at_rest else (f"t{next(self._names)}", 0)
        turn = Turn(
            trajectory_id=name,
            group_id=f"g{number // 16}",
            prompt_ids=prompt_ids,
            sampling=Sampling(max_tokens=max_tokens),
        )
        result = await self._pool.generate(turn)
        if num_turns + 1 < TURNS:
            self._at_rest.append((name, num_turns + 1))
        return len(result.token_ids) if len(result.token_ids) == len(result.logprobs) else 0
