"""A client and a pool's session on the direct path, head starts included: any order of messages, losses and events keeps its invariants.

Nothing is real but the code under test: messages wait until a history delivers them, time is virtual, engines are fakes that both sides
reach. The normal run plays 100 histories; for thousands, set ``ROSE_HISTORIES``:

    ROSE_HISTORIES=5000 pytest tests/properties/test_direct_path.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose import RolloutPool
from rose.backends.remote.wire import compact
from rose.errors import RequestRefusedError, RoseError
from rose.hosts.http.pool_direct import Session
from rose.policies.routing import RoutingConfig
from rose.policies.staleness import is_admissible
from rose.pool import PoolConfig, direct
from rose.pool.remote_pool import RemotePool
from rose.testing import FakeEngine, ManualClock
from rose.testing.engine import NextToken
from rose.testing.updates import FakeUpdateSource
from rose.types import (
    AnyVersion,
    AtLeast,
    EngineAddress,
    EngineId,
    Exactly,
    FinishReason,
    Sampling,
    Turn,
    TurnResult,
    VersionConstraint,
    WeightVersion,
)

NUM_HISTORIES = int(os.environ.get("ROSE_HISTORIES", "100"))
CONTEXT, NEWEST = 40, 3
TOKEN_S = 0.01
CONFIG = PoolConfig(
    routing=RoutingConfig(cap_per_engine=1), stall_s=30.0, circuit_s=0.05, circuit_max_s=0.1, retry_s=0.01
)


@attrs.define(eq=False, kw_only=True, slots=False)
class _Engine(FakeEngine):
    """Is reached by both sides; refuses what could outgrow its context, as some servers do."""

    lease: int = 0

    def address(self) -> EngineAddress:
        return EngineAddress(name="fake", options=(("engine_id", self.engine_id), ("lease", self.lease)))

    def _refuse_impossible(self, request: Any) -> None:
        super()._refuse_impossible(request)
        if len(request.prompt_ids) + request.sampling.max_tokens > self.max_model_len:
            self._refuse("it could outgrow the context")


class _Doors:
    """A client's way to the engines; a lease that is over opens nothing."""

    def __init__(self, engines: list[_Engine], clock: ManualClock) -> None:
        self._engines, self._clock = engines, clock
        self.delay_s = 0.0

    @contextlib.asynccontextmanager
    async def engine(self, start: direct.Start) -> AsyncIterator[_Engine]:
        await self._clock.sleep(self.delay_s)
        engine = next(each for each in self._engines if each.engine_id == start.engine_id)
        if start.address != engine.address():
            message = "the lease is over"
            raise RoseError(message)
        yield engine

    async def close(self) -> None:
        pass


class _Wire:
    """Both ends of the connection: what was sent waits; nothing is sent or delivered while it is broken."""

    def __init__(self) -> None:
        self.to_pool: list[Any] = []
        self.to_client: list[Any] = []
        self.is_open = self.closed = False

    async def send(self, message: list[Any]) -> None:
        if self.is_open:
            self.to_pool.append(json.loads(compact(message)))

    async def send_str(self, text: str) -> None:
        self.to_client.append(json.loads(text))


class _World:
    """A pool of two engines, one client of it, and what is between them."""

    session: Session

    def __init__(self) -> None:
        self.clock, self.wire = ManualClock(), _Wire()
        given: dict[str, Any] = {"clock": self.clock, "max_model_len": CONTEXT, "token_s": TOKEN_S, "vocab_size": 10**9}
        self.engines = [_Engine(engine_id=EngineId(f"e{n}"), weight_version=_v(1), **given) for n in range(2)]
        for engine in self.engines:
            engine.next_token = _rule(engine)
        self.pool = RolloutPool(self.engines, clock=self.clock, config=CONFIG)
        self.remote = RemotePool("http://nowhere")
        self.doors = self.remote._doors = _Doors(self.engines, self.clock)  # type: ignore[assignment]
        self.remote._link = self.wire  # type: ignore[assignment]
        self.calls: list[tuple[Turn, asyncio.Task[TurnResult]]] = []
        self.floors: dict[str, int] = {}
        self.latest = 1
        self.is_counted = True  # whether each token that is given was counted once, and no other
        self._tasks: set[asyncio.Task[None]] = set()

    # What a history may do.

    async def submit(self, name: int, longest: int, versions: VersionConstraint) -> None:
        sampling = Sampling(max_tokens=longest, temperature=0.0)
        num_prompt = 5 + len(self.calls) % 20
        turn = Turn(
            trajectory_id=f"t{name}", group_id="g", prompt_ids=(1,) * num_prompt, sampling=sampling, versions=versions
        )
        self.calls.append((turn, self._spawn(self.remote.generate(turn))))
        self.is_counted = self.is_counted and not isinstance(versions, Exactly)

    async def cancel(self, index: int) -> None:
        if self.calls:
            self.calls[index % len(self.calls)][1].cancel()
            self.is_counted = False

    async def hear_at_pool(self, num: int) -> None:
        for message in _taken(self.wire.to_pool, num):
            is_new = message[0] == direct.SUBMIT and message[1] not in self.session.turns
            if is_new and not self._has_ended(message[1]):
                self.floors[message[1]] = self.latest
            await self.session.take(message)

    async def hear_at_client(self, num: int) -> None:
        for message in _taken(self.wire.to_client, num):
            self.remote._hear(message)

    async def lose(self) -> None:
        """Break the connection when the pool has heard all, and its answers are on the way."""
        await self.hear_at_pool(len(self.wire.to_pool))
        await self.clock.advance(0.0)
        await self.connect()

    async def connect(self) -> None:
        """Break the connection and open it again."""
        self.wire.to_pool.clear()
        self.wire.to_client.clear()
        self.session.socket, self.wire.is_open = None, False
        await self.clock.advance(TOKEN_S)
        self.session.socket, self.wire.is_open = self.wire, True  # type: ignore[assignment]
        await self.session.send([direct.SESSION, self.session.prefix])
        await self.remote._tell_all()

    async def give_up(self) -> None:
        """Let the pool give the client up, which comes back as a new one."""
        self.session.socket = None
        self.session.end()
        self.session = Session(self.pool, {}, self._spawn)
        self.is_counted = False
        await self.connect()

    async def upset(self, what: str, index: int) -> None:
        engine = self.engines[index % len(self.engines)]
        for stream in list(engine._streams):
            if what in {"evict", "lend"}:
                engine.evict(stream)
        if what == "busy":
            engine.set_busy(is_busy=not engine._is_busy)
        elif what == "lend":  # its lease ends, and it comes back under another
            self.is_counted = False
            with contextlib.suppress(RoseError):
                await self.pool.remove_engine(engine.engine_id, "its lease is over")
            engine.lease += 1
            await self.pool.add_engine(engine)

    async def activate(self) -> None:
        self.latest += 1
        await self.pool.sync_weights(FakeUpdateSource(run="r", version=_v(self.latest)))

    async def report(self) -> None:
        for call in list(self.remote._calls.values()):
            await self.remote._report(call)

    async def delay(self, delay_s: float) -> None:
        self.doors.delay_s = delay_s

    async def wait(self, num: int) -> None:
        await self.clock.advance(num * TOKEN_S)

    # How it begins, ends, and what must hold.

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with self.pool, self.remote._tasks:
            self.remote._is_open = True
            self.session = Session(self.pool, {}, self._spawn)
            await self.connect()
            yield
            self.remote._cancel_own()

    async def talk(self) -> None:
        """Deliver all there is to hear; afterwards the pool has had its say about each head start."""
        while self.wire.to_pool or self.wire.to_client:
            await self.hear_at_pool(1)
            await self.hear_at_client(1)
            await self.clock.advance(0.0)
        assert not any(call.is_ahead for call in self.remote._calls.values())
        attempts = [record.attempt for record in self.pool._state.live.values() if record.attempt is not None]
        running = [name for engine in self.engines for name, stream in engine._streams.items() if not stream.ended]
        assert set(running) <= {attempt.request.request_id for attempt in attempts}

    async def end(self) -> None:
        """Let all calls end."""
        for engine in self.engines:
            engine.set_busy(is_busy=False)
        for num in range(100):
            if num % 20 == 19 and self.latest < NEWEST:  # some wait for it
                await self.activate()
            await self.talk()
            if (
                all(task.done() for _, task in self.calls)
                and not self.remote._calls
                and not self.pool.snapshot().num_live_turns
            ):
                return
            await self.report()
            await self.clock.advance(0.25)
        raise AssertionError(self.remote._calls, self.pool.snapshot())

    def check(self) -> None:
        assert not any(engine.num_in_flight for engine in self.engines)
        assert all(view.num_in_flight == 0 for view in self.pool.snapshot().engines)
        num_given = 0
        for number, (turn, task) in enumerate(self.calls):
            if task.cancelled():
                continue
            error = task.exception()
            assert error is None or (isinstance(error, RoseError) and not isinstance(error, RequestRefusedError)), error
            if error is not None:
                self.is_counted = False
                continue
            self._check_result(turn, task.result(), self.floors[str(number)])
            num_given += len(task.result().token_ids)
        counted = sum(account.num_tokens for account in self.pool.accounts().values())
        assert counted == num_given or not self.is_counted

    def _has_ended(self, turn_id: str) -> bool:
        call = self.remote._calls.get(turn_id)
        return call is None or call.waiter.done()

    def _check_result(self, turn: Turn, result: TurnResult, floor: int) -> None:
        num_asked = min(turn.sampling.max_tokens, CONTEXT - len(turn.prompt_ids))
        assert len(result.token_ids) == num_asked
        assert result.finish_reason is FinishReason.LENGTH
        engines = [int(hop.engine_id[1:]) for hop in result.hops for _ in range(hop.num_tokens)]
        versions = [span.version.n for span in result.versions for _ in range(span.start, span.end)]
        told = zip(engines, versions, strict=True)
        wanted = [at + 100 * engine + 1000 * n for at, (engine, n) in enumerate(told, len(turn.prompt_ids))]
        assert list(result.token_ids) == wanted
        for span in result.versions:
            assert is_admissible(turn.versions, span.version, "r")
            assert span.version.n >= floor, "older than what the pool had when the turn came to it"

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _v(n: int) -> WeightVersion:
    return WeightVersion("r", n)


def _taken(queue: list[Any], num: int) -> list[Any]:
    taken = queue[:num]
    del queue[:num]
    return taken


def _rule(engine: _Engine) -> NextToken:
    """Let an engine give tokens that say where they stand, whose they are and of which weights."""

    def next_token(ids: Sequence[int], _sampling: Sampling, version: WeightVersion | None) -> int:
        assert version is not None
        return len(ids) + 100 * int(engine.engine_id[1:]) + 1000 * version.n

    return next_token


_SUBMIT = st.tuples(
    st.just("submit"),
    st.integers(0, 2),
    st.sampled_from([1, 3, 8, 100]),
    st.one_of(
        st.just(AnyVersion()), st.builds(AtLeast, st.integers(1, NEWEST)), st.builds(Exactly, st.integers(1, NEWEST))
    ),
)
_MEANWHILE = st.one_of(
    st.tuples(st.sampled_from(["hear_at_pool", "hear_at_client"]), st.integers(1, 4)),
    st.tuples(st.just("wait"), st.sampled_from([0, 0, 1, 3, 12])),
    st.sampled_from([("report",), ("talk",), ("talk",)]),
)
_EVENT = st.one_of(
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("upset"), st.sampled_from(["evict", "busy", "lend"]), st.integers(0, 1)),
    st.sampled_from([("activate",), ("lose",), ("connect",), ("give_up",)]),
    st.tuples(st.just("delay"), st.sampled_from([0.0, 0.5 * TOKEN_S, 3 * TOKEN_S])),
)
_ROUND = st.tuples(
    st.lists(_SUBMIT, min_size=1, max_size=3), st.lists(st.one_of(_MEANWHILE, _MEANWHILE, _EVENT), max_size=8)
)


@settings(max_examples=NUM_HISTORIES, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_ROUND, min_size=2, max_size=6))
def test_every_call_ends_once_and_leaves_nothing(rounds: list[tuple[list[Any], list[Any]]]) -> None:
    history = [step for submits, others in rounds for step in (*submits, *others)]

    async def play() -> None:
        world = _World()
        async with world.opened():
            for name in range(3):  # each trajectory has been somewhere
                await world.submit(name, 2, AnyVersion())
            await world.end()
            for step in history:
                await getattr(world, step[0])(*step[1:])
                await world.clock.advance(0.0)
            await world.end()
        world.check()

    asyncio.run(play())


def test_a_request_of_a_session_that_was_given_up_does_not_begin() -> None:
    async def play() -> None:
        world = _World()
        async with world.opened():
            await world.submit(0, 30, AnyVersion())
            await world.delay(3 * TOKEN_S)
            await world.hear_at_client(1)
            await world.clock.advance(0.0)
            await world.hear_at_pool(9)
            await world.clock.advance(0.0)
            assert [message[0] for message in world.wire.to_client] == [direct.START]
            await world.hear_at_client(1)
            await world.give_up()
            await world.hear_at_client(1)  # that it is another session; where the turn goes on is not known yet
            await world.wait(6)
            assert not any(engine.num_in_flight for engine in world.engines)
            await world.end()
        world.check()

    asyncio.run(play())
