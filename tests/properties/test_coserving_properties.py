"""Properties of the co-serving policies and governors, over random loads in virtual time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.backends.paced import profile_named
from rose.coserving.executor import GovernorConfig, RolloutGovernor, ServingGovernor, ServingLoad
from rose.coserving.ledger import Ledger
from rose.coserving.step_log import StepLog
from rose.interfaces.clock import Clock
from rose.interfaces.device import Device, StepWork
from rose.policies.admission import (
    START,
    AdmissionConfig,
    Budget,
    Decoding,
    Mode,
    Role,
    ServingState,
    Slo,
    decide,
    decode_deadline_s,
    should_yield,
)
from rose.policies.lending import Ask, DeviceUse, Lease, LendingConfig, plan_expiry, plan_grants
from rose.policies.memory import KvHolder, MemoryConfig, choose_victims, next_budget
from rose.policies.quiet import OwnPaces
from rose.types import DeviceId, JobId

CHUNK = 2048
SERVING = profile_named("h100:qwen2.5-7b")
ROLLOUT = profile_named("h100:qwen3-8b")
TPOT_SLO_S = 0.150


class VirtualClock(Clock):
    is_frozen = False

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def block(self, duration_s: float) -> None:
        self.time_s += max(0.0, duration_s)

    async def sleep(self, duration_s: float) -> None:
        self.block(duration_s)


@attrs.define
class Shared:
    clock: VirtualClock = attrs.field(factory=VirtualClock)
    free_at_s: float = 0.0
    holder: object | None = None


class VirtualDevice(Device):
    def __init__(self, shared: Shared, profile: object) -> None:
        self.device_id = DeviceId("virtual")
        self.clock = shared.clock
        self.shared = shared
        self.profile = profile

    def acquire(self, *, is_blocking: bool) -> bool:
        assert self.shared.holder in (None, self)
        self.shared.holder = self
        return True

    def release(self) -> None:
        self.shared.holder = None

    def predict_s(self, work: StepWork) -> float:
        return self.profile.step_s(work)

    def begin_step(self, work: StepWork, ready_at_s: float) -> float:
        self.shared.free_at_s = max(ready_at_s, self.shared.free_at_s) + self.predict_s(work)
        return self.shared.free_at_s

    def finish_step(self, end_s: float) -> float:
        self.clock.block(end_s - self.clock.now())
        return 0.0

    def give_pages(self, address: int, num_bytes: int) -> int:
        return 0


@attrs.define
class Request:
    name: str
    arrival_s: float
    num_prompt: int
    num_output: int
    num_prefilled: int = 0
    token_times: list[float] = attrs.field(factory=list)


@contextmanager
def governors(mode: Mode) -> Iterator[tuple[Shared, ServingGovernor, RolloutGovernor]]:
    with tempfile.TemporaryDirectory() as folder:
        shared, ledger = Shared(), Ledger.create(Path(folder) / "ledger")
        ledger.publish_budget(Budget(mode=mode, fencing_token=1, expires_s=1e9, is_granted=True))
        common = {"config": GovernorConfig(), "log": StepLog(), "ledgers": [ledger]}
        admission = AdmissionConfig(stale_after_s=1e9)  # the heartbeat thread lives in real time
        serving = ServingGovernor(
            VirtualDevice(shared, SERVING),
            shared.clock,
            **common,
            admission=admission,
            chunk_tokens=CHUNK,
            kv_pool_bytes=42e9,
        )
        rollout = RolloutGovernor(VirtualDevice(shared, ROLLOUT), shared.clock, **common, admission=admission)
        try:
            yield shared, serving, rollout
        finally:
            serving.close()


class Server:
    """Continuous batching with chunked prefill, as much of it as matters for timing."""

    def __init__(self, shared: Shared, governor: ServingGovernor, requests: list[Request]) -> None:
        self.shared = shared
        self.governor = governor
        self.coming = sorted(requests, key=lambda request: request.arrival_s)
        self.live: list[Request] = []

    def take_in(self) -> None:
        while self.coming and self.coming[0].arrival_s <= self.shared.clock.now():
            request = self.coming.pop(0)
            self.governor.note_arrival(request.name)
            self.governor.note_admitted(request.name)
            self.live.append(request)

    def step(self) -> None:
        if not self.governor.ask_serving(self.take_in):
            return
        decoding = [r for r in self.live if r.token_times]
        room, chunks, work = CHUNK - len(decoding), [], StepWork(num_decodes=len(decoding))
        for request in self.live:
            if not request.token_times and room > 0:
                tokens = min(room, request.num_prompt - request.num_prefilled)
                chunks.append((request, tokens))
                room -= tokens
        tokens = sum(tokens for _, tokens in chunks)
        self.governor.begin(attrs.evolve(work, num_prefill_tokens=tokens, prefill_positions=tokens**2 / 2))
        self.governor.finish(has_more=True)
        for request, tokens in chunks:
            request.num_prefilled += tokens
        for request in self.live:
            if request.num_prefilled == request.num_prompt:
                request.token_times.append(self.shared.free_at_s)
        self.live = [r for r in self.live if len(r.token_times) < r.num_output]
        started = [r for r in self.live if r.token_times]
        self.governor.publish(
            ServingLoad(
                num_running=len(self.live),
                waiting_ids=[r.name for r in self.live if not r.token_times],
                decoding=[(r.name, len(r.token_times)) for r in started],
            )
        )
        self.governor.release()


def simulate(mode: Mode, requests: list[Request], step_tokens: int) -> tuple[list[Request], int]:
    """Let rollouts ask all the time while serving answers ``requests``; returns them and the rollout turns."""
    work = StepWork(num_decodes=step_tokens, context_tokens=500 * step_tokens)
    num_turns = 0
    with governors(mode) as (shared, serving, rollout):
        server = Server(shared, serving, requests)
        while server.coming or server.live:
            server.take_in()
            if rollout.ask_rollout(work, server.take_in):
                rollout.begin(work)
                rollout.finish(has_more=True)
                num_turns += 1
                continue
            if server.live:
                server.step()
            elif server.coming:
                shared.clock.block(max(0.0, server.coming[0].arrival_s - shared.clock.now()))
    return requests, num_turns


LOADS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 6000), st.integers(2, 80)), min_size=1, max_size=15).map(
    lambda rows: [Request(str(i), at, n_in, n_out) for i, (at, n_in, n_out) in enumerate(rows)]
)


@settings(max_examples=25, deadline=None)
@given(requests=LOADS, step_tokens=st.integers(1, 16), mode=st.sampled_from([Mode.SLO, Mode.QUIET]))
def test_no_token_of_serving_comes_later_than_the_slo(requests: list[Request], step_tokens: int, mode: Mode) -> None:
    """Whatever arrives, also a long prompt right after a rollout step, gaps between tokens stay within the SLO."""
    done, num_turns = simulate(mode, requests, step_tokens)
    gaps = [b - a for request in done for a, b in zip(request.token_times, request.token_times[1:], strict=False)]
    assert max(gaps, default=0.0) <= TPOT_SLO_S
    assert all(len(request.token_times) == request.num_output for request in done)
    assert num_turns or max(request.num_output for request in done) < 20, "nothing was lent"


@settings(max_examples=10, deadline=None)
@given(requests=LOADS)
def test_strict_mode_costs_serving_at_most_one_turn_a_busy_period(requests: list[Request]) -> None:
    copies = [attrs.evolve(request, token_times=[]) for request in requests]
    alone, _ = simulate(Mode.CLOSED, copies, 1)
    shared, _ = simulate(Mode.STRICT, requests, 16)
    turn_s = ROLLOUT.step_s(StepWork(num_decodes=16, context_tokens=8000))
    for before, after in zip(alone, shared, strict=True):
        if len(requests) == 1:
            # both runs look at a closed gate in between, and for up to ``max_poll_s`` at a time
            assert after.token_times[-1] - before.token_times[-1] <= turn_s + GovernorConfig().max_poll_s


STATES = st.builds(
    ServingState,
    num_arrived=st.integers(0, 3),
    num_admitted=st.integers(0, 3),
    num_running=st.integers(0, 5),
    num_waiting=st.integers(0, 2),
    kv_used_bytes=st.floats(0, 100),
    kv_pool_bytes=st.just(100.0),
    oldest_arrival_s=st.floats(99, 100),
    last_step_end_s=st.floats(99, 100),
    deadline_s=st.floats(99, 101),
    next_decode_s=st.floats(0, 0.1),
    heartbeat_s=st.floats(98, 100),
)


@settings(max_examples=400)
@given(
    state=st.none() | STATES,
    mode=st.sampled_from([Mode.SLO, Mode.QUIET, Mode.STRICT]),
    role=st.sampled_from(list(Role)),
    step_s=st.floats(0, 0.2),
)
def test_no_step_starts_past_the_deadline_nor_in_doubt(
    state: ServingState | None, mode: Mode, role: Role, step_s: float
) -> None:
    config, now_s = AdmissionConfig(role=role), 100.0
    if decide(config, mode, state, step_s, now_s) is not START:
        return
    assert state is not None, "nothing could be read"
    assert now_s - state.heartbeat_s <= config.stale_after_s
    assert state.kv_used_bytes <= config.serving_kv_bound_fraction * state.kv_pool_bytes
    if state.num_running or state.num_prompts_waiting:
        assert mode is not Mode.STRICT
        assert now_s + step_s + state.next_decode_s <= state.deadline_s + 1e-9
        assert not state.num_prompts_waiting
    assert not should_yield(config, mode, state, now_s + 1, step_s + 10.0, now_s) or not state.num_running


DECODING = st.lists(
    st.builds(
        Decoding,
        first_token_s=st.floats(0, 10),
        num_tokens=st.integers(1, 500),
        own_s=st.floats(0, 5),
        slo=st.sampled_from([Slo(), Slo(ttft_s=0.3, tpot_s=0.08)]),
    ),
    min_size=1,
    max_size=60,
)


@given(requests=DECODING, mode=st.sampled_from([Mode.SLO, Mode.QUIET]), reserve_s=st.floats(0, 0.06), extra=DECODING)
def test_a_deadline_keeps_every_class_s_gap_and_pace_and_more_requests_never_move_it_back(
    requests: list[Decoding], mode: Mode, reserve_s: float, extra: list[Decoding]
) -> None:
    config, end_s, paces = AdmissionConfig(), 10.0, OwnPaces(lone_s=0.008, usual_s=0.009)

    def deadline_s(decoding: list[Decoding]) -> float:
        return decode_deadline_s(config, mode, reserve_s, end_s, decoding, next_decode_s=0.01, paces=paces)

    latest_s = deadline_s(requests)
    for request in requests:
        assert latest_s + reserve_s <= end_s + request.slo.tpot_s
        assert latest_s - request.first_token_s <= request.slo.tpot_s * request.num_tokens
    assert deadline_s(requests + extra) <= latest_s


MEMORY = st.builds(
    MemoryConfig,
    pool_bytes=st.integers(100, 10_000),
    headroom_bytes=st.integers(0, 2_000),
    granule_bytes=st.integers(1, 50),
    growth_fraction=st.floats(0.01, 1.0),
    growth_interval_s=st.just(1.0),
)


@given(config=MEMORY, used=st.lists(st.floats(0, 12_000), min_size=1, max_size=30), cap=st.floats(0, 20_000))
def test_budgets_leave_serving_its_headroom_and_grow_slowly(
    config: MemoryConfig, used: list[float], cap: float
) -> None:
    budget, waited_s = 0, 0.0
    for serving_used in used:
        change = next_budget(
            config, serving_used_bytes=serving_used, cap_bytes=cap, current_bytes=budget, since_growth_s=waited_s
        )
        assert 0 <= change.budget_bytes <= max(0.0, min(config.pool_bytes - serving_used - config.headroom_bytes, cap))
        step = max(config.granule_bytes, config.growth_fraction * config.pool_bytes)
        assert change.budget_bytes <= budget + step
        assert not change.has_grown or waited_s >= config.growth_interval_s
        budget, waited_s = change.budget_bytes, 0.0 if change.has_grown else waited_s + 0.5


@given(
    holders=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=12),
    need=st.integers(-5, 300),
)
def test_victims_are_the_fewest_youngest_that_suffice(holders: list[tuple[int, int]], need: int) -> None:
    running = [KvHolder(f"r{i}", float(at), held) for i, (at, held) in enumerate(holders)]
    by_id = {holder.request_id: holder for holder in running}
    victims = [by_id[request_id] for request_id in choose_victims(running, need)]
    freed = sum(victim.held_bytes for victim in victims)
    assert freed >= min(need, sum(holder.held_bytes for holder in running))
    if victims:
        assert freed - victims[-1].held_bytes < need, "one victim too many"
        spared = [h for h in running if h not in victims and h.held_bytes]
        assert all(h.admitted_s <= min(v.admitted_s for v in victims) for h in spared)


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["grant", "revoke", "wait"]), st.sampled_from(["x", "y"]), st.integers(0, 4)),
        max_size=40,
    )
)
def test_leases_are_exclusive_and_tokens_only_grow(actions: list[tuple[str, str, int]]) -> None:
    config = LendingConfig(ttl_s=3.0, quota=2)
    devices = {
        name: DeviceUse(device_id=DeviceId(name), kv_use_fraction=i / 10, last_token=0) for i, name in enumerate("abcd")
    }
    tokens: dict[str, list[int]] = {name: [] for name in devices}
    now_s = 0.0
    for action, job, number in actions:
        now_s += number if action == "wait" else 0.0
        ended: tuple[Lease, ...] = plan_expiry(list(devices.values()), now_s)
        if action == "revoke":
            ended += tuple(d.lease for d in devices.values() if d.lease is not None and d.lease not in ended)[:number]
        for lease in ended:
            devices[lease.device_id] = attrs.evolve(devices[lease.device_id], lease=None)
        if action == "grant":
            for lease in plan_grants(config, list(devices.values()), [Ask(job=JobId(job), num_devices=number)], now_s):
                assert devices[lease.device_id].lease is None, "lent twice"
                tokens[lease.device_id].append(lease.fencing_token)
                devices[lease.device_id] = attrs.evolve(
                    devices[lease.device_id], lease=lease, last_token=lease.fencing_token
                )
        held = [d.lease.job for d in devices.values() if d.lease is not None]
        assert all(held.count(JobId(name)) <= config.quota for name in "xy")
    assert all(seen == sorted(set(seen)) for seen in tokens.values())
