from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from synthetic_study import problem_sweep, study_result, sweep

from rose.simulation.report import figures, looks, sweep_figures, sweep_texts
from rose.simulation.report.data import read_study

AXES = (
    ("borrowed", "GPUs", [0, 1, 2, 4, 8, 16, 32, 64]),
    ("load", "", [0.1, 0.5, 0.9]),
    ("link", "Gbps", [10, 25, 50, 100, 200]),
    ("scale", "", [1, 2, 4, 100]),
    ("layout", "", ["colocated", "pd"]),
    ("link.latency_s", "s", [0.002]),
)


def prepared(names=None, **change):
    study = read_study({**study_result(names), **change})
    return study, looks.assign_looks([study])


def texts_of(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def row_names(axis):
    return [label.get_text() for label in axis.get_yticklabels()]


def legend_names(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def vertical_lines(axis):
    return sorted(line.get_xdata()[0] for line in axis.lines if list(line.get_ydata()) == [0, 1])


def drawn(figure):
    """Draw once, with a canvas and no screen: what overlaps or warns shows here."""
    with mpl.rc_context(looks.RC_PARAMS):
        FigureCanvasAgg(figure).draw()
    return figure


def test_gain_has_a_bar_a_strategy_whiskers_bounds_and_values():
    study, styles = prepared(amdahl_gain=2.0)
    figure = drawn(figures.gain(study, styles))
    axis = figure.axes[0]
    assert row_names(axis) == [strategy.name for strategy in study.strategies[1:]]
    assert [bar.get_width() for bar in axis.patches] == [s.get("end_to_end_gain") for s in study.strategies[1:]]
    assert vertical_lines(axis) == pytest.approx([1.0, 801 / 477, 2.0])
    assert "1.57x" in texts_of(figure)
    whisker = next(line for line in axis.lines if list(line.get_ydata()) == [1, 1])
    assert list(whisker.get_xdata()) == pytest.approx(study.get("default").ranges["end_to_end_gain"])
    assert legend_names(figure)[0] == "Amdahl bound 2.00x"


def test_a_bound_that_would_squeeze_the_bars_is_named_and_not_drawn():
    study, styles = prepared(amdahl_gain=7.63)
    figure = figures.gain(study, styles)
    assert 7.63 not in vertical_lines(figure.axes[0])
    assert legend_names(figure)[0] == "Amdahl bound 7.63x (out of view)"


def test_values_stay_inside_the_view():
    study, styles = prepared()
    for paint in (figures.gain, figures.cost, figures.time, figures.overhead):
        figure = drawn(paint(study, styles))
        renderer = figure.canvas.get_renderer()
        for axis in figure.axes:
            right = axis.get_window_extent(renderer).x1
            assert all(text.get_window_extent(renderer).x1 <= right + 1 for text in axis.texts), paint.__name__


def test_times_have_the_floor_and_the_amdahl_bound():
    study, styles = prepared()
    rollout, step = drawn(figures.time(study, styles)).axes
    assert vertical_lines(rollout) == [372.0]
    assert vertical_lines(step) == pytest.approx([801 / 7.63, 801 - 696 + 372])
    assert row_names(rollout)[0] == "fixed"


def test_a_missing_figure_keeps_its_row_and_says_so():
    result = study_result(["paper", "spot"])
    result["spot"]["cost_dollars"] = None
    study = read_study(result)
    figure = drawn(figures.cost(study, looks.assign_looks([study])))
    assert row_names(figure.axes[0]) == ["fixed", "paper", "spot"]
    assert "not measured" in texts_of(figure)


def test_coserving_has_a_point_a_strategy_beside_serving_and_both_lines():
    study, styles = prepared()
    figure = drawn(figures.micro(study, styles))
    ttft, tpot = figure.axes
    points = {(line.get_xdata()[0], line.get_ydata()[0]) for line in ttft.lines if line.get_linestyle() == "None"}
    assert (338.1, study.get("paper").get("rollout_s")) in points
    assert len(points) == 8
    assert vertical_lines(ttft) == [314.8, 500.0]
    assert vertical_lines(tpot) == [117.8, 150.0]
    assert legend_names(figure)[-2:] == ["serving alone", "SLO"]
    assert "spot" not in legend_names(figure)


def test_latencies_far_apart_are_on_a_logarithmic_axis():
    result = study_result(["paper", "prism"])
    result["prism"]["ttft_p99_ms"] = 24_000.0
    study = read_study(result)
    ttft, tpot = drawn(figures.micro(study, looks.assign_looks([study]))).axes
    assert (ttft.get_xscale(), tpot.get_xscale()) == ("log", "linear")


def test_overhead_has_sync_by_version_where_it_is_known():
    result = study_result(["paper", "spot"])
    result["paper"]["sync_by_version_s"] = [1.0, 2.0, 1.5]
    study = read_study(result)
    overhead, sync = drawn(figures.overhead(study, looks.assign_looks([study]))).axes
    assert row_names(overhead) == ["paper", "spot"]
    assert list(sync.lines[0].get_ydata()) == [1.0, 2.0, 1.5]
    assert list(sync.lines[0].get_xdata()) == [1, 2, 3]


def test_overhead_has_mean_sync_times_where_versions_are_unknown_and_they_differ():
    result = study_result(["paper", "spot"])
    result["paper"]["sync_s"], result["spot"]["sync_by_version_s"] = 2.5, [4.0]
    study = read_study(result)
    axes = drawn(figures.overhead(study, looks.assign_looks([study]))).axes
    assert [bar.get_width() for bar in axes[1].patches] == [2.5, 4.0]
    result["spot"]["sync_by_version_s"] = [2.51]
    assert len(figures.overhead(read_study(result), looks.assign_looks([study])).axes) == 1


def test_who_held_nothing_has_no_overhead():
    result = study_result(["paper", "spot"])
    result["spot"]["borrowed_gpu_s"] = 0
    study = read_study(result)
    assert row_names(figures.overhead(study, looks.assign_looks([study])).axes[0]) == ["paper"]


def test_completion_starts_at_nothing_and_ends_at_all():
    study, styles = prepared(["paper"])
    axis = drawn(figures.completion(study, styles)).axes[0]
    curve = axis.lines[0]
    assert (curve.get_xdata()[0], curve.get_ydata()[0]) == (0.0, 0.0)
    assert (curve.get_xdata()[-1], curve.get_ydata()[-1]) == (696.0, 1.0)
    assert vertical_lines(axis) == [372.0]


def test_trajectories_done_before_the_step_are_left_of_the_view():
    result = study_result(["paper", "spot"])
    result["fixed"]["completion"] = []
    result["spot"]["completion"] = [[-40.0, 0.5], [-10.0, 0.8], [90.0, 1.0]]
    study = read_study(result)
    styles = looks.assign_looks([study])
    axis = drawn(figures.completion(study, styles)).axes[0]
    assert [tuple(line.get_xdata()[:2]) for line in axis.lines if line.get_ydata()[0] == 0.0][1] == (-40.0, -40.0)
    assert axis.get_xlim()[0] == 0
    result["paper"]["completion"], result["spot"]["completion"] = [], [[-40.0, 0.5], [-10.0, 1.0]]
    assert figures.completion(read_study(result), styles).axes[0].get_xlim()[1] > 0


@pytest.mark.parametrize(("axis_name", "unit", "values"), AXES)
def test_a_sweep_has_a_line_a_strategy_and_a_tick_a_value(axis_name, unit, values):
    study, styles = prepared(sweep=sweep(axis_name, unit, values))
    figure = drawn(sweep_figures.sweep(study, study.sweeps[0], styles))
    gain, ttft, _ = figure.axes
    assert [label.get_text() for label in gain.get_xticklabels()] == [
        f"{v:g}" if not isinstance(v, str) else v for v in values
    ]
    assert legend_names(figure)[:3] == ["paper", "default", "quiet"]
    lines = [line for line in gain.lines if line.get_marker() not in {"None", ""}]
    assert len(lines) == 11
    assert lines[1].get_ydata()[-1] == pytest.approx(study.sweeps[0].points[-1].get("default").get("end_to_end_gain"))
    assert any(list(line.get_ydata()) == [500.0, 500.0] for line in ttft.lines)


def test_whiskers_of_a_line_are_one_path_with_gaps():
    study, styles = prepared(["paper"], sweep=sweep("load", "", [0.1, 0.9], ["paper"]))
    axis = sweep_figures.sweep(study, study.sweeps[0], styles).axes[0]
    xs = list(axis.lines[0].get_xdata())
    assert xs[:2] == [0.1, 0.1]
    assert math.isnan(xs[2])
    low, high = study.sweeps[0].points[0].get("paper").ranges["end_to_end_gain"]
    assert list(axis.lines[0].get_ydata())[:2] == pytest.approx([low, high])


def whisker_study(low, high):
    swept = sweep("load", "", [0.1, 0.9], ["paper", "spot"])
    swept["points"][0]["spot"]["spread"]["end_to_end_gain"] = {"min": low, "max": high}
    return prepared(["paper", "spot"], sweep=swept, amdahl_gain=None)


def test_every_mean_is_in_view_and_whiskers_where_they_leave_room():
    for low, high, is_cut in ((0.98, 1.2, False), (0.2, 3.0, True)):
        study, styles = whisker_study(low, high)
        axis = drawn(sweep_figures.sweep(study, study.sweeps[0], styles)).axes[0]
        bottom, top = axis.get_ylim()
        means = [value for line in axis.lines if line.get_marker() not in {"None", ""} for value in line.get_ydata()]
        assert bottom < min(means)
        assert max(means) < top
        assert (bottom < low and high < top) is not is_cut
        assert ("those that leave the panel are cut" in sweep_texts.sweep(study, study.sweeps[0]).caption) is is_cut


def test_latencies_far_apart_over_a_sweep_are_on_a_logarithmic_axis():
    swept = sweep("load", "", [0.1, 0.9], ["paper", "prism"])
    swept["points"][1]["prism"]["ttft_p99_ms"] = 24_000.0
    study, styles = prepared(["paper", "prism"], sweep=swept)
    gain, ttft, _ = drawn(sweep_figures.sweep(study, study.sweeps[0], styles)).axes
    assert (gain.get_yscale(), ttft.get_yscale()) == ("linear", "log")
    assert ttft.get_ylim()[1] > 24_000


def test_lines_stand_aside_so_that_whiskers_do_not_cover_each_other():
    study, styles = prepared(sweep=sweep("load", "", [0.1, 0.9]))
    axis = drawn(sweep_figures.sweep(study, study.sweeps[0], styles)).axes[0]
    lines = [line for line in axis.lines if line.get_marker() not in {"None", ""}]
    starts = [line.get_transform().transform((0.1, 1.0))[0] for line in lines]
    assert starts == sorted(set(starts))
    assert starts[-1] - starts[0] < 15


def test_crowded_ticks_are_thinned_and_the_ends_stay():
    values = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15]
    study, styles = prepared(["paper"], sweep=sweep("link", "Gbps", values, ["paper"]))
    axis = drawn(sweep_figures.sweep(study, study.sweeps[0], styles)).axes[0]
    ticks = list(axis.get_xticks())
    assert ticks[-1] == 15
    assert len(ticks) < 13
    renderer = axis.figure.canvas.get_renderer()
    boxes = sorted((label.get_window_extent(renderer) for label in axis.get_xticklabels()), key=lambda box: box.x0)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_a_strategy_that_was_not_run_everywhere_has_a_shorter_line():
    swept = sweep("load", "", [0.1, 0.5, 0.9], ["paper", "spot"])
    del swept["points"][0]["spot"]
    study, styles = prepared(["paper", "spot"], sweep=swept)
    axis = drawn(sweep_figures.sweep(study, study.sweeps[0], styles)).axes[0]
    assert sorted(len(line.get_xdata()) for line in axis.lines if line.get_marker() not in {"None", ""}) == [2, 3]


def test_the_problem_has_idle_and_queueing_shares_and_rollout_times():
    study, _ = prepared([], sweep=problem_sweep())
    shares, times = drawn(sweep_figures.problem(study, study.sweeps[0])).axes
    idle, queued = (list(line.get_ydata()) for line in shares.lines)
    assert idle[0] < idle[-1]
    assert queued[0] > queued[-1]
    assert list(times.lines[1].get_ydata()) == [372.0] * 6


def test_an_overview_has_a_panel_a_study_and_the_same_rows():
    first, second = (
        read_study(study_result(names, name=name)) for name, names in (("a", ["paper", "spot"]), ("b", ["paper"]))
    )
    styles = looks.assign_looks([first, second])
    figure = drawn(figures.overview((first, second), styles))
    assert [axis.get_title(loc="left") or axis.get_title() for axis in figure.axes] == ["a", "b"]
    assert row_names(figure.axes[0]) == ["paper", "spot"]
    assert texts_of(SimpleNamespace(axes=[figure.axes[1]])) == ["1.33x", "not measured"]


def test_svg_takes_its_colours_from_the_page():
    study, styles = prepared(["paper"])
    svg = figures.draw_study(study, styles, prefix="p-")["gain"]
    assert "var(--ink, #1f2933)" in svg
    assert 'id="p-0-' in svg
    assert ": #1f2933" not in svg
    assert "#ffffff;" not in svg.replace("var(--paper, #ffffff)", "")
