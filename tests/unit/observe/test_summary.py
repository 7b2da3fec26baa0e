from __future__ import annotations

import json

import attrs
import pytest
from synthetic_run import ROSE, figures, versions

from rose.observe.latency import LatencySummary
from rose.observe.summary import (
    ServingFigures,
    build_summary,
    comparison_rows,
    is_over_slo,
    serving_rows,
    size,
    sync_rows,
)

ARM_KEYS = {
    "rollout_s", "step_s", "rollout_tokens_per_s", "rollout_share", "p75_fraction", "success_first", "success_last",
}  # fmt: skip
LATENCY_KEYS = {
    "requests", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "itl_p99_ms",
    "violations_fraction",
}  # fmt: skip
PHASE_KEYS = {
    "lr",
    "versions",
    "changed_fraction",
    "codec",
    "versions_by_codec",
    "bytes_dense",
    "bytes_sent",
    "stage_s",
    "pause_s",
}


def latency(**changes):
    base = LatencySummary(
        num_requests=290, ttft_p50_ms=40.0, ttft_p90_ms=90.0, ttft_p99_ms=180.0, tpot_p50_ms=40.0, tpot_p99_ms=47.0,
        itl_p99_ms=80.0, violations_fraction=0.0,
    )  # fmt: skip
    return ServingFigures(latency=attrs.evolve(base, **changes))


def test_the_summary_has_the_documented_keys():
    summary = build_summary(figures())
    assert {"device", "k", "valid", "fixed", "rose", "ungated", "gain", "serving", "sync", "borrowed"} <= summary.keys()
    assert all(summary[arm].keys() == ARM_KEYS for arm in ("fixed", "rose", "ungated"))
    assert summary["gain"].keys() == {"rollout_throughput", "rollout_throughput_over_uncapped", "step_time"}
    serving = summary["serving"]
    assert serving["slo"] == {"ttft_ms": 500.0, "tpot_ms": 150.0}
    assert serving["alone"].keys() == LATENCY_KEYS
    assert serving["shared"].keys() >= LATENCY_KEYS | {"added_delay_mean_ms"}
    assert all(phase.keys() == PHASE_KEYS for phase in summary["sync"]["phases"].values())
    assert summary["borrowed"].keys() == {"turns", "evicted", "rerouted", "device_seconds"}


def test_the_summary_is_json_even_with_figures_that_are_not_finite():
    summary = build_summary(figures(rose=attrs.evolve(ROSE, success_last=float("nan"))))
    assert json.loads(json.dumps(summary, allow_nan=False))["rose"]["success_last"] is None


def test_gains_say_how_much_faster_rose_is():
    gain = build_summary(figures())["gain"]
    assert gain["rollout_throughput"] == pytest.approx(2377 / 1630)
    assert gain["rollout_throughput_over_uncapped"] == pytest.approx(2377 / 1804)
    assert gain["step_time"] == pytest.approx(35.9 / 26.1)


def test_arms_that_were_not_measured_are_null():
    summary = build_summary(figures(ungated=None, serving_ungated=None, uncapped_tokens_per_s=None))
    assert summary["ungated"] is None
    assert summary["serving"]["ungated"] is None
    assert summary["gain"]["rollout_throughput_over_uncapped"] is None


def test_a_run_is_valid_without_reasons_against_it():
    assert build_summary(figures())["valid"] is True
    summary = build_summary(figures(invalid_reasons=("rate error 3 %",)))
    assert (summary["valid"], summary["invalid_reasons"]) == (False, ["rate error 3 %"])


def test_each_phase_has_figures_of_its_own():
    phases = build_summary(figures())["sync"]["phases"]
    assert list(phases) == ["learn", "sparse"]
    assert (phases["learn"]["versions"], phases["sparse"]["versions"]) == (12, 4)
    assert (phases["learn"]["codec"], phases["sparse"]["codec"]) == ("dense", "sparse")
    assert phases["sparse"]["bytes_sent"] == 34_000 + 31_000 + 28_000 + 25_000
    assert phases["sparse"]["changed_fraction"] == pytest.approx(0.038)


def test_a_phase_has_the_codec_of_most_of_its_versions_and_counts_all():
    one = versions()[0]
    others = [attrs.evolve(one, n=n, codec="sparse") for n in (2, 3)]
    phase = build_summary(figures(versions=(one, *others)))["sync"]["phases"]["learn"]
    assert phase["codec"] == "sparse"
    assert phase["versions_by_codec"] == {one.codec: 1, "sparse": 2}


@pytest.mark.parametrize(
    ("changes", "is_over"),
    [({}, False), ({"ttft_p99_ms": 501.0}, True), ({"tpot_p99_ms": 150.1}, True), ({"ttft_p99_ms": None}, False)],
)
def test_the_slo_is_broken_by_either_p99(changes, is_over):
    assert is_over_slo(build_summary(figures(shared=latency(**changes))), "shared") is is_over


def test_comparison_rows_divide_times_and_subtract_success():
    rows = {row[0]: row[1:] for row in comparison_rows(build_summary(figures()))}
    assert rows["step time (s)"] == ("35.9", "26.1", "0.73x")
    assert rows["rollout throughput (tokens/s)"] == ("1,630", "2,377", "1.46x")
    assert rows["success on held-out maps, after"] == ("0.43", "0.41", "-0.02")


def test_rows_show_a_hyphen_for_what_was_not_measured():
    run = figures(rose=attrs.evolve(ROSE, success_last=None), ungated=None, serving_ungated=None)
    assert comparison_rows(build_summary(run))[-1][2:] == ("-", "-")
    assert {row[4] for row in serving_rows(build_summary(run))} == {"-"}


def test_serving_rows_give_the_inflation_and_the_slo():
    run = figures(alone=latency(), shared=latency(ttft_p99_ms=198.0))
    rows = {row[0]: row[1:] for row in serving_rows(build_summary(run))}
    assert rows["TTFT P99 (ms)"][:3] == ("180.0", "198.0", "1.10x")
    assert rows["TTFT P99 (ms)"][4] == "500"


def test_sync_rows_are_means_a_version():
    learn, sparse = sync_rows(build_summary(figures()))
    assert learn[4:8] == ("dense", "608 kB", "608 kB", "100.0 %")
    assert sparse[4:8] == ("sparse", "608 kB", "29.5 kB", "4.9 %")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(999, "999 B"), (607_744, "608 kB"), (1.5e6, "1.5 MB"), (16.4e9, "16.4 GB")]
)
def test_sizes_have_three_digits(num_bytes, text):
    assert size(num_bytes) == text
