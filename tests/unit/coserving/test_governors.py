"""Serving and rollout governors on one device, in one thread."""

from __future__ import annotations

import itertools
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rose.backends.gang import GangDevice
from rose.coserving.executor import GovernorConfig, RolloutGovernor, ServingGovernor, ServingLoad, StepGovernor
from rose.coserving.step_log import StepLog
from rose.errors import ConfigError
from rose.interfaces.device import StepWork
from rose.policies.admission import AdmissionConfig, Budget, HoldReason, Mode, Role, Slo
from rose.policies.memory import MemoryConfig
from rose.types import DeviceId

WORK = StepWork(num_decodes=4)
CONFIG = GovernorConfig()
MEMORY = MemoryConfig(pool_bytes=1000, headroom_bytes=100, granule_bytes=10, growth_fraction=1.0, growth_interval_s=0.0)


def nothing() -> None:
    """Take nothing in."""


def rollout_on(site: Any, **kwargs: Any) -> RolloutGovernor:
    kwargs.setdefault("admission", AdmissionConfig())
    return RolloutGovernor(site.device("rollout"), site.clock, CONFIG, StepLog(), ledgers=[site.ledger], **kwargs)


@pytest.fixture
def serving(site: Any) -> Any:
    governor = ServingGovernor(
        site.device("serving"),
        site.clock,
        CONFIG,
        StepLog(),
        ledgers=[site.ledger],
        admission=AdmissionConfig(),
        chunk_tokens=1024,
        kv_pool_bytes=1000,
    )
    yield governor
    governor.close()


def serve_one(governor: ServingGovernor, site: Any, load: ServingLoad) -> float:
    """One serving step; returns its end."""
    assert governor.ask_serving(nothing)
    governor.begin(StepWork(num_decodes=len(load.decoding)))
    governor.finish(has_more=True)
    governor.publish(load)
    governor.release()
    return float(site.turn.free_at_s)


DECODING = ServingLoad(num_running=1, decoding=[("a", 50)], decode_context_tokens=100)


def test_a_dedicated_engine_keeps_absolute_time(site: Any) -> None:
    """Steps follow each other after the host gap, although the engine asks later than it was ready."""
    governor = StepGovernor(site.device("own"), site.clock, CONFIG, StepLog())
    ends = []
    for _ in range(3):
        assert governor.ask()
        governor.begin(WORK)
        governor.finish(has_more=True)
        governor.release()
        ends.append(site.turn.free_at_s)
        site.clock.block(3e-3)  # host work of the machine, longer than the modelled gap
    assert [round(b - a, 6) for a, b in itertools.pairwise(ends)] == [0.0115, 0.0115]
    assert governor.log.report().rate_error == 0.0


def test_host_work_far_too_slow_is_a_rate_error(site: Any) -> None:
    governor = StepGovernor(site.device("own"), site.clock, CONFIG, StepLog())
    for _ in range(2):
        governor.ask()
        governor.begin(WORK)
        governor.finish(has_more=True)
        site.clock.block(20e-3)
    report = governor.log.report()
    assert report.rate_error == pytest.approx((20e-3 - CONFIG.host_gap_s) / 20e-3)
    assert not report.is_valid


def test_a_word_stands_for_many_turns(site: Any) -> None:
    governor = StepGovernor(site.device("own"), site.clock, CONFIG, StepLog())
    governor.ask()
    governor.begin(WORK, [WORK] * 7)
    governor.finish(has_more=False)
    assert len(site.turn.turns) == 8
    assert site.clock.now() == pytest.approx(10.0 + 8 * 0.010 + 7 * CONFIG.host_gap_s)


def test_without_a_lease_nothing_starts(site: Any) -> None:
    governor = rollout_on(site)
    assert not governor.ask_rollout(WORK, nothing)
    assert governor.last_hold is HoldReason.LEASE_MISSING
    site.grant(expires_s=10.0)
    assert not governor.ask_rollout(WORK, nothing)
    assert governor.last_hold is HoldReason.LEASE_EXPIRED


def test_an_older_lender_is_fenced(site: Any, serving: ServingGovernor) -> None:
    governor = rollout_on(site)
    site.grant(token=5)
    assert governor.ask_rollout(WORK, nothing)
    governor.skip()
    site.grant(token=4)
    assert not governor.ask_rollout(WORK, nothing)
    assert governor.last_hold is HoldReason.LEASE_FENCED
    assert governor.is_lease_over()


def test_a_silent_serving_engine_is_not_trusted(site: Any) -> None:
    """No serving engine ever spoke: fail closed. In ungated mode the base line asks nobody."""
    governor = rollout_on(site)
    site.grant()
    assert not governor.ask_rollout(WORK, nothing)
    assert governor.last_hold is HoldReason.STALE
    site.grant(Mode.UNGATED)
    assert governor.ask_rollout(WORK, nothing)


def test_a_prompt_on_its_way_holds_rollouts_before_the_step_loop_knows(site: Any, serving: ServingGovernor) -> None:
    site.grant()
    governor = rollout_on(site)
    serving.note_arrival("a")
    assert not governor.ask_rollout(WORK, nothing)
    assert governor.last_hold is HoldReason.PROMPT_WAITS
    serving.note_admitted("a")
    assert site.ledger.serving().num_prompts_waiting == 1
    assert not governor.ask_rollout(WORK, nothing)
    serving.note_arrival("b")
    serving.note_lost("b")
    serving.publish(ServingLoad())
    assert governor.ask_rollout(WORK, nothing), "a prompt that was lost holds rollouts for ever"


def test_rollouts_fill_the_slack_and_stop_before_the_deadline(site: Any, serving: ServingGovernor) -> None:
    site.grant()
    governor = rollout_on(site)
    end_s = serve_one(serving, site, DECODING)
    num_turns = 0
    while governor.ask_rollout(WORK, nothing):
        governor.begin(WORK)
        governor.finish(has_more=True)
        num_turns += 1
    assert governor.last_hold is HoldReason.NO_SLACK
    deadline_s = site.ledger.serving().deadline_s
    assert num_turns >= 3
    assert site.turn.free_at_s + 0.010 <= deadline_s <= end_s + 0.150 - 0.042, "a prompt chunk finds room too"


def test_serving_leaves_the_device_to_a_rollout_between_two_steps(site: Any, serving: ServingGovernor) -> None:
    """Courtesy lasts while slack lasts and the rollout engine says it wants the device; a waiting prompt ends it."""
    site.grant()
    governor = rollout_on(site)
    serve_one(serving, site, DECODING)
    assert governor.ask_rollout(WORK, nothing)
    governor.begin(WORK)
    governor.finish(has_more=True)
    before_s = site.clock.now()
    serve_one(serving, site, DECODING)
    assert site.turn.turns[-1][1] - before_s == pytest.approx(CONFIG.think_s, abs=2 * CONFIG.poll_s)
    governor.publish(num_running=1, num_waiting=0, kv_used_bytes=0, num_evicted=0, num_tokens=0)
    serving.note_arrival("b")
    before_s = site.clock.now()
    serve_one(serving, site, DECODING)
    assert site.turn.turns[-1][1] - before_s <= CONFIG.host_gap_s + 1e-9


def test_the_time_that_serving_gives_away_is_no_wait_for_a_frozen_engine(
    site: Any, serving: ServingGovernor, monkeypatch: pytest.MonkeyPatch
) -> None:
    since_s: list[float] = []
    monkeypatch.setattr(serving._watchdog, "begin", since_s.append)
    site.grant()
    governor = rollout_on(site)
    serve_one(serving, site, DECODING)
    assert governor.ask_rollout(WORK, nothing)
    governor.begin(WORK)
    governor.finish(has_more=True)
    before_s = site.clock.now()
    serve_one(serving, site, DECODING)
    assert since_s[-1] - before_s == pytest.approx(CONFIG.think_s, abs=2 * CONFIG.poll_s)


def test_inputs_are_taken_in_after_the_wait(site: Any, serving: ServingGovernor) -> None:
    taken: list[float] = []
    serve_one(serving, site, DECODING)
    asked_s = site.clock.now()
    serving.ask_serving(lambda: taken.append(site.clock.now()))
    assert taken == [pytest.approx(asked_s + CONFIG.host_gap_s)]
    assert site.turn.holder is serving.device


def test_frozen_time_stops_serving_and_frees_rollouts(site: Any, serving: ServingGovernor) -> None:
    site.grant()
    governor = rollout_on(site)
    site.clock.is_frozen = True
    assert not serving.ask_serving(nothing)
    assert governor.ask_rollout(WORK, nothing)
    governor.begin(WORK, [WORK] * 3)
    governor.finish(has_more=True)
    assert site.turn.turns == []
    site.ledger.publish_budget(Budget())
    assert not governor.ask_rollout(WORK, nothing), "a lease is needed also while frozen"


def test_later_turns_go_through_the_gate_and_are_owed_when_it_stays_shut(site: Any, serving: ServingGovernor) -> None:
    site.grant()
    governor = rollout_on(site)
    assert governor.ask_rollout(WORK, nothing)
    governor.begin(WORK, [WORK] * 3)
    site.clock.on_block = lambda: serving.note_arrival("p") if serving._num_arrived == 0 else None
    start_s = site.clock.now()
    governor.finish(has_more=True)
    assert len(site.turn.turns) == 1
    assert governor.owed_s == pytest.approx(0.030)
    assert site.clock.now() - start_s <= 0.010 + CONFIG.max_hold_s + CONFIG.max_poll_s
    site.clock.on_block = nothing
    assert not governor.ask_rollout(WORK, nothing)
    serving.note_lost("p")
    assert governor.ask_rollout(WORK, nothing)
    assert len(site.turn.turns) == 4, "owed turns are taken before the next step"
    assert governor.owed_s == 0.0


def test_a_revoked_lease_ends_the_later_turns_at_once(site: Any, serving: ServingGovernor) -> None:
    site.grant()
    governor = rollout_on(site)
    assert governor.ask_rollout(WORK, nothing)
    governor.begin(WORK, [WORK] * 3)
    site.clock.on_block = lambda: site.ledger.publish_budget(Budget(fencing_token=2))
    start_s = site.clock.now()
    governor.finish(has_more=True)
    assert site.clock.now() - start_s <= 0.010 + CONFIG.host_gap_s + 1e-9
    assert site.turn.holder is None


def test_what_serving_says_while_the_turn_is_taken_counts(site: Any, serving: ServingGovernor) -> None:
    """A prompt that arrives between the look at the ledger and the grant gets the device."""
    site.grant()
    governor = rollout_on(site)
    take = governor.device.acquire

    def acquire(*, is_blocking: bool) -> bool:
        if serving._num_arrived == 0:
            serving.note_arrival("p")
        return take(is_blocking=is_blocking)

    governor.device.acquire = acquire  # type: ignore[method-assign]
    assert not governor.ask_rollout(WORK, nothing)
    assert governor.last_hold is HoldReason.PROMPT_WAITS
    assert site.turn.holder is None


def test_the_turn_is_never_kept_after_a_step(site: Any, serving: ServingGovernor) -> None:
    site.grant()
    governor = rollout_on(site)
    assert governor.ask_rollout(WORK, nothing)
    governor.skip()
    assert site.turn.holder is None
    serve_one(serving, site, DECODING)
    assert site.turn.holder is None


def test_the_budget_follows_serving_and_the_lease(site: Any, serving: ServingGovernor) -> None:
    governor = rollout_on(site, memory=MEMORY)
    assert governor.kv_budget_bytes() == 0
    site.grant()
    assert governor.kv_budget_bytes() == 900
    serving.publish(ServingLoad(kv_used_bytes=455))
    assert governor.kv_budget_bytes() == 440, "rounded down to granules"
    assert governor.possible_kv_bytes() == 900
    site.ledger.publish_budget(Budget(fencing_token=2))
    assert governor.kv_budget_bytes() == 0
    assert rollout_on(site).kv_budget_bytes() is None
    assert rollout_on(site).possible_kv_bytes() == math.inf


def test_a_new_lease_begins_with_memory_even_where_time_stands_still(site: Any, serving: ServingGovernor) -> None:
    memory = MemoryConfig(
        pool_bytes=1000, headroom_bytes=100, granule_bytes=10, growth_fraction=0.05, growth_interval_s=0.25
    )
    site.grant()
    governor = rollout_on(site, memory=memory)
    assert governor.kv_budget_bytes() == 50
    site.ledger.publish_budget(Budget(fencing_token=2))
    governor.is_lease_over()
    assert governor.kv_budget_bytes() == 0
    site.clock.is_frozen = True
    site.grant(token=3)
    governor.is_lease_over()
    assert governor.kv_budget_bytes() == 50
    assert governor.kv_budget_bytes() == 50, "it grows no faster than before"


def test_an_slo_without_room_for_a_prefill_chunk_is_refused(site: Any) -> None:
    with pytest.raises(ConfigError, match=r"device dev.*TPOT SLO of 0\.05 s.*4096 tokens.*max_num_batched_tokens"):
        ServingGovernor(
            site.device("serving"),
            site.clock,
            CONFIG,
            StepLog(),
            ledgers=[site.ledger],
            admission=AdmissionConfig(slo=Slo(tpot_s=0.05)),
            chunk_tokens=4096,
            kv_pool_bytes=1000,
        )


def test_the_heartbeat_beats_without_steps(site: Any, serving: ServingGovernor) -> None:
    site.clock.time_s = 99.0
    deadline = time.monotonic() + 5
    while site.ledger.serving().heartbeat_s != 99.0:
        assert time.monotonic() < deadline, "no heartbeat in 5 s"
        time.sleep(0.01)


def test_serving_does_not_wait_for_a_rollout_that_its_kv_use_keeps_out(site: Any, serving: ServingGovernor) -> None:
    """Above the bound no compute is lent, so that leaving the device idle would only make its requests stay longer."""
    site.grant()
    governor = rollout_on(site)
    crowded = ServingLoad(num_running=1, decoding=[("a", 50)], decode_context_tokens=100, kv_used_bytes=810)
    serve_one(serving, site, crowded)
    assert not governor.ask_rollout(WORK, nothing)
    assert governor.last_hold is HoldReason.SERVING_KV
    before_s = site.clock.now()
    serve_one(serving, site, crowded)
    assert site.turn.turns[-1][1] - before_s <= CONFIG.host_gap_s + 1e-9


def test_requests_leave_nothing_behind_however_they_end(site: Any, serving: ServingGovernor) -> None:
    """One token, an abort while waiting, a preemption: times of requests that are gone are forgotten."""
    for name in ("one token", "aborted"):
        serving.note_arrival(name)
        serving.note_admitted(name)
    assert site.ledger.serving().oldest_arrival_s == 10.0
    site.clock.time_s = 20.0
    serving.note_arrival("long")
    serving.note_admitted("long")
    serving.publish(ServingLoad(num_running=1, decoding=[("long", 1)]))
    serving.publish(ServingLoad(num_running=0, waiting_ids=["long"]))
    assert not math.isnan(site.ledger.serving().oldest_arrival_s), "a preempted request waits"
    serving.publish(ServingLoad())
    assert math.isnan(site.ledger.serving().oldest_arrival_s)
    assert not serving._arrived_s
    assert not serving._accounts._prompts
    assert not serving._accounts._answers


def test_a_request_that_was_given_up_is_not_published_again(site: Any, serving: ServingGovernor) -> None:
    """An abort, then an admission before the next step: who was given up is neither waiting, decoding nor counted."""
    for name in ("a", "b"):
        serving.note_arrival(name)
        serving.note_admitted(name)
    serve_one(serving, site, ServingLoad(num_running=1, decoding=[("a", 1)], waiting_ids=("b",)))
    for name in ("a", "b"):
        serving.note_aborted(name)
    serving.note_arrival("c")
    serving.note_admitted("c")
    assert site.ledger.serving().num_waiting == 1
    assert site.ledger.serving().deadline_s == math.inf
    serve_one(serving, site, ServingLoad(num_running=1, decoding=[("c", 1)]))
    assert serving._accounts.counters.num_requests == 2
    assert serving._accounts.counters.num_tokens == 2


def test_prompts_that_turn_out_too_long_end_lending_to_every_class(site: Any) -> None:
    """Also where only requests of a class with a long TPOT decode, longer than the tightest one's."""
    site.grant()
    serving = ServingGovernor(
        site.device("serving"),
        site.clock,
        CONFIG,
        StepLog(),
        ledgers=[site.ledger],
        admission=AdmissionConfig(classes={"batch": Slo(ttft_s=5.0, tpot_s=1.0)}),
        chunk_tokens=1024,
        kv_pool_bytes=1000,
    )
    load = ServingLoad(num_running=1, decoding=[("a", 1)], decode_context_tokens=100)
    serving.note_admitted("a", 0, "batch")
    serve_one(serving, site, load)
    assert site.ledger.serving().deadline_s > site.clock.now() + 0.3
    serving._prefill_s = lambda num_tokens: 0.5  # type: ignore[method-assign]
    serving._reserve_s = serving._learned_reserve_s()
    serve_one(serving, site, load)
    assert site.ledger.serving().deadline_s < site.clock.now()
    serving.close()


def test_serving_counts_its_own_time_only(site: Any, serving: ServingGovernor) -> None:
    """What a request would have taken alone is known: rollout turns and yielding are no part of it."""
    site.grant()
    governor = rollout_on(site)
    serve_one(serving, site, DECODING)
    before_s = serving._own_s
    for _ in range(2):
        assert governor.ask_rollout(WORK, nothing)
        governor.begin(WORK)
        governor.finish(has_more=True)
    governor.publish(num_running=0, num_waiting=0, kv_used_bytes=0, num_evicted=0, num_tokens=9)
    serve_one(serving, site, DECODING)
    site.clock.block(CONFIG.host_gap_s)
    serve_one(serving, site, DECODING)
    assert serving._own_s - before_s == pytest.approx(2 * 0.010 + CONFIG.host_gap_s, abs=1e-3)
    rollout = site.ledger.rollout()
    assert rollout.busy_s == pytest.approx(0.020)
    assert rollout.num_tokens == 9
    assert rollout.fencing_token == 1


def test_a_class_has_its_own_promise(site: Any) -> None:
    """A request of an urgent class brings the deadline forward, one of a lax class does not move it."""
    deadlines = {}
    for name in ("urgent", None, "lax"):
        governor = ServingGovernor(
            site.device("serving"),
            site.clock,
            CONFIG,
            StepLog(),
            ledgers=[site.ledger],
            admission=AdmissionConfig(classes={"urgent": Slo(tpot_s=0.06), "lax": Slo(tpot_s=1.0)}),
            chunk_tokens=512,
            kv_pool_bytes=1000,
        )
        governor.note_arrival("a")
        governor.note_admitted("a", 600, name)
        assert site.ledger.serving().first_token_deadline_s == pytest.approx(
            site.clock.now() + 0.5 - (0.010 + 0.016) - (0.010 + 88 / 32e3)
        )
        end_s = serve_one(governor, site, ServingLoad(num_running=1, decoding=[("a", 3)]))
        deadlines[name] = site.ledger.serving().deadline_s - end_s
        governor.close()
    assert deadlines["urgent"] < deadlines[None] <= deadlines["lax"]


def test_a_decode_device_does_not_hold_for_prompts_on_their_way(site: Any) -> None:
    """They hold until their KV was asked for, and again when it is there."""
    governor = ServingGovernor(
        site.device("serving"),
        site.clock,
        CONFIG,
        StepLog(),
        ledgers=[site.ledger],
        admission=AdmissionConfig(role=Role.DECODE),
        chunk_tokens=4096,
        kv_pool_bytes=1000,
    )
    site.grant()
    rollout = rollout_on(site, admission=AdmissionConfig(role=Role.DECODE))
    governor.note_arrival("a")
    governor.note_admitted("a", 600)
    assert not rollout.ask_rollout(WORK, nothing), "nobody asked for its KV yet"
    governor.publish(ServingLoad(waiting_ids=["a"], awaited_ids=["a"]))
    site.clock.time_s += 0.140
    assert rollout.ask_rollout(WORK, nothing), rollout.last_hold
    rollout.skip()
    governor.publish(ServingLoad(waiting_ids=["a"]))
    assert not rollout.ask_rollout(WORK, nothing), "its KV is there"
    assert rollout.last_hold is HoldReason.PROMPT_WAITS
    governor.close()


def test_usage_tells_what_users_saw(site: Any, serving: ServingGovernor) -> None:
    """A first token after the budget and a gap beyond the TPOT count once each, with their seconds."""
    for name in ("a", "b"):
        serving.note_arrival(name)
        serving.note_admitted(name)
    site.clock.time_s += 0.6
    serve_one(serving, site, ServingLoad(num_running=2, decoding=[("a", 1), ("b", 1)], kv_used_bytes=500))
    site.clock.time_s += 0.2
    serve_one(serving, site, ServingLoad(num_running=2, decoding=[("a", 2), ("b", 2)], kv_used_bytes=250))
    serving.note_aborted("b")
    serve_one(serving, site, ServingLoad())
    deadline = time.monotonic() + 5
    while (usage := site.ledger.usage()).num_tokens < 5:
        assert time.monotonic() < deadline, usage
        time.sleep(0.01)
    assert (usage.num_requests, usage.num_broken, usage.num_tokens, usage.num_gaps_broken) == (2, 2, 5, 2)
    assert usage.debt_s == pytest.approx(2 * 0.110 + 2 * 0.060, abs=0.01)
    assert usage.kv_peak_fraction == pytest.approx(0.5)
    assert usage.pid == os.getpid()


def test_an_engine_over_two_devices_needs_both(make_site: Any, tmp_path: Path) -> None:
    """All or none: one closed ledger, one busy device or one missing lease keeps it from both."""
    sites = [make_site(tmp_path / "a"), make_site(tmp_path / "b")]
    clock = sites[1].clock = sites[0].clock
    devices = [site.device("rollout") for site in sites]
    for device, name in zip(devices, ("dev0", "dev1"), strict=True):
        device.device_id = DeviceId(name)
    gang = GangDevice(devices)
    servers = [
        ServingGovernor(
            site.device("serving"),
            clock,
            CONFIG,
            StepLog(),
            ledgers=[site.ledger],
            admission=AdmissionConfig(),
            chunk_tokens=512,
            kv_pool_bytes=1000,
        )
        for site in sites
    ]
    governor = RolloutGovernor(
        gang,
        clock,
        CONFIG,
        StepLog(),
        ledgers=[site.ledger for site in sites],
        admission=AdmissionConfig(),
        memory=MEMORY,
    )
    sites[0].grant()
    assert not governor.ask_rollout(WORK, nothing)
    assert governor.last_hold is HoldReason.LEASE_MISSING
    assert governor.kv_budget_bytes() == 0
    sites[1].grant()
    servers[1].publish(ServingLoad(kv_used_bytes=455))
    assert governor.kv_budget_bytes() == 2 * 440, "the tightest device decides for both"
    servers[1].note_arrival("p")
    assert not governor.ask_rollout(WORK, nothing)
    servers[1].note_lost("p")
    sites[1].turn.holder = servers[1].device
    assert not governor.ask_rollout(WORK, nothing)
    assert governor.last_hold is HoldReason.DEVICE_BUSY
    assert [site.turn.holder for site in sites] == [None, servers[1].device], "none is kept"
    sites[1].turn.holder = None
    sites[1].turn.free_at_s = clock.now() + 0.5
    assert governor.ask_rollout(WORK, nothing)
    governor.begin(WORK)
    governor.finish(has_more=False)
    assert sites[0].turn.free_at_s == sites[1].turn.free_at_s, "both are busy until the step is over"
    assert [site.turn.holder for site in sites] == [None, None]
    for server in servers:
        server.close()


def test_a_step_asked_for_in_frozen_time_is_not_charged_when_time_goes_on(site: Any, serving: ServingGovernor) -> None:
    """It was given no turn; charging it would need one."""
    site.grant()
    governor = rollout_on(site)
    site.clock.is_frozen = True
    assert governor.ask_rollout(WORK, nothing)
    site.clock.is_frozen = False
    governor.begin(WORK, [WORK])
    governor.finish(has_more=True)
    assert site.turn.turns == []
    assert governor.ask_rollout(WORK, nothing)
    governor.begin(WORK)
    governor.finish(has_more=True)
    assert len(site.turn.turns) == 1
