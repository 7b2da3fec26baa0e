"""A real SGLang rollout engine that borrows paced devices: gate, lease, KV budget, aborts, pauses, commands, sleep.

Once on one device, once tensor-parallel over two with a ledger each.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs
import pytest
import pytest_asyncio
from sglang_site import Event, Server, sglang_server

from rose.backends.paced import PacedClock
from rose.backends.sglang import commands
from rose.backends.sglang.calls import call
from rose.coserving.ledger import Ledger
from rose.errors import EngineError
from rose.policies.admission import Budget, Mode
from rose.testing.models import make_qwen3

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

M = 8
KV_BYTES_PER_WORD = 147_456 * M
POOL_WORDS = 4096
NUM_SLOTS = 8
VOCAB = 256
GRANULE = 128 << 20


@attrs.define
class Bench:
    """A rollout server, its device's clock and ledger."""

    clock: PacedClock
    ledgers: Sequence[Ledger]
    server: Server
    _token: int = 0
    _ids: Any = attrs.field(factory=itertools.count)

    def lend(self, mode: Mode, kv_cap_words: float = math.inf) -> None:
        self._token += 1
        cap_bytes = kv_cap_words * KV_BYTES_PER_WORD / len(self.ledgers)
        budget = Budget(
            mode=mode, kv_cap_bytes=cap_bytes, fencing_token=self._token, expires_s=math.inf, is_granted=True
        )
        for ledger in self.ledgers:
            ledger.publish_budget(budget)

    def revoke(self) -> None:
        """End the lease of the last device; one is enough."""
        self._token += 1
        self.ledgers[-1].publish_budget(Budget(fencing_token=self._token))

    def budget_words(self, kv_cap_words: int) -> int:
        """Return the budget under a cap: whole granules of each device."""
        each = int(kv_cap_words * KV_BYTES_PER_WORD / len(self.ledgers)) // GRANULE * GRANULE
        return each * len(self.ledgers) // KV_BYTES_PER_WORD

    def name(self) -> str:
        return f"{random.getrandbits(32):08x}-{next(self._ids)}"

    async def answer(self, prompt: Sequence[int], max_tokens: int, request_id: str | None = None) -> Answer:
        answer = Answer()
        async for event in self.server.stream(request_id or self.name(), prompt, max_tokens):
            answer.events.append(event)
        return answer

    async def snapshot(self) -> dict[str, Any]:
        return await commands.rose_snapshot(self.server.http)

    async def until(self, **wanted: Any) -> dict[str, Any]:
        """Wait until the snapshot has these values."""
        async with asyncio.timeout(20):
            while True:
                snapshot = await self.snapshot()
                if all(snapshot[key] == value for key, value in wanted.items()):
                    return snapshot
                await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def answers(self, num: int, max_tokens: int, *, beside: int = 0) -> AsyncIterator[list[asyncio.Task[Answer]]]:
        """Have ``num`` requests under way, all of them running, ``beside`` others."""
        tasks = [asyncio.create_task(self.answer(prompt_of(seed), max_tokens)) for seed in range(num)]
        try:
            await self.until(num_running=num + beside)
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@attrs.define
class Answer:
    events: list[Event] = attrs.field(factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]

    @property
    def finish(self) -> tuple[str, str | None]:
        """The kind of the end, and its message."""
        finishes = [event.finish for event in self.events if event.finish is not None]
        assert len(finishes) == 1, "a stream ends once"
        assert self.events[-1].finish is finishes[0]
        assert self.events[-1].meta["completion_tokens"] == len(self.tokens), "a token was lost or came twice"
        return finishes[0]["type"], finishes[0].get("message")


def prompt_of(seed: int, num_tokens: int = 60) -> list[int]:
    tokens = random.Random(seed)
    return [tokens.randrange(3, VOCAB) for _ in range(num_tokens)]


EVICTED = ("abort", "rose:evicted")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2], ids=["tp1", "tp2"])
async def bench(request: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    num_ranks = request.param
    root = tmp_path_factory.mktemp("sglang")
    model = make_qwen3(
        root / "model", layers=2, hidden=128, heads=4, kv_heads=2, vocab=VOCAB, max_positions=1024, is_tied=False
    )
    clock = PacedClock.create(root / "clock", k=0.3)
    ledgers = [Ledger.create(root / f"ledger{rank}") for rank in range(num_ranks)]
    settings = {
        "role": "rollout",
        "device": {
            "kind": "paced",
            "path": [str(root / f"device{rank}") for rank in range(num_ranks)],
            "clock": clock.path,
            "profile": "h100:qwen3-8b",
            "tokens_per_token": M,
        },
        "ledger": [ledger.path for ledger in ledgers],
        "memory": {"pool_bytes": 42_000_000_000, "granule_bytes": GRANULE},
    }
    pool = ("--max-total-tokens", str(POOL_WORDS), "--max-running-requests", "32", "--chunked-prefill-size", "2048")
    async with sglang_server(root, model, settings, *pool, ranks=num_ranks) as server:
        bench = Bench(clock, ledgers, server)
        bench.lend(Mode.UNGATED)
        await bench.answer(prompt_of(0), 4)  # the first step of several ranks takes seconds
        yield bench


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def lent(bench: Bench) -> AsyncIterator[None]:
    """Before each test the device is lent, all of it; after it the engine is idle and alive."""
    bench.lend(Mode.UNGATED)
    await bench.until(kv_budget_tokens=POOL_WORDS)
    yield
    bench.clock.unfreeze()
    await bench.server.control("continue_generation")
    await commands.set_gate(bench.server.http, is_open=True)
    await bench.until(num_running=0, num_waiting=0, kv_used_tokens=0)
    await asyncio.sleep(0.1)  # an idle iteration: SGLang looks for leaks, and ends the engine over one
    await bench.snapshot()
    assert bench.server.is_alive()


async def test_gate_of_the_ledger(bench: Bench) -> None:
    """A closed gate holds a stream in the middle within two steps, without losing or changing a token."""
    alone = (await bench.answer(prompt_of(1), 30)).tokens
    async with bench.answers(1, 30) as (task,):
        bench.lend(Mode.CLOSED)
        await asyncio.sleep(0.3)
        closed_s = bench.clock.now()
        assert (await bench.snapshot())["hold"] == "gate_closed"
        await asyncio.sleep(0.5)
        assert not task.done()
        log = await commands.step_log(bench.server.http, closed_s - 0.1)
        assert not log, "a step ran behind a closed gate"
        bench.lend(Mode.UNGATED)
        answer = await task
    assert answer.tokens == (await bench.answer(prompt_of(0), 30)).tokens
    assert (await bench.answer(prompt_of(1), 30)).tokens == alone


async def test_gate_command_and_aborts(bench: Bench) -> None:
    """Behind a closed gate messages are served: an abort ends a running and a waiting request at once."""
    name = bench.name()
    running = asyncio.create_task(bench.answer(prompt_of(0), 500, name))
    await bench.until(num_running=1)
    await commands.set_gate(bench.server.http, is_open=False)
    waiting_name = bench.name()
    waiting = asyncio.create_task(bench.answer(prompt_of(1), 20, waiting_name))
    await bench.until(num_running=1, num_waiting=1)
    await bench.server.abort(name)
    await bench.server.abort(waiting_name)
    async with asyncio.timeout(2):
        first, second = await running, await waiting
        assert first.finish[0] == second.finish[0] == "abort"
    assert first.tokens
    assert not second.tokens
    await commands.set_gate(bench.server.http, is_open=True)
    assert (await bench.answer(prompt_of(0), 8)).finish[0] == "length"


async def test_health_is_answered_behind_a_closed_gate(bench: Bench) -> None:
    async with bench.answers(1, 400):
        await commands.set_gate(bench.server.http, is_open=False)
        async with asyncio.timeout(5), bench.server.http.session.get(bench.server.http.url + "/health") as answer:
            assert answer.status == 200
        await commands.set_gate(bench.server.http, is_open=True)


async def test_memory_of_the_ledger(bench: Bench) -> None:
    """A smaller cap evicts the youngest at once, with the tokens they have; a larger one lets all run again."""
    async with bench.answers(NUM_SLOTS, 300) as tasks:
        await asyncio.sleep(0.5)
        bench.lend(Mode.UNGATED, 556)
        async with asyncio.timeout(5):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        snapshot = await bench.snapshot()
        assert snapshot["kv_budget_tokens"] <= 556
        assert snapshot["kv_used_tokens"] <= snapshot["kv_budget_tokens"]
        assert 1 <= snapshot["num_running"] < NUM_SLOTS
        ended = [await task for task in tasks if task.done()]
        assert {answer.finish for answer in ended} == {EVICTED}
        assert all(answer.tokens for answer in ended)
        assert not tasks[0].done(), "the oldest was evicted before a younger one"
        bench.lend(Mode.UNGATED)
        await bench.until(kv_budget_tokens=POOL_WORDS)


async def test_evicted_answers_go_on(bench: Bench) -> None:
    """An evicted answer, asked for anew with its tokens, ends as if nothing had been."""
    wholes = await asyncio.gather(*(bench.answer(prompt_of(seed), 250) for seed in range(4)))
    async with bench.answers(4, 250) as tasks:
        await asyncio.sleep(0.3)
        bench.revoke()
        parts = [await task for task in tasks]
    bench.lend(Mode.UNGATED)
    await bench.until(kv_budget_tokens=POOL_WORDS)
    assert {part.finish for part in parts} == {EVICTED}
    for seed, part in enumerate(parts):
        rest = await bench.answer([*prompt_of(seed), *part.tokens], 250 - len(part.tokens))
        assert part.tokens + rest.tokens == wholes[seed].tokens


async def test_revocation(bench: Bench) -> None:
    """Without a lease every request ends as evicted at once, and new ones too."""
    async with bench.answers(NUM_SLOTS, 400) as tasks:
        revoked_s = time.monotonic()
        bench.revoke()
        answers = [await task for task in tasks]
        assert max(answer.events[-1].at_s for answer in answers) - revoked_s < 2.0
        assert {answer.finish for answer in answers} == {EVICTED}
    assert (await bench.answer(prompt_of(0), 10)).finish == EVICTED


async def test_what_never_fits_is_refused(bench: Bench) -> None:
    bench.lend(Mode.UNGATED, 556)
    await bench.until(kv_budget_tokens=bench.budget_words(556))
    answer = await bench.answer(prompt_of(0, 400), 400)
    assert answer.finish == ("abort", "rose:refused")
    assert (await bench.answer(prompt_of(0), 10)).finish[0] == "length"


async def test_budget_command_is_the_ledger_s_where_memory_is_shared(bench: Bench) -> None:
    """A command cuts at once; the policy's word comes with the next iteration."""
    async with bench.answers(4, 400) as tasks:
        assert await commands.set_kv_budget(bench.server.http, 100) == 100
        await bench.until(kv_budget_tokens=POOL_WORDS)
        assert [task.done() for task in tasks] == [False, True, True, True]


async def test_frozen(bench: Bench) -> None:
    """While time stands still rollouts run unpaced, and calls are answered."""
    bench.clock.freeze()
    frozen_s = bench.clock.now()
    async with asyncio.timeout(10):
        assert (await bench.answer(prompt_of(0), 50)).finish[0] == "length"
    assert (await bench.snapshot())["is_frozen"]
    assert bench.clock.now() == frozen_s


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pause(bench: Bench, mode: str) -> None:
    """A pause wins over the gate; paused, aborts end at once and a revoked lease evicts; what is left goes on unharmed."""
    name = bench.name()
    aborted = asyncio.create_task(bench.answer(prompt_of(9), 400, name))
    async with bench.answers(2, 250, beside=1) as tasks:
        await bench.server.control("pause_generation", mode=mode)
        assert (await bench.until(is_paused=True))["is_paused"]
        await bench.server.abort(name)
        async with asyncio.timeout(2):
            assert (await aborted).finish[0] == "abort"
        await bench.server.control("continue_generation")
        answers = [await task for task in tasks]
    assert {answer.finish[0] for answer in answers} == {"length"}
    async with bench.answers(2, 400) as tasks:
        await bench.server.control("pause_generation", mode=mode)
        bench.revoke()
        async with asyncio.timeout(2):
            assert {(await task).finish for task in tasks} == {EVICTED}
        await bench.server.control("continue_generation")


async def test_running_cap(bench: Bench) -> None:
    assert await commands.set_running_cap(bench.server.http, 2) == 2
    tasks = [asyncio.create_task(bench.answer(prompt_of(seed), 200)) for seed in range(5)]
    await bench.until(num_running=2, num_waiting=3)
    assert await commands.set_running_cap(bench.server.http, 32) == 32
    await bench.until(num_running=5, num_waiting=0)
    assert {(await task).finish[0] for task in tasks} == {"length"}
    for wrong in (0, 33):
        with pytest.raises(EngineError, match="num_requests is from 1 to 32"):
            await commands.set_running_cap(bench.server.http, wrong)


async def test_wrong_commands_change_nothing(bench: Bench) -> None:
    before = await bench.snapshot()
    for command, arguments, message in (
        ("set_gate", {"is_open": 1}, "is_open is true or false"),
        ("set_gate", {}, "is_open"),
        ("set_kv_budget", {"num_tokens": -5}, "num_tokens is a whole number"),
        ("set_kv_budget", {"num_tokens": 5, "more": 1}, "more"),
    ):
        with pytest.raises(EngineError, match=message):
            await call(bench.server.http, command, **arguments)
    assert await bench.snapshot() == before


async def test_flushed_cache_keeps_the_reserve(bench: Bench) -> None:
    """After a flush the slots that are held back are still nobody's."""
    bench.lend(Mode.UNGATED, 556)
    budget = bench.budget_words(556)
    await bench.until(kv_budget_tokens=budget)
    await bench.answer(prompt_of(3), 8)
    await bench.until(num_running=0, num_waiting=0)
    await asyncio.sleep(0.2)  # SGLang flushes only after an iteration without a request
    await bench.server.control("flush_cache")
    assert (await bench.snapshot())["kv_budget_tokens"] == budget
    assert (await bench.answer(prompt_of(3), 8)).finish[0] == "length"


async def test_sleep_and_wake(bench: Bench) -> None:
    """Asleep, nothing runs and nothing is held; awake, answers are what they were and the weights are known to be."""
    whole = (await bench.answer(prompt_of(0), 20)).tokens
    async with bench.answers(3, 400) as tasks:
        slept = await commands.sleep(bench.server.http)
        assert slept["num_requests"] == 3
        assert slept["released_bytes"] == 0, "without its memory saver SGLang keeps the books only"
        assert {(await task).finish for task in tasks} == {EVICTED}
    snapshot = await bench.snapshot()
    assert snapshot["is_asleep"]
    assert snapshot["released_tags"] == ["kv_cache", "weights"]
    assert snapshot["kv_budget_tokens"] == snapshot["kv_used_tokens"] == 0
    assert (await bench.answer(prompt_of(0), 20)).finish == EVICTED
    assert (await commands.sleep(bench.server.http))["num_requests"] == 0
    assert (await commands.wake(bench.server.http))["weight_bytes"] > 0
    assert (await commands.wake(bench.server.http))["weight_bytes"] is None, "nobody noted sums of a waking engine"
    snapshot = await bench.until(kv_budget_tokens=POOL_WORDS)
    assert not snapshot["released_tags"]
    assert (await bench.answer(prompt_of(0), 20)).tokens == whole


async def test_memory_calls_are_contained(bench: Bench) -> None:
    """SGLang's own calls, wrongly made, end the engine without this: release while busy, resume of what was not released."""
    async with bench.answers(1, 200):
        await bench.server.refused("release_memory_occupation", "while no request runs", tags=["kv_cache"])
        assert not (await bench.snapshot())["released_tags"]
    await bench.server.refused("resume_memory_occupation", "not released", tags=["kv_cache", "weights"])
    assert (await bench.answer(prompt_of(0), 8)).finish[0] == "length"
    await bench.until(num_running=0)
    await bench.server.control("release_memory_occupation", tags=["kv_cache"])
    assert (await bench.snapshot())["released_tags"] == ["kv_cache"]
    await bench.server.refused("release_memory_occupation", "released already", tags=["kv_cache"])
    await bench.server.control("resume_memory_occupation", tags=["kv_cache"])
    assert not (await bench.snapshot())["released_tags"]


async def test_chunked_prompt_is_ended_in_the_middle(bench: Bench) -> None:
    """An eviction may meet a prompt whose prefill is half done."""
    for _ in range(6):
        task = asyncio.create_task(bench.answer(prompt_of(random.randrange(1 << 30), 900), 10))
        await asyncio.sleep(random.uniform(0.0, 0.25))
        bench.revoke()
        async with asyncio.timeout(5):
            await task
        bench.lend(Mode.UNGATED)
        await bench.until(kv_budget_tokens=POOL_WORDS, num_running=0)
