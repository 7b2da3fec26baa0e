"""A borrower holds what its pool has use for: it asks at once, ahead of peaks, and gives back what is idle, never what is in use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import attrs
import pytest

from rose.coserving.ledger import Ledger
from rose.coserving.lender import LeaseChange, Lender
from rose.errors import EngineError
from rose.policies.demand import DemandConfig, DemandTracker
from rose.policies.lending import LendingConfig
from rose.pool import Borrower, PoolConfig, RolloutPool, RoutingConfig
from rose.testing import FakeEngine, Fault, FaultKind, ManualClock
from rose.types import DeviceId, EngineId, JobId, Sampling, Turn, WeightVersion

JOB, OTHER = JobId("job"), JobId("other")
HOLD_S = 20.0
NUM_SLOTS = 4
FOLLOW = DemandConfig(fill_fraction=0.8, idle_giveback_s=HOLD_S, env_s=0.0)


@attrs.define
class Site:
    """Four lent devices with an engine of the job on each, idlest first; the job's own engine takes four turns."""

    folder: Path
    clock: ManualClock = attrs.field(factory=ManualClock)
    engines: dict[DeviceId, FakeEngine] = attrs.field(init=False)
    lender: Lender = attrs.field(init=False)
    changes: list[tuple[float, LeaseChange, str]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        names = [DeviceId(f"d{i}") for i in range(4)]
        self.engines = {name: self.engine(f"on-{name}") for name in names}
        ledgers = {name: Ledger.create(self.folder / name) for name in names}
        for ledger in ledgers.values():
            ledger.beat(0.0)
        self.lender = Lender(ledgers, self.clock, LendingConfig(stale_after_s=1e9))
        self.lender.subscribe(
            lambda event: self.changes.append((self.clock.now(), event.change, event.lease.device_id))
        )

    def engine(self, name: str) -> FakeEngine:
        return FakeEngine(engine_id=EngineId(name), clock=self.clock, token_s=0.5)

    @contextlib.asynccontextmanager
    async def borrowing(self, engines=None, **options) -> AsyncIterator[RolloutPool]:
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=NUM_SLOTS))
        options = {"demand": FOLLOW, **options}
        async with RolloutPool([self.engine("own")], clock=self.clock, config=config) as pool:
            chosen = self.engines if engines is None else engines
            async with Borrower(self.lender, pool, chosen, job=JOB, clock=self.clock, **options) as borrower:
                self.borrower = borrower
                yield pool

    borrower: Borrower = attrs.field(init=False)

    def held(self) -> set[str]:
        return {lease.device_id for lease in self.lender.leases if lease.job == JOB}

    def times(self, change: LeaseChange) -> list[float]:
        return [at_s for at_s, each, _ in self.changes if each is change]

    def run(self, work):
        return asyncio.run(self.clock.run(work))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def turns(pool: RolloutPool, number: int, *, tokens: int = 20, name: str = "t") -> list[asyncio.Task]:
    """Start so many turns, half a second a token."""
    return [
        asyncio.ensure_future(
            pool.generate(
                Turn(
                    trajectory_id=f"{name}{i}",
                    group_id=name,
                    prompt_ids=(1, 2),
                    sampling=Sampling(max_tokens=tokens, logprobs=False),
                )
            )
        )
        for i in range(number)
    ]


def test_what_is_not_used_is_given_back_and_asked_for_at_once_when_it_is_needed(site):
    async def work():
        async with site.borrowing() as pool:
            assert len(site.held()) == 4, "nothing is known yet"
            await site.clock.sleep(HOLD_S + 2.5)
            assert site.held() == set()
            assert {view.engine_id for view in pool.snapshot().engines} == {"own"}
            begun_s = site.clock.now()
            done = turns(pool, 12)
            await site.clock.sleep(1.5)
            assert len(site.held()) == 4, "it has no phase to judge by yet"
            results = await asyncio.gather(*done)
            assert {len(result.token_ids) for result in results} == {20}
            assert {hop.engine_id for result in results for hop in result.hops} > {"own"}
            assert site.times(LeaseChange.GRANTED)[4] - begun_s <= 1.0

    site.run(work())


def test_an_engine_that_has_a_turn_is_never_given_back(site):
    async def work():
        async with site.borrowing() as pool:
            short = turns(pool, 4, tokens=4, name="s")
            long = turns(pool, 2, tokens=400)
            await asyncio.gather(*short)
            await site.clock.sleep(3 * HOLD_S)
            used = {view.engine_id for view in pool.snapshot().engines if view.num_in_flight}
            assert "own" not in used
            assert {f"on-{device}" for device in site.held()} == used, "though two turns need none"
            results = await asyncio.gather(*long)
            assert all(len(result.hops) == 1 for result in results)

    site.run(work())


def test_a_turn_that_comes_after_the_look_keeps_the_engine(site):
    async def work():
        async with site.borrowing() as pool:
            await site.clock.sleep(0.5)
            running = turns(pool, 5)
            await asyncio.sleep(0.01)
            used = {view.engine_id for view in pool.snapshot().engines if view.num_in_flight}
            for loan in list(site.borrower._loans):
                await site.borrower._give_back(loan)
            assert {f"on-{device}" for device in site.held()} == used - {"own"}
            assert all(len(result.hops) == 1 for result in await asyncio.gather(*running))

    site.run(work())


def test_announced_demand_finds_its_engines_ready(site):
    async def work():
        async with site.borrowing() as pool:
            await site.clock.sleep(2 * HOLD_S)
            assert site.held() == set()
            pool.expect(8, at_s=site.clock.now() + 60.0)
            await site.clock.sleep(50.0)
            assert site.held() == set()
            await site.clock.sleep(9.0)
            assert len(site.held()) == 2, "8 turns fill 10 slots to four fifths, 4 of them are its own"
            await site.clock.sleep(2 * HOLD_S)
            assert site.held() == set(), "they did not come"

    site.run(work())


def test_a_negative_number_of_trajectories_is_refused():
    with pytest.raises(ValueError, match="num_trajectories must be >= 0, got -1"):
        RolloutPool().expect(-1)


def test_steps_that_come_regularly_find_their_engines_ready(site):
    async def work():
        async with site.borrowing() as pool:
            for step in range(4):
                started_s = site.clock.now()
                before = len(site.held())
                await asyncio.gather(*turns(pool, 16, name=f"step{step}-"))
                assert before == (4 if step != 1 else 0), "the second step has no pause to judge by"
                await site.clock.sleep(80.0 - (site.clock.now() - started_s))
            held_s = sum(account.present_s for name, account in pool.accounts().items() if name.startswith("on-"))
            assert held_s < 0.75 * 4 * site.clock.now()

    site.run(work())


def test_the_lender_keeps_no_wish_that_the_job_does_not_have_any_more(site):
    async def work():
        site.lender.grant(OTHER, 2)
        async with site.borrowing() as pool:
            await asyncio.gather(*turns(pool, 12))
            assert site.lender._waiting.wishes(site.clock.now())
            await site.clock.sleep(HOLD_S + 13.0)
            assert site.held() == set()
            assert site.lender._waiting.wishes(site.clock.now()) == []

    site.run(work())


def test_engines_that_made_nothing_are_asked_for_last(site):
    stuck = site.engines[DeviceId("d0")]
    stuck.faults = [Fault(kind=FaultKind.STALL, at_s=0.0)]

    async def work():
        async with site.borrowing(demand=DemandTracker(FOLLOW)) as pool:
            await asyncio.gather(*turns(pool, 16))
            assert stuck.requests
            await site.clock.sleep(2 * HOLD_S)
            assert site.held() == set()
            pool.expect(8)
            await site.clock.sleep(2.0)
            assert len(site.held()) == 2
            assert "d0" not in site.held(), "although serving uses it least"
            pool.expect(16)
            await site.clock.sleep(2.0)
            assert len(site.held()) == 4

    site.run(work())


def test_a_function_gives_engines_for_granted_devices_and_others_go_back(site):
    made = []

    def engine_on(device: DeviceId) -> FakeEngine | None:
        made.append(device)
        return None if device in ("d0", "d2") else site.engine(f"at-{device}")

    async def work():
        async with site.borrowing(engine_on, demand=None, ask_again_s=5.0) as pool:
            await site.clock.sleep(12.0)
            assert site.held() == {"d1", "d3"}
            assert {view.engine_id for view in pool.snapshot().engines} == {"own", "at-d1", "at-d3"}
            assert sorted(made) == ["d0", "d1", "d2", "d3"], "each is asked for once"
            assert site.lender.grant(OTHER, 4), "what is of no use to the job is others'"
        assert site.held() == set()

    site.run(work())


def test_no_more_devices_are_held_than_the_job_may_have(site):
    pair = (DeviceId("d0"), DeviceId("d1"))
    engines = {pair: site.engine("pair"), DeviceId("d2"): site.engine("on-d2"), DeviceId("d3"): site.engine("on-d3")}
    most = []
    site.lender.subscribe(lambda _event: most.append(len(site.lender.leases)))

    async def work():
        async with site.borrowing(engines, most_devices=3) as pool:
            assert len(site.held()) == 3
            await asyncio.gather(*turns(pool, 30))
        async with site.borrowing(engines, most_devices=1):
            assert site.held() <= {"d2", "d3"}
            assert len(site.held()) == 1

    site.run(work())
    assert max(most) == 3


def test_an_engine_that_a_holder_put_to_sleep_is_woken(site):
    asleep = site.engines[DeviceId("d0")]

    async def work():
        await asleep.sleep()
        async with site.borrowing() as pool:
            assert not asleep.is_asleep
            await asyncio.gather(*turns(pool, 16))
        assert asleep.requests

    site.run(work())


def test_an_engine_that_cannot_wake_is_left_alone(site):
    asleep = site.engines[DeviceId("d0")]

    async def work():
        await asleep.sleep()
        asleep.die()
        async with site.borrowing() as pool:
            assert site.held() == {"d1", "d2", "d3"}
            await asyncio.gather(*turns(pool, 16))

    site.run(work())


def test_time_to_be_ready_is_learned(site):
    """Engines that must catch up with the weights are asked for that much earlier."""
    for engine in site.engines.values():
        engine.weight_version = WeightVersion("run", 0)

    async def work():
        async with site.borrowing() as pool:
            site.borrower._demand._ready_s.append(17.0)
            await site.clock.sleep(2 * HOLD_S)
            pool.expect(16, at_s=site.clock.now() + 60.0)
            await site.clock.sleep(45.0)
            assert len(site.held()) == 4

    site.run(work())


def test_an_engine_that_fails_its_first_reading_is_given_back_and_stops_nothing(site):
    async def broken():
        message = "no reading today"
        raise EngineError(message)

    site.engines[DeviceId("d1")].snapshot = broken

    async def work():
        async with site.borrowing() as pool:
            await site.clock.sleep(1.0)
            assert site.held() == {"d0", "d2", "d3"}
            await asyncio.gather(*turns(pool, 4))

    site.run(work())


def test_a_short_memory_of_the_own_engine_asks_for_more_borrowed_ones(site):
    """What an engine can take is what its memory lets it, not the cap; what one that just joined can take is not what it has yet."""

    async def work():
        async with site.borrowing() as pool:
            demand = site.borrower._demand
            (own,) = (view for view in pool.snapshot().engines if view.engine_id == "own")

            def slots(view, *, is_full=False):
                return demand._num_slots(view, is_full=is_full)

            assert slots(own) == NUM_SLOTS
            assert slots(attrs.evolve(own, num_slots=1)) == 1
            assert slots(attrs.evolve(own, num_slots=4, num_in_flight=2, num_shown=None), is_full=True) == 2
            assert slots(attrs.evolve(own, num_slots=4, num_in_flight=2, num_shown=0), is_full=True) == NUM_SLOTS

    site.run(work())
