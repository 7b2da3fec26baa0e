"""A version's way to modelled engines: when it is there, what it costs, which way an engine catches up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import attrs
import pytest

from rose.errors import BlobNotFoundError
from rose.policies.retention import RetentionConfig
from rose.pool import EngineState, RolloutPool
from rose.simulation.links import ADDRESS, RelayedSync, SharedLink
from rose.simulation.loop import LoopClock, VirtualLoop
from rose.simulation.scenario import LinkConfig
from rose.simulation.sync import SyncCost, paper_sync_cost, sync_cost
from rose.simulation.sync_times import SyncSpeeds, encode_s, put_size, stage_s, sync_times
from rose.testing import FakeEngine
from rose.types import EngineId, EngineKind, WeightUpdate, WeightVersion

LINK = LinkConfig(gbps=10.0, local_gbps=100.0, latency_s=0.001)
COST = sync_cost("qwen3-8b", num_training_ranks=8, gpus_per_engine=1, changed_fraction=0.02)
SPEEDS = SyncSpeeds()


def run(work: Callable[[], Awaitable[None]]) -> float:
    async def main() -> float:
        await work()
        return asyncio.get_running_loop().time()

    return VirtualLoop().run(main())


def relay_of(cost: SyncCost = COST, link: SharedLink | None = None, **options: int) -> RelayedSync:
    thin = link or SharedLink(gbps=LINK.gbps, latency_s=LINK.latency_s)
    kept = RetentionConfig(**options)
    return RelayedSync(run="r", cost=cost, link=thin, local_gbps=LINK.local_gbps, retention=kept)


def v(n: int) -> WeightVersion:
    return WeightVersion("r", n)


async def planned(relay: RelayedSync, known: WeightVersion | None) -> WeightUpdate:
    update = await relay.plan(known)
    assert update is not None
    return update


def shown(update: WeightUpdate) -> list[str]:
    """Return the versions of the update's manifests, anchors beside a version marked."""
    parts = [key.split("/") for key in update.manifest_keys]
    return [n if what == "manifest" else f"{n}/{what}" for _, n, _, what in parts]


@pytest.mark.parametrize("cost_of", [sync_cost, paper_sync_cost])
def test_one_engine_alone_takes_what_the_arithmetic_says(cost_of: Callable[..., SyncCost]) -> None:
    cost = cost_of("qwen3-32b", num_training_ranks=32, gpus_per_engine=4, changed_fraction=0.02)
    relay = relay_of(cost)

    async def work() -> None:
        assert await relay.publish() == v(1) == relay.version
        update = await planned(relay, v(0))
        assert (update.target, update.address, shown(update)) == (v(1), ADDRESS, ["1"])
        assert await relay.fetch(update, is_local=False) == cost.engine_bytes
        await asyncio.sleep(relay.activation_s(update))

    assert run(work) == pytest.approx(sync_times(cost, LINK).total_s)


def test_payloads_cross_once_however_many_ask_and_only_for_those_elsewhere() -> None:
    relay = relay_of()
    here_s = encode_s(COST, SPEEDS)
    fetched_s = stage_s(COST, SPEEDS, gbps=LINK.local_gbps, latency_s=LINK.latency_s)
    put_bytes, num_trips = put_size(COST)
    put_s = put_bytes * 8 / (LINK.gbps * 1e9) + num_trips * LINK.latency_s

    async def work() -> None:
        loop = asyncio.get_running_loop()
        await relay.publish(is_remote=False)
        assert loop.time() == pytest.approx(here_s)
        update = await planned(relay, v(0))
        await relay.fetch(update, is_local=True)
        assert loop.time() == pytest.approx(here_s + fetched_s)
        assert relay.link.delivered_bytes == 0
        await asyncio.gather(*(relay.fetch(update, is_local=False) for _ in range(50)))
        assert loop.time() == pytest.approx(here_s + 2 * fetched_s + put_s)
        assert relay.link.delivered_bytes == put_bytes
        await relay.fetch(update, is_local=False)
        assert relay.link.delivered_bytes == put_bytes

    run(work)


def test_one_that_gives_up_does_not_take_the_version_from_the_others() -> None:
    relay = relay_of()

    async def work() -> None:
        await relay.publish(is_remote=False)
        update = await planned(relay, v(0))
        first = asyncio.ensure_future(relay.fetch(update, is_local=False))
        second = asyncio.ensure_future(relay.fetch(update, is_local=False))
        await asyncio.sleep(0.1)
        first.cancel()
        assert await second == COST.engine_bytes
        assert first.cancelled()
        assert relay.link.delivered_bytes == put_size(COST)[0]

    run(work)


def test_two_jobs_share_the_thin_link() -> None:
    async def publish(relays: list[RelayedSync]) -> None:
        await asyncio.gather(*(relay.publish() for relay in relays))

    link = SharedLink(gbps=LINK.gbps, latency_s=LINK.latency_s)
    alone_s = run(lambda: publish([relay_of()]))
    together_s = run(lambda: publish([relay_of(link=link), relay_of(link=link)]))
    assert together_s - alone_s == pytest.approx(put_size(COST)[0] * 8 / (LINK.gbps * 1e9))


def test_deltas_while_they_are_fewer_bytes_then_the_anchor() -> None:
    """At 2 % a version is 1.2 % of the weights: a chain of 10 is less than an anchor, one of 94 is more."""
    relay = relay_of(anchor_every=95, keep=200)

    async def work() -> None:
        assert await relay.plan(v(0)) is None
        for _ in range(96):
            await relay.publish(is_remote=False)
        assert shown(await planned(relay, v(95))) == ["96"]
        assert shown(await planned(relay, v(86))) == [str(n) for n in range(87, 97)]
        for known in (v(2), v(0), None, WeightVersion("other", 95)):
            assert shown(await planned(relay, known)) == ["95/anchor", "96"]
        assert await relay.plan(v(96)) is None
        late = await planned(relay, None)
        assert await relay.fetch(late, is_local=True) == COST.engine_dense_bytes + COST.engine_bytes
        assert relay.activation_s(late) > relay.activation_s(await planned(relay, v(95)))

    run(work)


def test_the_first_version_is_an_anchor_that_every_cluster_has() -> None:
    relay = relay_of()

    async def work() -> None:
        update = await planned(relay, None)
        assert shown(update) == ["0"]
        assert await relay.fetch(update, is_local=False) == COST.engine_dense_bytes
        assert relay.link.delivered_bytes == 0
        await relay.publish()
        assert shown(await planned(relay, None)) == ["0", "1"]

    run(work)


def test_an_anchor_crosses_before_its_version_is_seen() -> None:
    relay = relay_of(anchor_every=1)

    async def work() -> None:
        await relay.publish()
        assert relay.link.delivered_bytes == put_size(COST)[0] + put_size(COST, is_anchor=True)[0] > COST.dense_bytes

    run(work)


def test_a_retired_version_is_reported_and_planned_around() -> None:
    relay = relay_of(anchor_every=3, keep=1)

    async def work() -> None:
        await relay.publish(is_remote=False)
        old = await planned(relay, v(0))
        for _ in range(3):
            await relay.publish(is_remote=False)
        with pytest.raises(BlobNotFoundError):
            await relay.fetch(old, is_local=True)
        assert shown(await planned(relay, v(0))) == ["3/anchor", "4"]

    run(work)


def test_a_publish_that_was_given_up_leaves_the_version_to_the_next() -> None:
    relay = relay_of()

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(encode_s(COST, SPEEDS) + 0.01):
                await relay.publish()
        assert relay.version == v(0)
        assert await relay.plan(v(0)) is None
        assert await relay.publish() == v(1)

    run(work)


def test_the_next_publish_sends_again_what_one_that_was_given_up_had_sent() -> None:
    """Given up while the anchor crossed, after the changes had: by then the weights have moved on."""
    relay = relay_of(anchor_every=1)
    put_bytes, anchor_bytes = put_size(COST)[0], put_size(COST, is_anchor=True)[0]

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(encode_s(COST, SPEEDS) + 1.0):
                await relay.publish()
        assert relay.link.delivered_bytes == put_bytes
        await relay.publish()
        assert relay.link.delivered_bytes == 2 * put_bytes + anchor_bytes

    run(work)


@attrs.define(eq=False, kw_only=True, slots=False)
class Follower(FakeEngine):
    """A fake whose updates take as long as the relay says."""

    relay: RelayedSync
    is_local: bool

    async def stage(self, update: WeightUpdate) -> None:
        await self.relay.fetch(update, is_local=self.is_local)
        self.activate_s = self.relay.activation_s(update)
        await super().stage(update)


def test_the_live_pool_follows() -> None:
    """A sync of a pool in both clusters takes the put, the slowest stage and one activation; nobody is left behind."""
    relay = relay_of()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock = LoopClock(loop)
        engines = [
            Follower(engine_id=EngineId(f"e{i}"), clock=clock, relay=relay, is_local=i < 2, weight_version=v(0))
            for i in range(5)
        ]
        pool = RolloutPool(clock=clock)
        async with pool:
            for engine in engines:
                kind = EngineKind.DEDICATED if engine.is_local else EngineKind.BORROWED
                await pool.add_engine(engine, kind=kind)
            await relay.publish()
            report = await pool.sync_weights(relay)
            assert not report.errors
            assert len(report.activations) == 5
            assert {engine.weight_version for engine in engines} == {v(1)}
            assert {view.state for view in pool.snapshot().engines} == {EngineState.READY}
            assert loop.time() == pytest.approx(sync_times(COST, LINK).total_s, abs=1e-3)
            assert not (await pool.sync_weights(relay)).activations

    run(work)
