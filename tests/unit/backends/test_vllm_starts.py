"""Engines that do not start, or are given up while they start, leave nothing behind. No vLLM needed."""

from __future__ import annotations

import asyncio
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rose.backends.completion import to_the_end
from rose.backends.vllm import InProcessVllmEngine, VllmEngine, VllmOptions, inprocess
from rose.errors import EngineLostError

OPTIONS = VllmOptions(engine_id="e", model="m")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("0.24 GiB KV cache is needed, larger than the available", "option kv_cache_bytes (now 67108864)"),
        ("initialization failed. See root cause above.", "option kv_cache_bytes (now 67108864)"),
        ("We couldn't connect to 'https://huggingface.co'", "model 'm' is no folder here"),
        ("Repository Not Found for url: https://huggingface.co/m", "model 'm' is no folder here"),
    ],
)
def test_an_engine_that_does_not_start_says_which_option_it_may_be(said, advice):
    """vLLM's own words name gpu_memory_utilization, which has no part in it here, and no model."""
    told = OPTIONS.start_failure(RuntimeError(said))
    assert told.startswith(f"engine e did not start: {said}")
    assert advice in told


def test_other_failures_of_a_start_are_told_as_they_are(tmp_path):
    options = VllmOptions(engine_id="e", model=str(tmp_path))
    for said in ("no such device", "We couldn't connect to 'https://huggingface.co'"):
        assert options.start_failure(RuntimeError(said)) == f"engine e did not start: {said}"


def worker_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vllm-")]


async def test_an_engine_in_process_that_does_not_start_ends_its_thread(monkeypatch):
    def build(_: InProcessVllmEngine) -> None:
        message = "no model"
        raise EngineLostError(message)

    monkeypatch.setattr(InProcessVllmEngine, "_build", build)
    with pytest.raises(EngineLostError, match="no model"):
        await InProcessVllmEngine.create(OPTIONS)
    assert worker_threads() == []
    assert not inprocess._OPEN


async def test_a_job_that_comes_just_after_the_worker_ended_is_refused(monkeypatch):
    engine = InProcessVllmEngine(OPTIONS)
    engine._lost = None

    class LateQueue(queue.SimpleQueue):
        def put(self, job: Any) -> None:
            engine._lost = "its step failed"
            super().put(job)

    engine._jobs = LateQueue()
    with pytest.raises(EngineLostError, match="its step failed"):
        async with asyncio.timeout(5):
            await engine._do(lambda: 1)


async def test_a_start_that_is_cancelled_runs_to_its_end_and_is_closed(monkeypatch):
    """Its process exists by then; nobody else could end it."""
    calls: list[str] = []
    is_starting, may_go_on = threading.Event(), threading.Event()

    def start(engine: VllmEngine) -> None:
        is_starting.set()
        assert may_go_on.wait(5)
        context = SimpleNamespace(destroy=lambda linger: calls.append("sockets"))
        core = SimpleNamespace(resources=SimpleNamespace(ctx=context))
        engine._llm = SimpleNamespace(shutdown=lambda timeout_s: calls.append("process"), engine_core=core)

    monkeypatch.setattr(VllmEngine, "_start_llm", start)
    engine = VllmEngine(OPTIONS)
    task = asyncio.ensure_future(engine.start())
    await asyncio.to_thread(is_starting.wait, 5)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == ["process", "sockets"]
    with pytest.raises(EngineLostError):
        await engine.snapshot()


async def test_what_must_not_be_left_half_done_is_done_before_a_cancellation_takes_effect():
    steps = []

    async def work() -> str:
        steps.append("begun")
        await asyncio.sleep(0.01)
        steps.append("done")
        message = "nobody hears of this"
        raise ValueError(message)

    task = asyncio.ensure_future(to_the_end(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["begun", "done"]
