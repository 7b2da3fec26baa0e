"""Prefill and decode on different devices, a rollout engine beside each: every role keeps its own promise."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from coserving_site import SERVING_VOCAB, M, Site

from rose.backends.vllm.environment import import_vllm
from rose.backends.vllm.streams import sampling_params
from rose.policies.admission import Mode
from rose.types import Sampling

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

NUM_REQUESTS = 24
NUM_TOKENS = 40
TIMEOUT_S = 2.5


@attrs.define
class Deployment:
    site: Site
    folder: Path

    async def answer(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """Answer as a router of disaggregated serving does: the first engine computes the prompt, the second decodes."""
        await self.site.tokens("prefill", prompt, 1)
        return await self.site.tokens("decode", prompt, num_tokens)

    async def timed(self, prompt: list[int]) -> tuple[float, float, float, float]:
        """Answer; returns TTFT on the prefill device; wait, TPOT and longest gap on the decode device."""
        sent_s, first_s = await self.site.times("prefill", prompt, 1)
        asked_s, *times = await self.site.times("decode", prompt, NUM_TOKENS)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return first_s - sent_s, times[0] - asked_s, (times[-1] - times[0]) / len(gaps), max(gaps)


def report(words: dict[Mode, list[float]], arms: dict[Mode, list[Any]]) -> None:
    """Print the figures (``pytest -s``): TTFT, wait, TPOT and gaps in ms, borrowed tokens a second."""
    for mode, arm in arms.items():
        rows = (f"mean {1e3 * statistics.mean(row):.1f} max {1e3 * max(row):.1f}" for row in arm)
        print(mode.value, *rows, [round(number) for number in words[mode]], sep=" | ")  # noqa: T201 - for the reader of -s


def fresh_prompt(num_tokens: int, seed: str) -> list[int]:
    tokens = random.Random(seed)
    return [tokens.randrange(3, SERVING_VOCAB) for _ in range(num_tokens)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    import_vllm(is_offline=True)
    from rose.backends.vllm.kv_transfer import transfer_config  # noqa: PLC0415 - after the environment is prepared

    site = Site.make(tmp_path_factory.mktemp("site"), "prefill", "decode")
    folder = tmp_path_factory.mktemp("kv")
    sides = []
    for device, is_producer in (("prefill", True), ("decode", False)):
        transfer = transfer_config(folder, is_producer=is_producer, timeout_s=TIMEOUT_S)
        admission, engine_args = {"role": device}, {"kv_transfer_config": transfer}
        sides += [
            site.options(device, "serving", device, admission=admission, engine_args=engine_args),
            site.options(f"{device}-rollout", "rollout", device, admission=admission),
        ]
    async with contextlib.AsyncExitStack() as stack:
        await site.start(stack, *sides)
        yield Deployment(site, folder)


async def prompt_tokens_computed(site: Site, name: str, since_s: float) -> int:
    return sum(int(row[5]) for row in await site.engines[name].step_log(since_s))


@pytest.mark.parametrize("num_tokens", [5, 64, 3000])
async def test_tokens_are_those_of_one_engine(deployment: Deployment, num_tokens: int) -> None:
    """The decode engine computes one prompt token, and the whole prompt when its KV never comes: the same answer."""
    site, prompt = deployment.site, fresh_prompt(num_tokens, f"tokens-{num_tokens}")
    begin_s = site.clock.now()
    split = await deployment.answer(prompt)
    assert await prompt_tokens_computed(site, "decode", begin_s) == 1
    for file in deployment.folder.iterdir():
        file.unlink()
    await site.engines["decode"].reset_prefix_cache()
    begin_s = site.clock.now()
    assert await site.tokens("decode", prompt, NUM_TOKENS) == split
    assert await prompt_tokens_computed(site, "decode", begin_s) == num_tokens


async def test_a_prompt_on_its_way_holds_nobody(deployment: Deployment) -> None:
    """A decode engine that waits for KV leaves its device to rollouts, and answers when the KV is there."""
    site, prompt = deployment.site, fresh_prompt(500, "on its way")
    site.lend(Mode.SLO)
    async with site.rollouts("decode-rollout"):
        async with asyncio.timeout(10.0):
            while not site.words.get("decode-rollout"):
                await asyncio.sleep(0.05)
        answer = asyncio.create_task(site.tokens("decode", prompt, NUM_TOKENS))
        await asyncio.sleep(0.1)
        before = site.words["decode-rollout"]
        async with asyncio.timeout(10.0):
            while site.words["decode-rollout"] - before <= 8:  # more than the step that was under way
                await asyncio.sleep(0.05)
        assert (await site.engines["decode"].snapshot()).num_waiting == 1
        await site.tokens("prefill", prompt, 1)
        assert len(await answer) == NUM_TOKENS


async def test_each_role_keeps_its_promise(deployment: Deployment) -> None:
    """Alone and lent up to the SLO, on the same arrivals: TTFT where prompts are computed, TPOT and gaps where answers are."""
    site = deployment.site
    arms: dict[Mode, list[Any]] = {}
    words: dict[Mode, list[float]] = {}
    names = ("prefill-rollout", "decode-rollout")
    start_s = site.clock.now()
    for mode in (Mode.CLOSED, Mode.SLO):
        site.lend(mode)
        async with site.rollouts(*names):
            before, begin_s = [site.words.get(name, 0) for name in names], site.clock.now()
            answers = await site.arrivals(NUM_REQUESTS, 5.0, deployment.timed, mode.value)
            seconds = site.clock.now() - begin_s
            words[mode] = [(site.words.get(n, 0) - b) * M / seconds for n, b in zip(names, before, strict=True)]
        arms[mode] = list(zip(*answers, strict=True))
    report(words, arms)
    if doubts := await site.doubts(start_s):
        pytest.skip(f"the machine disturbed the pacing, so latencies prove nothing: {doubts}")
    alone_ttft, _, alone_tpot, _ = arms[Mode.CLOSED]
    ttft, wait, tpot, gap = arms[Mode.SLO]
    assert words[Mode.CLOSED] == [0.0, 0.0]
    assert min(words[Mode.SLO]) > 100, "borrowed tokens a second on each device"
    assert max(ttft) < 0.5
    assert statistics.mean(ttft) - statistics.mean(alone_ttft) < 0.030
    assert statistics.median(tpot) > 2 * statistics.median(alone_tpot), "no slack was lent on the decode device"
    assert max(tpot) < 0.150
    assert max(gap) < 0.150
    assert max(wait) < 0.150, "a decode device owes the first token within one TPOT of the KV"


async def cached_tokens(deployment: Deployment, seed: str) -> list[list[int]]:
    """Hold four conversations of four turns each on the prefill engine; vLLM's own count of cached prompt tokens a turn."""
    from vllm.inputs.engine import tokens_input  # noqa: PLC0415 - after the environment is prepared

    engine = deployment.site.engines["prefill"]
    await engine.reset_prefix_cache()
    greedy = sampling_params(Sampling(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=False))

    async def conversation(number: int) -> list[int]:
        prompt, cached = fresh_prompt(100 + 50 * number, f"{seed}-{number}"), []
        for turn in range(4):
            outputs = engine._llm.generate(tokens_input(prompt), greedy, f"{seed}-{number}-{turn}")
            cached += [output.num_cached_tokens async for output in outputs][-1:]
            prompt = [*prompt, *fresh_prompt(120, f"{seed}-{number}-{turn}")]
        return cached

    return await asyncio.gather(*(conversation(number) for number in range(4)))


async def test_serving_s_prefix_cache_hits_as_alone(deployment: Deployment) -> None:
    """The same conversations with the same lengths, alone and beside rollouts: the same hits, turn for turn."""
    site = deployment.site
    site.lend(Mode.CLOSED)
    alone = await cached_tokens(deployment, "alone")
    site.lend(Mode.SLO)
    before = site.words.get("prefill-rollout", 0)
    async with site.rollouts("prefill-rollout"):
        await asyncio.sleep(0.5)
        beside = await cached_tokens(deployment, "beside")
    assert site.words["prefill-rollout"] > before
    assert beside == alone
    assert [turns[0] for turns in alone] == [0, 0, 0, 0]
    assert sum(map(sum, alone)) > 0.5 * sum(100 + 50 * n + 120 * turn for n in range(4) for turn in range(4))
