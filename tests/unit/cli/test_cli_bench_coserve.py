from __future__ import annotations

import json

import pytest

from rose.bench.coserve import report
from rose.bench.coserve.settings import LIVE_POLICIES, PROBES
from rose.cli.main import main

RUN = ["bench", "coserve"]
QUICK = [*RUN, "--seeds", "1", "--duration", "2", "--rate", "3", "--processes", "1", "--probes", "none"]
KEYS = {
    "policies",
    "yield_p99_ms",
    "step_bound_ms",
    "drain_s",
    "reclaim_ms_per_gib",
    "ledger_us_per_step",
    "serving_throughput_attached_over_alone",
    "machine",
    "versions",
    "commit",
}
POLICY_KEYS = {
    "ttft_p50_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "violations_fraction",
    "windows_broken",
    "itl_p99_ms",
    "added_delay_mean_ms",
    "added_delay_p99_ms",
    "rollout_net_tokens",
    "evicted",
}


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trace", "nope"], "no load 'nope': neither a trace file nor one of burst, burst-40, burst-80"),
        (["--trace", "azure"], "no load 'azure'"),
        (
            ["--trace", "azure", "--traces", "."],
            "--trace azure: there is no file azure2023_conv.csv.gz; give its folder",
        ),
        (["--trace", ""], "--trace is empty"),
        (["--policies", "slo,best"], "--policies: there is no 'best'; choose of alone, ungated, static"),
        (["--probes", "speed"], "--probes: there is no 'speed'; choose of ledger"),
        (["--rate", "0"], "'0' is not a number above 0"),
        (["--rate", "1", "--load", "0.5"], "not allowed with argument"),
        (["--live", "--virtual"], "not allowed with argument"),
        (["--live", "--trace", "burst,burst-40"], "a live run takes one load, got burst, burst-40"),
        (["--seeds", "0"], "'0' is not a whole number >= 1"),
        (["--duration", "-3"], "'-3' is not a number above 0"),
        (["--out", "/dev/null/x"], "cannot make folder /dev/null/x"),
        (["--wrong"], "unknown option --wrong"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, arguments, complaint):
    assert main([*RUN, *arguments]) == 2
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert complaint in err
    assert not out


def test_json_is_one_object_with_the_promised_keys(capsys, here):
    assert main([*QUICK, "--policies", "paper,slo,quiet", "--json", "--out", "results"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) >= KEYS
    assert set(printed["policies"]) == {"alone", "paper", "slo", "quiet"}
    assert all(set(figures) >= POLICY_KEYS for figures in printed["policies"].values())
    assert json.loads((here / "results" / "coserve.json").read_text()) == printed


def test_a_named_trace_that_is_absent_is_left_out_with_a_message(capsys):
    assert main([*QUICK, "--policies", "slo", "--trace", "burst,azure", "--traces", ".", "--json"]) == 0
    out, err = capsys.readouterr()
    assert set(json.loads(out)["workloads"]) == {"burst"}
    assert "left out: --trace azure: there is no file azure2023_conv.csv.gz" in err


def test_tables_show_policies_and_what_was_not_measured(capsys):
    assert main([*QUICK, "--policies", "slo"]) == 0
    printed = capsys.readouterr().out
    for text in ("burst, virtual", "TTFT P50", "windows broken", "slo", "drain_s: not measured, probe drain"):
        assert text in printed


def test_a_live_run_gets_what_was_asked_for(capsys, monkeypatch):
    asked = []

    def run_live_bench(settings, tell):
        asked.append(settings)
        return {"kind": "live", "policies": {}, "skipped": {}, "failed": {}, **dict.fromkeys(report.PROBE_KEYS)}

    monkeypatch.setattr(report, "run_live_bench", run_live_bench)
    assert main([*RUN, "--live", "--runs", "2", "--duration", "5", "--policies", "slo,static", "--k", "3"]) == 0
    assert main([*RUN, "--live", "--probes", "none"]) == 0
    assert "static is left out: virtual time only" in capsys.readouterr().err
    assert (asked[0].policies, asked[0].num_runs, asked[0].duration_s, asked[0].k) == (("slo",), 2, 5.0, 3.0)
    assert asked[0].probes == PROBES
    assert (asked[1].policies, asked[1].probes, asked[1].duration_s) == (LIVE_POLICIES, (), 24.0)


def test_a_failed_probe_is_an_error_after_the_others_were_shown(capsys, monkeypatch):
    def run_virtual_bench(settings, probes, tell):
        found = dict.fromkeys(report.PROBE_KEYS) | {"drain_s": 0.3}
        return {"kind": "virtual", "policies": {}, "skipped": {}, "failed": {"yield": "the engine is gone"}, **found}

    monkeypatch.setattr(report, "run_virtual_bench", run_virtual_bench)
    assert main(RUN) == 2
    out, err = capsys.readouterr()
    assert "kill switch to drained: 0.3 s" in out
    assert "rose: error: yield: the engine is gone" in err
