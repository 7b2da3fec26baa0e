"""Several jobs on one lender, live: fair shares while demands swing, no device twice, unused shares lent and taken back in time.

Virtual time: the live lender, pools and borrowers with fake engines. Each job has an engine of its own on every device.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.coserving.ledger import IDLE_SERVING
from rose.coserving.lender import LeaseChange, LeaseEvent, Lender
from rose.policies.admission import Budget
from rose.policies.demand import DemandConfig
from rose.policies.fair_shares import water_fill
from rose.policies.lending import JobTerms, LendingConfig
from rose.pool import Borrower, PoolConfig, RolloutPool, RoutingConfig
from rose.simulation.loop import LoopClock, VirtualLoop, new_loop
from rose.testing import FakeEngine
from rose.types import DeviceId, EngineId, JobId, Sampling, Turn

NUM_SLOTS = 4
DURATION_S = 600.0
TURN_TOKENS, TOKEN_S = 2, 10.0
NUM_EXAMPLES = int(os.environ.get("ROSE_LENDER_EXAMPLES", "12"))
"""Histories of each property; more by the variable ``ROSE_LENDER_EXAMPLES``."""
MIN_HOLD_S, GRACE_S, ASK_AGAIN_S, LOOK_S, TICK_S, IDLE_S = 20.0, 3.0, 5.0, 1.0, 1.0, 10.0
TAKE_BACK_S = LOOK_S + MIN_HOLD_S + TICK_S + GRACE_S + ASK_AGAIN_S
"""From a job's need until it has its share of devices that others hold: what the documentation promises."""
GIVE_BACK_S = IDLE_S + LOOK_S
Demand = Callable[[float], int]


@attrs.define
class MemoryLedger:
    """A ledger without a file, of a serving engine that is always idle."""

    clock: LoopClock
    written: Budget = attrs.field(factory=Budget)

    def publish_budget(self, budget):
        self.written = budget

    def budget(self):
        return self.written

    def serving(self):
        return attrs.evolve(IDLE_SERVING, kv_used_bytes=0.1, kv_pool_bytes=1.0, heartbeat_s=self.clock.now())


@attrs.define(eq=False)
class Job:
    """A job that keeps as many turns going as its demand says."""

    name: JobId
    demand: Demand
    pool: RolloutPool
    engines: Mapping[DeviceId, FakeEngine]
    running: set[asyncio.Task] = attrs.field(factory=set)
    num_done: int = 0
    num_started: int = 0

    async def work(self, clock: LoopClock) -> None:
        while True:
            for _ in range(self.demand(clock.now()) - len(self.running)):
                self.num_started += 1
                self.running.add(asyncio.ensure_future(self.turn(self.num_started)))
            await clock.sleep(1.0)

    async def turn(self, number: int) -> None:
        try:
            result = await self.pool.generate(
                Turn(
                    trajectory_id=f"{self.name}-{number}",
                    group_id=self.name,
                    prompt_ids=(1, 2),
                    sampling=Sampling(max_tokens=TURN_TOKENS, logprobs=False),
                )
            )
            assert len(result.token_ids) == TURN_TOKENS
            self.num_done += 1
        finally:
            self.running.discard(asyncio.current_task())


@attrs.define(eq=False)
class Site:
    """Devices, their lender and the jobs on them; counts device seconds."""

    loop: VirtualLoop
    num_devices: int
    config: LendingConfig
    jobs: dict[str, Job] = attrs.field(factory=dict)
    held: Counter = attrs.field(factory=Counter)
    device_s: Counter = attrs.field(factory=Counter)
    counted_s: float = 0.0
    history: list[tuple[float, dict[str, int]]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.clock = LoopClock(self.loop)
        self.devices = [DeviceId(f"d{i}") for i in range(self.num_devices)]
        ledgers = {device: MemoryLedger(self.clock) for device in self.devices}
        self.lender = Lender(ledgers, self.clock, self.config)
        self.lender.subscribe(self.hear)

    clock: LoopClock = attrs.field(init=False)
    devices: list[DeviceId] = attrs.field(init=False)
    lender: Lender = attrs.field(init=False)

    def count(self) -> None:
        now_s = self.clock.now()
        for job, number in self.held.items():
            self.device_s[job] += number * (now_s - self.counted_s)
        self.counted_s = now_s

    def hear(self, event: LeaseEvent) -> None:
        if event.change in (LeaseChange.RENEWED, LeaseChange.REVOKING):
            return
        self.count()
        self.held[event.lease.job] += 1 if event.change is LeaseChange.GRANTED else -1
        self.history.append((self.clock.now(), dict(self.held)))

    @contextlib.asynccontextmanager
    async def working(self, name: str, demand: Demand) -> AsyncIterator[Job]:
        engines = {device: self.engine(f"{name}@{device}") for device in self.devices}
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=NUM_SLOTS), stall_s=1e6)
        follow = DemandConfig(fill_fraction=0.8, idle_giveback_s=IDLE_S, look_s=LOOK_S, env_s=0.0)
        async with (
            RolloutPool([self.engine(f"{name}-own")], clock=self.clock, config=config) as pool,
            Borrower(
                self.lender,
                pool,
                engines,
                job=JobId(name),
                clock=self.clock,
                ask_again_s=ASK_AGAIN_S,
                demand=follow,
            ),
        ):
            job = self.jobs[name] = Job(JobId(name), demand, pool, engines)
            working = asyncio.ensure_future(job.work(self.clock))
            try:
                yield job
            finally:
                working.cancel()
                for task in (*job.running,):
                    task.cancel()
                await asyncio.gather(working, *job.running, return_exceptions=True)

    def engine(self, name: str) -> FakeEngine:
        return FakeEngine(engine_id=EngineId(name), clock=self.clock, token_s=TOKEN_S)

    async def run(self, demands: Mapping[str, Demand], duration_s: float, *, warm_up_s: float = 0.0) -> None:
        """Let jobs work for a while; device seconds count after the warm-up."""
        async with contextlib.AsyncExitStack() as stack:
            for name, demand in demands.items():
                await stack.enter_async_context(self.working(name, demand))
            while self.clock.now() < duration_s:
                await self.clock.sleep(TICK_S / 2)
                self.check()
                self.lender.tick()
                if self.clock.now() <= warm_up_s:
                    self.count()
                    self.device_s.clear()
            self.count()
            for device in self.devices:
                assert sum(self.is_working(job, device) for job in self.jobs.values()) <= 1
        assert self.lender.leases == (), "leaving gives all back"

    def is_working(self, job: Job, device: DeviceId) -> bool:
        engine = job.engines[device]
        return engine.num_in_flight > 0 or job.pool.state_of(engine.engine_id) is not None

    def check(self) -> None:
        """A device is one job's: by the lender, and by who works there."""
        holders = {lease.device_id: lease.job for lease in self.lender.leases}
        assert len(holders) == len(self.lender.leases)
        for device in self.devices:
            at_work = [name for name, job in self.jobs.items() if self.is_working(job, device)]
            assert at_work in ([], [holders.get(device)]), (self.clock.now(), device, at_work, holders)


def simulated(
    num_devices: int,
    demands: Mapping[str, Demand],
    duration_s: float,
    *,
    warm_up_s: float = 0.0,
    weights: Mapping[str, float] | None = None,
) -> Site:
    jobs = {name: JobTerms(weight=weight) for name, weight in (weights or {}).items()}
    config = LendingConfig(jobs=jobs, min_hold_s=MIN_HOLD_S, grace_s=GRACE_S, stale_after_s=1e9)
    loop = new_loop()
    site = Site(loop, num_devices, config)
    loop.run(site.run(demands, duration_s, warm_up_s=warm_up_s))
    return site


def always(number: int) -> Demand:
    return lambda _now_s: number


def swing(low: int, high: int, period_s: float, share: float = 0.5, offset_s: float = 0.0) -> Demand:
    return lambda now_s: high if (now_s + offset_s) % period_s < share * period_s else low


@pytest.mark.parametrize(
    ("num_devices", "weights"),
    [(6, {"a": 1.0, "b": 1.0}), (8, {"a": 1.0, "b": 1.0, "c": 2.0}), (7, {"a": 1.0, "b": 1.0, "c": 1.0})],
)
def test_jobs_that_all_want_more_have_their_shares_within_a_twentieth(
    num_devices: int, weights: dict[str, float]
) -> None:
    many = NUM_SLOTS * (num_devices + 2)
    site = simulated(num_devices, {name: always(many) for name in weights}, DURATION_S, weights=weights)
    total_s = sum(site.device_s.values())
    assert total_s > 0.97 * num_devices * DURATION_S, "next to no device is idle"
    for name, weight in weights.items():
        assert site.device_s[name] / total_s == pytest.approx(weight / sum(weights.values()), rel=0.05)
    assert all(job.num_done for job in site.jobs.values())


def test_an_unused_share_is_lent_and_taken_back_within_the_stated_time() -> None:
    """Job a has turns in the second half only; until then b may have all devices, then half of them."""
    rise_s = 200.0
    site = simulated(8, {"a": lambda now_s: 64 if now_s >= rise_s else 0, "b": always(64)}, 400.0)

    def held_at(at_s: float, name: str) -> int:
        return next(held.get(name, 0) for when_s, held in reversed(site.history) if when_s <= at_s)

    assert held_at(0.9 * rise_s, "b") == 8
    assert held_at(rise_s + TAKE_BACK_S, "a") >= 4
    assert held_at(0.9 * 400, "b") == 4


def test_what_a_job_does_not_use_others_get_within_the_stated_time() -> None:
    """Job a ends its work; b, which holds its share, has the rest soon after."""
    end_s = 150.0
    site = simulated(6, {"a": lambda now_s: 48 if now_s < end_s else 0, "b": always(48)}, 300.0)
    last_turn_s = end_s + 3 * TURN_TOKENS * TOKEN_S  # 48 turns on the 16 slots that it has
    by_s = last_turn_s + GIVE_BACK_S + ASK_AGAIN_S + LOOK_S
    before = [held.get("b", 0) for at_s, held in site.history if at_s < end_s]
    after = [held.get("b", 0) for at_s, held in site.history if at_s <= by_s]
    assert (before[-1], after[-1]) == (3, 6)


def test_jobs_whose_demands_swing_against_each_other_use_what_one_alone_would_leave() -> None:
    """DAPO's swing: each job wants much for a third of the time, little otherwise."""
    demands = {name: swing(2, 40, 300.0, 1 / 3, 100.0 * i) for i, name in enumerate("abc")}
    site = simulated(8, demands, 1200.0, warm_up_s=300.0)
    alone = simulated(8, {"a": demands["a"]}, 1200.0, warm_up_s=300.0)
    total_s = sum(site.device_s.values())
    for name in "abc":
        # Alike: how long a job holds depends on when it gives back, too. Shares of jobs that all want more are tested above.
        assert site.device_s[name] / total_s == pytest.approx(1 / 3, rel=0.1)
    assert alone.device_s["a"] < 0.55 * 8 * 900.0, "it gives back what it does not use"
    assert site.jobs["a"].num_done > 0.8 * alone.jobs["a"].num_done, "and gets it back although others want it too"


SCHEDULES = st.lists(st.tuples(st.integers(10, 40), st.integers(0, 30)), min_size=1, max_size=4)


def scheduled(steps: Sequence[tuple[int, int]]) -> Demand:
    def demand(now_s: float) -> int:
        for duration_s, number in steps:
            if now_s < duration_s:
                return number
            now_s -= duration_s
        return 0

    return demand


@given(
    st.integers(1, 6),
    st.lists(st.tuples(SCHEDULES, st.sampled_from([0.5, 1.0, 3.0])), min_size=2, max_size=3),
)
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_jobs_want_devices_are_held_once_and_nothing_is_lost(num_devices, jobs) -> None:
    demands = {name: scheduled(steps) for name, (steps, _) in zip("abc", jobs, strict=False)}
    weights = {name: weight for name, (_, weight) in zip("abc", jobs, strict=False)}
    site = simulated(num_devices, demands, 200.0, weights=weights)
    for job in site.jobs.values():
        assert job.num_done == job.num_started, "every turn came to its end"
    assert not any(site.held.values())


@given(st.integers(2, 9), st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=3))
@settings(max_examples=max(2, NUM_EXAMPLES // 6), deadline=None)
def test_shares_are_by_weight_for_any_weights(num_devices: int, weights: list[float]) -> None:
    terms = dict(zip("abc", weights, strict=False))
    many = NUM_SLOTS * (num_devices + 2)
    site = simulated(num_devices, {name: always(many) for name in terms}, DURATION_S, weights=terms)
    total_s = sum(site.device_s.values())
    shares = water_fill(dict.fromkeys(terms, float(num_devices)), terms, num_devices)
    for name, share in shares.items():
        due_s = total_s * share / num_devices
        assert site.device_s[name] == pytest.approx(due_s, abs=max(0.05 * due_s, 2 * MIN_HOLD_S))
