"""Head starts while messages are late or lost and weights and limits change. Real sockets on loopback, fake engines behind HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from pool_parts import EngineServer, direct_pool, turn, until
from rose import RolloutPool
from rose.policies.route_views import RoutingConfig
from rose.pool import PoolConfig, direct
from rose.pool.remote_pool import RemotePool
from rose.testing import FakeEngine
from rose.testing.updates import FakeUpdateSource
from rose.types import AtLeast, EngineRequest, WeightVersion

V3, V4 = WeightVersion("r", 3), WeightVersion("r", 4)
ONE_SLOT = PoolConfig(routing=RoutingConfig(cap_per_engine=1))


@contextlib.asynccontextmanager
async def _client(**options: Any) -> AsyncIterator[tuple[RolloutPool, RemotePool, EngineServer]]:
    """Give a pool of one engine, a client of it whose trajectory ``t0`` has had a turn, and the engine."""
    async with direct_pool(1, weight_version=V3, **options) as (pool, url, servers), RemotePool(url) as remote:
        await remote.generate(turn("t0"))
        await until(lambda: not remote._calls)
        yield pool, remote, servers[0]


def _cut(remote: RemotePool) -> None:
    socket = remote._link._socket
    assert socket is not None
    socket._response.connection.transport.abort()  # type: ignore[union-attr]


@pytest.mark.parametrize("lost", [direct.STOP, direct.SUBMIT])
async def test_a_head_start_of_a_turn_that_waits_ends_though_the_connection_broke(lost: str) -> None:
    async with _client(token_s=0.02, config=ONE_SLOT) as (pool, remote, server):
        engine, link = server.engine, remote._link
        other = asyncio.create_task(pool.generate(turn("other", max_tokens=200)))
        await until(lambda: engine.num_in_flight == 1)
        heard: list[list[Any]] = []
        sent: list[str] = []
        hear, send = link._on_message, link.send

        async def swallow(message: list[Any]) -> None:
            sent.append(message[0])

        link._on_message = heard.append
        if lost == direct.SUBMIT:
            link.send = swallow  # type: ignore[method-assign]
        task = asyncio.create_task(remote.generate(turn("t0", 20, max_tokens=400)))
        await until(lambda: engine.num_in_flight == 2 and lost in [*sent, *(message[0] for message in heard)])
        link._on_message, link.send = hear, send  # type: ignore[method-assign]
        _cut(remote)
        await until(lambda: link.num_connections == 2)
        await until(lambda: engine.num_in_flight == 1, timeout_s=1.0)
        assert engine.num_in_flight == 1
        assert not other.done()
        for one in (task, other):
            one.cancel()
        await asyncio.gather(task, other, return_exceptions=True)


async def test_a_head_start_that_asks_for_more_than_there_is_room_for_is_not_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some servers refuse what could outgrow their context; the pool asks for what fits."""
    accept = FakeEngine._refuse_impossible

    def refuse(engine: FakeEngine, request: EngineRequest) -> None:
        if len(request.prompt_ids) + request.sampling.max_tokens > engine.max_model_len:
            engine._refuse("too long")
        accept(engine, request)

    monkeypatch.setattr(FakeEngine, "_refuse_impossible", refuse)
    async with _client(max_model_len=64) as (pool, remote, _):
        got = await remote.generate(turn("t0", 20, max_tokens=100))
        assert len(got.token_ids) == 44
        await until(lambda: not pool.snapshot().num_live_turns)


async def test_a_head_start_is_not_taken_over_once_the_weights_are_newer() -> None:
    async with _client(token_s=0.02) as (pool, remote, server):
        late, send = asyncio.Event(), remote._link.send

        async def delay(message: list[Any]) -> None:
            if message[0] == direct.SUBMIT:
                await late.wait()
            await send(message)

        remote._link.send = delay  # type: ignore[method-assign]
        task = asyncio.create_task(remote.generate(turn("t0", 20, max_tokens=20, versions=AtLeast(3))))
        await until(lambda: server.engine.num_in_flight == 1)
        await asyncio.sleep(0.1)
        await pool.sync_weights(FakeUpdateSource(run="r", version=V4))
        await pool.barrier(V4, timeout_s=5.0)
        late.set()
        assert {span.version for span in (await task).versions} == {V4}
        await until(lambda: not server.engine.num_in_flight and not pool.snapshot().num_live_turns)


async def test_a_barrier_waits_for_tokens_that_a_client_has_not_reported_yet() -> None:
    async with direct_pool(1, weight_version=V3, token_s=0.01) as (pool, url, servers), RemotePool(url) as remote:
        task = asyncio.create_task(remote.generate(turn("t0", max_tokens=80)))
        await until(lambda: any(call.record.token_ids for call in remote._calls.values()))
        await pool.sync_weights(FakeUpdateSource(run="r", version=V4))
        (record,) = pool._driver._state.live.values()
        assert not record.spans, "nothing was reported yet"
        await pool.barrier(V4, timeout_s=10.0)
        assert not pool.snapshot().num_live_turns
        assert [span.version for span in (await task).versions] == [V3, V4]
        assert not servers[0].engine.num_in_flight
