"""A connection that callers share and that none of them takes along."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose import RolloutPool, Sampling, Turn
from rose.errors import TransportError, TurnFailedError
from rose.frameworks import HeldPool, PoolPlace, is_neutral
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.testing import FakeEngine


@contextlib.asynccontextmanager
async def held(**options: float) -> AsyncIterator[HeldPool]:
    async with (
        RolloutPool([FakeEngine(**options)]) as pool,  # type: ignore[arg-type]
        serve_pool(PoolService(pool, name="toy")) as url,
    ):
        one = HeldPool(PoolPlace(url=url))
        yield one
        await one.close()


def turn(max_tokens: int = 4) -> Turn:
    return Turn(
        trajectory_id="t", group_id="g", prompt_ids=(1, 2), sampling=Sampling(max_tokens=max_tokens, temperature=0.0)
    )


async def test_callers_share_one_connection() -> None:
    async with held() as one:
        first, second = await asyncio.gather(one.get(), one.get())
        assert first is second
        assert len((await first.generate(turn())).token_ids) == 4


async def test_a_caller_that_is_cancelled_takes_nobodys_turns_along() -> None:
    async with held(token_s=0.02) as one:

        async def first() -> None:
            await (await one.get()).generate(turn(400))

        caller = asyncio.create_task(first())
        await asyncio.sleep(0.1)
        other = asyncio.create_task((await one.get()).generate(turn(20)))
        await asyncio.sleep(0.05)
        caller.cancel()
        assert len((await other).token_ids) == 20


async def test_one_that_was_given_up_is_not_handed_out_again() -> None:
    async with held() as one:
        first = await one.get()
        one.give_up(first)
        second = await one.get()
        assert second is not first
        one.give_up(first)
        assert await one.get() is second
        await one.close()
        await one.close()
        with pytest.raises(TurnFailedError):
            await second.generate(turn())
        assert await one.get() is not second


async def test_a_caller_that_is_cancelled_while_it_opens_leaves_no_connection_behind() -> None:
    async with held() as one:
        caller = asyncio.create_task(one.get())
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        (orphan,) = [task for task in asyncio.all_tasks() if task.get_name() == "rose-pool"]
        assert (await (await one.get()).generate(turn())).token_ids
        async with asyncio.timeout(10):
            await orphan


async def test_what_kept_it_from_opening_is_told_and_tried_anew() -> None:
    one = HeldPool(PoolPlace(url="http://127.0.0.1:9"), timeout_s=0.3)
    for _ in range(2):
        with pytest.raises(TransportError):
            await one.get()
    await one.close()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("top_k", -1, True),
        ("top_k", 50, False),
        ("repetition_penalty", 1.0, True),
        ("repetition_penalty", 1.1, False),
        ("detokenize", True, True),
        ("prompt_logprobs", False, True),
        ("prompt_logprobs", 0, False),
        ("unheard_of", None, False),
    ],
)
def test_neutral_settings(name: str, value: object, *, expected: bool) -> None:
    assert is_neutral(name, value) is expected
