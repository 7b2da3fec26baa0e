"""Dual-SLO admission, rule by rule."""

from __future__ import annotations

import math

import attrs
import pytest

from rose.config import load
from rose.errors import ConfigError
from rose.policies.admission import (
    START,
    AdmissionConfig,
    Budget,
    Decoding,
    Hold,
    HoldReason,
    Mode,
    Role,
    ServingState,
    Slo,
    arrival_reserve_s,
    check_lease,
    decide,
    decode_deadline_s,
    should_yield,
)
from rose.policies.quiet import OwnPaces, quiet_start_s

CONFIG = AdmissionConfig()
NOW_S = 100.0
IDLE = ServingState(
    num_arrived=3,
    num_admitted=3,
    num_running=0,
    num_waiting=0,
    kv_used_bytes=0,
    kv_pool_bytes=100,
    oldest_arrival_s=math.nan,
    last_step_end_s=NOW_S - 0.001,
    deadline_s=math.inf,
    next_decode_s=0.0,
    heartbeat_s=NOW_S,
)
BUSY = attrs.evolve(IDLE, num_running=4, deadline_s=NOW_S + 0.030, next_decode_s=0.010)
WAITING = attrs.evolve(BUSY, num_arrived=4, oldest_arrival_s=NOW_S - 0.01)


def held(mode: Mode, serving: ServingState | None, step_s: float = 0.010) -> HoldReason | None:
    decision = decide(CONFIG, mode, serving, step_s, NOW_S)
    return decision.reason if isinstance(decision, Hold) else None


def test_an_idle_server_lends_in_every_mode_but_closed() -> None:
    for mode in Mode:
        assert held(mode, IDLE) is (HoldReason.GATE_CLOSED if mode is Mode.CLOSED else None)


@pytest.mark.parametrize("mode", [Mode.SLO, Mode.QUIET])
def test_a_step_must_fit_before_the_deadline_with_serving_s_own(mode: Mode) -> None:
    """20 ms of slack are left: 30 ms to the deadline less 10 ms of serving's next decode step."""
    assert held(mode, BUSY, 0.0199) is None
    assert held(mode, BUSY, 0.0201) is HoldReason.NO_SLACK


@pytest.mark.parametrize("mode", [Mode.SLO, Mode.QUIET])
def test_rollouts_wait_for_prompts_also_for_those_on_their_way(mode: Mode) -> None:
    assert held(mode, WAITING, 0.0) is HoldReason.PROMPT_WAITS
    assert held(mode, attrs.evolve(BUSY, num_waiting=1), 0.0) is HoldReason.PROMPT_WAITS


def test_strict_lends_idle_time_only() -> None:
    assert held(Mode.STRICT, BUSY, 0.0) is HoldReason.SERVING_BUSY


def test_the_published_rule_lets_a_step_start_while_both_slacks_stay_positive() -> None:
    assert held(Mode.PAPER, BUSY, 5.0) is HoldReason.NO_SLACK
    assert held(Mode.PAPER, attrs.evolve(BUSY, last_step_end_s=NOW_S - 0.120), 0.019) is None
    assert held(Mode.PAPER, attrs.evolve(BUSY, last_step_end_s=NOW_S - 0.120), 0.021) is HoldReason.NO_SLACK
    assert held(Mode.PAPER, attrs.evolve(WAITING, oldest_arrival_s=NOW_S - 0.49), 0.009) is None
    assert held(Mode.PAPER, attrs.evolve(WAITING, oldest_arrival_s=NOW_S - 0.49), 0.011) is HoldReason.NO_SLACK


def test_the_published_rule_counts_the_prefill_of_the_most_urgent_prompt() -> None:
    prompt = attrs.evolve(WAITING, last_step_end_s=NOW_S, first_token_deadline_s=NOW_S + 0.020)
    assert held(Mode.PAPER, prompt, 0.019) is None
    assert held(Mode.PAPER, prompt, 0.021) is HoldReason.NO_SLACK


def test_doubt_closes_the_gate() -> None:
    assert held(Mode.SLO, None) is HoldReason.UNREADABLE
    assert held(Mode.SLO, attrs.evolve(IDLE, heartbeat_s=NOW_S - 1.1)) is HoldReason.STALE
    assert held(Mode.SLO, attrs.evolve(IDLE, heartbeat_s=NOW_S - 0.9)) is None
    assert held(Mode.SLO, attrs.evolve(IDLE, heartbeat_s=NOW_S + 1.1)) is HoldReason.STALE, "of the boot before"
    assert held(Mode.UNGATED, None) is None


def test_no_compute_is_lent_above_the_kv_bound() -> None:
    """Lending stretches the stay of serving's requests, and so their KV."""
    assert held(Mode.SLO, attrs.evolve(IDLE, kv_used_bytes=81)) is HoldReason.SERVING_KV
    assert held(Mode.SLO, attrs.evolve(IDLE, kv_used_bytes=80)) is None


def decoding(first_token_s: float, num_tokens: int, slo: Slo = CONFIG.slo, own_s: float = 0.0) -> Decoding:
    return Decoding(first_token_s, num_tokens, own_s, slo)


def test_the_deadline_is_the_nearest_of_gap_and_paces() -> None:
    gap_s, pace_s = 0.95 * (0.150 - 0.060), 0.9 * 0.150
    assert decode_deadline_s(CONFIG, Mode.SLO, 0.060, 10.0, []) == math.inf
    assert decode_deadline_s(CONFIG, Mode.SLO, 0.060, 10.0, [decoding(5.0, 1000)]) == pytest.approx(10.0 + gap_s)
    requests = [decoding(5.0, 1000), decoding(9.9, 1)]
    assert decode_deadline_s(CONFIG, Mode.SLO, 0.060, 10.0, requests) == pytest.approx(9.9 + pace_s)


def test_the_more_requests_decode_the_less_each_is_slowed_down() -> None:
    def pace_s(num_decoding: int) -> float:
        deadline_s = decode_deadline_s(CONFIG, Mode.SLO, 0.060, 100.0, [decoding(90.0, 70)] * num_decoding)
        return (deadline_s - 90.0) / 70

    full_s = CONFIG.pace_fill * CONFIG.slo.tpot_s
    assert pace_s(CONFIG.full_pace_decodes) == pytest.approx(full_s)
    assert pace_s(2 * CONFIG.full_pace_decodes) == pytest.approx(full_s / 2)
    assert pace_s(8 * CONFIG.full_pace_decodes) == pytest.approx(full_s / 8)


def test_every_class_has_its_own_pace_and_gap() -> None:
    fast = Slo(ttft_s=0.2, tpot_s=0.080)
    config = AdmissionConfig(classes={"fast": fast})
    assert (config.slo_of("fast"), config.slo_of("other"), config.slo_of(None)) == (fast, config.slo, config.slo)
    slow_only = decode_deadline_s(config, Mode.SLO, 0.050, 10.0, [decoding(9.95, 1)])
    with_fast = decode_deadline_s(config, Mode.SLO, 0.050, 10.0, [decoding(9.95, 1), decoding(5.0, 99, fast)])
    assert slow_only == pytest.approx(9.95 + 0.9 * 0.150)
    assert with_fast == pytest.approx(10.0 + 0.95 * (0.080 - 0.050))


def test_quiet_lends_nothing_to_a_busy_server_before_it_knows_its_requests() -> None:
    request = decoding(9.0, 50, own_s=1.0)
    assert decode_deadline_s(CONFIG, Mode.QUIET, 0.06, 10.0, [request], next_decode_s=0.010) == pytest.approx(10.010)
    paces = OwnPaces(lone_s=0.008, usual_s=0.009)
    known_s = decode_deadline_s(CONFIG, Mode.QUIET, 0.06, 10.0, [request], next_decode_s=0.010, paces=paces)
    assert known_s == pytest.approx(0.010 + quiet_start_s(CONFIG.quiet_stretch, paces, [request]))
    assert known_s > 10.020


def test_a_prefill_device_has_no_decode_to_keep_and_is_held_by_prompts_alone() -> None:
    config = AdmissionConfig(role=Role.PREFILL)
    assert decode_deadline_s(config, Mode.SLO, 0.0, 10.0, [decoding(1.0, 1)]) == math.inf
    prompts = attrs.evolve(WAITING, deadline_s=math.inf)
    assert decide(config, Mode.SLO, prompts, 0.0, NOW_S) == Hold(HoldReason.PROMPT_WAITS)
    assert decide(config, Mode.SLO, attrs.evolve(BUSY, deadline_s=math.inf), 0.2, NOW_S) is START
    assert arrival_reserve_s(config, 0.2, 8192, "p0") == 0.0, "the TPOT is not this device's affair"
    with pytest.raises(ConfigError, match=r"p0: a TTFT SLO of 0\.5 s.*8192 tokens \(0\.600 s\).*ttft_s"):
        arrival_reserve_s(config, 0.6, 8192, "p0")


def test_a_decode_device_is_held_by_prompts_too_but_keeps_no_chunk_for_them() -> None:
    config = AdmissionConfig(role=Role.DECODE)
    come = attrs.evolve(BUSY, num_waiting=1, oldest_arrival_s=NOW_S - 3)
    assert decide(config, Mode.SLO, come, 0.0, NOW_S) == Hold(HoldReason.PROMPT_WAITS)
    assert decide(config, Mode.PAPER, come, 0.019, NOW_S) is START, "there is no prefill slack here"
    assert not should_yield(config, Mode.SLO, come, NOW_S + 1, 0.0, NOW_S)
    assert arrival_reserve_s(config, 0.140, 4096, "d0") == 0.0, "no prompt chunk ever joins a step"


def test_the_tightest_class_decides_whether_an_slo_leaves_room() -> None:
    config = AdmissionConfig(classes={"fast": Slo(tpot_s=0.055)})
    with pytest.raises(ConfigError, match=r"TPOT SLO of 0\.055 s"):
        arrival_reserve_s(config, 0.0527, 2048, "s0")


def test_serving_yields_only_to_whom_it_helps() -> None:
    assert should_yield(CONFIG, Mode.SLO, BUSY, NOW_S + 0.001, 0.015, NOW_S)
    assert not should_yield(CONFIG, Mode.SLO, BUSY, NOW_S - 0.001, 0.015, NOW_S), "nobody wants the device"
    assert not should_yield(CONFIG, Mode.SLO, BUSY, NOW_S + 0.001, 0.025, NOW_S), "the step would not fit"
    assert not should_yield(CONFIG, Mode.SLO, WAITING, NOW_S + 0.001, 0.001, NOW_S), "a prompt waits"
    assert not should_yield(CONFIG, Mode.UNGATED, BUSY, NOW_S + 0.001, 0.001, NOW_S)
    assert not should_yield(CONFIG, Mode.SLO, attrs.evolve(BUSY, kv_used_bytes=81), NOW_S + 0.001, 0.001, NOW_S), (
        "no step"
    )
    assert not should_yield(CONFIG, Mode.CLOSED, BUSY, NOW_S + 0.001, 0.001, NOW_S)


def test_leases() -> None:
    lease = Budget(fencing_token=3, expires_s=NOW_S + 1, is_granted=True)
    assert check_lease(lease, 3, NOW_S) is None
    assert check_lease(None, 3, NOW_S) is HoldReason.UNREADABLE
    assert check_lease(lease, 4, NOW_S) is HoldReason.LEASE_FENCED
    assert check_lease(lease, 3, NOW_S + 1) is HoldReason.LEASE_EXPIRED
    assert check_lease(attrs.evolve(lease, is_granted=False), 3, NOW_S) is HoldReason.LEASE_MISSING


def test_an_slo_of_zero_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"slo.*tpot_s must be a positive number.*got 0"):
        load(AdmissionConfig, {"slo": {"tpot_s": 0}})
    with pytest.raises(ValueError, match="ttft_s"):
        Slo(ttft_s=math.nan)


def test_the_slo_must_leave_room_for_a_prefill_chunk_and_a_rollout_step() -> None:
    assert arrival_reserve_s(CONFIG, 0.0527, 2048, "s0") == pytest.approx(0.0606, abs=1e-4)
    with pytest.raises(ConfigError, match=r"s0: a TPOT SLO of 0\.15 s.*4096 tokens \(0\.130 s"):
        arrival_reserve_s(CONFIG, 0.130, 4096, "s0")
    named = AdmissionConfig(arrival_reserve_s=0.01)
    assert arrival_reserve_s(named, 0.05, 2048, "s0") == 0.01
    with pytest.raises(ConfigError, match="no room"):
        arrival_reserve_s(named, 0.145, 2048, "s0")


def test_start_is_one_value() -> None:
    assert decide(CONFIG, Mode.SLO, IDLE, 0.01, NOW_S) is START
