"""Engines that schedule ahead, on vLLM's real asynchronous scheduler: same tokens, exclusive turns, memory that waits for batches.

Engines that share a device have processes of their own: in one process they would step in turn, and one that waits for the device would keep
the other from ending its batch in flight.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from test_coserving_identity import PAIRINGS, PROMPTS, Pair, Shape, check_identity, open_pair, tokens

from rose.backends.host import HostDevice
from rose.backends.vllm import VllmEngine, VllmOptions
from rose.backends.vllm.environment import import_vllm
from rose.policies.admission import Mode
from rose.testing.contracts.streams import collect

AHEAD_SCHEDULER = "rose.testing.ahead.AheadScheduler"

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@attrs.frozen
class AheadShape(Shape):
    """Engines of this shape keep two batches in flight."""

    def options(self, folder: Path, name: str, dtype: str, rose: dict[str, Any]) -> VllmOptions:
        return attrs.evolve(Shape.options(self, folder, name, dtype, rose), scheduler_cls=AHEAD_SCHEDULER)


def ahead(shape: Shape) -> AheadShape:
    return AheadShape(*attrs.astuple(shape))


@pytest.mark.parametrize(
    ("is_async", "name"), [(True, "RoseAsyncScheduler"), (False, "RoseScheduler"), (None, "RoseScheduler")]
)
async def test_the_class_follows_vllm_s_configuration(is_async: Any, name: str) -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    import_vllm()
    scheduler: Any = importlib.import_module("rose.backends.vllm.scheduler").RoseScheduler
    assert type(scheduler.__new__(scheduler, vllm_config=config)).__name__ == name


async def test_a_batch_whose_requests_have_ended_gives_the_turn_back(tmp_path: Path) -> None:
    """Aborted while a batch is in flight: nothing is left to schedule, and the batch lands all the same."""
    async with open_pair(tmp_path, *map(ahead, PAIRINGS[0])) as pair:
        for _ in range(5):
            stream = pair.serving.generate(pair.request(PROMPTS[0], 200))
            async for _chunk in stream:
                break
            await stream.aclose()
        async with asyncio.timeout(5):
            while pair.serving._core.batch_queue:
                await asyncio.sleep(0.01)
        device = HostDevice(tmp_path / "device")
        assert device.acquire(is_blocking=False)
        device.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Two engine processes that schedule ahead, and one elsewhere that does too."""
    folder = tmp_path_factory.mktemp("ahead")
    async with open_pair(folder, *map(ahead, PAIRINGS[0]), kind=VllmEngine) as pair:
        yield pair


async def test_two_processes_that_schedule_ahead_change_no_token(pair: Pair) -> None:
    await check_identity(pair, 120)


@pytest.mark.parametrize("mode", [Mode.SLO, Mode.QUIET, Mode.PAPER, Mode.UNGATED, Mode.STRICT])
async def test_both_sides_get_on_in_every_mode(pair: Pair, mode: Mode) -> None:
    """A serving engine with a batch always in flight lets rollouts in, and none is kept from its end."""
    pair.lend(None)
    alone = await pair.serve(40)
    pair.lend(mode)
    rollouts = [asyncio.create_task(pair.roll_out(prompt, 60)) for prompt in PROMPTS]
    async with asyncio.timeout(60):
        beside = await pair.serve(40)
        done = await asyncio.gather(*rollouts)
    assert tokens(beside) == tokens(alone)
    assert all(len(stream.token_ids) == 60 for stream, _ in done)


async def test_batches_are_queued_behind_each_other(tmp_path: Path) -> None:
    """Each engine while the other has nothing to do. (When a queued batch begins, by the clock, the machine's load decides.)"""
    async with open_pair(tmp_path, *map(ahead, PAIRINGS[0])) as pair:
        pair.lend(None)
        depths = depths_of(pair.serving)
        await pair.serve(60)
        assert max(depths) == 2
        pair.lend(Mode.SLO)
        depths = depths_of(pair.rollout)
        await asyncio.gather(*(pair.roll_out(prompt, 100) for prompt in PROMPTS))
        assert max(depths) == 2


def depths_of(engine: Any) -> list[int]:
    """Return a list that gets, with each batch from now on, how many are in flight then."""
    scheduler, depths = engine._core.scheduler, []
    schedule = scheduler.schedule

    def noting(*args: Any, **options: Any) -> Any:
        out = schedule(*args, **options)
        depths.append(len(scheduler._in_flight))
        return out

    scheduler.schedule = noting
    return depths


async def test_the_gate_closes_before_the_next_batch(pair: Pair) -> None:
    pair.lend(Mode.UNGATED)
    task = asyncio.create_task(collect(pair.rollout, pair.request(PROMPTS[0], 200)))
    while not (await pair.rollout.snapshot()).num_running:
        await asyncio.sleep(0.002)
    await pair.rollout._ask("rose_set_gate", False)  # noqa: FBT003 - as over the wire
    await asyncio.sleep(0.1)  # what is in flight ends
    before = await pair.rollout._ask("rose_step_log", float("-inf"))
    await asyncio.sleep(0.2)
    after = await pair.rollout._ask("rose_step_log", float("-inf"))
    alone = await pair.serve(8)
    assert len(before) == len(after)
    assert all(len(stream.token_ids) == 8 for stream in alone), "a closed rollout engine holds no turn"
    await pair.rollout._ask("rose_set_gate", True)  # noqa: FBT003 - as over the wire
    assert len((await task).token_ids) == 200
