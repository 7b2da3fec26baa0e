"""The executor's interface: fencing, disconnects, draining, restarts, and errors in their own types."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import attrs
import pytest
import pytest_asyncio

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from aiohttp import web
from executor_parts import Parts, executor_parts, request

from rose.backends.remote import RemoteEngine
from rose.backends.remote.client import HttpClient
from rose.errors import (
    ConfigError,
    EngineBusyError,
    EngineError,
    EngineFencedError,
    EngineLeaseError,
    EngineLostError,
    RequestRefusedError,
    VersionConflictError,
)
from rose.hosts.http.auth import Access, TokenConfig
from rose.hosts.http.server import bind, make_app, parse_place, served
from rose.interfaces.serving import PauseMode
from rose.policies.admission import Budget
from rose.policies.lending import job_key
from rose.testing import fake_update
from rose.testing.contracts.streams import collect, reading, until
from rose.types import FinishReason, JobId, RequestId, WeightVersion


@pytest_asyncio.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    async with executor_parts(tmp_path) as parts:
        yield parts


UPDATE = fake_update(WeightVersion("run", 4))
COMMANDS = {
    "generate": lambda engine: collect(engine, request()),
    "pause": lambda engine: engine.pause(PauseMode.KEEP),
    "resume": lambda engine: engine.resume(),
    "stage": lambda engine: engine.stage(UPDATE),
    "activate": lambda engine: engine.activate(),
    "checksums": lambda engine: engine.weight_checksums(),
    "kv-budget": lambda engine: engine.set_kv_budget(64),
    "gate": lambda engine: engine.set_gate(is_open=False),
    "prefix-reset": lambda engine: engine.reset_prefix_cache(),
    "sleep": lambda engine: engine.sleep(),
    "wake": lambda engine: engine.wake(),
}


async def test_every_route_that_does_something_is_tried(parts: Parts):
    routes = {route.path.rpartition("/")[2] for route in parts.service.routes() if route.method == "POST"}
    assert routes == {*COMMANDS, "abort"}


@pytest.mark.parametrize("token", [(), (6,), (8,), (7, 7)])
@pytest.mark.parametrize("name", COMMANDS)
async def test_without_the_leases_token_nothing_happens(parts: Parts, name: str, token: tuple[int, ...]):
    parts.remote.set_lease(*token)
    with pytest.raises(EngineLeaseError, match="ask the lender"):
        await COMMANDS[name](parts.remote)
    assert parts.fake.requests == []
    fake, state = parts.fake, await parts.fake.snapshot()
    assert (state.is_paused, state.kv_total_tokens, fake._is_gate_open) == (False, fake.kv_total_tokens, True)
    assert (fake.is_asleep, fake.num_prefix_resets, fake._staged) == (False, 0, None)
    assert parts.service.num_fenced == 1
    assert (await parts.remote.snapshot()).num_running == 0, "reading needs no lease"


@pytest.mark.parametrize("end", ["revoked", "expired", "lent to another"])
async def test_a_lease_that_is_over_ends_its_streams_as_evicted(parts: Parts, end: str):
    parts.lend(7, expires_s=time.monotonic() + (0.3 if end == "expired" else math.inf))
    async with reading(parts.remote, request(max_tokens=2000)) as stream:
        await stream.has_tokens(3)
        if end == "revoked":
            parts.lend(8, is_granted=False)
        elif end == "lent to another":
            parts.lend(8)
        async with asyncio.timeout(2):
            await stream.finish()
    assert stream.finish_reason is FinishReason.EVICTED
    assert len(stream.token_ids) >= 3
    assert parts.fake.aborted == ["r1"]
    with pytest.raises(EngineLeaseError):
        await collect(parts.remote, request("r2"))
    await parts.remote.abort(RequestId("r1"))  # no error: it is over
    if end == "lent to another":
        parts.remote.set_lease(8)
        assert (await collect(parts.remote, request("r3"))).finish_reason is FinishReason.LENGTH


async def test_a_request_that_the_engine_did_not_know_yet_is_ended_too(parts: Parts):
    abort, num_calls = parts.fake.abort, 0

    async def deaf_at_first(request_id: RequestId) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            await abort(request_id)

    parts.fake.abort = deaf_at_first
    async with reading(parts.remote, request(max_tokens=2000)) as stream:
        await stream.has_tokens(1)
        parts.lend(8)
        async with asyncio.timeout(2):
            await stream.finish()
    assert stream.finish_reason is FinishReason.EVICTED


async def test_what_was_held_back_is_let_go_with_the_lease(parts: Parts):
    await parts.remote.pause(PauseMode.KEEP)
    await parts.remote.set_gate(is_open=False)
    await parts.remote.set_kv_budget(5)
    await asyncio.sleep(0.1)
    assert (await parts.remote.snapshot()).is_paused
    parts.lend(8)
    parts.remote.set_lease(8)
    async with asyncio.timeout(2):
        assert (await collect(parts.remote, request())).finish_reason is FinishReason.LENGTH
    assert (await parts.remote.snapshot()).kv_total_tokens == parts.fake.kv_total_tokens


async def test_what_the_holder_before_held_back_does_not_bind_the_next(parts: Parts):
    """Also where the next one is quicker than the look at who holds the lease."""
    await parts.remote.set_gate(is_open=False)
    parts.lend(8)
    parts.remote.set_lease(8)
    await parts.remote.set_kv_budget(5)
    assert parts.fake._is_gate_open
    assert parts.fake._kv_budget_tokens == 5


async def test_an_unreadable_ledger_starts_nothing_and_ends_nothing(parts: Parts):
    async with reading(parts.remote, request(max_tokens=100)) as stream:
        await stream.has_tokens(1)
        section = parts.ledgers[0]._budget
        section._write_head(1, 0)  # a writer that died half-way
        with pytest.raises(EngineBusyError, match="cannot be read"):
            await collect(parts.remote, request("r2"))
        await stream.finish()
    assert stream.finish_reason is FinishReason.LENGTH


async def test_a_gang_needs_every_lease(tmp_path: Path):
    async with executor_parts(tmp_path, num_devices=2) as parts:
        assert (await collect(parts.remote, request())).finish_reason is FinishReason.LENGTH
        for tokens in ((7,), (8, 7), (7, 9)):
            parts.remote.set_lease(*tokens)
            with pytest.raises(EngineLeaseError):
                await parts.remote.resume()
        parts.remote.set_lease(7, 8)
        parts.lend(9, 1)
        with pytest.raises(EngineLeaseError):
            await parts.remote.resume()


async def test_a_jobs_bearer_token_is_good_for_its_own_leases_only(parts: Parts):
    """The fencing token of another job's lease can be guessed: it is the number of leases that the device had."""
    accesses = {"holder": Access.JOB, "other": Access.JOB, "serving": Access.CONTROL}
    tokens = [
        TokenConfig(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), access=access)
        for name, access in accesses.items()
    ]
    budget = Budget(fencing_token=7, expires_s=math.inf, is_granted=True, holder=job_key(JobId("holder")))
    parts.ledgers[0].publish_budget(budget)
    listener = bind(parse_place("127.0.0.1:0"), tokens)
    async with served(make_app(parts.service.routes(), tokens=tokens), listener) as url, AsyncExitStack() as stack:
        engines = {name: RemoteEngine(url, engine_id=name, token=name) for name in accesses}
        for engine in engines.values():
            stack.push_async_callback(engine.close)
            engine.set_lease(7)
        for name in ("holder", "serving"):
            assert (await collect(engines[name], request(name))).finish_reason is FinishReason.LENGTH
        with pytest.raises(EngineLeaseError, match="is another job's"):
            await collect(engines["other"], request("other"))
        with pytest.raises(EngineLeaseError):
            await engines["other"].pause(PauseMode.ABORT)
        parts.lend(7)  # by a lender that does not say to whom
        assert (await collect(engines["other"], request("other"))).finish_reason is FinishReason.LENGTH
    assert [asked.request_id for asked in parts.fake.requests] == ["holder", "serving", "other"]


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_client_that_goes_away_aborts_once(parts: Parts, num_tokens: int):
    if not num_tokens:
        await parts.fake.pause(PauseMode.KEEP)
    async with reading(parts.remote, request(max_tokens=2000)) as stream:
        if num_tokens:
            await stream.has_tokens(num_tokens)
        else:
            await until(lambda: parts.fake.num_in_flight == 1)
    await until(lambda: parts.fake.num_in_flight == 0 and parts.service.num_streams == 0)
    await asyncio.sleep(0.05)
    assert parts.fake.aborted == ["r1"]
    assert parts.service.outcomes == {"gone": 1}


async def test_an_abort_then_a_closed_stream_is_one_abort(parts: Parts):
    chunks = parts.remote.generate(request(max_tokens=2000))
    async with aclosing(chunks):
        await anext(chunks)
        await parts.remote.abort(RequestId("r1"))
    await until(lambda: parts.service.num_streams == 0)
    assert parts.fake.aborted == ["r1"]


async def test_draining_evicts_and_refuses(parts: Parts):
    async with reading(parts.remote, request(max_tokens=2000)) as stream:
        await stream.has_tokens(3)
        assert await parts.service.drain(2.0)
        await stream.finish()
    assert (stream.finish_reason, len(stream.token_ids) >= 3) == (FinishReason.EVICTED, True)
    with pytest.raises(EngineBusyError, match="is ending"):
        await collect(parts.remote, request("r2"))


async def test_draining_does_not_wait_for_an_engine_that_hangs(parts: Parts):
    async with reading(parts.remote, request(max_tokens=2000)) as stream:
        await stream.has_tokens(1)
        parts.fake.abort = lambda _: asyncio.sleep(10)
        began_s = time.monotonic()
        assert not await parts.service.drain(0.1)
        assert time.monotonic() - began_s < 1


async def test_errors_of_the_engine_cross_in_their_types(parts: Parts):
    with pytest.raises(VersionConflictError, match="stage"):
        await parts.remote.activate()
    with pytest.raises(RequestRefusedError, match="token ids outside"):
        await collect(parts.remote, attrs.evolve(request("r2"), prompt_ids=(5000,)))
    parts.fake.set_busy(is_busy=True)
    with pytest.raises(EngineBusyError, match="takes no more work"):
        await collect(parts.remote, request("r3"))
    parts.fake.set_busy(is_busy=False)
    with pytest.raises(EngineError, match="cannot prove its weights"):
        await parts.remote.weight_checksums()
    async with reading(parts.remote, request("r4", max_tokens=2000)) as stream:
        await stream.has_tokens(2)
        parts.fake.fence()
        with pytest.raises(EngineFencedError, match="fenced"):
            await stream.finish()
    assert len(stream.token_ids) >= 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("abort", {}),
        ("pause", {"mode": "nap"}),
        ("kv-budget", {"num_tokens": True}),
        ("stage", {"target": "x"}),
        ("gate", []),
    ],
)
async def test_commands_that_say_nothing_are_refused(parts: Parts, path: str, body: object):
    client = HttpClient(parts.url)
    with pytest.raises(ConfigError):
        await client.call("POST", f"/v1/{path}", body, headers=parts.remote._headers)
    with pytest.raises(RequestRefusedError, match="request_id is missing"):
        await client.call("POST", "/v1/generate", {}, headers=parts.remote._headers)
    await client.close()


async def test_an_engine_that_was_started_anew_is_lost_once(parts: Parts):
    assert (await parts.remote.snapshot()).weight_version == WeightVersion("run", 3)
    parts.fake.die()
    await until(lambda: len(parts.fakes) == 2 and parts.supervisor.problem is None)
    parts.fake.weight_version = None
    for _ in range(2):
        with pytest.raises(EngineLostError):
            await parts.remote.stage(UPDATE)
    assert parts.remote.weight_version is None
    assert (await parts.remote.snapshot()).weight_version is None
    await parts.remote.stage(UPDATE)
    assert (await parts.remote.activate()).version == UPDATE.target
    assert parts.remote.weight_version == UPDATE.target


async def test_a_reading_tells_of_a_new_engine_before_it_takes_it(parts: Parts):
    await parts.remote.snapshot()
    parts.fake.die()
    await until(lambda: len(parts.fakes) == 2 and parts.supervisor.problem is None)
    with pytest.raises(EngineLostError, match="started anew"):
        await parts.remote.snapshot()
    assert (await parts.remote.snapshot()).num_running == 0


async def test_a_lost_executor_is_a_lost_engine(tmp_path: Path):
    async with executor_parts(tmp_path) as parts:
        remote = parts.remote
        await remote.snapshot()
    with pytest.raises(EngineLostError, match="is the process alive"):
        await remote.snapshot()
    with pytest.raises(EngineLostError):
        await collect(remote, request())
    await remote.close()


@pytest.mark.parametrize("answer", [[], {}, 7, {"num_running": "x"}])
async def test_a_stranger_at_the_address_is_a_lost_engine(answer: object):
    async def talk(_: web.Request) -> web.Response:
        return web.json_response(answer)

    listener = bind(parse_place("127.0.0.1:0"), ())
    routes = [web.get("/v1/snapshot", talk), web.post("/v1/generate", talk)]
    async with served(make_app(routes), listener) as url:
        remote = RemoteEngine(url)
        with pytest.raises(EngineLostError, match="no executor"):
            await collect(remote, request())
        with pytest.raises(EngineLostError, match="no executor"):
            await remote.snapshot()
        await remote.close()


async def test_sleep_and_wake(parts: Parts):
    async with reading(parts.remote, request(max_tokens=2000)) as stream:
        await stream.has_tokens(2)
        assert (await parts.remote.sleep()).num_evicted == 1
        await stream.finish()
    assert stream.finish_reason is FinishReason.EVICTED
    assert parts.remote.is_asleep
    with pytest.raises(EngineBusyError):
        await collect(parts.remote, request("r2"))
    assert not (await parts.remote.wake()).is_stale
    assert not parts.remote.is_asleep
    assert (await collect(parts.remote, request("r3"))).finish_reason is FinishReason.LENGTH


async def test_holds_are_counted_by_reason(parts: Parts):
    """A rollout engine with requests, and a serving engine that was never heard of."""
    ledger = parts.ledgers[0]
    parts.holds.look()
    assert set(parts.holds.held_s.values()) == {0.0}
    ledger.publish_rollout(type(ledger.rollout())(num_waiting=1))
    await asyncio.sleep(0.2)
    held = {reason.value: held_s for reason, held_s in parts.holds.held_s.items() if held_s}
    assert list(held) == ["stale"]
    assert 0.1 < held["stale"] < 0.4
