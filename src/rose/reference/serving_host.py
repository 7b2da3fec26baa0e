"""The serving side of the demo in a process of its own: serving engines, and the clients that replay their load.

A production model's clients do not share a Python process with a rollout pool; here they do not either, so that what they
measure is the device and not the pool's event loop.

Requests (JSON lines, answered in order, see ``rose.reference.worker_process``)
    1. ``{"clock": path, "engines": [EngineSpec fields]}``, once and first, starts the engines.
    2. ``{"do": "replay", "label": text, "arrivals": [[[at_s, prompt_tokens, output_tokens], ...] a device], "vocab_size": n}``
       begins an arm: its time starts now, on the paced clock. An arm that still runs is ended, or the loads of both would add up.
    3. ``{"do": "progress"}`` answers the latest TTFTs and TPOTs.
    4. ``{"do": "stop"}`` ends the arm: requests in flight are cut off; answers every request that has a token, how long the
       others waited for their first one, and how many failed (those are in neither list).
    5. ``{"do": "warm_up"}`` lets every engine make its first step, which takes longest; the clock must run.
    6. ``{"do": "step_logs", "since_s": t}`` answers each engine's device turns since then.

Invariants: times are the paced clock's, counted from the arm's start; token ids are drawn anew for every arm, so that no arm
finds another's prefixes in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

import attrs

from rose.backends.paced import PacedClock
from rose.errors import EngineError, RoseError
from rose.reference.engines import EngineSpec, make_engine
from rose.reference.trajectory import derive_seed
from rose.reference.worker_process import take_over_stdout
from rose.types import EngineRequest, FinishReason, RequestId, Sampling

if TYPE_CHECKING:
    from rose.reference.engines import FleetEngine

_RECENT = 400
_FIRST_WORD = 3
_SHORTEST_CUT_TOKENS = 30

Arrival = tuple[float, int, int]


@attrs.define
class _Answer:
    """One request: its number in the device's list, when it was sent, and when each of its tokens came."""

    index: int
    device: str
    arrived_s: float
    is_finished: bool = False
    is_failed: bool = False
    token_times_s: list[float] = attrs.field(factory=list)

    def kept_times_s(self) -> list[float]:
        """Return the token times that count: of a request that was cut off early only the first one."""
        is_whole = self.is_finished or len(self.token_times_s) >= _SHORTEST_CUT_TOKENS
        return self.token_times_s if is_whole else self.token_times_s[:1]

    def latency_s(self) -> tuple[float, float | None]:
        """Return the time to the first token, and the mean time of each further one."""
        first_s, last_s = self.token_times_s[0], self.token_times_s[-1]
        num_gaps = len(self.token_times_s) - 1
        return first_s - self.arrived_s, (last_s - first_s) / num_gaps if num_gaps else None


class _Replay:
    """One arm's load on all devices."""

    def __init__(self, engines: Sequence[FleetEngine], clock: PacedClock, label: str, vocab_size: int) -> None:
        self._engines = engines
        self._clock = clock
        self._label = label
        self._vocab_size = vocab_size
        self._start_s = clock.now()
        self._tasks: set[asyncio.Task[None]] = set()
        self.answers: list[_Answer] = []
        self.recent: deque[_Answer] = deque(maxlen=_RECENT)

    def begin(self, arrivals: Sequence[Sequence[Arrival]]) -> None:
        for engine, list_ in zip(self._engines, arrivals, strict=True):
            self._spawn(self._feed(engine, list_))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _feed(self, engine: FleetEngine, arrivals: Sequence[Arrival]) -> None:
        rng = random.Random(derive_seed(self._label, engine.engine_id))
        for index, (at_s, num_prompt, num_output) in enumerate(arrivals):
            prompt = rng.choices(range(_FIRST_WORD, self._vocab_size), k=num_prompt)
            await self._clock.sleep(self._start_s + at_s - self._clock.now())
            self._spawn(self._ask(engine, index, prompt, num_output))

    async def _ask(self, engine: FleetEngine, index: int, prompt: Sequence[int], num_output: int) -> None:
        answer = _Answer(index, engine.engine_id, self._clock.now() - self._start_s)
        self.answers.append(answer)
        request = EngineRequest(
            request_id=RequestId(f"{self._label}-{engine.engine_id}-{index}"),
            prompt_ids=tuple(prompt),
            sampling=Sampling(max_tokens=num_output, temperature=0.0, ignore_eos=True, logprobs=False),
        )
        try:
            async with contextlib.aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    answer.token_times_s += [self._clock.now() - self._start_s] * len(chunk.token_ids)
                    answer.is_finished = chunk.finish_reason is FinishReason.LENGTH
        except EngineError:
            answer.is_finished = False
        answer.is_failed = not answer.is_finished
        if answer.is_finished:
            self.recent.append(answer)

    async def stop(self) -> dict[str, Any]:
        ended_s = self._clock.now() - self._start_s
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        whole = [answer for answer in self.answers if not answer.is_failed]
        return {
            "duration_s": ended_s,
            "num_sent": [sum(answer.device == engine.engine_id for answer in self.answers) for engine in self._engines],
            "num_failed": len(self.answers) - len(whole),
            "waited_s": [ended_s - answer.arrived_s for answer in whole if not answer.token_times_s],
            "answers": [
                [answer.index, answer.device, answer.arrived_s, answer.kept_times_s()]
                for answer in whole
                if answer.token_times_s
            ],
        }


class _Host:
    """The child's state between requests; each public coroutine is one request."""

    def __init__(self, clock: PacedClock, engines: Sequence[FleetEngine]) -> None:
        self._clock = clock
        self._engines = engines
        self._arm: _Replay | None = None

    @classmethod
    async def start(cls, clock: str, engines: Sequence[dict[str, Any]]) -> Self:
        paced_clock = PacedClock(clock)
        host = cls(paced_clock, [make_engine(EngineSpec(**spec), clock=paced_clock) for spec in engines])
        try:
            await asyncio.gather(*(engine.start() for engine in host._engines))
        except BaseException:
            await host.close()
            raise
        return host

    async def handle(self, do: str, **arguments: Any) -> Any:
        return await getattr(self, f"do_{do}")(**arguments)

    async def do_warm_up(self) -> None:
        await asyncio.gather(*map(_first_token, self._engines))

    async def do_replay(self, label: str, arrivals: Sequence[Sequence[Arrival]], vocab_size: int) -> None:
        await self.do_stop()
        self._arm = _Replay(self._engines, self._clock, label, vocab_size)
        self._arm.begin(arrivals)

    async def do_progress(self) -> list[tuple[float, float | None]]:
        return [] if self._arm is None else [answer.latency_s() for answer in self._arm.recent]

    async def do_stop(self) -> dict[str, Any]:
        arm, self._arm = self._arm, None
        return {} if arm is None else await arm.stop()

    async def do_step_logs(self, since_s: float) -> dict[str, list[list[float]]]:
        return {engine.engine_id: await engine.step_log(since_s) for engine in self._engines}

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))


async def _first_token(engine: FleetEngine) -> None:
    request = EngineRequest(
        request_id=RequestId(f"first-{engine.engine_id}"),
        prompt_ids=(_FIRST_WORD,),
        sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=False),
    )
    async for _ in engine.generate(request):
        pass


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 28)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def serve(answers: TextIO) -> None:
    """Answer request lines from standard input until it ends, then stop the engines."""
    host: _Host | None = None
    reader = await _lines()
    try:
        while line := await reader.readline():
            request = json.loads(line)
            try:
                if host is None:
                    host = await _Host.start(request["clock"], request["engines"])
                    reply: dict[str, Any] = {"ok": None}
                else:
                    reply = {"ok": await host.handle(**request)}
            except RoseError as error:
                reply = {"error": str(error)}
            answers.write(json.dumps(reply, separators=(",", ":")) + "\n")
            answers.flush()
    finally:
        if host is not None:
            await host.close()


if __name__ == "__main__":
    asyncio.run(serve(take_over_stdout()))
