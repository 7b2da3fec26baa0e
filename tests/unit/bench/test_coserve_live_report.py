from __future__ import annotations

import importlib.util

import pytest

from rose.bench.coserve import report
from rose.bench.coserve.settings import LiveSettings
from rose.bench.coserve.virtual import VirtualSettings
from rose.bench.coserve.workloads import CoserveWorkload
from rose.bench.coserve.world import CoservePolicy, DeviceSetup, longest_step_s
from rose.errors import EngineError

WORKLOAD = CoserveWorkload(name="burst", rate_rps=3.0)
VIRTUAL = VirtualSettings(
    workloads=(WORKLOAD,),
    policies=(CoservePolicy.SLO,),
    num_seeds=1,
    duration_s=3.0,
    setup=DeviceSetup(warm_up_s=1.0),
)


def test_a_virtual_report_has_every_figure_and_says_why_one_is_missing():
    found = report.run_virtual_bench(VIRTUAL, (), lambda _: None)
    assert set(report.PROBE_KEYS) <= set(found)
    assert set(found["policies"]) == {"alone", "slo"}
    assert found["skipped"]["drain_s"] == "probe drain was not asked for"
    assert found["drain_s"] is None
    assert found["step_bound_ms"] == pytest.approx(longest_step_s(VIRTUAL.setup) * 1e3)
    assert {"machine", "versions", "commit", "date", "schema"} <= set(found)


def test_a_probe_that_fails_is_named_and_the_others_are_kept(monkeypatch):
    async def broken():
        message = "no pages"
        raise EngineError(message)

    monkeypatch.setattr(report, "measure_ledger", lambda: {"serving_us": 3.0, "rollout_us": 5.0})
    monkeypatch.setattr(report, "measure_attached", broken)
    found = report.run_virtual_bench(VIRTUAL, ("ledger", "attached"), lambda _: None)
    assert found["failed"] == {"attached": "no pages"}
    assert found["skipped"]["serving_throughput_attached_over_alone"] == "probe attached failed"
    assert found["ledger_us_per_step"] == 5.0


def test_figures_come_from_their_probes():
    probes = {
        "yield": {"slo": {"p99_ms": 11.0, "step_bound_ms": 17.0}},
        "drain": {"drain_s": 0.2},
        "reclaim": {"huge_ms_per_gib": 4.0, "small_ms_per_gib": 50.0},
        "ledger": {"serving_us": 3.0, "rollout_us": 5.0},
        "attached": {"serving_throughput_attached_over_alone": 0.99},
    }
    assert report._figures(probes) == {
        "yield_p99_ms": 11.0,
        "step_bound_ms": 17.0,
        "drain_s": 0.2,
        "reclaim_ms_per_gib": 4.0,
        "ledger_us_per_step": 5.0,
        "serving_throughput_attached_over_alone": 0.99,
    }


def test_a_live_report_without_anything_that_needs_engines_starts_none(monkeypatch):
    monkeypatch.setattr(report, "measure_ledger", lambda: {"serving_us": 3.0, "rollout_us": 5.0})
    monkeypatch.setattr(report.LiveRig, "start", None)
    found = report.run_live_bench(LiveSettings(policies=(), probes=("ledger",)), lambda _: None)
    assert found["kind"] == "live"
    assert found["ledger_us_per_step"] == 5.0
    assert found["skipped"]["static"].startswith("virtual time only")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_each_load_gets_its_figures(tmp_path):
    from rose.bench.coserve.drawings import draw_plots  # noqa: PLC0415 - after the skip

    found = report.run_virtual_bench(VIRTUAL, (), lambda _: None)
    drawn = draw_plots(tmp_path, found)
    assert [path.name for path in drawn] == ["coserve-burst-latency.svg", "coserve-burst-trade.svg"]
    assert all(path.read_text().startswith("<?xml") for path in drawn)
