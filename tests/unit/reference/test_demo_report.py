"""From what the arms measured to the summary, the timeline and the report."""

from __future__ import annotations

import json

import attrs
import pytest

from rose.observe.latency import RequestRecord, Slo
from rose.observe.report.page import render
from rose.observe.rollout import TrajectoryTime
from rose.observe.summary import VersionRecord
from rose.pool import EngineAccount
from rose.reference.arms import ArmResult, StepResult
from rose.reference.demo_config import DemoConfig
from rose.reference.demo_report import FleetLogs, RunRecord, build_figures, build_report, build_timeline
from rose.reference.load import HORIZON_S
from rose.reference.serving_site import ServingArm
from rose.types import DeviceId, EngineId, EngineKind, HopEnd

OWN, SHARED = DeviceId("own0"), DeviceId("shared0")
DEVICES = {EngineId("dedicated0"): OWN, EngineId("borrowed0"): SHARED, EngineId("serving0"): SHARED}
CONFIG = DemoConfig(steps=2, num_dedicated=1, num_borrowed=1, fixed_rollout_share=0.8)


def version(n: int, phase: str) -> VersionRecord:
    return VersionRecord(
        n=n,
        phase=phase,
        lr=1e-3,
        changed_fraction=0.5,
        codec="dense",
        bytes_dense=1000,
        bytes_sent=900,
        stage_s=0.1,
        pause_s=0.01,
    )


def step(number: int, start_s: float, rollout_s: float, *, phase: str = "learn", is_whole: bool = True) -> StepResult:
    times = tuple(
        TrajectoryTime(started_s=start_s, ended_s=start_s + rollout_s * share, num_tokens=100) for share in (0.5, 1.0)
    )
    return StepResult(
        step=number, phase=phase, reward=0.25, times=times, is_whole=is_whole, version=version(number, phase)
    )


def serving(*ttfts_s: float, unanswered: int = 0, duration_s: float = 20.0, rate_rps: float = 5.6) -> ServingArm:
    records = tuple(
        RequestRecord.from_token_times(
            index=index,
            device="serving0",
            arrived_s=float(index),
            token_times_s=[index + ttft_s, index + ttft_s + 0.02],
        )
        for index, ttft_s in enumerate(ttfts_s)
    )
    return ServingArm(
        records=records,
        num_sent=len(records) + unanswered,
        num_unanswered=unanswered,
        duration_s=duration_s,
        rate_rps=rate_rps,
    )


def arm(name: str, start_s: float, rollout_s: float, site: ServingArm, **changes) -> ArmResult:
    steps = (
        step(1, start_s, rollout_s),
        step(2, start_s + rollout_s, rollout_s, phase="sparse"),
    )
    account = EngineAccount(kind=EngineKind.BORROWED, num_attempts=7, num_rerouted=2)
    account.num_ended[HopEnd.EVICTED] = 1
    values = {
        "name": name,
        "started_s": start_s,
        "ended_s": start_s + 2 * rollout_s,
        "steps": steps,
        "serving": site,
        "success_first": 0.2,
        "success_last": 0.5,
        "is_bit_exact": True,
        "accounts": {"borrowed0": account, "dedicated0": EngineAccount(kind=EngineKind.DEDICATED, num_attempts=99)},
    }
    return ArmResult(**(values | changes))


def turns(start_s: float, *, late_s: float = 0.0001, num: int = 10) -> list[list[float]]:
    """Rows of ``StepRecord``: 10 ms a turn, one every 20 ms."""
    return [[start_s + 0.02 * i, 0.010, late_s, 0.0, 0.0, 0, 4] for i in range(num)]


def logs(start_s: float, **late_s: float) -> FleetLogs:
    rows = {engine: turns(start_s, late_s=late_s.get(engine, 0.0001)) for engine in DEVICES}
    return FleetLogs.read(rows, DEVICES)


@pytest.fixture
def record() -> RunRecord:
    arms = {
        "fixed": arm("fixed", 0.0, 10.0, serving(0.030, 0.040, 0.050)),
        "uncapped": arm("uncapped", 30.0, 8.0, serving(0.030), success_first=None, success_last=None),
        "rose": arm("rose", 60.0, 5.0, serving(0.034, 0.046, unanswered=1, rate_rps=5.5)),
        "ungated": arm("ungated", 90.0, 4.0, serving(0.060, 0.090), success_first=None, success_last=None),
    }
    return RunRecord(
        config=CONFIG,
        slo=Slo(ttft_ms=500, tpot_ms=150),
        load_source="two requests",
        shared_devices=(SHARED,),
        arms=arms,
        logs={name: logs(result.started_s) for name, result in arms.items()},
    )


def test_the_summary_says_what_the_arms_measured(record):
    summary = build_figures(record)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert (summary["device"], summary["k"]) == ("paced:h100:qwen2.5-7b+h100:qwen3-8b", 2.5)
    assert (summary["valid"], summary["invalid_reasons"]) == (True, [])
    assert summary["gain"] == {
        "rollout_throughput": pytest.approx(2.0),
        "rollout_throughput_over_uncapped": pytest.approx(8 / 5),
        "step_time": pytest.approx(12.5 / 7.5),
    }
    fixed, rose = summary["fixed"], summary["rose"]
    assert (fixed["rollout_s"], fixed["step_s"], fixed["rollout_share"]) == (10.0, 12.5, pytest.approx(0.8))
    assert (rose["rollout_s"], rose["step_s"]) == (5.0, pytest.approx(7.5)), (
        "training takes the same modelled time in both arms"
    )
    assert (fixed["success_first"], fixed["success_last"]) == (0.2, 0.5)
    assert summary["ungated"]["success_last"] is None
    assert summary["borrowed"] == {
        "turns": 7,
        "evicted": 1,
        "rerouted": 2,
        "device_seconds": pytest.approx(0.1),
    }
    assert summary["sync"]["phases"].keys() == {"learn", "sparse"}


def test_delays_are_those_of_the_same_requests_and_unanswered_ones_count(record):
    site = build_figures(record)["serving"]
    assert site["rate_rps"] == 5.5
    assert "added_delay_mean_ms" not in site["alone"]
    assert site["shared"]["added_delay_mean_ms"] == pytest.approx(5.0)
    assert site["ungated"]["added_delay_mean_ms"] == pytest.approx(40.0)
    assert (site["shared"]["requests"], site["shared"]["violations_fraction"]) == (3, pytest.approx(1 / 3))
    assert site["alone"]["ttft_p50_ms"] == pytest.approx(40.0)


def test_the_short_arms_may_be_left_out(record):
    summary = build_figures(attrs.evolve(record, arms={name: record.arms[name] for name in ("fixed", "rose")}))
    assert summary["ungated"] is None
    assert summary["serving"]["ungated"] is None
    assert summary["gain"]["rollout_throughput_over_uncapped"] is None


def with_arm(record: RunRecord, name: str, **changes) -> RunRecord:
    return attrs.evolve(record, arms={**record.arms, name: attrs.evolve(record.arms[name], **changes)})


def problems(record: RunRecord) -> list[str]:
    summary = build_figures(record)
    assert summary["valid"] is (not summary["invalid_reasons"])
    return summary["invalid_reasons"]


def test_a_disturbed_engine_makes_the_run_invalid(record):
    disturbed = attrs.evolve(record, logs={**record.logs, "uncapped": logs(30.0, serving0=0.006)})
    (problem,) = problems(disturbed)
    assert problem.startswith(
        "pacing disturbed in uncapped: serving0 is late by 6.0 ms (P99) of a median step of 10.0 ms"
    )


def test_lost_trajectories_make_the_run_invalid(record):
    steps = (step(1, 60.0, 5.0, is_whole=False), *record.arms["rose"].steps[1:])
    assert problems(with_arm(record, "rose", steps=steps)) == ["rose step 1 lost trajectories"]


def test_a_lost_engine_makes_the_run_invalid(record):
    rows = {engine: turns(60.0) for engine in DEVICES if engine != "borrowed0"}
    partial = FleetLogs.read(rows, DEVICES)
    (problem,) = problems(attrs.evolve(record, logs={**record.logs, "rose": partial}))
    assert problem.startswith("borrowed0 was lost")
    assert "rose" in problem


def test_an_arm_that_outlasts_its_load_makes_the_run_invalid(record):
    long = attrs.evolve(record.arms["fixed"].serving, duration_s=HORIZON_S + 1)
    (problem,) = problems(with_arm(record, "fixed", serving=long))
    assert "fixed took 601 s" in problem
    assert "600 s" in problem


def test_the_timeline_has_every_lane_and_every_rollout(record):
    timeline = build_timeline(record)
    lanes = {(span.device, span.lane) for span in timeline.spans}
    assert lanes == {(OWN, "rollout"), (SHARED, "rollout"), (SHARED, "serving"), ("job", "rollout")}
    rollouts = {span.name: span for span in timeline.spans if span.device == "job"}
    assert rollouts.keys() == {f"{name} step {n}" for name in record.arms for n in (1, 2)}
    second = rollouts["rose step 2"]
    assert (second.start_s, second.end_s, second.kind) == (65.0, 70.0, "sparse")
    assert sum(span.busy_s for span in timeline.spans if span.lane == "serving") == pytest.approx(4 * 10 * 0.010)


def test_the_report_shows_the_record_and_can_be_rendered(record):
    summary, timeline = build_figures(record), build_timeline(record)
    data = build_report(record, summary, timeline)
    strips = {(strip.arm, strip.device): strip for strip in data.strips}
    assert strips.keys() == {(name, device) for name in ("fixed", "rose") for device in (OWN, SHARED)}
    shared = strips["rose", SHARED]
    assert shared.has_serving
    assert not strips["rose", OWN].has_serving
    assert sum(shared.serving) * shared.bin_s == pytest.approx(0.1), "the strip starts with its arm"
    busy = {(share.arm, share.device): share for share in data.busy}
    assert busy["rose", SHARED].serving_fraction == pytest.approx(0.1 / 10)
    assert busy["fixed", OWN].serving_fraction == 0.0
    assert data.latency["ungated"].ttft_ms == pytest.approx((60.0, 90.0))
    assert [(figure.step, figure.success) for figure in data.steps["rose"]] == [(0, 0.2), (1, None), (2, 0.5)]
    assert data.completion_s == {"fixed": (5.0, 10.0), "rose": (2.5, 5.0)}
    assert data.reference_success is not None
    text = " ".join(data.assumptions)
    for said in (
        "8 tokens of the modelled agent",
        "2.50 modelled s a step",
        "At most 16 turns",
        "150 supervised steps",
    ):
        assert said in text
    page = render(data, {})
    assert "two requests" in page
    assert "2.00x" in page


@pytest.mark.parametrize("changes", [{"env": "my.game:Game"}, {"num_eval_maps": 64}])
def test_other_maps_have_no_line_to_clear(record, changes):
    config = attrs.evolve(CONFIG, **changes)
    other = attrs.evolve(record, config=config)
    assert build_report(other, build_figures(other), build_timeline(other)).reference_success is None
