from __future__ import annotations

import asyncio
import time

import pytest

from rose.errors import ConfigError, EnvironmentFailedError
from rose.reference.env_workers import EnvironmentPool
from rose.reference.environment import Step

COUNT_DOWN = "toy_games:CountDown"


async def test_episodes_are_played_in_other_processes_and_kept_apart():
    async with EnvironmentPool(COUNT_DOWN, num_processes=2) as pool:
        first = await asyncio.gather(pool.reset("a", 1), pool.reset("b", 2), pool.reset("c", 3))
        assert first == ["left ", "left left ", "left left left "]
        assert await pool.step("a", "hm go") == Step(observation="", reward=1.0, is_done=True)
        assert await pool.step("b", None) == Step(observation="left left ", reward=0.0, is_done=False)
        assert (await pool.step("c", "go")).observation == "left left "
        with pytest.raises(EnvironmentFailedError, match="a is not running; reset it first"):
            await pool.step("a", "go")


async def test_requests_of_one_moment_travel_together(monkeypatch: pytest.MonkeyPatch):
    async with EnvironmentPool(COUNT_DOWN, num_processes=1) as pool:
        sent: list[int] = []
        process = pool._lanes[0].process
        post = process.post
        monkeypatch.setattr(process, "post", lambda batch: (sent.append(len(batch)), post(batch))[1])
        await asyncio.gather(*(pool.reset(f"t{i}", 2) for i in range(50)))
        await asyncio.gather(*(pool.step(f"t{i}", "go") for i in range(50)))
        assert sent == [50, 50]


async def test_an_environment_that_raises_spoils_its_own_episode_only():
    async with EnvironmentPool(COUNT_DOWN, num_processes=1) as pool:
        await asyncio.gather(pool.reset("good", 2), pool.reset("bad", 2))
        good, bad = await asyncio.gather(pool.step("good", "go"), pool.step("bad", "crash"), return_exceptions=True)
        assert good == Step(observation="left ", reward=0.0, is_done=False)
        assert isinstance(bad, EnvironmentFailedError)
        assert str(bad) == "CountDown.step of bad raised ZeroDivisionError: boom"
        with pytest.raises(EnvironmentFailedError, match="seed -1 is below zero"):
            await pool.reset("worse", -1)
        assert await pool.reset("bad", 1) == "left "


async def test_a_dead_worker_fails_its_episodes_and_no_others():
    async with EnvironmentPool(COUNT_DOWN, num_processes=2) as pool:
        await pool.reset("doomed", 3)
        await pool.reset("safe", 3)
        with pytest.raises(EnvironmentFailedError, match=r"environment worker 0 ended with code 3"):
            await pool.step("doomed", "die")
        assert (await pool.step("safe", "go")).observation == "left left "
        assert await pool.reset("next", 1) == "left "
        with pytest.raises(EnvironmentFailedError, match="worker 1 ended"):
            await pool.step("next", "die")
        with pytest.raises(EnvironmentFailedError, match="no environment process"):
            await pool.reset("late", 1)


async def test_dropping_frees_the_id_and_is_harmless_otherwise():
    async with EnvironmentPool(COUNT_DOWN, num_processes=1) as pool:
        await pool.drop("unknown")
        await pool.reset("a", 3)
        with pytest.raises(EnvironmentFailedError, match="already running"):
            await pool.reset("a", 3)
        await pool.drop("a")
        assert await pool.reset("a", 1) == "left "
        assert pool._lanes[0].num_episodes == 1


async def test_a_process_that_hangs_is_ended():
    async with EnvironmentPool(COUNT_DOWN, num_processes=1, timeout_s=5.0) as pool:
        await pool.reset("a", 3)
        pool._timeout_s = 0.2
        with pytest.raises(
            EnvironmentFailedError, match=r"no answer to step of a within 0.2 s; environment worker 0 was ended"
        ):
            await pool.step("a", "hang")
        await pool._lanes[0].process.close()
        with pytest.raises(EnvironmentFailedError, match="no environment process"):
            await pool.reset("b", 1)


async def test_cancelling_a_request_does_not_shift_the_answers_of_others():
    async with EnvironmentPool(COUNT_DOWN, num_processes=1) as pool:
        dropped = asyncio.ensure_future(pool.reset("a", 1))
        kept = asyncio.ensure_future(pool.reset("b", 2))
        await asyncio.sleep(0)
        dropped.cancel()
        assert await kept == "left left "
        assert await pool.reset("c", 3) == "left left left "


async def test_no_process_outlives_the_pool():
    async with EnvironmentPool(COUNT_DOWN) as pool:
        processes = [lane.process for lane in pool._lanes]
        assert not any(process.has_ended for process in processes)
    assert all(process.has_ended for process in processes)
    with pytest.raises(EnvironmentFailedError, match="was closed"):
        await pool.reset("a", 1)


def test_a_wrong_environment_is_refused_before_any_process_starts():
    with pytest.raises(ConfigError, match="has no class"):
        EnvironmentPool("toy_games:Nothing")


async def test_frozen_lake_is_fast_enough():
    """Several thousand steps a second on a quiet machine; the bound leaves room for a busy one."""
    async with EnvironmentPool("rose.reference.lake:FrozenLake") as pool:
        await pool.reset("warm", 0)

        async def play(i: int) -> int:
            observation = await pool.reset(f"t{i}", i)
            assert observation.startswith("obs P")
            return sum([1 async for _ in _steps(pool, f"t{i}")])

        started = time.perf_counter()
        num_steps = sum(await asyncio.gather(*(play(i) for i in range(200))))
        assert num_steps == 2000
        assert num_steps / (time.perf_counter() - started) > 300


async def _steps(pool: EnvironmentPool, name: str):
    step = Step(observation="", reward=0, is_done=False)
    while not step.is_done:
        step = await pool.step(name, "up")
        yield step


async def test_dead_processes_are_started_again_as_often_as_allowed():
    async with EnvironmentPool(COUNT_DOWN, num_processes=2, max_restarts=2) as pool:
        for name in ("a", "b"):
            await pool.reset(name, 3)
            with pytest.raises(EnvironmentFailedError, match="ended with code 3"):
                await pool.step(name, "die")
            await asyncio.gather(*(pool.reset(f"{name}{i}", 1) for i in range(4)))
        assert sum(not lane.process.has_ended for lane in pool._lanes) == 2
        for name in ("a0", "a1", "b0", "b1", "b2"):
            with pytest.raises(EnvironmentFailedError):
                await pool.step(name, "die")
        with pytest.raises(EnvironmentFailedError, match="no environment process"):
            await pool.reset("late", 1)


async def test_a_process_that_hangs_is_ended_and_replaced():
    async with EnvironmentPool(COUNT_DOWN, num_processes=1, timeout_s=5.0, max_restarts=1) as pool:
        await pool.reset("a", 3)
        pool._timeout_s = 0.1
        with pytest.raises(EnvironmentFailedError, match="no answer to step of a within"):
            await pool.step("a", "hang")
        pool._timeout_s = 20.0
        assert await pool.reset("b", 1) == "left "
