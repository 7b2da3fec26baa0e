"""What an engine gives that is no chunk, no token or no reading ends its attempt, and harms no other turn and not the pool."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import numpy as np
import pytest

from rose.errors import EngineLostError, TurnFailedError
from rose.pool import PoolConfig, RolloutPool
from rose.testing import FakeEngine, ManualClock
from rose.types import EngineId, FinishReason, HopEnd, Sampling, TokenChunk, Turn

CONFIG = PoolConfig(max_hops=3, circuit_s=0.1, circuit_max_s=0.1, retry_s=0.01)
EVICTED = TokenChunk(finish_reason=FinishReason.EVICTED)


@attrs.define(eq=False, kw_only=True, slots=False)
class Careless(FakeEngine):
    """Gives ``chunks`` and ``reading``, whatever they are."""

    chunks: tuple[Any, ...] = ()
    reading: Any = ...

    async def generate(self, request):
        self.requests.append(request)
        for chunk in self.chunks:
            yield chunk

    async def snapshot(self):
        return await super().snapshot() if self.reading is ... else self.reading


def chunk(**changes: Any) -> TokenChunk:
    return TokenChunk(**{"token_ids": (1,), "logprobs": (-1.0,), **changes})


def turn(name: str) -> Turn:
    return Turn(trajectory_id=name, group_id=name, prompt_ids=(1, 2), sampling=Sampling(max_tokens=4))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (None, "it gave None in place of a TokenChunk"),
        ({"token_ids": [1]}, "it gave an object of type dict in place of a TokenChunk"),
        (chunk(token_ids=None), "token_ids and logprobs of a TokenChunk are tuples, got None"),
        (chunk(token_ids=b"ab"), "token_ids and logprobs of a TokenChunk are tuples, got an object of type bytes"),
        (chunk(logprobs=None), "are tuples, got an object of type tuple and None"),
        (chunk(token_ids=(np.int64(1),)), r"token ids are plain integers .*, got an object of type int64"),
        (chunk(token_ids=(None,)), "token ids are plain integers .*, got None"),
        (chunk(token_ids=(True,)), "token ids are plain integers .*, got True"),
        (chunk(logprobs=(np.float32(-1),)), "no log of a probability, a plain number <= 0: an object of type float32"),
        (chunk(logprobs=(None,)), "no log of a probability, a plain number <= 0: None"),
        (chunk(logprobs=(float("nan"),)), "no log of a probability, a plain number <= 0: nan"),
        (chunk(version="r:1"), "the version of a TokenChunk is a WeightVersion or None, got 'r:1'"),
        (chunk(finish_reason="stop"), "the finish_reason of a TokenChunk is a FinishReason or None, got 'stop'"),
    ],
)
def test_what_is_no_chunk_ends_the_attempt_and_is_named(wrong, says):
    clock = ManualClock()
    careless = Careless(engine_id=EngineId("careless"), clock=clock, chunks=(wrong, EVICTED))

    async def work():
        async with RolloutPool([careless], clock=clock, config=CONFIG) as pool:
            with pytest.raises(TurnFailedError, match=f"3 attempts .3 lost.*the last error: .*{says}") as caught:
                await pool.generate(turn("t"))
            assert caught.value.partial.token_ids == ()
            assert {hop.ended for hop in caught.value.hops} == {HopEnd.LOST}
            (view,) = pool.snapshot().engines
            assert (view.num_in_flight, view.kv_reserved_tokens) == (0, 0)
            await pool.add_engine(FakeEngine(engine_id=EngineId("good"), clock=clock))
            result = await pool.generate(turn("u"))
            assert len(result.token_ids) == 4
            assert result.hops[-1].engine_id == "good"

    asyncio.run(clock.run(work()))


@attrs.define(eq=False, kw_only=True, slots=False)
class Lingering(FakeEngine):
    """Ends every stream twice and then never."""

    is_left: bool = False

    async def generate(self, request):
        self.requests.append(request)
        try:
            yield chunk(finish_reason=FinishReason.STOP)
            yield chunk(finish_reason=FinishReason.STOP)
            await asyncio.Event().wait()
        finally:
            self.is_left = True


async def test_a_stream_that_does_not_end_after_its_end_is_left():
    engine = Lingering(engine_id=EngineId("a"))
    async with RolloutPool([engine], config=PoolConfig(reading_timeout_s=0.05)) as pool:
        result = await pool.generate(turn("t"))
        assert result.token_ids == (1,)
        for _ in range(1000):
            if not pool._driver._pumps:
                break
            await asyncio.sleep(0.005)
        assert not pool._driver._pumps
        assert engine.is_left
        assert pool.accounts()["a"].num_ended[HopEnd.FINISHED] == 1


def test_tokens_as_lists_are_tokens():
    clock = ManualClock()
    chunks = (chunk(token_ids=[1], logprobs=[-1.0]), chunk(finish_reason=FinishReason.STOP))
    engine = Careless(engine_id=EngineId("lists"), clock=clock, chunks=chunks)

    async def work():
        async with RolloutPool([engine], clock=clock) as pool:
            return await pool.generate(turn("t"))

    assert asyncio.run(clock.run(work())).token_ids == (1, 1)


@pytest.mark.parametrize("wrong", [None, "fine", {"num_running": 1}])
def test_what_is_no_reading_is_no_engine(wrong):
    clock = ManualClock()
    bad = Careless(engine_id=EngineId("bad"), clock=clock, reading=wrong)

    async def work():
        async with RolloutPool([FakeEngine(clock=clock)], clock=clock) as pool:
            with pytest.raises(EngineLostError, match=r"engine 'bad' gave .* as a reading, not an EngineSnapshot"):
                await pool.add_engine(bad)
            bad.reading = ...
            await pool.add_engine(bad)
            assert len((await pool.generate(turn("t"))).token_ids) == 4

    asyncio.run(clock.run(work()))


def test_a_reading_with_a_label_that_is_no_version_is_none():
    clock = ManualClock()
    bad = Careless(engine_id=EngineId("bad"), clock=clock)
    bad.reading = attrs.evolve(asyncio.run(FakeEngine(clock=clock).snapshot()), weight_version="r:1")

    async def work():
        async with RolloutPool([FakeEngine(clock=clock)], clock=clock) as pool:
            with pytest.raises(EngineLostError, match="with a WeightVersion or None"):
                await pool.add_engine(bad)
            assert pool.version is None

    asyncio.run(clock.run(work()))
