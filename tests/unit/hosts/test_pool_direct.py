"""The direct path: the pool decides, the client streams from the engines. Real sockets on loopback, fake engines behind HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

import aiohttp
import attrs

from pool_parts import direct_pool, engine_servers, fakes, pool_of, turn, until
from rose import RolloutPool
from rose.backends.remote import RemoteEngine
from rose.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    RequestRefusedError,
    TransportError,
    TurnFailedError,
)
from rose.hosts.http.auth import Access, TokenConfig
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.policies.route_views import RoutingConfig, RoutingRule
from rose.pool import PoolConfig, direct
from rose.pool.remote_pool import RemotePool
from rose.testing import FakeEngine
from rose.types import AtLeast, EngineRequest, FinishReason, HopEnd, RequestId, RouteReason, TokenChunk, WeightVersion

FORGIVING = PoolConfig(circuit_s=0.05, circuit_max_s=0.1)


async def test_a_turn_comes_out_as_in_process() -> None:
    async with direct_pool(2, weight_version=WeightVersion("r", 3)) as (pool, url, servers):
        async with RolloutPool.connect(url) as remote:
            wanted, got = await pool.generate(turn()), await remote.generate(turn())
        assert (got.token_ids, got.logprobs, got.versions) == (wanted.token_ids, wanted.logprobs, wanted.versions)
        assert got.finish_reason is FinishReason.LENGTH
        assert [hop.num_tokens for hop in got.hops] == [5]
        assert sum(server.num_asked for server in servers) == 2


async def test_the_prompt_does_not_cross_the_pool() -> None:
    sent: list[str] = []
    async with direct_pool(1) as (_, url, servers):
        remote = RolloutPool.connect(url)
        send = remote._link.send

        async def note(message: list[Any]) -> None:
            sent.append(json.dumps(message))
            await send(message)

        remote._link.send = note  # type: ignore[method-assign]
        async with remote:
            await remote.generate(turn(num_prompt=900))
        assert len(servers[0].engine.requests[0].prompt_ids) == 900
    assert max(map(len, sent)) < 500


async def test_accounts_and_affinity_are_the_pool_s() -> None:
    config = PoolConfig(
        routing=RoutingConfig(rule=RoutingRule.PAPER)
    )  # by the table alone, whatever the engines' paces
    async with direct_pool(4, config=config) as (pool, url, _):
        async with RolloutPool.connect(url) as one, RolloutPool.connect(url) as two:
            first = await one.generate(turn("t0"))
            for client in (one, one, two, two):
                if client is not one:
                    await until(lambda: pool.snapshot().num_live_turns == 0)
                again = await client.generate(turn("t0"))
                assert again.hops[0].reason is RouteReason.AFFINITY
                assert again.hops[0].engine_id == first.hops[0].engine_id
            await until(lambda: pool.snapshot().num_live_turns == 0)
            accounts = await two.accounts()
            assert await two.statistics() == pool.statistics()
            assert {name: account.num_tokens for name, account in accounts.items()} == {
                name: account.num_tokens for name, account in pool.accounts().items()
            }
        assert sum(account.num_tokens for account in accounts.values()) == 25
        assert sum(account.num_ended[HopEnd.FINISHED] for account in accounts.values()) == 5


async def test_an_engine_without_an_address_is_streamed_from_through_the_pool() -> None:
    engines = fakes(2)
    async with pool_of(engines) as (pool, url), RolloutPool.connect(url) as remote:
        wanted, got = await pool.generate(turn()), await remote.generate(turn())
        assert got.token_ids == wanted.token_ids
        await until(lambda: pool.snapshot().num_live_turns == 0)
        assert not any(engine.aborted for engine in engines)


async def test_the_proxy_streams_nothing_but_attempts_under_way() -> None:
    async with pool_of(fakes(1)) as (_, url):
        engine = RemoteEngine(f"{url}/engines/e0")
        request = turn()
        with pytest.raises(EngineError, match="no attempt under way"):
            async for _ in engine.generate(_request(request)):
                pass
        await engine.close()


@pytest.mark.parametrize("is_direct", [True, False])
async def test_a_turn_that_stalls_moves_with_its_tokens(*, is_direct: bool) -> None:
    async with _either(is_direct=is_direct, token_s=0.01) as (pool, url, engines), RolloutPool.connect(url) as remote:
        task = asyncio.create_task(remote.generate(turn(max_tokens=100)))
        await until(lambda: any(record.token_ids for record in pool._state.live.values()), timeout_s=60.0)
        first = next(engine for engine in engines if engine.num_in_flight)
        request_id = first.requests[-1].request_id
        first.stall()
        got = await task
        first.unstall()
        wanted = await pool.generate(turn(max_tokens=100))
        assert got.token_ids == wanted.token_ids
        assert len(got.logprobs) == 100
        assert HopEnd.STALLED in {hop.ended for hop in got.hops}
        assert got.hops[0].num_tokens > 0
        assert sum(hop.num_tokens for hop in got.hops) == 100
        assert first.aborted.count(request_id) == 1  # a machine that stands still for long may move the turn once more


async def test_a_stream_that_breaks_off_goes_on_elsewhere() -> None:
    """Case E09, as the client of an engine meets it."""
    async with direct_pool(2, config=FORGIVING) as (pool, url, servers), RolloutPool.connect(url) as remote:
        servers[0].cuts = servers[1].cuts = [3]
        result = await remote.generate(turn(max_tokens=8))
        assert result.token_ids == (await pool.generate(turn(max_tokens=8))).token_ids
        assert [hop.ended for hop in result.hops] == [HopEnd.LOST, HopEnd.FINISHED]
        assert [hop.num_tokens for hop in result.hops] == [3, 5]
        await until(lambda: pool.snapshot().num_live_turns == 0)


async def test_a_client_s_word_takes_no_engine_out_of_the_pool() -> None:
    async with direct_pool(1, config=FORGIVING) as (pool, url, servers), RolloutPool.connect(url) as remote:
        servers[0].cuts = [0]
        assert [hop.ended for hop in (await remote.generate(turn())).hops] == [HopEnd.LOST, HopEnd.FINISHED]
        assert pool.snapshot().engines[0].state.value == "ready"


async def test_an_engine_that_gives_too_many_tokens_is_cut_short_as_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = FakeEngine.generate

    def give_more(engine: FakeEngine, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        sampling = attrs.evolve(request.sampling, max_tokens=request.sampling.max_tokens + 3)
        return generate(engine, attrs.evolve(request, sampling=sampling))

    monkeypatch.setattr(FakeEngine, "generate", give_more)
    async with direct_pool(1, max_model_len=20) as (pool, url, servers), RolloutPool.connect(url) as remote:
        for longest in (5, 100):  # by its own budget, by the context
            wanted = await pool.generate(turn(max_tokens=longest))
            got = await remote.generate(turn("t1", max_tokens=longest))
            assert got.token_ids == wanted.token_ids
            assert [hop.ended for hop in got.hops] == [HopEnd.FINISHED]
        await until(lambda: not pool.snapshot().num_live_turns and not servers[0].engine.num_in_flight)


async def test_refusals_and_deadlines_come_in_their_own_types() -> None:
    async with direct_pool(1, token_s=0.05) as (_, url, _), RolloutPool.connect(url) as remote:
        with pytest.raises(RequestRefusedError, match="token ids outside"):
            await remote.generate(turn(num_prompt=2000))
        full = await remote.generate(turn(num_prompt=5000))  # case E01: no engine is asked
        assert (full.token_ids, full.finish_reason, full.hops) == ((), FinishReason.LENGTH, ())
        with pytest.raises(DeadlineExceededError, match="not done after"):
            await remote.generate(turn(max_tokens=50, deadline_s=0.1))
        with pytest.raises(TypeError, match="turn must be"):
            await remote.generate("hello")  # type: ignore[arg-type]


async def test_versions_are_kept_to() -> None:
    version = WeightVersion("r", 3)
    async with direct_pool(2, weight_version=version) as (_, url, servers), RolloutPool.connect(url) as remote:
        got = await remote.generate(turn(versions=AtLeast(3)))
        assert [span.version for span in got.versions] == [version]
        for server in servers:  # the engine's own word is what counts
            server.engine.weight_version = WeightVersion("r", 2)
        with pytest.raises((TurnFailedError, DeadlineExceededError)):
            await remote.generate(turn(versions=AtLeast(3), deadline_s=0.5))


async def test_a_cancelled_call_is_aborted_once_and_leaves_nothing() -> None:
    """Case E11 over the direct path: waiting, in flight, and about to begin."""
    async with direct_pool(2, token_s=0.05, max_running=2) as (pool, url, servers), RolloutPool.connect(url) as remote:
        tasks = [asyncio.create_task(remote.generate(turn(f"t{n}", max_tokens=500))) for n in range(10)]
        await until(lambda: sum(server.num_asked for server in servers) == 10)
        late = asyncio.create_task(remote.generate(turn("late")))
        await asyncio.sleep(0)
        for task in [*tasks, late]:
            task.cancel()
        await asyncio.gather(*tasks, late, return_exceptions=True)
        await until(lambda: pool.snapshot().num_live_turns == 0 and not remote._calls)
        await until(lambda: not any(server.engine.num_in_flight for server in servers))
        await until(lambda: all(view.num_in_flight == 0 for view in pool.snapshot().engines))
        for server in servers:
            assert len(server.aborts) == len(set(server.aborts))
            assert len(server.engine.aborted) == len(set(server.engine.aborted)) == len(server.engine.requests)
        assert len((await remote.generate(turn("after"))).token_ids) == 5


async def test_a_client_that_vanishes_has_its_turns_cancelled() -> None:
    async with direct_pool(1, token_s=0.05, linger_s=0.2) as (pool, url, servers):
        async with aiohttp.ClientSession() as session:
            socket = await _connect(session, url)
            await socket.send_json(direct.submit_to_wire("1", turn(max_tokens=500)))
            assert (await socket.receive_json())[0] == direct.START
            socket._response.connection.transport.abort()  # type: ignore[union-attr] # as a killed process
            assert pool.snapshot().num_live_turns == 1
            await until(lambda: pool.snapshot().num_live_turns == 0)
        await until(lambda: len(servers[0].aborts) == 1)
        assert pool.accounts()[servers[0].engine.engine_id].num_ended[HopEnd.STALLED] == 0


async def test_a_client_that_is_silent_blames_no_engine_and_is_given_up_at_last() -> None:
    given = {"config": PoolConfig(stall_s=1.5), "silent_s": 4.0}
    async with direct_pool(1, **given) as (pool, url, servers), aiohttp.ClientSession() as session:
        socket = await _connect(session, url)
        await socket.send_json(direct.submit_to_wire("1", turn(max_tokens=500)))
        await socket.receive_json()
        await asyncio.sleep(2.5)
        assert pool.snapshot().num_live_turns == 1
        assert pool.accounts()[servers[0].engine.engine_id].num_rerouted == 0
        await until(lambda: pool.snapshot().num_live_turns == 0)


async def test_a_broken_connection_loses_nothing() -> None:
    async with direct_pool(2, token_s=0.01) as (pool, url, servers), RolloutPool.connect(url) as remote:
        tasks = [asyncio.create_task(remote.generate(turn(f"t{n}", max_tokens=60))) for n in range(6)]
        for _ in range(3):
            await asyncio.sleep(0.15)
            num = remote._link.num_connections
            _cut(remote)
            await until(lambda num=num: remote._link.num_connections > num)
        results = await asyncio.gather(*tasks)
        assert [len(result.token_ids) for result in results] == [60] * 6
        assert sum(server.num_asked for server in servers) == 6  # none ran twice
        await until(lambda: pool.snapshot().num_live_turns == 0 and not remote._calls)
        assert sum(account.num_tokens for account in pool.accounts().values()) == 360


async def test_turns_go_on_when_the_pool_comes_back_as_another_process() -> None:
    async with engine_servers(fakes(1, token_s=0.01)) as servers:
        engine = RemoteEngine(servers[0].url, engine_id="e0")
        async with pool_of([engine]) as (_, url):
            remote = RemotePool(url)
            await remote.__aenter__()
            task = asyncio.create_task(remote.generate(turn(max_tokens=100)))
            await until(lambda: servers[0].num_asked)
        port = int(url.rpartition(":")[2])
        async with _again([engine], port) as pool:
            assert len((await task).token_ids) == 100
            await until(lambda: pool.snapshot().num_live_turns == 0)
        await remote.__aexit__(None, None, None)
        await engine.close()


async def test_a_turn_that_is_submitted_twice_runs_once() -> None:
    async with direct_pool(1, token_s=0.01) as (pool, url, servers), aiohttp.ClientSession() as session:
        socket = await _connect(session, url)
        starts = []
        for _ in range(2):
            await socket.send_json(direct.submit_to_wire("1", turn(max_tokens=9)))
            starts.append(await socket.receive_json())
        assert starts[0] == starts[1]
        attempt = starts[0][2]
        part = [TokenChunk(token_ids=(5,), logprobs=(-0.1,))]
        await socket.send_json(direct.report_to_wire(direct.Report(turn_id="1", attempt=attempt, start=0, chunks=part)))
        chunks = [TokenChunk(token_ids=(5, 6), logprobs=(-0.1, -0.2))]
        report = direct.report_to_wire(
            direct.Report(turn_id="1", attempt=attempt, start=0, chunks=chunks, end=FinishReason.STOP)
        )
        for _ in range(2):
            await socket.send_json(report)
        await socket.send_json(direct.submit_to_wire("1", turn(max_tokens=9)))
        told = [await socket.receive_json()]
        await socket.send_json(direct.submit_to_wire("1", turn(max_tokens=9)))
        while len(told) < 3 and await _has_more(socket, told):
            pass
        assert all(one == told[0] for one in told)
        assert told[0][0] == direct.SETTLED
        assert told[0][2]["num_tokens"] == 2
        assert told[0][2]["hops"][0]["num_tokens"] == 2
        assert pool.accounts()[servers[0].engine.engine_id].num_tokens == 2


async def test_tokens_whose_report_was_lost_are_asked_for_again() -> None:
    async with direct_pool(1) as (pool, url, _), aiohttp.ClientSession() as session:
        socket = await _connect(session, url)
        await socket.send_json(direct.submit_to_wire("1", turn(max_tokens=9)))
        start = await socket.receive_json()
        late = [TokenChunk(token_ids=(7,), logprobs=(-0.3,))]
        for chunks in (late, []):
            report = direct.Report(turn_id="1", attempt=start[2], start=2, chunks=chunks, end=FinishReason.STOP)
            await socket.send_json(direct.report_to_wire(report))
            assert await socket.receive_json() == start  # nothing is kept of it
        assert pool.snapshot().num_live_turns == 1
        whole = [TokenChunk(token_ids=(5, 6, 7), logprobs=(-0.1, -0.2, -0.3))]
        report = direct.Report(turn_id="1", attempt=start[2], start=0, chunks=whole, end=FinishReason.STOP)
        await socket.send_json(direct.report_to_wire(report))
        settled = await socket.receive_json()
        assert (settled[0], settled[2]["num_tokens"]) == (direct.SETTLED, 3)


async def test_a_client_that_was_given_up_while_connected_is_told_by_the_end_of_its_connection() -> None:
    async with direct_pool(1, token_s=0.05, silent_s=0.3) as (pool, url, _), aiohttp.ClientSession() as session:
        socket = await _connect(session, url)
        await socket.send_json(direct.submit_to_wire("1", turn(max_tokens=500)))
        assert (await socket.receive_json())[0] == direct.START
        kinds = []
        while not socket.closed:
            kinds.append((await socket.receive()).type)
        assert aiohttp.WSMsgType.CLOSE in kinds
        await until(lambda: pool.snapshot().num_live_turns == 0)
        again = await _connect(session, url)
        await again.send_json(direct.submit_to_wire("1", turn(max_tokens=500)))
        assert (await again.receive_json())[0] == direct.START


async def test_a_call_that_is_cancelled_while_there_is_no_connection_is_cancelled_afterwards() -> None:
    async with direct_pool(1, token_s=0.05, linger_s=30.0) as (pool, url, servers), RolloutPool.connect(url) as remote:
        task = asyncio.create_task(remote.generate(turn(max_tokens=500)))
        await until(lambda: servers[0].num_asked)
        _cut(remote)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: remote._link.num_connections == 2 and pool.snapshot().num_live_turns == 0)
        await until(lambda: len(servers[0].engine.aborted) == 1)


async def test_a_turn_whose_client_left_is_not_begun_again() -> None:
    async with direct_pool(2) as (pool, url, _), aiohttp.ClientSession() as session:
        socket = await _connect(session, url)
        await socket.send_json(direct.submit_to_wire("1", turn()))
        attempt = (await socket.receive_json())[2]
        report = direct.Report(turn_id="1", attempt=attempt, start=0, end=FinishReason.EVICTED)
        await socket.send_json(direct.report_to_wire(report))
        await socket.close()
        await until(lambda: pool.snapshot().num_live_turns == 0)
        assert sum(account.num_ended[HopEnd.STALLED] for account in pool.accounts().values()) == 0


async def test_nonsense_ends_the_connection_and_nothing_else() -> None:
    async with direct_pool(1) as (_, url, _), aiohttp.ClientSession() as session:
        for nonsense in _NONSENSE:
            socket = await _connect(session, url)
            await socket.send_str(nonsense)
            answer = await socket.receive()
            is_refusal = answer.type is aiohttp.WSMsgType.TEXT and "request_refused_error" in answer.data
            assert is_refusal or answer.type is aiohttp.WSMsgType.CLOSE
            await socket.close()
        async with RolloutPool.connect(url) as remote:
            assert len((await remote.generate(turn())).token_ids) == 5


async def test_a_turn_that_the_pool_fails_on_is_answered() -> None:
    async with direct_pool(1) as (pool, url, _), RolloutPool.connect(url) as remote:

        async def broken(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        pool.generate = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(TurnFailedError, match="the pool failed: ZeroDivisionError"):
            await asyncio.wait_for(remote.generate(turn()), 10.0)


async def test_a_barrier_holds_over_the_connection() -> None:
    before, after = WeightVersion("r", 3), WeightVersion("r", 4)
    async with direct_pool(1, weight_version=before) as (pool, url, _), RolloutPool.connect(url) as remote:
        await remote.barrier(before)
        with pytest.raises(DeadlineExceededError, match=r"not all was at r:4 after 0\.05 s: engine e0 is at r:3"):
            await remote.barrier(after, timeout_s=0.05)
        with pytest.raises(TypeError, match="version must be of type WeightVersion"):
            await remote.barrier(4)  # type: ignore[arg-type]
        waiting = asyncio.create_task(remote.barrier(after))
        await until(lambda: pool._driver._barriers)
        waiting.cancel()
        await until(lambda: not pool._driver._barriers)
        assert not pool._driver._barriers, "a client that goes away waits no longer"


@pytest.mark.parametrize("body", [[], {}, {"version": 4}, {"version": "r:1", "timeout_s": "soon"}])
async def test_what_is_no_barrier_is_refused(body: Any) -> None:
    async with direct_pool(1) as (_, url, _), aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/barrier", json=body) as answer:
            data = await answer.json()
        assert (answer.status, data["error"]["type"]) == (400, "config_error")
        assert 'the body is {"version": "run:n"' in data["error"]["message"]


async def test_a_connection_is_used_while_it_is_open_and_opened_once() -> None:
    async with direct_pool(1) as (_, url, _):
        remote = RolloutPool.connect(url)
        calls = (remote.snapshot, lambda: remote.generate(turn()), lambda: remote.barrier(WeightVersion("r", 1)))
        for _ in range(2):
            for call in calls:
                with pytest.raises(TurnFailedError, match="not open; use it inside"):
                    await call()
            assert remote._client._session is None, "nothing is left open"
            if not remote._was_opened:
                async with remote:
                    await remote.snapshot()
                    with pytest.raises(TurnFailedError, match="opened once"):
                        await remote.__aenter__()
                    assert len((await remote.generate(turn())).token_ids) == 5


async def test_a_call_that_cannot_be_sent_is_forgotten() -> None:
    async with direct_pool(1) as (pool, url, _), RolloutPool.connect(url) as remote:
        broken = turn()
        object.__setattr__(broken, "deadline_s", object())
        with pytest.raises(TypeError, match="JSON"):
            await remote.generate(broken)
        assert not remote._calls
        assert len((await remote.generate(turn())).token_ids) == 5
        await until(lambda: pool.snapshot().num_live_turns == 0)


@pytest.mark.parametrize("token", ["secret\n", "", " secret", "geheim\u00fc"])
def test_what_can_be_no_token_is_refused_at_once(token: str) -> None:
    with pytest.raises(ConfigError, match="was it read with its line's end"):
        RolloutPool.connect("http://127.0.0.1:9", token=token)


async def test_tokens_are_asked_for() -> None:
    tokens = [TokenConfig(name=name, sha256=_sha(name), access=access) for name, access in _ACCESS.items()]
    async with direct_pool(1, tokens=tokens) as (_, url, _):
        async with RolloutPool.connect(url, token="math") as remote:  # noqa: S106 - of this test
            assert len((await remote.generate(turn())).token_ids) == 5
            assert (await remote.snapshot()).num_waiting == 0
        for token in (None, "wrong", "board"):
            with pytest.raises(ConfigError, match=r"refuses this client: 40[13]"):
                await RolloutPool.connect(url, token=token).__aenter__()


async def test_a_pool_that_is_not_there_is_named() -> None:
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:9 .*Connect call failed.*is the process alive"):
        await RolloutPool.connect("http://127.0.0.1:9", timeout_s=0.2).__aenter__()
    for wrong in ("127.0.0.1:9", "", "ws://127.0.0.1:9"):
        with pytest.raises(ConfigError, match="is no URL of a pool"):
            RolloutPool.connect(wrong)
    with pytest.raises(TurnFailedError, match="not open"):
        await RolloutPool.connect("http://127.0.0.1:9").generate(turn())


async def test_calls_fail_when_the_pool_stays_away() -> None:
    async with direct_pool(1, token_s=5.0) as (_, url, _):
        remote = RemotePool(url, reconnect_s=0.3)
        await remote.__aenter__()
        task = asyncio.create_task(remote.generate(turn()))
        await asyncio.sleep(0.05)
    with pytest.raises(TransportError, match="cannot be reached"):
        await task
    await remote.__aexit__(None, None, None)


async def test_leaving_ends_the_calls() -> None:
    async with direct_pool(1, token_s=5.0) as (pool, url, servers):
        async with RolloutPool.connect(url) as remote:
            task = asyncio.create_task(remote.generate(turn()))
            await until(lambda: servers[0].num_asked)
        with pytest.raises(TurnFailedError, match="closed"):
            await task
        await until(lambda: pool.snapshot().num_live_turns == 0)


@pytest.mark.parametrize("num_steps", range(0, 40, 4))
async def test_leaving_that_is_cancelled_leaves_nothing_open(num_steps: int) -> None:
    config = PoolConfig(stall_s=0.5)  # the pool's alarm for the turn goes on as long
    async with direct_pool(1, config=config) as (_, url, _):
        before = asyncio.all_tasks()
        remote = RolloutPool.connect(url)

        async def use() -> None:
            async with remote:
                await remote.generate(turn())
                await remote.snapshot()
                leaving.set()

        leaving = asyncio.Event()
        task = asyncio.create_task(use())
        await leaving.wait()
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert remote._client._session is None
        assert not remote._doors._doors
        assert not remote._own
        await until(lambda: asyncio.all_tasks() <= before, timeout_s=10.0)


async def test_a_result_is_given_before_its_report() -> None:
    async with direct_pool(1) as (pool, url, _), RolloutPool.connect(url) as remote:
        live: list[int] = []
        for n in range(5):
            await remote.generate(turn(f"t{n}"))
            live.append(pool.snapshot().num_live_turns)
        assert live == [1] * 5
        await until(lambda: pool.snapshot().num_live_turns == 0)


# Below: what the tests share.

_NONSENSE = (
    "[]",
    "{}",
    "5",
    "[1, [",
    "[" * 100_000,
    '["dance"]',
    '["submit", "x"]',
    '["submit", [], 1, {}, null, {}]',
    f'["submit", "x", {10**20}, {{"max_tokens": 1}}, null, {{"trajectory_id": "t", "group_id": "g"}}]',
    '["submit", "x", -1, {"max_tokens": 1}, null, {"trajectory_id": "t", "group_id": "g"}]',
    '["submit", "x", 1, {"max_tokens": 1}, null, 5]',
    '["report", "1"]',
    '["report", "1", 1, 0, [5], null]',
    '["report", [], 1, 0, [], null]',
    '["cancel"]',
    '["cancel", {}]',
    '["turns", 5]',
)
_ACCESS = {"math": Access.JOB, "board": Access.READ}


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _request(of: Any) -> Any:
    return EngineRequest(request_id=RequestId("stray"), prompt_ids=of.prompt_ids, sampling=of.sampling)


def _cut(remote: RemotePool) -> None:
    socket = remote._link._socket
    assert socket is not None
    socket._response.connection.transport.abort()  # type: ignore[union-attr]


async def _has_more(socket: aiohttp.ClientWebSocketResponse, told: list[Any]) -> bool:
    with contextlib.suppress(TimeoutError):
        told.append(await socket.receive_json(timeout=0.2))
        return True
    return False


async def _connect(session: aiohttp.ClientSession, url: str) -> aiohttp.ClientWebSocketResponse:
    socket = await session.ws_connect(url + direct.PATH, headers={direct.SESSION_HEADER: "s"})
    assert (await socket.receive_json())[0] == direct.SESSION
    return socket


def _either(*, is_direct: bool, **options: Any) -> Any:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[tuple[RolloutPool, str, list[FakeEngine]]]:
        config = PoolConfig(stall_s=1.5, reading_interval_s=0.1)
        if is_direct:
            async with direct_pool(2, config=config, **options) as (pool, url, servers):
                yield pool, url, [server.engine for server in servers]
        else:
            engines = fakes(2, **options)
            async with pool_of(engines, config=config) as (pool, url):
                yield pool, url, engines

    return opened()


def _again(engines: list[Any], port: int) -> Any:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[RolloutPool]:
        async with RolloutPool(engines) as pool, serve_pool(PoolService(pool, name="toy"), f"127.0.0.1:{port}"):
            yield pool

    return opened()
