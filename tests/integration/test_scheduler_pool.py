from __future__ import annotations

import asyncio

import pytest

from rose.bench.scheduler import dead_server
from rose.bench.scheduler.arrivals import Arrivals, run_open_loop
from rose.bench.scheduler.dead_server import measure_dead_server
from rose.bench.scheduler.engines import BenchEngine, DeadEngine, Served
from rose.bench.scheduler.inprocess import measure_inprocess
from rose.bench.scheduler.memory import bytes_per_trajectory
from rose.errors import EngineError
from rose.pool.circuit import CircuitBreaker
from rose.types import EngineRequest, FinishReason, RequestId, Sampling


def request(*prompt_ids):
    return EngineRequest(request_id=RequestId("r"), prompt_ids=prompt_ids or (1,), sampling=Sampling(max_tokens=8))


async def test_an_engine_answers_with_all_its_chunks():
    engine = BenchEngine("e", num_chunks=3, chunk_tokens=2)
    engine.watched[7] = served = Served()

    chunks = [chunk async for chunk in engine.generate(request(7, 8))]

    assert [len(chunk.token_ids) for chunk in chunks] == [2, 2, 2]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason.LENGTH]
    assert engine.num_tokens == 6
    assert served.began_s <= served.ended_s


async def test_a_dead_engine_looks_healthy():
    engine = DeadEngine("e")

    await engine.snapshot()
    with pytest.raises(EngineError, match="fails whatever"):
        engine.generate(request())
    assert engine.num_requests == 1


def test_the_pool_loses_nothing_to_a_dead_server():
    found = measure_dead_server()

    assert (found["requests"], found["lost"]) == (400, 0)
    assert found["sent_to_dead"] <= 5
    assert found["burst"]["lost"] == 0
    assert found["verl_like"]["lost"] == found["verl_like"]["sent_to_dead"] > 380


def test_without_a_circuit_the_dead_server_would_get_more(monkeypatch):
    monkeypatch.setattr(CircuitBreaker, "fail", lambda self, now_s: now_s)
    monkeypatch.setattr(dead_server, "NUM_REQUESTS", 60)

    assert dead_server.measure_dead_server()["sent_to_dead"] > 5


def test_arrivals_are_the_same_for_everybody():
    first, second = (Arrivals(rate_per_s=50, duration_s=2, seed=3) for _ in range(2))

    assert first.times_s == second.times_s == sorted(first.times_s)
    assert 50 < len(first.times_s) < 150
    assert first.prompt(5) == second.prompt(5)
    assert all(1024 <= len(first.prompt(i)) <= 4096 for i in range(64))


async def test_an_open_loop_does_not_wait_for_slow_turns():
    arrivals = Arrivals(rate_per_s=200, duration_s=0.1, prompt_tokens=(1, 2))
    begun: list[int] = []
    all_begun = asyncio.Event()

    async def run_turn(number):
        begun.append(number)
        if len(begun) == len(arrivals.times_s):
            all_begun.set()
        await all_begun.wait()

    late_s = await run_open_loop(arrivals, run_turn)

    assert begun == list(range(len(arrivals.times_s)))
    assert len(late_s) == len(begun)


async def test_a_turn_that_fails_ends_an_open_loop_with_its_own_error():
    async def run_turn(number):
        message = f"turn {number}"
        raise EngineError(message)

    with pytest.raises(EngineError, match="turn 0"):
        await run_open_loop(Arrivals(rate_per_s=100, duration_s=0.05, prompt_tokens=(1, 2)), run_turn)


def test_every_turn_of_the_in_process_face_is_measured():
    arrivals = Arrivals(rate_per_s=100, duration_s=0.2, prompt_tokens=(4, 8))

    found = measure_inprocess(arrivals)

    assert found["turns"] == len(arrivals.times_s)
    assert 0.0 < found["added_p50_ms"] <= found["added_p99_ms"]


def test_memory_is_that_of_a_trajectory_whatever_their_number():
    few, many = bytes_per_trajectory(150), bytes_per_trajectory(450)

    assert 1000 < many < 10_000
    assert few == pytest.approx(many, rel=0.3)
