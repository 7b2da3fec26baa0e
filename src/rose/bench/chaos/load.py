"""Load of a chaos site: clients of serving, and reinforcement-learning jobs on borrowed engines."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import attrs

from rose.backends.remote import RemoteEngine
from rose.backends.remote.client import HttpClient
from rose.bench.chaos.site import ROLLOUT_VOCAB, SERVING_VOCAB, Device, Site
from rose.errors import RoseError
from rose.pool import Borrower, RolloutPool
from rose.pool.remote_lender import RemoteLender
from rose.types import DeviceId, HopEnd, JobId, Sampling, Turn

_TIMEOUT_S = 60.0
_NUM_PROMPTS = 6
_FIRST_TOKEN = 3
_PAUSE_S = 0.1


@attrs.frozen(kw_only=True)
class Asked:
    """One request to serving. Times on the event loop's clock; ``failure`` is empty when it was answered."""

    began_s: float
    ended_s: float
    failure: str = ""


@attrs.define(eq=False)
class ServingLoad:
    """Asks one serving engine on and on; the same prompts over and over, whose greedy answers must not change.

    Args:
        device: Whose serving engine.
        num_workers: Requests in flight at a time.
        seed: Of prompts and pauses.
    """

    device: Device
    num_workers: int = 2
    seed: int = 0
    asked: list[Asked] = attrs.field(factory=list)
    answers: dict[tuple[int, ...], list[int]] = attrs.field(factory=dict)
    num_different: int = 0
    broken: list[str] = attrs.field(factory=list)

    def first_answer_s(self, since_s: float) -> float | None:
        """Return when the first request that began after ``since_s`` was answered."""
        ends = (one.ended_s for one in reversed(self.asked) if one.began_s > since_s and not one.failure)
        return min(ends, default=None)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask for as long as the context lasts; what is in flight then is not counted."""
        client = HttpClient(self.device.serving_url, timeout_s=_TIMEOUT_S)
        tasks = [asyncio.create_task(self._work(client, number)) for number in range(self.num_workers)]
        try:
            yield
        finally:
            await _ended(tasks, self.broken)
            await client.close()

    async def _work(self, client: HttpClient, number: int) -> None:
        loop, rng = asyncio.get_running_loop(), random.Random(f"{self.seed} {self.device.name} {number}")
        prompts = _prompts(self.seed, SERVING_VOCAB, 600)
        while True:
            began_s, failure = loop.time(), ""
            prompt = rng.choice(prompts)
            try:
                answer = await client.call("POST", "/complete", {"prompt_ids": prompt, "max_tokens": 8})
            except RoseError as error:
                failure = str(error)
            else:
                expected = self.answers.setdefault(prompt, answer)
                self.num_different += answer != expected
            self.asked.append(Asked(began_s=began_s, ended_s=loop.time(), failure=failure))
            await asyncio.sleep(rng.expovariate(1 / 0.3) if not failure else _PAUSE_S)


@attrs.define(eq=False)
class Job:
    """One job: a pool of borrowed engines alone, turns all the time; a turn that is given up is counted and asked again.

    Args:
        name: The job's.
        site: Where it borrows.
        num_turns: Turns in flight at a time.
        max_tokens: Of a turn.
        seed: Of the prompts.
    """

    name: str
    site: Site
    num_turns: int = 3
    max_tokens: int = 40
    seed: int = 0
    finished_s: list[float] = attrs.field(factory=list)
    ends: Counter[str] = attrs.field(factory=Counter)
    lost: list[str] = attrs.field(factory=list)
    answers: dict[tuple[int, ...], tuple[int, ...]] = attrs.field(factory=dict)
    num_different: int = 0
    num_short: int = 0
    num_moved: int = 0
    broken: list[str] = attrs.field(factory=list)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Generate for as long as the context lasts."""
        clock = self.site.clock
        async with contextlib.AsyncExitStack() as stack:
            engines = {}
            for name, device in self.site.devices.items():
                engines[DeviceId(name)] = engine = RemoteEngine(device.executor_url, engine_id=name, clock=clock)
                stack.push_async_callback(engine.close)
            lender = await stack.enter_async_context(RemoteLender(self.site.lender_url, clock=clock))
            pool = await stack.enter_async_context(RolloutPool(clock=clock))
            await stack.enter_async_context(
                Borrower(lender, pool, engines, job=JobId(self.name), clock=clock, ask_again_s=1.0)
            )
            tasks = [asyncio.create_task(self._work(pool, number)) for number in range(self.num_turns)]
            stack.push_async_callback(_ended, tasks, self.broken)
            yield

    async def _work(self, pool: RolloutPool, number: int) -> None:
        rng = random.Random(f"{self.seed} {self.name} {number}")
        prompts = _prompts(self.seed, ROLLOUT_VOCAB, 60)
        sampling = Sampling(max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True)
        count = 0
        while True:
            count += 1
            prompt, name = rng.choice(prompts), f"{self.name}-{number}-{count}"
            turn = Turn(trajectory_id=name, group_id=name, prompt_ids=prompt, sampling=sampling)
            try:
                result = await pool.generate(turn)
            except RoseError as error:
                self.lost.append(str(error))
                await asyncio.sleep(_PAUSE_S)
                continue
            self.finished_s.append(asyncio.get_running_loop().time())
            self.ends.update(hop.ended.value for hop in result.hops)
            self.num_moved += any(hop.num_tokens and hop.ended is not HopEnd.FINISHED for hop in result.hops)
            self.num_short += len(result.token_ids) != self.max_tokens
            self.num_different += result.token_ids != self.answers.setdefault(prompt, result.token_ids)


def _prompts(seed: int, vocab: int, longest: int) -> Sequence[tuple[int, ...]]:
    rng = random.Random(seed)
    lengths = [max(8, longest * i // (_NUM_PROMPTS - 1)) for i in range(_NUM_PROMPTS)]
    return [tuple(rng.randrange(_FIRST_TOKEN, vocab) for _ in range(length)) for length in lengths]


async def _ended(tasks: Sequence[asyncio.Task[None]], broken: list[str]) -> None:
    """End clients; notes what ended one before."""
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    broken += [repr(outcome) for outcome in outcomes if isinstance(outcome, Exception)]
