"""A rollout engine cut over two borrowed devices, each with a serving engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from coserving_site import KV_BYTES_PER_WORD, ROLLOUT_VOCAB, M, Site

from rose.backends.turn_lock import TurnLock
from rose.errors import EngineLostError
from rose.policies.admission import Mode

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

DEVICES = ("left", "right")
NUM_REQUESTS = 16
NUM_TOKENS = 40
KV_BYTES = 16 << 20
POOL_BYTES = 100e9  # more than the engine's own pool, so that the whole of it can be lent


@pytest.fixture(scope="module", autouse=True)
def unbound_threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # by itself vLLM wants one NUMA node a worker
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    site = Site.make(tmp_path_factory.mktemp("site"), *DEVICES, pool_bytes=POOL_BYTES)
    async with contextlib.AsyncExitStack() as stack:
        rollout = site.options("rollout", "rollout", *DEVICES, tensor_parallel_size=2, kv_cache_bytes=KV_BYTES)
        await site.start(stack, rollout, *(site.options(device, "serving", device) for device in DEVICES))
        yield site


def workers(site: Site) -> list[psutil.Process]:
    """Return the worker processes of the cut engine: the two largest children of its core."""
    children = psutil.Process(site.engines["rollout"].pid).children(recursive=True)
    return sorted(children, key=lambda child: child.memory_info().rss)[-2:]


async def words_in(site: Site, seconds: float) -> int:
    before = site.words.get("rollout", 0)
    await asyncio.sleep(seconds)
    return site.words.get("rollout", 0) - before


async def test_it_steps_only_when_both_devices_allow(site: Site) -> None:
    """Either lease closed: no token; both open: tokens, and the same device time on both ledgers."""
    site.lend(Mode.SLO)
    async with site.rollouts("rollout", max_tokens=60):
        await asyncio.sleep(0.5)
        assert await words_in(site, 0.5) > 0
        for device in DEVICES:
            site.lend(Mode.CLOSED, device)
            await asyncio.sleep(1.2)  # a step under way stands for several turns, the later ones of which may be held
            assert await words_in(site, 0.5) == 0, f"it ran although {device} was closed"
            site.lend(Mode.SLO, device)
            await asyncio.sleep(0.3)
            assert await words_in(site, 1.0) > 0
    await asyncio.sleep(0.3)
    left, right = (site.ledgers[device].rollout() for device in DEVICES)
    assert left.busy_s == right.busy_s > 0


async def test_serving_on_both_devices_keeps_its_promise(site: Site) -> None:
    """The same arrivals on both devices, alone and lent up to the SLO."""

    async def timed(device: str, prompt: list[int]) -> tuple[float, float]:
        sent_s, *times = await site.times(device, prompt, NUM_TOKENS)
        return times[0] - sent_s, (times[-1] - times[0]) / (NUM_TOKENS - 1)

    async def load(device: str, seed: str) -> list[Any]:
        return await site.arrivals(NUM_REQUESTS, 3.0, lambda prompt: timed(device, prompt), seed + device)

    arms: dict[Mode, Any] = {}
    words: dict[Mode, float] = {}
    start_s = site.clock.now()
    for mode in (Mode.CLOSED, Mode.SLO):
        site.lend(mode)
        async with site.rollouts("rollout"):
            before, begin_s = site.words.get("rollout", 0), site.clock.now()
            arms[mode] = await asyncio.gather(*(load(device, mode.value) for device in DEVICES))
            words[mode] = (site.words.get("rollout", 0) - before) * M / (site.clock.now() - begin_s)
    if doubts := await site.doubts(start_s):
        pytest.skip(f"the machine disturbed the pacing, so latencies prove nothing: {doubts}")
    assert words[Mode.CLOSED] == 0
    assert words[Mode.SLO] > 100, "borrowed tokens a second"
    for device, alone, lent in zip(DEVICES, arms[Mode.CLOSED], arms[Mode.SLO], strict=True):
        (alone_ttft, _), (ttft, tpot) = (list(zip(*arm, strict=True)) for arm in (alone, lent))
        print(device, words, statistics.mean(alone_ttft), statistics.mean(ttft), max(ttft), max(tpot))  # noqa: T201
        assert max(ttft) < 0.5
        assert max(tpot) < 0.150
        assert statistics.mean(ttft) - statistics.mean(alone_ttft) < 0.030


async def fill_kv(site: Site, num_tokens: int) -> None:
    """Compute prompts until every block was written once; unpaced, for time stands still."""
    site.clock.freeze()
    tokens = random.Random(0)
    prompts = [[tokens.randrange(3, ROLLOUT_VOCAB) for _ in range(1000)] for _ in range(num_tokens // 1000 + 8)]
    await asyncio.gather(*(site.tokens("rollout", prompt, 1) for prompt in prompts))
    site.clock.unfreeze()


async def test_the_smaller_budget_counts_and_both_workers_give_pages_back(site: Site) -> None:
    """A cap on one device bounds the engine, and its workers' memory shrinks by their share of the held blocks."""
    engine, cap_bytes = site.engines["rollout"], 2.5e9

    async def budget_tokens() -> int:
        await asyncio.sleep(0.4)
        return int((await engine._ask("rose_snapshot"))["kv_budget_tokens"])

    async def await_growth() -> None:
        async with asyncio.timeout(30):
            while await budget_tokens() < total:
                pass

    total = (await engine.snapshot()).kv_total_tokens
    site.lend(Mode.SLO)
    await await_growth()
    await fill_kv(site, total)
    full = [worker.memory_info().rss for worker in workers(site)]
    site.lend(Mode.SLO, "left", kv_cap_bytes=cap_bytes)
    assert 0 < await budget_tokens() <= 2 * cap_bytes / KV_BYTES_PER_WORD < total / 4, "one device's cap, times two"
    given = [before - worker.memory_info().rss for before, worker in zip(full, workers(site), strict=True)]
    print("bytes given back by each worker", given)  # noqa: T201 - for the reader of -s
    assert min(given) > 0.7 * KV_BYTES
    site.lend(Mode.SLO, "left")
    await await_growth()
    site.lend(Mode.SLO, "right", kv_cap_bytes=cap_bytes)
    assert 0 < await budget_tokens() <= 2 * cap_bytes / KV_BYTES_PER_WORD
    assert len(await site.tokens("rollout", [5] * 40, 20)) == 20


async def test_both_turns_are_free_when_it_dies(site: Site) -> None:
    """Killed in the midst of its work, it leaves no worker behind and no device taken; serving goes on."""
    engine = site.engines["rollout"]
    site.lend(Mode.UNGATED)
    processes = [psutil.Process(engine.pid), *workers(site)]
    async with site.rollouts("rollout", max_tokens=100):
        await asyncio.sleep(0.5)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineLostError):
            await site.tokens("rollout", [5] * 10, 100)
    for device in DEVICES:
        turn = TurnLock(site.root / f"{device}.device")
        async with asyncio.timeout(2):
            while not turn.acquire(is_blocking=False):
                await asyncio.sleep(0.01)
        turn.close()
        assert len(await site.tokens(device, [5] * 100, 20)) == 20
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=20)
    assert not alive
