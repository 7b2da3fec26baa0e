"""The pool for loops without asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rose import pool as asynchronous
from rose import sync
from rose.errors import ConfigError, DeadlineExceededError, EngineLostError, RequestRefusedError, TurnFailedError
from rose.testing import FakeEngine
from rose.types import EngineId, Sampling, Turn, WeightVersion


def engines(num: int = 2, **options: object) -> list[FakeEngine]:
    return [FakeEngine(engine_id=EngineId(f"e{i}"), **options) for i in range(num)]  # type: ignore[arg-type]


def turn(name: str = "t", max_tokens: int = 4, prompt: tuple[int, ...] = (1, 2, 3)) -> Turn:
    return Turn(trajectory_id=name, group_id="g", prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens))


@pytest.fixture
def slow() -> Iterator[tuple[sync.RolloutPool, FakeEngine]]:
    engine = engines(1, token_s=30.0)[0]
    with sync.RolloutPool([engine]) as pool:
        yield pool, engine


def test_generates() -> None:
    with sync.RolloutPool(engines()) as pool:
        assert len(pool.generate(turn()).token_ids) == 4
        assert pool.snapshot().num_live_turns == 0
        assert sum(account.num_tokens for account in pool.accounts().values()) == 4


def test_many_come_in_order() -> None:
    with sync.RolloutPool(engines()) as pool:
        results = pool.generate_many(turn(f"t{n}", max_tokens=n) for n in range(1, 9))
    assert [len(result.token_ids) for result in results] == list(range(1, 9))


def test_many_threads_share_it() -> None:
    with sync.RolloutPool(engines()) as pool, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: pool.generate(turn(f"t{n}")), range(40)))
    assert len(results) == 40


def test_one_that_fails_cancels_the_others(slow: tuple[sync.RolloutPool, FakeEngine]) -> None:
    pool, engine = slow
    with pytest.raises(RequestRefusedError, match="token ids outside"):
        pool.generate_many([turn("a"), turn("b", prompt=(5000,))])
    assert pool.snapshot().num_live_turns == 0
    assert len(engine.aborted) <= 1


def test_a_timeout_cancels(slow: tuple[sync.RolloutPool, FakeEngine]) -> None:
    pool, _ = slow
    with pytest.raises(DeadlineExceededError, match=r"not done after 0\.02 s \(timeout_s\), and is cancelled"):
        pool.generate(turn(), timeout_s=0.02)
    assert pool.snapshot().num_live_turns == 0


def test_a_call_that_ran_over_its_time_has_ended_when_it_raises() -> None:
    ended = threading.Event()

    async def slow_to_end(_pool: object) -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            for _ in range(50):
                await asyncio.sleep(0)
            ended.set()

    with sync.RolloutPool(engines()) as pool:
        with pytest.raises(DeadlineExceededError):
            pool.call(slow_to_end, timeout_s=0.02)
        assert ended.is_set()


@pytest.fixture
def ctrl_c_counts() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run in the background of a shell, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_counts")
def test_ctrl_c_cancels(slow: tuple[sync.RolloutPool, FakeEngine]) -> None:
    pool, engine = slow
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.generate(turn())
    assert pool.snapshot().num_live_turns == 0
    assert len(engine.requests) == 1


def test_what_cannot_open_says_why() -> None:
    engine = engines(1)[0]
    engine.die()
    with pytest.raises(EngineLostError):
        sync.RolloutPool([engine])


@pytest.mark.usefixtures("ctrl_c_counts")
def test_ctrl_c_while_it_opens_ends_what_was_started() -> None:
    ended = threading.Event()

    @contextlib.asynccontextmanager
    async def never() -> AsyncIterator[None]:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60.0)
            yield
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        sync.RolloutPool.over(never)
    assert ended.is_set()
    assert not any(thread.name == "rose-sync" for thread in threading.enumerate())


def test_a_job_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")
    opened: list[object] = []

    def open_pool(job: object) -> asynchronous.RolloutPool:
        opened.append(job)
        return asynchronous.RolloutPool(engines())

    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        sync.RolloutPool.open(tmp_path / "none.toml")
    monkeypatch.setattr("rose.hosts.job.open_pool", open_pool)
    with sync.RolloutPool.open("job.toml") as pool:
        assert len(pool.generate(turn()).token_ids) == 4
        with pytest.raises(DeadlineExceededError, match="is at None"):
            pool.barrier(WeightVersion("r", 1), timeout_s=0.05)
    assert opened == ["job.toml"]


def test_closing_ends_the_calls_of_other_threads(slow: tuple[sync.RolloutPool, FakeEngine]) -> None:
    pool, engine = slow
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(pool.generate, turn())
        while not engine.requests:
            pool.snapshot()
        pool.close()
        with pytest.raises(TurnFailedError, match="closed"):
            call.result(5)
    pool.close()
    with pytest.raises(TurnFailedError, match="closed"):
        pool.generate(turn())


def test_a_call_on_its_own_loop_is_refused() -> None:
    async def inside(_: object) -> None:
        pool.snapshot()

    with sync.RolloutPool(engines()) as pool, pytest.raises(RuntimeError, match="wait for itself"):
        pool.call(inside)
