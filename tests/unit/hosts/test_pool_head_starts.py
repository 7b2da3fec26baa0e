"""Turns that begin before the pool has answered. Real sockets on loopback, fake engines behind HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from pool_parts import EngineServer, direct_pool, turn, until
from rose import RolloutPool
from rose.policies.route_views import RoutingConfig
from rose.pool import PoolConfig, direct
from rose.pool.remote_pool import RemotePool
from rose.types import EngineId, TurnResult, WeightVersion

V3 = WeightVersion("r", 3)


class _Held:
    """Keeps what a pool says from a client until it is let go."""

    def __init__(self, remote: RemotePool) -> None:
        self._link, self._hear = remote._link, remote._link._on_message
        self._kept: list[Any] = []
        self._link._on_message = self._kept.append

    @property
    def kinds(self) -> list[str]:
        return [message[0] for message in self._kept]

    def let_go(self) -> None:
        self._link._on_message = self._hear
        for message in self._kept:
            self._hear(message)


@contextlib.asynccontextmanager
async def _client(num: int = 2, **options: Any) -> AsyncIterator[tuple[RolloutPool, RemotePool, list[EngineServer]]]:
    """Give a pool, a client of it whose trajectory ``t0`` has had a turn, and the engines."""
    async with direct_pool(num, weight_version=V3, **options) as (pool, url, servers), RemotePool(url) as remote:
        await remote.generate(turn("t0"))
        await until(lambda: not remote._calls)
        yield pool, remote, servers


def _home(servers: list[EngineServer]) -> EngineServer:
    return next(server for server in servers if server.engine.requests)


def _is_quiet(pool: RolloutPool, remote: RemotePool) -> bool:
    return not remote._calls and not pool.snapshot().num_live_turns


async def test_a_next_turn_does_not_wait_for_the_pool() -> None:
    async with _client() as (pool, remote, servers):
        held = _Held(remote)
        task = asyncio.create_task(remote.generate(turn("t0", 20)))
        engine = _home(servers).engine
        await until(lambda: len(engine.requests) == 2 and not engine.num_in_flight and direct.START in held.kinds)
        await asyncio.sleep(0.05)
        assert not task.done()  # the answer is there, the pool's word is not
        held.let_go()
        got = await task
        await until(lambda: _is_quiet(pool, remote))
        assert engine.requests[1].request_id.endswith("-1")
        assert got.token_ids == (await pool.generate(turn("t1", 20))).token_ids
        assert not engine.aborted
        account = pool.accounts()[engine.engine_id]
        assert account.num_tokens == 10 + 5 * (len(engine.requests) - 2)


async def test_a_pool_that_chooses_otherwise_has_its_way() -> None:
    async with _client(token_s=0.02) as (pool, remote, servers):
        home = _home(servers)
        await pool.remove_engine(home.engine.engine_id, "test")
        got = await remote.generate(turn("t0", 20))
        await until(lambda: _is_quiet(pool, remote))
        other = next(server for server in servers if server is not home)
        assert [hop.engine_id for hop in got.hops] == [other.engine.engine_id]
        assert got.token_ids == (await pool.generate(turn("t1", 20))).token_ids
        assert home.engine.requests[1].request_id in home.engine.aborted
        assert pool.accounts()[other.engine.engine_id].num_tokens == 10


async def test_a_turn_that_has_to_wait_does_not_run_meanwhile() -> None:
    config = PoolConfig(routing=RoutingConfig(cap_per_engine=1))
    async with _client(1, token_s=0.02, config=config) as (pool, remote, servers):
        engine = servers[0].engine
        other = asyncio.create_task(pool.generate(turn("other", max_tokens=40)))
        await until(lambda: engine.num_in_flight == 1)
        task = asyncio.create_task(remote.generate(turn("t0", 20)))
        await until(lambda: len(engine.requests) == 3 and engine.num_in_flight == 1)
        assert engine.aborted == [engine.requests[2].request_id]
        assert not other.done()
        await other
        got = await task
        assert got.token_ids == (await pool.generate(turn("t1", 20))).token_ids
        await until(lambda: _is_quiet(pool, remote))


async def test_a_call_cancelled_before_the_pool_s_word_leaves_nothing() -> None:
    async with _client(token_s=0.05) as (pool, remote, servers):
        held = _Held(remote)
        task = asyncio.create_task(remote.generate(turn("t0", 20, max_tokens=100)))
        engine = _home(servers).engine
        await until(lambda: engine.num_in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert vars(caught.value)["partial"].token_ids == ()
        held.let_go()
        await until(lambda: _is_quiet(pool, remote) and not engine.num_in_flight)
        assert engine.aborted == [engine.requests[1].request_id]


async def test_an_engine_that_breaks_a_head_start_off_fails_an_attempt_like_any_other() -> None:
    config = PoolConfig(circuit_s=0.05, circuit_max_s=0.1)
    async with _client(token_s=0.01, config=config) as (pool, remote, servers):
        home = _home(servers)
        home.cuts.append(2)
        held = _Held(remote)
        task = asyncio.create_task(remote.generate(turn("t0", 20)))
        await until(lambda: len(home.engine.requests) == 2 and not home.engine.num_in_flight)
        held.let_go()
        got = await task
        assert got.token_ids == (await pool.generate(turn("t1", 20))).token_ids
        assert len(got.hops) == 2
        await until(lambda: _is_quiet(pool, remote))


async def test_without_head_starts_every_turn_waits_for_the_pool() -> None:
    async with direct_pool(1, weight_version=V3) as (_, url, servers), RemotePool(url, has_head_starts=False) as remote:
        for num in (8, 20):
            await remote.generate(turn("t0", num))
            held = _Held(remote)
            held.let_go()
        held = _Held(remote)
        task = asyncio.create_task(remote.generate(turn("t0", 30)))
        await until(lambda: direct.START in held.kinds)
        assert servers[0].num_asked == 2
        held.let_go()
        await task


async def test_many_trajectories_come_out_as_in_process_while_engines_and_connections_break() -> None:
    config = PoolConfig(circuit_s=0.02, circuit_max_s=0.05, routing=RoutingConfig(cap_per_engine=4))
    rng = Random(3)
    async with direct_pool(3, weight_version=V3, token_s=0.002, config=config) as (pool, url, servers):
        async with RemotePool(url) as remote:

            async def trajectory(name: str) -> list[TurnResult]:
                return [await remote.generate(turn(name, 8 + 7 * n)) for n in range(8)]

            async def trouble() -> None:
                while True:
                    await asyncio.sleep(0.03)
                    rng.choice(servers).cuts.append(rng.randrange(5))
                    if rng.random() < 0.3:
                        socket = remote._link._socket
                        if socket is not None:
                            socket._response.connection.transport.abort()  # type: ignore[union-attr]

            breaking = asyncio.create_task(trouble())
            done = await asyncio.gather(*[trajectory(f"t{n}") for n in range(12)])
            breaking.cancel()
            for server in servers:
                server.cuts.clear()
            await until(lambda: _is_quiet(pool, remote))
        wanted = [(await pool.generate(turn(f"w{n}", 8 + 7 * n))).token_ids for n in range(8)]
        assert all([result.token_ids for result in results] == wanted for results in done)
        assert not any(server.engine.num_in_flight for server in servers)
        assert all(view.num_in_flight == 0 for view in pool.snapshot().engines)
        counted = sum(account.num_tokens for account in pool.accounts().values())
        assert counted == 5 * (12 * 8 + 8)


def test_engine_ids_are_what_is_sent() -> None:
    assert direct.submit_to_wire("1", turn(), direct.Ahead(engine_id=EngineId("e"), version=V3))[-1] == ["e", "r:3"]
