from __future__ import annotations

import itertools
import os

import pytest

from rose.bench.coserve import live, live_runs, probes
from rose.bench.coserve.live import ROLLOUT, SERVING, LiveRun
from rose.bench.coserve.settings import LiveSettings
from rose.errors import EngineError
from rose.observe.latency import RequestRecord

SETTINGS = LiveSettings(num_runs=2)


def record(index, ttft_s, arrived_s=None, gap_s=0.01, num_tokens=3):
    at = float(index) if arrived_s is None else arrived_s
    times = [at + ttft_s + gap_s * i for i in range(num_tokens)]
    return RequestRecord.from_token_times(index=index, device="serving", arrived_s=at, token_times_s=times)


def run(policy, ttfts_s, number=1, *, problems=(), num_unanswered=0, net_tokens=1000, rows=None, skip=()):
    return LiveRun(
        policy=policy,
        label=f"{policy}-{number}",
        duration_s=10.0,
        requests=tuple(record(i, ttft) for i, ttft in enumerate(ttfts_s) if i not in skip),
        num_unanswered=num_unanswered,
        net_tokens=net_tokens,
        decoded_tokens=0,
        thrown_tokens=0,
        num_evicted=0,
        pacing={},
        turns=rows or {SERVING: [], ROLLOUT: []},
        problems=problems,
    )


def summarise(*runs):
    return live_runs.summarise_runs(SETTINGS, runs)


def test_added_delay_is_paired_with_the_mean_of_serving_alone():
    found = summarise(
        run("alone", [0.10, 0.20]), run("alone", [0.12, 0.22], 2), run("slo", [0.13, 0.24]), run("slo", [0.15, 0.24], 2)
    )
    slo = found["policies"]["slo"]
    assert [one["added_delay_mean_ms"] for one in slo["runs"]] == pytest.approx([25.0, 35.0])
    assert slo["added_delay_mean_ms"] == pytest.approx(30.0)
    assert slo["spread"]["added_delay_mean_ms"] == pytest.approx(50**0.5)


def test_a_run_of_serving_alone_is_held_against_the_others_of_its_kind():
    alone = summarise(run("alone", [0.10, 0.20]), run("alone", [0.12, 0.22], 2))["policies"]["alone"]
    assert [one["added_delay_mean_ms"] for one in alone["runs"]] == pytest.approx([-20.0, 20.0])
    assert alone["added_delay_mean_ms"] == pytest.approx(0.0)


def test_a_request_without_an_answer_is_a_violation_and_has_no_delay():
    found = summarise(run("alone", [0.1] * 4), run("slo", [0.1] * 4, num_unanswered=1, skip={2}))
    slo = found["policies"]["slo"]
    assert slo["num_requests"] == 3
    assert slo["violations_fraction"] == pytest.approx(1 / 4)
    assert slo["added_delay_mean_ms"] == pytest.approx(0.0)


def test_disturbed_runs_are_named_and_never_counted():
    found = summarise(
        run("alone", [0.1]),
        run("slo", [9.0], problems=("late",)),
        run("slo", [0.2], 2),
        run("paper", [1.0], problems=("x",)),
    )
    assert found["policies"]["slo"]["num_runs"] == 1
    assert found["policies"]["slo"]["ttft_p99_ms"] == pytest.approx(200.0)
    assert "paper" not in found["policies"]
    assert (found["num_runs"], found["num_invalid"]) == (4, 2)
    assert found["problems"] == {"slo-1": ["late"], "paper-1": ["x"]}


def test_without_a_valid_run_of_serving_alone_there_is_nothing_to_report():
    found = summarise(run("alone", [0.1], problems=("late",)), run("slo", [0.1]))
    assert found["policies"] == {}


def test_policies_are_compared_by_delay_and_tokens():
    found = summarise(
        run("alone", [0.1]),
        run("slo", [0.11], net_tokens=900),
        run("paper", [0.14], net_tokens=1000),
        run("ungated", [0.13], net_tokens=450),
    )
    assert found["comparison"] == pytest.approx(
        {
            "paper_delay_over_slo": 4.0,
            "slo_tokens_over_paper": 0.9,
            "ungated_delay_over_slo": 3.0,
            "slo_tokens_over_ungated": 2.0,
        }
    )


def test_every_policy_runs_once_before_any_runs_twice_and_alone_is_always_among_them():
    planned = list(live_runs.plan_runs(LiveSettings(policies=("slo", "paper"), num_runs=2)))
    assert planned == [(policy, number) for number in (1, 2) for policy in ("alone", "slo", "paper")]
    assert list(live_runs.plan_runs(LiveSettings(policies=()))) == []


def test_tokens_are_those_of_turns_within_the_run():
    rows = [[1.0, 0.1, 0, 0, 0, 64, 8], [2.0, 0.1, 0, 0, 0, 0, 9], [3.0, 0.1, 0, 0, 0, 100, 0]]
    assert live._num_tokens(rows, 3.0) == 81


@pytest.mark.parametrize(("num_cores", "k"), [(1, 4.0), (2, 2.0), (4, 1.0), (64, 1.0)])
def test_the_clock_is_as_slow_as_the_cores_need(monkeypatch, num_cores, k):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    assert live.choose_k() == k


def test_waits_are_from_arrival_to_the_start_of_the_prefill():
    rows = {
        SERVING: [[0.05, 0.02, 0, 0, 0, 512, 0], [0.07, 0.01, 0, 0, 0, 0, 1], [1.01, 0.02, 0, 0, 0, 512, 0]],
        ROLLOUT: [],
    }
    seen = run("slo", [0.1, 0.1], rows=rows)
    assert probes.prefill_waits_s(seen) == pytest.approx([0.05, 0.01])
    rows[SERVING].pop()
    with pytest.raises(EngineError, match="1 prefills of 2 requests"):
        probes.prefill_waits_s(seen)


def test_idle_time_is_used_by_steps_and_their_host_gaps():
    rows = {SERVING: [[0.0, 3.9985, 0, 0, 0, 1, 0]], ROLLOUT: [[5.0, 2.9985, 0, 0, 0, 0, 1]]}
    assert probes.idle_used_fraction(run("slo", [0.1], rows=rows)) == pytest.approx(0.5)


def test_sparse_requests_never_meet():
    arrivals = probes.sparse_arrivals(50, seed=3)
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(arrivals)]
    assert min(gaps) > 0.3
    assert arrivals == probes.sparse_arrivals(50, seed=3)


def test_a_step_of_the_ledger_costs_microseconds_on_both_sides():
    found = probes.measure_ledger(num_steps=100)
    assert set(found) == {"serving_us", "rollout_us"}
    assert all(0.5 < value < 1000 for value in found.values())
