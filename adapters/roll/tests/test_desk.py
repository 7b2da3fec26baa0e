"""Requests over a pool of our own writing, and the options and versions behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from rose import RolloutPool
from rose.backends.memory import MemoryTransport
from rose.errors import ConfigError, TransportError, TurnFailedError
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.testing import FakeEngine, FakeTrainer
from rose.testing.ports import free_ports
from rose.transfer.publisher import Publisher
from rose.types import AnyVersion, AtLeast, FinishReason, Sampling, Turn, TurnResult, VersionSpan, WeightVersion
from rose_roll.connection import LoopConnection
from rose_roll.desk import Desk, Request
from rose_roll.options import RoseOptions, wire_dtype
from rose_roll.partials import NOTHING
from rose_roll.patience import Patience
from rose_roll.versions import Versions, ends_of, spans_of


class Pool:
    """Notes turns, and is at a version."""

    def __init__(self) -> None:
        self.version: WeightVersion | None = None
        self.turns: list[Turn] = []
        self.num_asked = 0
        self.is_away = False

    async def snapshot(self) -> Any:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.is_away:
            message = "away"
            raise TransportError(message)
        return SimpleNamespace(version=self.version, waiting={}, engines=())

    async def generate(self, turn: Turn) -> TurnResult:
        self.turns.append(turn)
        return TurnResult(token_ids=(3,), logprobs=(-1.0,), finish_reason=FinishReason.STOP, versions=(), hops=())


@pytest.fixture
def free_url() -> str:
    """An address at which nothing listens."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


REQUEST = Request(request_id="r", trajectory_id="t", group_id="g", prompt_ids=(1, 2), sampling=Sampling(max_tokens=4))


async def test_turns_ask_for_the_newest_weights_that_are_known() -> None:
    pool, now = Pool(), [0.0]
    versions = Versions(refresh_s=2.0, clock=lambda: now[0])
    desk = Desk(pool, options=RoseOptions(deadline_s=7.0), versions=versions)
    await desk.run(REQUEST)
    pool.version = WeightVersion("r", 4)
    await desk.run(REQUEST)
    now[0] = 3.0
    await desk.run(REQUEST)
    pool.version = WeightVersion("r", 5)
    await desk.begin_step(9)
    await desk.run(REQUEST)
    assert [turn.versions for turn in pool.turns] == [AnyVersion(), AnyVersion(), AtLeast(4), AtLeast(5)]
    assert {turn.deadline_s for turn in pool.turns} == {7.0}
    assert versions.step_of(WeightVersion("r", 5)) == 9
    assert versions.step_of(WeightVersion("r", 4)) is None


async def test_an_abort_in_the_moment_in_which_a_turn_ends_keeps_its_tokens() -> None:
    class Ending(Pool):
        async def generate(self, turn: Turn) -> TurnResult:
            asyncio.get_running_loop().call_soon(desk.abort)  # comes before whoever waits for this turn goes on
            return await super().generate(turn)

    desk = Desk(Ending(), options=RoseOptions(), versions=Versions())
    assert (await desk.run(REQUEST)).token_ids == (3,)
    await desk.close()


async def test_turns_of_a_step_wait_for_its_version() -> None:
    """None of them goes out with what was known before; one of them asks."""
    pool = Pool()
    desk = Desk(pool, options=RoseOptions(), versions=Versions())
    pool.version = WeightVersion("r", 4)
    await desk.begin_step(0)
    pool.version = WeightVersion("r", 5)
    other = attrs.evolve(REQUEST, request_id="r1")
    await asyncio.gather(desk.begin_step(1), desk.run(REQUEST), desk.run(other))
    assert [turn.versions for turn in pool.turns] == [AtLeast(5), AtLeast(5)]
    assert pool.num_asked == 2


async def test_a_pool_that_is_away_when_a_step_begins_is_waited_for() -> None:
    pool = Pool()
    desk = Desk(pool, options=RoseOptions(retry_s=0.001), versions=Versions())
    pool.version, pool.is_away = WeightVersion("r", 4), True
    await desk.begin_step(7)
    with pytest.raises(TransportError):
        await desk.run(REQUEST)
    running = asyncio.ensure_future(desk.run(REQUEST, patience=Patience(60.0)))
    await asyncio.sleep(0.01)
    pool.is_away = False
    await running
    assert [turn.versions for turn in pool.turns] == [AtLeast(4)]
    assert desk.versions.step_of(WeightVersion("r", 4)) == 7


@contextlib.asynccontextmanager
async def pool_at(url: str, engine: FakeEngine) -> AsyncIterator[RolloutPool]:
    """A pool behind its real service."""
    async with RolloutPool([engine]) as pool, serve_pool(PoolService(pool, name="toy"), url.removeprefix("http://")):
        yield pool


async def connected(url: str, **options: Any) -> LoopConnection:
    """Return a connection that had a turn of a pool with weights, which has ended since."""
    connection = LoopConnection(RoseOptions(pool=url, **options))
    async with pool_at(url, FakeEngine(weight_version=WeightVersion("r", 3))):
        assert (await (await connection.desk()).run(REQUEST)).versions[0].version == WeightVersion("r", 3)
    return connection


async def test_a_pool_that_was_started_anew_ends_turns_however_often_they_are_asked_anew(free_url: str) -> None:
    connection = await connected(free_url, deadline_s=0.2, retry_s=0.05, give_up_s=1.0)
    async with pool_at(free_url, FakeEngine()):
        desk = await connection.desk()
        with pytest.raises(TurnFailedError, match="has lost the weights of this job: it was started anew") as caught:
            await asyncio.wait_for(desk.run(REQUEST, patience=Patience(1000.0)), 30)
        assert caught.value.partial == NOTHING
        assert desk.num_live == 0
        await connection.close()


async def test_weights_that_were_only_asked_about_can_be_lost_too() -> None:
    class Losing(Pool):
        async def generate(self, turn: Turn) -> TurnResult:
            self.version = None
            await asyncio.Event().wait()
            raise AssertionError(turn)

    pool = Losing()
    pool.version = WeightVersion("r", 3)
    desk = Desk(pool, options=RoseOptions(give_up_s=0.1), versions=Versions())
    with pytest.raises(TurnFailedError, match="has lost the weights of this job"):
        await asyncio.wait_for(desk.run(REQUEST), 20)


async def test_a_connection_that_was_closed_leaves_nobody_who_watches(free_url: str) -> None:
    connection = LoopConnection(RoseOptions(pool=free_url))
    async with pool_at(free_url, FakeEngine(first_token_s=60.0)):
        running = asyncio.ensure_future((await connection.desk()).run(REQUEST))
        while not any(one.get_name() == "rose-weights-watch" for one in asyncio.all_tasks()):
            await asyncio.sleep(0.01)
        await connection.close()
        assert not [one for one in asyncio.all_tasks() if one.get_name() == "rose-weights-watch"]
        with pytest.raises(TurnFailedError, match="was closed"):
            await running


async def test_a_pool_that_gets_the_weights_back_in_time_has_not_lost_them(
    free_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rose_roll.desk._LOOK_S", 0.02)
    connection = await connected(free_url, give_up_s=1000.0)
    with contextlib.closing(MemoryTransport()) as store:
        publisher = Publisher(FakeTrainer(), store, run="r")
        async with pool_at(free_url, FakeEngine()) as pool:
            waiting = asyncio.ensure_future((await connection.desk()).run(REQUEST))
            while "the pool has no weights of this job any more" not in caplog.text:
                await asyncio.sleep(0.01)
            for _ in range(4):
                await publisher.publish()
            await pool.sync_weights(store)
            assert [span.version for span in (await waiting).versions] == [WeightVersion("r", 3)]
            await connection.close()
        publisher.close()


def test_a_pool_that_lost_its_weights_makes_no_older_ones_good() -> None:
    versions = Versions()
    versions.note(WeightVersion("r", 4))
    versions.note(None)
    assert versions.constraint() == AtLeast(4)


def test_a_version_keeps_the_step_that_it_was_first_seen_in() -> None:
    versions = Versions()
    version = WeightVersion("r", 1)
    versions.note(version, 3)
    versions.note(version, 4)
    span = VersionSpan(version=version, start=0, end=2)
    result = TurnResult(token_ids=(1, 2), logprobs=(), finish_reason=FinishReason.STOP, versions=(span,), hops=())
    assert spans_of(result, versions, offset=5) == [{"start": 5, "end": 7, "version": "r:1", "step": 3}]


def test_the_ends_of_spans_are_by_number() -> None:
    assert ends_of([{"version": f"r:{n}"} for n in (10, 9, 11)]) == ("r:9", "r:11")
    assert ends_of([]) == (None, None)


def test_options_come_from_the_environment_and_are_overridden() -> None:
    environ = {"ROSE_ROLL": json.dumps({"deadline_s": 5, "retry_s": 2}), "ROSE_POOL": "http://h:1"}
    options = RoseOptions.of({"deadline_s": 9.0}, environ)
    assert (options.deadline_s, options.retry_s) == (9.0, 2)
    assert options.place(environ).url == "http://h:1"
    assert RoseOptions.of({"pool": "http://other:2"}, environ).place(environ).url == "http://other:2"


@pytest.mark.parametrize("text", ["{", "[1]", '{"deadline": 3}', '{"deadline_s": 0}', '{"on_suspend": "stop"}'])
def test_options_that_are_wrong_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ROSE_ROLL|deadline|on_suspend"):
        RoseOptions.of(environ={"ROSE_ROLL": text})


def test_weights_travel_as_what_the_engines_hold() -> None:
    assert wire_dtype(RoseOptions(), SimpleNamespace(dtype="fp32")) == "float32"
    assert wire_dtype(RoseOptions(), SimpleNamespace(dtype=None)) == "bfloat16"
    assert wire_dtype(RoseOptions(wire_dtype="float16"), SimpleNamespace(dtype="bf16")) == "float16"
