"""Weights pushed to a pool's service: real store, real publishers, engines that take versions without looking at them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import attrs
import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose import RolloutPool
from rose.backends.memory import MemoryTransport
from rose.errors import ConfigError, EngineLostError, LayoutMismatchError, RoseError, TransferError, TransportError
from rose.frameworks import PoolPlace, PushReport, StreamedTrainer, WeightPush
from rose.hosts.http.auth import TokenConfig
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.policies.weight_pull import PullAction, PullPlan, PullReason
from rose.pool import SyncReport
from rose.pool.store_offer import StoreOffer, TargetShape
from rose.testing import FakeEngine, Fault, FaultKind
from rose.testing.ports import free_ports
from rose.transfer.publisher import PublishReport
from rose.transfer.relay import POINTER, read_manifest
from rose.types import EngineId, TransportAddress, WeightVersion

MODEL = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 8}
OPEN: list[WeightPush] = []
SHAPES = {
    "model.embed_tokens.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 4),
    "model.norm.weight": (8,),
}


@contextlib.asynccontextmanager
async def site(
    engines: Sequence[FakeEngine], *, targets: Sequence[TargetShape] = (), has_store: bool = True, **options: Any
) -> AsyncIterator[tuple[PoolPlace, MemoryTransport]]:
    store = MemoryTransport()
    with contextlib.closing(store):
        offer = (
            StoreOffer(address=store.serve(port=free_ports(1)[0]), targets=targets, model=MODEL) if has_store else None
        )
        async with (
            RolloutPool(engines) as pool,
            serve_pool(PoolService(pool, name="toy", store=offer, **options)) as url,
        ):
            yield PoolPlace(url=url), store


def engines(*faults: Fault, **options: Any) -> list[FakeEngine]:
    return [
        FakeEngine(engine_id=EngineId("e0"), **options),
        FakeEngine(engine_id=EngineId("e1"), faults=faults, **options),
    ]


def shown(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, dtype=np.float32) for name, shape in SHAPES.items()}


def pushes(place: PoolPlace, world_size: int = 1, **options: Any) -> list[tuple[StreamedTrainer, WeightPush]]:
    trainers = [StreamedTrainer(rank=rank, world_size=world_size) for rank in range(world_size)]
    ranks = [(trainer, WeightPush(place, trainer=trainer, run="toy-1", **options)) for trainer in trainers]
    OPEN.extend(one for _, one in ranks)
    return ranks


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    """Close what a test has opened; twice does no harm."""
    yield
    for one in OPEN:
        one.close()
        one.close()
    OPEN.clear()


async def push(ranks: list[tuple[StreamedTrainer, WeightPush]], value: float) -> list[PushReport]:
    for trainer, _ in ranks:
        trainer.update(shown(value))
    return await asyncio.gather(*(asyncio.to_thread(one.push) for _, one in ranks))


async def test_ranks_push_their_shares_and_every_engine_follows() -> None:
    async with site(engines()) as (place, store):
        ranks = pushes(place, world_size=2)
        for n in range(3):
            first, other = await push(ranks, float(n))
            assert first.version == other.version == WeightVersion("toy-1", n)
            assert first.sync is not None
            assert set(first.sync.activations) == {"e0", "e1"}
            assert not first.errors
            assert other.sync is None, "rank 0 alone talks to the pool"
            assert first.publish.is_gathered
        async with place.connect() as pool:
            assert {engine.version for engine in (await pool.snapshot()).engines} == {WeightVersion("toy-1", 2)}
        assert read_manifest(store, str(store.read_pointer(POINTER))).version == WeightVersion("toy-1", 2)


async def test_an_unchanged_push_is_a_version_too() -> None:
    async with site(engines()) as (place, _):
        ranks = pushes(place)
        await push(ranks, 1.0)
        (report,) = await push(ranks, 1.0)
        assert report.version.n == 1
        assert report.publish.num_changed == 0
        assert report.sync is not None
        assert len(report.sync.activations) == 2


async def test_an_engine_that_fails_is_reported_and_the_push_goes_on() -> None:
    async with site(engines(Fault(kind=FaultKind.FENCE, request_index=1))) as (place, _):
        ranks = pushes(place)
        await push(ranks, 0.0)
        (report,) = await push(ranks, 1.0)
        assert set(report.errors) == {"e1"}
        assert not report.is_with_nobody
        assert report.sync is not None
        assert set(report.sync.activations) == {"e0"}
        (report,) = await push(ranks, 2.0)
        assert not report.errors, "it comes back by full weights"


async def test_a_version_that_no_engine_took_is_with_nobody() -> None:
    faults = [Fault(kind=FaultKind.CORRUPT_UPDATE, request_index=0)]
    async with site([FakeEngine(engine_id=EngineId("e0"), faults=faults)]) as (place, _):
        (report,) = await push(pushes(place), 0.0)
        assert report.is_with_nobody


NO_ENGINE = SyncReport(activations={}, unchanged=(), errors={})


@pytest.mark.parametrize("reason", [PullReason.STILL_ADMISSIBLE, PullReason.LOAN_TOO_SHORT])
def test_a_version_that_a_lent_engine_puts_off_is_with_nobody_unless_it_does_without(reason: PullReason) -> None:
    put_off = {EngineId("lent"): PullPlan(action=PullAction.WAIT, reason=reason)}
    report = attrs.evolve(NO_ENGINE, errors={EngineId("e0"): TransferError("no")}, put_off=put_off)
    is_with_nobody = PushReport(publish=cast("PublishReport", None), sync=report).is_with_nobody
    assert is_with_nobody is (reason is not PullReason.STILL_ADMISSIBLE)


def test_the_store_is_what_to_look_at_where_nothing_else_is_known() -> None:
    away, other = {EngineId("e0"): TransportError("away")}, {EngineId("e1"): TransferError("no such tensor")}
    for errors, is_store_away in ((away, True), (other, False), (away | other, False), ({}, False)):
        report = attrs.evolve(NO_ENGINE, errors=errors)
        assert PushReport(publish=cast("PublishReport", None), sync=report).is_store_away is is_store_away


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_sync_that_outlives_its_push_asks_no_more_and_leaves_the_store_alone(
    monkeypatch: pytest.MonkeyPatch, *, is_answered: bool
) -> None:
    call, asked, asking, closed = PoolPlace.call, [], threading.Event(), threading.Event()

    def late(self: PoolPlace, method: str, path: str, body: object = None, *, timeout_s: float) -> Any:
        if path != "/v1/sync":
            return call(self, method, path, body, timeout_s=timeout_s)
        asked.append(threading.current_thread())
        asking.set()
        assert closed.wait(20)
        if not is_answered:
            message = "away"
            raise TransportError(message)
        return {"activations": {}, "unchanged": ["e0", "e1"], "errors": {}, "put_off": {}}

    monkeypatch.setattr("rose.frameworks.push._REST_S", 30.0)
    monkeypatch.setattr(PoolPlace, "call", late)
    async with site(engines()) as (place, _):
        ranks = pushes(place, is_sync_awaited=False, sync_retry_s=100.0)
        await push(ranks, 0.0)
        assert await asyncio.to_thread(asking.wait, 20)
        store = ranks[0][1]._store
        assert store is not None
        ranks[0][1].close()
        monkeypatch.setattr(store.transport, "read_pointer", lambda _: pytest.fail("it was closed"))
        closed.set()
        await asyncio.to_thread(asked[0].join, 20)
        assert not asked[0].is_alive()
        assert len(asked) == 1


def test_a_version_is_with_nobody_where_errors_are_all_there_is() -> None:
    failed = attrs.evolve(NO_ENGINE, errors={EngineId("e0"): TransferError("no")})
    for report, is_with_nobody in (
        (failed, True),
        (attrs.evolve(failed, unchanged=(EngineId("e1"),)), False),
        (NO_ENGINE, False),  # engines may come yet
    ):
        assert PushReport(publish=cast("PublishReport", None), sync=report).is_with_nobody is is_with_nobody


async def test_a_pool_that_does_not_let_a_sync_in_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.frameworks.push._REST_S", 0.01)
    report = await push_failing(monkeypatch, 1, 0.0, error=ConfigError("no such token"))
    assert report.problem == "no such token"
    assert report.is_with_nobody


async def test_a_version_is_announced_before_any_engine_has_it() -> None:
    pair, told = engines(), []
    async with site(pair) as (place, _):
        ranks = pushes(place, world_size=2)
        for n in range(2):
            for trainer, _push in ranks:
                trainer.update(shown(float(n)))
            calls = (
                asyncio.to_thread(
                    one.push, announce=lambda v, rank=rank: told.append((rank, v.n, [e.weight_version for e in pair]))
                )
                for rank, (_, one) in enumerate(ranks)
            )
            await asyncio.gather(*calls)
            assert {e.weight_version for e in pair} == {WeightVersion("toy-1", n)}
    assert told == [(0, 0, [None, None]), (0, 1, [WeightVersion("toy-1", 0)] * 2)]


async def test_a_version_that_could_not_be_announced_is_brought_to_no_engine() -> None:
    pair = engines()
    async with site(pair) as (place, _):
        ((trainer, one),) = pushes(place)
        trainer.update(shown(0.0))
        told: list[WeightVersion] = []

        def fail(version: WeightVersion) -> None:
            told.append(version)
            raise ConnectionError(str(version))

        with pytest.raises(ConnectionError, match="toy-1:0"):
            await asyncio.to_thread(one.push, announce=fail)
        trainer.update(shown(1.0))
        report = await asyncio.to_thread(one.push, announce=told.append)
        assert told == [WeightVersion("toy-1", 0), WeightVersion("toy-1", 1)]
        assert report.version == WeightVersion("toy-1", 1)
        assert [[update.target.n for update in e.updates] for e in pair] == [[1], [1]]


async def test_a_sync_that_takes_long_is_not_waited_for_beyond_its_time() -> None:
    async with site(engines(stage_s=0.5)) as (place, _):
        ranks = pushes(place, sync_timeout_s=0.05)
        (report,) = await push(ranks, 0.0)
        assert report.sync is None
        assert "were not at toy-1:0 after 0.05 s (sync_timeout_s)" in report.problem
        assert report.error is None
        assert not report.is_with_nobody, "they are on the way"
        (report,) = await push(ranks, 1.0)
        assert report.version.n == 1
        async with place.connect() as pool, asyncio.timeout(10.0):
            while {engine.version for engine in (await pool.snapshot()).engines} != {WeightVersion("toy-1", 1)}:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(("num_failures", "retry_s", "timeout_s"), [(2, 10.0, 60.0), (10_000, 1.0, 0.5)])
async def test_a_sync_that_failed_as_a_whole_is_asked_for_again_for_a_while(
    num_failures: int, retry_s: float, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.frameworks.push._REST_S", 0.01)
    asked: list[str] = []
    async with site(engines()) as (place, _):
        ranks = pushes(place, sync_retry_s=retry_s, sync_timeout_s=timeout_s)
        call = PoolPlace.call

        def without_sync(self: PoolPlace, method: str, path: str, body: object = None, *, timeout_s: float) -> Any:
            asked.extend([path] if path == "/v1/sync" else [])
            if path == "/v1/sync" and len(asked) <= num_failures:
                message = "away"
                raise TransportError(message)
            return call(self, method, path, body, timeout_s=timeout_s)

        monkeypatch.setattr(PoolPlace, "call", without_sync)
        (report,) = await push(ranks, 0.0)
        assert len(asked) >= 3
        if num_failures == 2:
            assert (report.error, report.problem) == (None, "")
            assert report.sync is not None
            assert set(report.sync.activations) == {"e0", "e1"}
        else:
            assert (report.sync, report.problem) == (None, "away")  # not that the engines took too long: none was asked
            assert isinstance(report.error, TransportError)


async def push_failing(
    monkeypatch: pytest.MonkeyPatch,
    num_failures: int,
    after_s: float,
    error: RoseError = TransportError("broke off"),  # noqa: B008 - raised, never changed
    **options: Any,
) -> PushReport:
    """Push once; as many syncs fail, each after a while."""
    asked: list[str] = []
    call = PoolPlace.call

    def failing(self: PoolPlace, method: str, path: str, body: object = None, *, timeout_s: float) -> Any:
        asked.extend([path] if path == "/v1/sync" else [])
        if path == "/v1/sync" and len(asked) <= num_failures:
            time.sleep(after_s)
            raise error
        return call(self, method, path, body, timeout_s=timeout_s)

    monkeypatch.setattr(PoolPlace, "call", failing)
    async with site(engines()) as (place, _):
        return (await push(pushes(place, **options), 0.0))[0]


async def test_a_sync_that_breaks_off_late_is_asked_for_again_as_long_as_one_that_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rose.frameworks.push._REST_S", 0.01)
    report = await push_failing(monkeypatch, 1, 0.4, sync_retry_s=0.3)
    assert report.error is None
    assert report.sync is not None
    assert not report.is_with_nobody


@pytest.mark.parametrize(
    ("num_away", "error", "num_asked"),
    [(2, TransportError("away"), 3), (99, TransportError("away"), 0), (2, TransferError("no"), 1)],
)
async def test_a_sync_in_which_no_engine_reached_the_store_is_asked_for_again(
    num_away: int, error: RoseError, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.frameworks.push._REST_S", 0.01)
    engine = FakeEngine(engine_id=EngineId("e0"))
    stage, staged = engine.stage, []

    async def away(update: Any) -> Any:
        staged.append(update)
        if len(staged) <= num_away:
            raise error
        return await stage(update)

    monkeypatch.setattr(engine, "stage", away)
    async with site([engine]) as (place, _):
        (report,) = await push(pushes(place, sync_retry_s=0.5), 0.0)
    assert report.error is None
    assert report.is_with_nobody is (num_asked < 3)
    assert len(staged) == num_asked if num_asked else len(staged) > 3


@pytest.mark.parametrize("beside", [EngineLostError("gone"), None, "put off"])
async def test_an_engine_that_fails_or_waits_beside_one_that_is_away_does_not_end_the_asking(
    beside: EngineLostError | str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rose.frameworks.push._REST_S", 0.01)
    pair = engines()
    stage, staged = pair[0].stage, []

    async def away(update: Any) -> Any:
        staged.append(update)
        if len(staged) <= 2:
            message = "away"
            raise TransportError(message)
        return await stage(update)

    async def lost(_: Any) -> Any:
        raise cast("EngineLostError", beside)

    async def put_off(*_: Any) -> dict[EngineId, PullPlan]:
        return {EngineId("e1"): PullPlan(action=PullAction.SKIP, reason=PullReason.LOAN_TOO_SHORT)}

    monkeypatch.setattr(pair[0], "stage", away)
    if isinstance(beside, EngineLostError):
        monkeypatch.setattr(pair[1], "stage", lost)
    if beside == "put off":
        monkeypatch.setattr("rose.pool.weights.WeightSync._put_off", put_off)
    async with site(pair) as (place, _):
        (report,) = await push(pushes(place, sync_retry_s=5.0), 0.0)
    assert report.sync is not None
    if beside is None:
        assert (len(staged), set(report.sync.activations)) == (1, {"e1"}), "one engine has it: turns go on"
        return
    assert (len(staged), set(report.sync.activations)) == (3, {"e0"})
    assert set(report.errors) == (set() if beside == "put off" else {"e1"}), "it is asked no more, and still told of"
    told = [record.message for record in caplog.records if "asked for again" in record.message]
    assert told == ["no engine is at toy-1:0 yet (engine e0: away); asked for again for 5 s"]


async def test_a_version_that_a_store_lost_is_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was started anew at the same place has nothing to offer, which is not that the engines have it all."""
    monkeypatch.setattr("rose.frameworks.push._REST_S", 0.01)
    call, asked = PoolPlace.call, []
    with contextlib.ExitStack() as stack:
        async with site(engines()) as (place, store):
            options = dict(store.address().options)

            def dying(self: PoolPlace, method: str, path: str, body: object = None, *, timeout_s: float) -> Any:
                asked.extend([path] if path == "/v1/sync" else [])
                if path == "/v1/sync" and len(asked) == 1:
                    store.close()
                if path == "/v1/sync" and len(asked) == 3:
                    again = MemoryTransport()
                    stack.callback(again.close)
                    again.serve(port=options["port"], token=options["token"])
                return call(self, method, path, body, timeout_s=timeout_s)

            monkeypatch.setattr(PoolPlace, "call", dying)
            (report,) = await push(pushes(place, sync_retry_s=60.0), 0.0)
    assert len(asked) == 3, "no repetition brings it back"
    assert report.sync is None
    assert report.is_with_nobody
    assert "has nothing where it had toy-1:0" in report.problem


async def test_engines_that_an_earlier_sync_brought_there_have_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    call = PoolPlace.call

    def twice(self: PoolPlace, method: str, path: str, body: object = None, *, timeout_s: float) -> Any:
        for _ in range(2 if path == "/v1/sync" else 1):
            answer = call(self, method, path, body, timeout_s=timeout_s)
        return answer

    monkeypatch.setattr(PoolPlace, "call", twice)
    async with site(engines()) as (place, _):
        (report,) = await push(pushes(place), 0.0)
    assert report.sync is not None
    assert set(report.sync.unchanged) == {"e0", "e1"}
    assert not report.is_with_nobody


async def test_nobody_gives_a_sync_up_that_is_about_to_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    report = await push_failing(monkeypatch, 10, 0.0, sync_timeout_s=0.9, sync_retry_s=1.1)  # the rest is 1 s
    assert report.problem == "broke off"
    assert report.is_with_nobody


async def test_a_sync_that_never_ends_holds_up_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a pool whose host died in its middle: nothing is heard of it any more."""
    call, asking, ending = PoolPlace.call, threading.Lock(), threading.Event()

    def silent_once(self: PoolPlace, method: str, path: str, body: object = None, *, timeout_s: float) -> Any:
        if self is place and path == "/v1/sync" and asking.acquire(blocking=False):
            ending.wait()
        return call(self, method, path, body, timeout_s=timeout_s)

    async with site(engines()) as (place, _):
        ranks = pushes(place, sync_timeout_s=1.0, sync_retry_s=0.0)
        with monkeypatch.context() as dying:
            dying.setattr(PoolPlace, "call", silent_once)
            (report,) = await push(ranks, 0.0)
        assert "the sync goes on" in report.problem
        ranks[0][1]._sync_timeout_s = 60.0
        (report,) = await push(ranks, 1.0)
        assert report.sync is not None
        assert set(report.sync.activations) == {"e0", "e1"}
        ending.set()


async def test_nobody_waits_where_that_is_not_wanted() -> None:
    async with site(engines(stage_s=0.2)) as (place, _):
        ranks = pushes(place, is_sync_awaited=False)
        (report,) = await push(ranks, 0.0)
        assert report.sync is None
        assert not report.problem
        async with place.connect() as pool, asyncio.timeout(10.0):
            while not any(engine.version for engine in (await pool.snapshot()).engines):
                await asyncio.sleep(0.05)


async def test_weights_are_cut_for_the_engines_that_the_pool_names() -> None:
    async with site(engines(), targets=[TargetShape(engine="vllm", tp=2)]) as (place, store):
        await push(pushes(place), 1.0)
        cut, whole = await asyncio.to_thread(num_cells, store), len(SHAPES)
        assert cut == whole + 1, "the projection lies on two ranks; the padded embedding, so small, on the first alone"


def num_cells(store: MemoryTransport) -> int:
    key = store.read_pointer(POINTER)
    assert key is not None
    return len(read_manifest(store, key).columns.codec)


async def test_weights_that_the_engines_cannot_hold_are_refused_by_name() -> None:
    async with site(engines(), targets=[TargetShape(engine="vllm", tp=2)]) as (place, _):
        ((trainer, one),) = pushes(place)
        trainer.update({"model.odd.weight": np.ones((4, 4), dtype=np.float32)})
        with pytest.raises(LayoutMismatchError, match=r"model\.odd\.weight"):
            await asyncio.to_thread(one.push)


async def test_half_a_pass_is_not_pushed() -> None:
    async with site(engines()) as (place, _):
        ((trainer, one),) = pushes(place)
        trainer.update(shown(1.0))
        await asyncio.to_thread(one.push)
        with pytest.raises(LayoutMismatchError, match="is missing"):
            trainer.update([("model.norm.weight", np.ones(8, dtype=np.float32))])
        with pytest.raises((LayoutMismatchError, TransferError), match="call update"):
            await asyncio.to_thread(one.push)
        trainer.update(shown(2.0))
        assert (await asyncio.to_thread(one.push)).version.n == 1


async def test_a_pool_without_a_store_says_what_to_do() -> None:
    async with site(engines(), has_store=False) as (place, _):
        ranks = pushes(place)
        with pytest.raises(ConfigError, match=r"\[transport\] of its job file keeper = \"pool\""):
            await push(ranks, 1.0)


async def test_the_store_is_told_to_the_job_only() -> None:
    tokens = [TokenConfig(name="toy", sha256=hashlib.sha256(b"secret").hexdigest())]
    async with site(engines(), tokens=tokens) as (place, _):
        with pytest.raises(ConfigError):
            await asyncio.to_thread(place.open_store)
        known = PoolPlace(url=place.url, token="secret")  # noqa: S106
        assert (await asyncio.to_thread(known.check))["name"] == "toy"
        (await asyncio.to_thread(known.open_store))[0].close()


async def test_a_pool_that_is_not_there() -> None:
    place = PoolPlace(url="http://127.0.0.1:9")
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:9"):
        await asyncio.to_thread(place.check)
    with pytest.raises(TransportError):
        await push(pushes(place), 1.0)


def test_what_is_no_offer_is_refused() -> None:
    offer = StoreOffer(address=TransportAddress(name="memory", options=(("host", "h"),)), targets=(), model={})
    assert StoreOffer.from_wire(offer.to_wire()) == offer
    for broken in (
        {},
        None,
        {**offer.to_wire(), "targets": [{"tp": 2}]},
        {**offer.to_wire(), "address": {"name": "x", "token_file": "/etc/passwd"}},
    ):
        with pytest.raises(TransportError, match="no offer of a store"):
            StoreOffer.from_wire(broken)
