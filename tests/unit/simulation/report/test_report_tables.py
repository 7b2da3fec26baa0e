from __future__ import annotations

import pytest
from synthetic_study import CONFIG, problem_sweep, study_result, sweep

from rose.simulation.report import tables
from rose.simulation.report.data import read_study


def column(table, head):
    heads, rows = table
    return {row[0]: row[heads.index(head)] for row in rows}


def test_a_cell_has_the_mean_and_in_a_second_line_the_range():
    table = tables.by_strategy(read_study(study_result(["paper", "spot"])).strategies, tables.JOB)
    assert column(table, "end-to-end gain")["paper"] == "1.33x\n1.29x..1.37x"
    assert list(column(table, "step (s)")) == ["fixed", "paper", "spot"]


def test_a_figure_that_nobody_has_is_no_column():
    result = study_result(["paper"])
    del result["paper"]["borrowed_tokens"]
    heads, _ = tables.by_strategy(read_study(result).strategies, tables.JOB)
    assert "borrowed tokens" not in heads
    assert tables.by_strategy((), tables.JOB) is None


def test_serving_has_a_row_for_it_alone_and_none_for_who_is_not_beside_it():
    table = tables.serving(read_study(study_result(["paper", "spot"])))
    assert list(column(table, "TTFT P99 (ms)")) == ["alone", "paper"]
    assert column(table, "TTFT P50 (ms)")["alone"] == "71.0"


def test_published_figures_stand_beside_the_same_strategy_and_our_own():
    heads, rows = tables.published(read_study(study_result(["paper", "default", "spot"])))
    assert heads == ("", "published", "simulated", "simulated / published", "default")
    found = {row[0]: row[1:] for row in rows}
    assert found["paper: rollout"][0] == "496 s"
    assert found["paper: rollout"][1].startswith("497 s\n")
    assert found["paper: rollout"][2] == "1.00"
    assert found["paper: rollout"][3].startswith("405 s\n")
    assert found["fixed: rollout's share of the step"][1].startswith("86.9 %")
    assert found["fixed: rollout's share of the step"][3] == "-"
    assert found["spot: allocation overhead"][1].startswith("7.1 %")
    assert found["serving_alone: TTFT P99"][1] == "315 ms"


def test_a_published_figure_without_ours_is_still_shown():
    result = {**study_result(["spot"]), "published": {"end_to_end_gain": 1.31}}
    assert tables.published(read_study(result))[1] == [("paper: end-to-end gain", "1.31x", "-", "-", "-")]


def test_a_sweep_has_a_row_a_value_and_strategy():
    study = read_study({**study_result(["paper"]), "sweep": sweep("link", "Gbps", [10, 100], ["paper"])})
    _, rows = tables.sweep(study, study.sweeps[0])
    assert [row[:2] for row in rows] == [
        ("10 Gbps", "fixed"),
        ("10 Gbps", "paper"),
        ("100 Gbps", "fixed"),
        ("100 Gbps", "paper"),
    ]
    bare = read_study({**study_result([]), "sweep": {"axis": "load", "unit": "", "points": [{"value": 1}]}})
    assert tables.sweep(bare, bare.sweeps[0]) is None
    assert problem_sweep()["points"]


def test_the_overview_has_a_row_a_study_and_a_column_a_strategy():
    studies = [
        read_study(study_result(names, name=name)) for name, names in (("a", ["paper", "spot"]), ("b", ["paper"]))
    ]
    heads, rows = tables.overview(studies)
    assert heads == ("", "published", "paper", "spot", "floor", "Amdahl bound")
    assert [row[0] for row in rows] == ["a", "b"]
    assert rows[1][3] == "-"
    assert rows[0][-1] == "7.63x"
    assert tables.overview([read_study(study_result([]))]) is None


def test_every_setting_has_its_dotted_name():
    rows = dict(tables.settings(CONFIG))
    assert rows["serving.ttft_slo_s"] == "0.5"
    assert rows["loop.algorithm"] == "grpo"
    assert "serving.trace" not in rows
    with pytest.raises(KeyError):
        rows["serving"]
