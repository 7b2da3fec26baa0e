from __future__ import annotations

import io
from copy import deepcopy

import pytest
from rich.console import Console
from summary_example import SUMMARY

from rose.cli.tables import demo_table

PHASE = {
    "lr": 1e-6, "versions": 4, "changed_fraction": 0.02, "codec": "sparse", "bytes_dense": 2_400_000,
    "bytes_sent": 120_000, "stage_s": 0.04, "pause_s": 0.006,
}  # fmt: skip


def shown(summary, width=100):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(demo_table(summary))
    return console.file.getvalue()


@pytest.fixture
def summary():
    return deepcopy(SUMMARY)


def test_the_whole_result_fits_eighty_columns(summary):
    summary["sync"]["phases"] = {"sparse": PHASE}
    summary["gain"]["rollout_throughput_over_uncapped"] = 1.26
    text = shown(summary, width=80)
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    for part in ("1.40x", "1.26x over fixed without its slot cap", "TTFT P99 (ms)", "600 kB", "5.0 %", "bit-exact"):
        assert part in text


def test_an_invalid_run_says_repeat_and_why(summary):
    summary.update(valid=False, invalid_reasons=["lateness P99 9 ms"])
    assert shown(summary).startswith("invalid, repeat: lateness P99 9 ms")


def test_a_broken_slo_and_wrong_bits_are_told(summary):
    summary["serving"]["shared"]["tpot_p99_ms"] = 151.0
    summary["sync"]["bit_exact"] = False
    text = shown(summary)
    assert "serving SLO broken" in text
    assert "NOT bit-exact" in text
