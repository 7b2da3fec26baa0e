"""Modelled devices: closed forms equal single steps, nothing is cut short, the live policies keep their word."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policies.admission import AdmissionConfig, Budget, Mode, Slo
from rose.policies.memory import MemoryConfig
from rose.simulation.batch import Batch, Job
from rose.simulation.device import Device, Idle, Lane, Turn
from rose.simulation.loop import VirtualLoop
from rose.simulation.sharing import AloneRule, CoservingConfig, CoservingRule, MemoryRule, SwitchRule

KV_BYTES = 100


@attrs.frozen
class Times:
    """10 ms a step, 0.1 ms a prompt token, 1 us a token of context, 1 ms between steps."""

    host_gap_s: float = 0.001
    kv_bytes_per_token: int = KV_BYTES

    def step_s(self, num_prefill: int, num_decodes: int, context_tokens: int, positions: float) -> float:
        return 0.010 + 1e-4 * num_prefill + 1e-6 * context_tokens

    def growth_s(self, num_decodes: int) -> float:
        return 1e-6 * num_decodes


class OneStepAtATime(AloneRule):
    def choose(self, now_s: float) -> Turn | Idle:
        word = super().choose(now_s)
        return attrs.evolve(word, max_steps=1) if isinstance(word, Turn) else word


def make_lane(name: str = "lane", *, kv_tokens: int = 100_000, **more: object) -> Lane:
    batch = Batch(max_seqs=64, kv_tokens=kv_tokens, **more)  # type: ignore[arg-type]
    return Lane(name=name, batch=batch, times=Times(), chunk_tokens=512)


def make_job(name: str, prompt: int, output: int, at_s: float = 0.0) -> Job:
    return Job(job_id=name, prompt_tokens=prompt, output_tokens=output, max_output_tokens=output, arrived_s=at_s)


Log = list[tuple[str, str, float]]


def listen(lane: Lane) -> Log:
    log: Log = []

    def hear(started: list[Job], ended: list[Job], now_s: float) -> None:
        for job in started:
            job.first_token_s = now_s
            log.append(("first", job.job_id, now_s))
        log.extend(("last", job.job_id, now_s) for job in ended)

    lane.listener = hear
    return log


def play(jobs: Sequence[tuple[float, int, int]], rule: type[AloneRule], **lane_options: int) -> tuple[Log, int]:
    loop = VirtualLoop()
    lane = make_lane(**lane_options)
    log = listen(lane)
    device = Device(loop, rule(lane))

    async def main() -> None:
        for i, (at_s, prompt, output) in enumerate(jobs):
            await asyncio.sleep(at_s - loop.time())
            lane.batch.add(make_job(f"j{i}", prompt, output, at_s))
            device.poke()
        while len(lane.batch):
            await asyncio.sleep(1)

    loop.run(main())
    return log, loop.num_callbacks


def test_one_request_takes_the_sum_of_its_steps() -> None:
    log, _ = play([(0.0, 100, 3)], AloneRule)
    first = 0.010 + 0.010
    steps = [0.010 + 1e-6 * 100, 0.010 + 1e-6 * 101]
    assert log[0] == ("first", "j0", pytest.approx(first))
    assert log[1] == ("last", "j0", pytest.approx(first + sum(steps) + 2 * 0.001))


JOBS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 800), st.integers(1, 120)), min_size=1, max_size=10).map(
    sorted
)


@settings(deadline=None, max_examples=50)
@given(JOBS, st.sampled_from([100_000, 1200]))
def test_runs_in_closed_form_equal_single_steps(jobs: list[tuple[float, int, int]], kv_tokens: int) -> None:
    runs, singles = play(jobs, AloneRule, kv_tokens=kv_tokens)[0], play(jobs, OneStepAtATime, kv_tokens=kv_tokens)[0]
    assert [entry[:2] for entry in runs] == [entry[:2] for entry in singles]
    assert [entry[2] for entry in runs] == pytest.approx([entry[2] for entry in singles], abs=1e-6)


def test_a_long_answer_costs_few_events() -> None:
    assert play([(0.0, 100, 10_000)], AloneRule)[1] < 400  # one a second for the test's own watching


def test_a_request_joins_after_the_step_in_progress() -> None:
    log, _ = play([(0.0, 100, 1000), (1.0, 100, 1)], AloneRule)
    first_s = next(at_s for what, name, at_s in log if (what, name) == ("first", "j1"))
    assert 1.0 + 0.020 <= first_s <= 1.0 + 0.020 + 0.012


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
        shared.rule = CoservingRule(owner, guest, config, evict=shared.evict)
        shared.device = Device(loop, shared.rule)
        shared.rule.ledger.on_change = shared.device.poke
        shared.owner_log, shared.guest_log = listen(owner), listen(guest)
        shared.grant(mode)
        return shared

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
    for mode in (Mode.STRICT, Mode.QUIET, Mode.SLO):
        shared = Shared.make(mode)
        shared.play(SERVING, guests=4, until_s=8.0)
        tokens[mode] = shared.guest_tokens()
        tpots[mode] = max(latencies(shared.owner_log, SERVING)[1])
    assert tokens[Mode.STRICT] < tokens[Mode.QUIET] < tokens[Mode.SLO]
    assert tpots[Mode.SLO] <= 0.15
    assert tpots[Mode.QUIET] < 0.6 * tpots[Mode.SLO]


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
