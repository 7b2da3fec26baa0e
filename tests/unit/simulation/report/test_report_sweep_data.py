from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from synthetic_study import problem_sweep, study_result, sweep

from rose.simulation.report.data import read_study
from rose.simulation.report.sweep_data import (
    GAIN,
    bound_lines,
    bounds_at,
    drawn_figures,
    gain_bounds,
    is_problem,
    names_of,
    slot_uses,
    values_of,
    view,
)


def swept_study(swept, names=("paper", "spot")):
    study = read_study({**study_result(names), "sweep": swept})
    return study, study.sweeps[0]


def test_values_and_names_of_a_figure():
    study, swept = swept_study(sweep("load", "", [0.1, 0.9], ["paper", "spot"]))
    assert names_of(study, swept, GAIN) == ["paper", "spot"]
    assert names_of(study, swept, "rollout_s") == ["fixed", "paper", "spot"]
    assert names_of(study, swept, "ttft_p99_ms") == ["paper"]
    assert [at for at, _ in values_of(swept, "paper", GAIN)] == [0.1, 0.9]
    assert drawn_figures(study, swept) == [GAIN, "ttft_p99_ms", "tpot_p99_ms"]
    assert drawn_figures(*swept_study(problem_sweep())) == []


def test_bounds_are_drawn_where_they_are_near():
    swept = sweep("load", "", [0.1, 0.9], ["paper", "spot"])
    for amdahl, names in ((2.0, ["fixed", "Amdahl bound"]), (7.6, ["fixed"])):
        for point in swept["points"]:
            point["amdahl_gain"] = amdahl
        study, read = swept_study(swept)
        assert [name for name, _ in bound_lines(study, read, GAIN)] == names
        assert gain_bounds(read) == [("Amdahl bound", [(0.1, amdahl), (0.9, amdahl)])]


def test_the_floor_is_a_bound_of_the_gain():
    swept = sweep("load", "", [0.1, 0.9], ["paper", "spot"])
    swept["points"][0]["floor_gain"] = 1.68
    study, read = swept_study(swept)
    assert ("floor", [(0.1, 1.68)]) in bound_lines(study, read, GAIN)
    assert bounds_at(read, lambda point: point.floor_s) == [(0.1, 372.0), (0.9, 372.0)]


def test_serving_is_bound_by_itself_alone_and_the_slo():
    study, swept = swept_study(sweep("load", "", [0.1, 0.9], ["paper", "spot"]))
    assert [name for name, _ in bound_lines(study, swept, "ttft_p99_ms")] == ["serving alone", "SLO"]
    assert dict(bound_lines(study, swept, "ttft_p99_ms"))["SLO"] == [(0.1, 500.0), (0.9, 500.0)]
    points = [{**point, "serving_alone": None} for point in sweep("load", "", [0.1], ["paper", "spot"])["points"]]
    study, swept = swept_study({"axis": "load", "unit": "", "points": points})
    assert [name for name, _ in bound_lines(study, swept, "ttft_p99_ms")] == ["SLO"]


def test_only_a_sweep_of_the_jobs_own_gpus_shows_the_problem():
    study, swept = swept_study(problem_sweep([4, 8]))
    assert is_problem(swept)
    assert [at for at, _ in slot_uses(study, swept)] == [4.0, 8.0]
    assert not is_problem(swept_study(sweep("load", "", [0.1], ["paper", "spot"]))[1])


@given(
    means=st.lists(st.floats(min_value=1.0, max_value=1e5), min_size=1, max_size=5),
    reach=st.floats(min_value=1.0, max_value=50.0),
)
def test_every_mean_is_in_view_and_a_cut_is_told(means, reach):
    points = [
        {
            "value": index,
            "paper": {"ttft_p99_ms": mean, "spread": {"ttft_p99_ms": {"min": mean / reach, "max": mean * reach}}},
        }
        for index, mean in enumerate(means)
    ]
    study, swept = swept_study({"axis": "load", "unit": "", "points": points}, ["paper"])
    shown = view(study, swept, "ttft_p99_ms")
    assert shown.low < min(means)
    assert shown.high > max([*means, 500.0])
    assert not shown.is_log or shown.low > 0
    is_whole = shown.low <= min(means) / reach and max(means) * reach <= shown.high
    assert is_whole or shown.is_cut
