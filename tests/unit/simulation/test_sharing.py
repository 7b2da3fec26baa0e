"""Who goes next on a shared device: the live policies keep their word, leases and memory are followed, models are switched."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from random import Random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policies.admission import AdmissionConfig, Budget, Mode, Slo, Start, arrival_reserve_s, decide
from rose.policies.memory import MemoryConfig
from rose.simulation.batch import Job
from rose.simulation.device import Device, Lane, Run, Turn
from rose.simulation.guest_memory import MemoryRule
from rose.simulation.loop import VirtualLoop
from rose.simulation.sharing import CoservingConfig, CoservingRule, SwitchRule, share_device

from test_device import KV_BYTES, Log, listen, make_job, make_lane  # isort: skip


@attrs.define
class Shared:
    """Serving and a guest on one device, with a lease."""

    loop: VirtualLoop
    owner: Lane
    guest: Lane
    rule: CoservingRule
    device: Device
    evicted: list[str] = attrs.field(factory=list)
    owner_log: Log = attrs.field(factory=list)
    guest_log: Log = attrs.field(factory=list)

    @classmethod
    def make(cls, mode: Mode, *, memory_rule: MemoryRule = MemoryRule.HEADROOM, pool_tokens: int = 100_000) -> Shared:
        loop = VirtualLoop()
        owner = make_lane("owner", kv_tokens=pool_tokens, has_cache=False)
        guest = make_lane("guest", kv_tokens=0, reserves_growth=True)
        config = CoservingConfig(
            admission=AdmissionConfig(slo=Slo(ttft_s=0.5, tpot_s=0.15)),
            memory=MemoryConfig(
                pool_bytes=pool_tokens * KV_BYTES,
                headroom_bytes=1000 * KV_BYTES,
                granule_bytes=KV_BYTES,
                growth_fraction=1.0,
            ),
            memory_rule=memory_rule,
        )
        shared = cls(loop, owner, guest, rule=None, device=None)  # type: ignore[arg-type] # set below
        shared.device, shared.rule = share_device(loop, owner, guest, config, evict=shared.evict)
        shared.owner_log, shared.guest_log = listen(owner), listen(guest)
        shared.keep_accounts()
        shared.grant(mode)
        return shared

    def keep_accounts(self) -> None:
        """Let the rule hear of serving's requests what a feed tells it."""
        log = self.owner.listener

        def hear(started: list[Job], ended: list[Job], now_s: float) -> None:
            for job in started:
                job.own_at_first_s = self.owner.own_s
            log(started, ended, now_s)
            for job in ended:
                self.rule.note_answer(job, now_s)

        self.owner.listener = hear

    def evict(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.evicted.append(job.job_id)
            self.guest.batch.drop(job)

    def grant(self, mode: Mode, token: int = 1) -> None:
        self.rule.ledger.on_change = lambda: None
        self.rule.ledger.publish_budget(Budget(mode=mode, fencing_token=token, expires_s=math.inf, is_granted=True))
        self.rule.ledger.on_change = self.device.poke

    def add(self, lane: Lane, name: str, prompt: int, output: int) -> None:
        lane.batch.add(make_job(name, prompt, output, self.loop.time()))
        self.rule.note_serving_changed()
        self.device.poke()

    def play(self, owner_jobs: Sequence[tuple[float, int, int]], guests: int, until_s: float) -> None:
        async def main() -> None:
            for i in range(guests):
                self.add(self.guest, f"g{i}", 300 + 10 * i, 2000)
            for i, (at_s, prompt, output) in enumerate(owner_jobs):
                await asyncio.sleep(at_s - self.loop.time())
                self.add(self.owner, f"s{i}", prompt, output)
            await asyncio.sleep(until_s - self.loop.time())
            self.device.fold()

        self.loop.run(main())

    def guest_tokens(self) -> int:
        return sum(self.guest.batch.made_tokens(job) for job in self.guest.batch.decoding())


SERVING = [(0.2 + 0.31 * i, 200 + 37 * (i % 5), 20 + 13 * (i % 7)) for i in range(20)]


@pytest.mark.parametrize("mode", [Mode.SLO, Mode.QUIET, Mode.PAPER, Mode.UNGATED])
def test_runs_of_guest_steps_are_what_the_live_policy_would_let_start_one_by_one(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome() -> tuple[Log, int]:
        shared = Shared.make(mode)
        shared.play(SERVING, guests=4, until_s=8.0)
        return shared.owner_log, shared.guest_tokens()

    in_runs = outcome()
    monkeypatch.setattr(CoservingRule, "_num_steps", lambda _rule, _now_s: 1)
    one_by_one = outcome()
    assert [entry[:2] for entry in in_runs[0]] == [entry[:2] for entry in one_by_one[0]]
    assert [entry[2] for entry in in_runs[0]] == pytest.approx([entry[2] for entry in one_by_one[0]], abs=2e-3)
    assert in_runs[1] == pytest.approx(one_by_one[1], rel=0.02)


def latencies(log: Log, arrivals: Sequence[tuple[float, int, int]]) -> tuple[list[float], list[float]]:
    firsts = {name: at_s for what, name, at_s in log if what == "first"}
    lasts = {name: at_s for what, name, at_s in log if what == "last"}
    ttfts = [firsts[f"s{i}"] - at_s for i, (at_s, _, _) in enumerate(arrivals) if f"s{i}" in firsts]
    tpots = [
        (lasts[f"s{i}"] - firsts[f"s{i}"]) / (output - 1)
        for i, (_, _, output) in enumerate(arrivals)
        if f"s{i}" in lasts and output > 1
    ]
    return ttfts, tpots


def test_modes_lend_more_the_less_they_protect_and_keep_their_promises() -> None:
    tokens, tpots = {}, {}
    arrivals = [(0.2 + 0.31 * i, 200 + 37 * (i % 5), 20 + 13 * (i % 7)) for i in range(60)]
    for mode in (Mode.STRICT, Mode.QUIET, Mode.SLO):
        shared = Shared.make(mode)
        shared.play(arrivals, guests=4, until_s=20.0)
        tokens[mode] = shared.guest_tokens()
        tpots[mode] = max(latencies(shared.owner_log, arrivals)[1])
    assert tokens[Mode.STRICT] < tokens[Mode.QUIET] < tokens[Mode.SLO]
    assert tpots[Mode.SLO] <= 0.15
    assert tpots[Mode.QUIET] < 0.6 * tpots[Mode.SLO]


def test_the_arrival_reserve_is_of_the_expected_chunk_as_in_the_live_governor() -> None:
    shared = Shared.make(Mode.CLOSED)
    shared.play([(0.1, 300, 400)], guests=0, until_s=0.5)
    state, owner = shared.rule.ledger.serving(), shared.owner
    chunk_s = owner.times.step_s(owner.chunk_tokens, 0, 0, owner.chunk_tokens**2 / 2)
    admission = AdmissionConfig(slo=Slo(ttft_s=0.5, tpot_s=0.15))
    reserve_s = arrival_reserve_s(admission, chunk_s, owner.chunk_tokens, "owner")
    assert state.deadline_s - state.last_step_end_s == pytest.approx(admission.gap_fill * (0.15 - reserve_s))


def test_a_prompt_waits_for_at_most_one_guest_step() -> None:
    alone = Shared.make(Mode.CLOSED)
    alone.play(SERVING, guests=0, until_s=8.0)
    shared = Shared.make(Mode.SLO)
    shared.play(SERVING, guests=4, until_s=8.0)
    before, after = latencies(alone.owner_log, SERVING)[0], latencies(shared.owner_log, SERVING)[0]
    longest_step_s = 0.012 + 0.001  # the chunk's bound, and the host's gap
    assert max(b - a for a, b in zip(before, after, strict=True)) <= longest_step_s + 0.010


def test_serving_that_needs_memory_gets_it_and_the_youngest_guests_go() -> None:
    shared = Shared.make(Mode.SLO, pool_tokens=12_000)
    shared.play([(1.0, 10_500, 40)], guests=4, until_s=3.0)
    assert shared.evicted
    assert shared.evicted == sorted(shared.evicted, reverse=True)
    assert shared.guest.batch.kv_tokens_used <= 12_000 - 10_500


def test_the_published_memory_rule_cuts_to_half_and_stays_there_until_the_jobs_next_step() -> None:
    shared = Shared.make(Mode.SLO, memory_rule=MemoryRule.PUBLISHED, pool_tokens=12_000)
    shared.play([(1.0, 3000, 2)], guests=1, until_s=4.0)
    assert shared.guest.batch.kv_tokens == 5500
    shared.rule.note_job_step()
    shared.rule.follow_budget(5.0)
    assert shared.guest.batch.kv_tokens == 11_000


def test_a_lease_that_ends_stops_the_guest_within_a_step() -> None:
    shared = Shared.make(Mode.SLO)

    async def main() -> None:
        shared.add(shared.guest, "g0", 300, 5000)
        await asyncio.sleep(1.0)
        shared.rule.ledger.publish_budget(Budget(mode=Mode.SLO, fencing_token=2))
        await asyncio.sleep(0.012)
        assert shared.evicted == ["g0"]
        assert shared.guest.batch.kv_tokens == 0

    shared.loop.run(main())


def test_switching_costs_the_load_of_the_model_that_comes() -> None:
    loop = VirtualLoop()
    owner, guest = make_lane("owner", has_cache=False), make_lane("guest")
    owner_log, guest_log = listen(owner), listen(guest)
    rule = SwitchRule(owner, guest, load_owner_s=0.5, load_guest_s=1.0, patience_s=10.0, wait_s=0.2)
    device = Device(loop, rule)

    async def main() -> None:
        guest.batch.add(make_job("g", 100, 500))
        device.poke()
        await asyncio.sleep(3.0)
        owner.batch.add(make_job("s", 100, 1, at_s=3.0))
        device.poke()
        await asyncio.sleep(20)

    loop.run(main())
    assert guest_log[0] == ("first", "g", pytest.approx(1.0 + 0.020))
    assert owner_log[0][2] - 3.0 == pytest.approx(0.2 + 0.5 + 0.020, abs=0.013)
    assert guest.batch.num_preempted == 1
    assert guest_log[-1][:2] == ("last", "g")


def test_a_guest_that_has_waited_long_enough_is_let_in_beside_a_busy_serving_model() -> None:
    loop = VirtualLoop()
    owner, guest = make_lane("owner", has_cache=False), make_lane("guest")
    owner_log, guest_log = listen(owner), listen(guest)
    rule = SwitchRule(owner, guest, load_owner_s=0.5, load_guest_s=1.0, patience_s=2.0, wait_s=0.2)
    device = Device(loop, rule)

    async def main() -> None:
        owner.batch.add(make_job("s", 100, 400))
        guest.batch.add(make_job("g", 100, 5))
        device.poke()
        await asyncio.sleep(20)

    loop.run(main())
    assert guest_log[0][2] == pytest.approx(2.0 + 1.0 + 0.020, abs=0.013)
    assert owner_log[-1][:2] == ("last", "s")
    assert owner_log[-1][2] > 400 * 0.011 + 1.5


def borrow(shared: Shared, **budget: object) -> None:
    shared.rule.ledger.publish_budget(
        Budget(**{"mode": Mode.SLO, "fencing_token": 1, "expires_s": math.inf, "is_granted": True, **budget})  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("serving", [[], [(0.05, 100, 5000)]])
def test_a_lease_that_runs_out_unrenewed_ends_the_guest_without_a_word_from_the_lender(
    serving: list[tuple[float, int, int]],
) -> None:
    shared = Shared.make(Mode.SLO)
    borrow(shared, expires_s=1.0)

    async def main() -> None:
        shared.add(shared.guest, "g0", 300, 5000)
        for at_s, prompt, output in serving:
            await asyncio.sleep(at_s)
            shared.add(shared.owner, "s0", prompt, output)
        await asyncio.sleep(0.99 - shared.loop.time())
        assert not shared.evicted
        borrow(shared, expires_s=2.0)  # renewed
        await asyncio.sleep(1.0)
        assert not shared.evicted
        await asyncio.sleep(0.05)
        assert shared.evicted == ["g0"]

    shared.loop.run(main())


def test_the_word_of_a_lender_with_an_outdated_token_is_none() -> None:
    shared = Shared.make(Mode.SLO)

    async def main() -> None:
        borrow(shared, fencing_token=7)
        shared.add(shared.guest, "g0", 300, 5000)
        await asyncio.sleep(0.5)
        borrow(shared, fencing_token=6)
        await asyncio.sleep(0.05)
        assert shared.evicted == ["g0"]

    shared.loop.run(main())


def test_a_paused_guest_leaves_when_its_lease_runs_out() -> None:
    shared = Shared.make(Mode.SLO)
    borrow(shared, expires_s=1.0)

    async def main() -> None:
        shared.add(shared.guest, "g0", 300, 5000)
        await asyncio.sleep(0.3)
        shared.guest.is_paused = True
        shared.device.poke()
        await asyncio.sleep(0.8)
        assert shared.evicted == ["g0"]

    shared.loop.run(main())


def test_a_guest_that_waits_for_memory_gets_it_as_its_budget_grows_though_others_decode() -> None:
    shared = Shared.make(Mode.SLO)
    memory = attrs.evolve(shared.rule._config.memory, growth_fraction=0.05)  # 5000 tokens each quarter of a second
    shared.rule._memory._config = memory

    async def main() -> None:
        for name in ("g0", "g1", "g2"):
            shared.add(shared.guest, name, 60, 3900)
        await asyncio.sleep(0.9)  # budgets of 5, 10 and 15 thousand
        shared.device.fold()
        assert shared.guest.batch.num_running == 3
        assert shared.guest_tokens() > 0

    shared.loop.run(main())


def test_a_lower_cap_of_the_lender_is_heard_though_serving_stands_still() -> None:
    shared = Shared.make(Mode.SLO)

    async def main() -> None:
        shared.add(shared.guest, "g0", 300, 5000)
        await asyncio.sleep(1.0)
        shared.device.poke()  # the budget has stopped growing
        await asyncio.sleep(0.1)
        assert shared.guest.batch.kv_tokens == 99_000
        borrow(shared, kv_cap_bytes=10_000 * KV_BYTES)
        await asyncio.sleep(0.05)
        assert shared.guest.batch.kv_tokens == 10_000

    shared.loop.run(main())


class WatchedDevice(Device):
    """Asks the live policy again at the start of every single guest step, with what serving said when the run began."""

    def __init__(self, shared: Shared, mode: Mode) -> None:
        super().__init__(shared.loop, shared.rule)
        self.shared, self.mode, self.num_asked, self.poked_s = shared, mode, 0, math.inf

    def poke(self) -> None:
        self.poked_s = min(self.poked_s, self._loop.time())
        super().poke()

    def _begin(self, turn: Turn, now_s: float) -> None:
        self.state, self.poked_s = self.shared.rule._state_at(), math.inf
        super()._begin(turn, now_s)
        if turn.lane is self.shared.guest and self._run is not None:
            self.ask(self._run, 0)

    def _take_steps(self, run: Run, num_steps: int, end_s: float) -> None:
        if run.lane is self.shared.guest:
            for i in range(num_steps):
                self.ask(run, i)
                assert run.end_s(i) + run.gap_s <= self.poked_s + 1e-9
        super()._take_steps(run, num_steps, end_s)

    def ask(self, run: Run, number: int) -> None:
        rule, start_s = self.shared.rule, run.end_s(number) + run.gap_s
        step_s = run.base_s + run.growth_s * number
        if run.plan is None:
            step_s *= 1 + rule._margin(run.lane)
        verdict = decide(rule._config.admission, self.mode, self.state, step_s, start_s - 1e-9)
        assert isinstance(verdict, Start), (verdict, start_s)
        self.num_asked += 1


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([Mode.SLO, Mode.QUIET, Mode.PAPER, Mode.STRICT]), st.integers(0, 1000))
def test_every_guest_step_is_one_that_the_live_policy_lets_start(mode: Mode, seed: int) -> None:
    shared = Shared.make(mode)
    device = shared.device = WatchedDevice(shared, mode)
    shared.grant(mode)
    rng = Random(seed)
    serving = sorted((rng.uniform(0, 3), rng.randint(1, 600), rng.randint(1, 80)) for _ in range(12))
    shared.play(serving, guests=3, until_s=5.0)
    assert device.num_asked > 10
