"""Borrowed engines fetch a version only when their loans are likely to pay for it, where the pool is told to look."""

from __future__ import annotations

import asyncio
import time

import attrs
import pytest

from rose.backends.memory import MemoryTransport
from rose.coserving.ledger import IDLE_SERVING, Ledger
from rose.coserving.lender import Lender
from rose.errors import BlobNotFoundError
from rose.policies.lending import LendingConfig
from rose.policies.weight_pull import PullConfig, PullReason
from rose.pool import (
    Borrower,
    EngineState,
    PoolConfig,
    PullCost,
    RolloutPool,
    SupportsPullCost,
    TransportSource,
    WeightPull,
)
from rose.testing import FakeEngine, FakeTrainer, ManualClock, fake_update
from rose.transfer.acks import Ack, AckBoard, read_acks
from rose.transfer.publisher import Publisher
from rose.types import DeviceId, EngineId, EngineKind, JobId, Sampling, Turn, WeightUpdate, WeightVersion

OWN, LENT, LATE = EngineId("own"), EngineId("lent"), EngineId("late")


def v(n: int) -> WeightVersion:
    return WeightVersion("r", n)


@attrs.define
class Source:
    """Versions that all cost alike, over a link of one byte a second."""

    n: int = 0
    num_bytes: int = 100
    present: frozenset[str] = frozenset()
    is_gone: bool = False

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        return None if known == v(self.n) else fake_update(v(self.n))

    async def cost(self, update: WeightUpdate) -> PullCost:
        if self.is_gone:
            message = "retired"
            raise BlobNotFoundError(message)
        return PullCost(pieces={str(update.target): self.num_bytes}, present=self.present, link_bytes_per_s=1.0)


def config(*, prior_loan_s: float = 50.0, mode: WeightPull = WeightPull.ECONOMIC, **terms) -> PoolConfig:
    return PoolConfig(weight_pull=mode, pull=PullConfig(prior_loan_s=prior_loan_s, **terms))


def turn(name: str) -> Turn:
    return Turn(trajectory_id=name, group_id="g", prompt_ids=(1, 2), sampling=Sampling(max_tokens=10))


def states(pool: RolloutPool) -> dict[str, EngineState]:
    return {view.engine_id: view.state for view in pool.snapshot().engines}


class Bench:
    """One engine of the job's own and a borrowed one, both of which have worked."""

    def __init__(self, pool_config: PoolConfig) -> None:
        self.clock, self.source = ManualClock(), Source()
        self.config = pool_config
        self.engines = [FakeEngine(engine_id=name, clock=self.clock, token_s=0.1) for name in (OWN, LENT)]

    def run(self, work) -> None:
        async def main() -> None:
            async with RolloutPool(
                [self.engines[0]], borrowed=[self.engines[1]], clock=self.clock, config=self.config
            ) as pool:
                await pool.sync_weights(self.source)
                await asyncio.gather(*(pool.generate(turn(f"t{i}")) for i in range(40)))
                self.source.n = 1
                await work(pool)

        asyncio.run(self.clock.run(main()))


def test_an_engine_whose_loan_does_not_pay_is_stale_and_the_others_go_on():
    bench = Bench(config())

    async def work(pool):
        report = await pool.sync_weights(bench.source)
        assert set(report.activations) == {OWN}
        assert {name: plan.reason for name, plan in report.put_off.items()} == {LENT: PullReason.LOAN_TOO_SHORT}
        assert states(pool) == {OWN: EngineState.READY, LENT: EngineState.STALE}
        assert bench.engines[1].weight_version == v(0)
        assert (await pool.generate(turn("next"))).hops[0].engine_id == OWN

    bench.run(work)


def test_it_is_offered_again_at_the_next_sync():
    bench = Bench(config())

    async def work(pool):
        await pool.sync_weights(bench.source)
        bench.source.n, bench.source.num_bytes = 2, 1
        report = await pool.sync_weights(bench.source)
        assert set(report.activations) == {OWN, LENT}
        assert states(pool) == {OWN: EngineState.READY, LENT: EngineState.READY}

    bench.run(work)


@pytest.mark.parametrize("mode", [WeightPull.ALWAYS, WeightPull.ECONOMIC])
def test_a_loan_that_pays_and_a_pool_that_does_not_look_do_the_same(mode):
    bench = Bench(config(prior_loan_s=1e6 if mode is WeightPull.ECONOMIC else 1.0, mode=mode))

    async def work(pool):
        report = await pool.sync_weights(bench.source)
        assert (set(report.activations), report.put_off) == ({OWN, LENT}, {})

    bench.run(work)


def test_what_has_crossed_is_fetched_even_for_a_short_loan():
    bench = Bench(config(prior_loan_s=1.0))

    async def work(pool):
        bench.source.present = frozenset({str(v(1))})
        report = await pool.sync_weights(bench.source)
        assert set(report.activations) == {OWN, LENT}

    bench.run(work)


def test_an_engine_that_is_admissible_goes_on_at_its_version():
    bench = Bench(config(prior_loan_s=1.0, max_staleness=2))

    async def work(pool):
        report = await pool.sync_weights(bench.source)
        assert [plan.reason for plan in report.put_off.values()] == [PullReason.STILL_ADMISSIBLE]
        assert states(pool) == {OWN: EngineState.READY, LENT: EngineState.READY}

    bench.run(work)


def test_a_version_that_cannot_be_weighed_is_fetched():
    bench = Bench(config(prior_loan_s=1.0))

    async def work(pool):
        bench.source.is_gone = True
        assert set((await pool.sync_weights(bench.source)).activations) == {OWN, LENT}

    bench.run(work)


def test_a_renewed_lease_is_an_offer():
    """Meanwhile loans were seen to last: what did not pay does."""
    bench = Bench(config(prior_loan_s=10.0))

    async def work(pool):
        pool.note_lease(LENT, bench.clock.now() + 30.0)
        await pool.sync_weights(bench.source)
        assert states(pool)[LENT] is EngineState.STALE
        pool.note_lease(LENT, bench.clock.now() + 30.0)
        await bench.clock.sleep(1.0)
        assert states(pool)[LENT] is EngineState.STALE
        pool._state.engines.ended_loans_s.extend([1e6] * 20)
        pool.note_lease(LENT, bench.clock.now() + 30.0)
        await bench.clock.sleep(1.0)
        assert states(pool)[LENT] is EngineState.READY
        pool.note_lease(EngineId("left long ago"), 0.0)

    bench.run(work)


def test_loans_that_are_over_are_remembered_once():
    bench = Bench(config())

    async def work(pool):
        begun_s = bench.clock.now()
        await bench.clock.sleep(5.0)
        for name, duration_s in (("x", 3.0), ("y", 4.0)):
            await pool.add_engine(FakeEngine(engine_id=EngineId(name), clock=bench.clock), EngineKind.BORROWED)
            await bench.clock.sleep(duration_s)
            await pool.remove_engine(EngineId(name), "over")
        await pool.remove_engine(OWN, "over")
        assert list(pool._state.engines.ended_loans_s) == [pytest.approx(3.0), pytest.approx(4.0)]
        assert begun_s > 0

    bench.run(work)


def test_the_borrower_tells_the_pool_when_leases_end(tmp_path):
    clock = ManualClock()
    ledger = Ledger.create(tmp_path / "d0")
    ledger.publish_serving(attrs.evolve(IDLE_SERVING, kv_used_bytes=0.1, kv_pool_bytes=1.0))
    ledger.beat(0.0)
    lender = Lender({DeviceId("d0"): ledger}, clock, LendingConfig(ttl_s=9.0))
    engines = {DeviceId("d0"): FakeEngine(engine_id=LENT, clock=clock)}

    async def work():
        async with RolloutPool(clock=clock) as pool, Borrower(lender, pool, engines, job=JobId("j"), clock=clock):
            member = pool._state.engines.members[LENT]
            assert member.lease_ends_s == 9.0
            await clock.sleep(3.5)
            assert member.lease_ends_s == pytest.approx(12.0)

    asyncio.run(clock.run(work()))


async def test_publishers_are_told_what_engines_have():
    """By unix time: a lease's end where there is one, else the time that the pool promises; fenced and lost ones have nothing."""
    store = MemoryTransport()
    publisher = Publisher(FakeTrainer(), store, run="r")
    await publisher.publish()
    source = TransportSource(store, board=AckBoard(store))
    assert isinstance(source, SupportsPullCost)
    pool_config = PoolConfig(ack_lease_s=100.0)
    async with RolloutPool(
        [FakeEngine(engine_id=OWN)], borrowed=[FakeEngine(engine_id=LENT)], config=pool_config
    ) as pool:
        pool.note_lease(LENT, pool._clock.now() + 7.0)
        await pool.sync_weights(source)
        acks = read_acks(store)
        now_s = time.time()
        assert {name: ack.version for name, ack in acks.items()} == {OWN: v(0), LENT: v(0)}
        assert acks[OWN].expires_unix_s == pytest.approx(now_s + 100, abs=3)
        assert acks[LENT].expires_unix_s == pytest.approx(now_s + 7, abs=3)
        await pool.remove_engine(LENT, "gone")
        await pool.sync_weights(source)
        assert set(read_acks(store)) == {OWN}
        update = await source.plan(None)
        assert update is not None
        cost = await source.cost(update)
        assert cost.pieces == {update.manifest_keys[0]: source._reader.read(update.manifest_keys[0]).bytes_sent}


async def test_a_board_that_cannot_be_written_does_not_stop_a_sync(caplog):
    store = MemoryTransport()
    await Publisher(FakeTrainer(), store, run="r").publish()
    first, second = AckBoard(store), AckBoard(store)
    async with RolloutPool([FakeEngine(engine_id=OWN)]) as pool:
        await pool.sync_weights(TransportSource(store, board=first))
        second.write({OWN: Ack(version=None, expires_unix_s=0.0)})
        report = await pool.sync_weights(TransportSource(store, board=first))
    assert report.unchanged == (OWN,)
    assert "could not be told to the publisher" in caplog.text
