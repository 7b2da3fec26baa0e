from __future__ import annotations

from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rose.simulation.report import canvas, looks
from rose.simulation.report.data import Strategy


@pytest.fixture
def axis():
    figure = Figure(figsize=(4, 3))
    FigureCanvasAgg(figure)
    return figure.subplots()


def tick_texts(axis):
    return [label.get_text() for label in axis.get_xticklabels()]


def test_few_values_stand_on_a_linear_axis(axis):
    assert canvas.place_values(axis, [0.1, 0.5, 0.9]) == {0.1: 0.1, 0.5: 0.5, 0.9: 0.9}
    assert axis.get_xscale() == "linear"
    assert tick_texts(axis) == ["0.1", "0.5", "0.9"]


def test_values_far_apart_stand_on_a_logarithmic_one(axis):
    canvas.place_values(axis, [16.0, 112.0, 10_000.0])
    assert axis.get_xscale() == "log"
    assert tick_texts(axis) == ["16", "112", "10,000"]


def test_nothing_at_all_has_its_place_before_values_far_apart(axis):
    values = [0.0, 1.0, 4.0, 64.0]
    canvas.place_values(axis, values)
    assert axis.get_xscale() == "symlog"
    places = [axis.transData.transform((value, 1.0))[0] for value in values]
    assert places == sorted(places)
    assert min(right - left for left, right in pairwise(places)) > 40


def test_words_stand_side_by_side(axis):
    assert canvas.place_values(axis, ["colocated", "pd"]) == {"colocated": 0.0, "pd": 1.0}
    assert tick_texts(axis) == ["colocated", "pd"]


def test_a_single_value_has_room_on_both_sides(axis):
    canvas.place_values(axis, [8.0])
    assert axis.get_xlim() == (7.5, 8.5)


def test_a_logarithmic_axis_has_a_few_round_ticks(axis):
    canvas.make_logarithmic(axis, 80.0, 1300.0, which="x")
    assert list(axis.get_xticks()) == [100, 200, 500, 1000]
    canvas.make_logarithmic(axis, 0.01, 90_000.0, which="y")
    assert len(axis.get_yticks()) <= 9


@pytest.mark.parametrize(
    ("figure", "value", "shown"),
    [
        ("overhead_fraction", 0.2, "20 %"),
        ("end_to_end_gain", 1.2, "1.2x"),
        ("cost_dollars", 40, "$40"),
        ("step_s", 1e4, "10,000"),
    ],
)
def test_numbers_on_an_axis_have_the_sign_of_their_figure(axis, figure, value, shown):
    canvas.measure_axis(axis.xaxis, figure)
    assert axis.xaxis.get_major_formatter()(value, 0) == shown


def test_bars_without_any_value_still_give_rows(axis):
    found = looks.Look(colour="#509be6", marker="o", dashes="-", width=1.0)
    canvas.draw_bars(
        axis, [Strategy(name="a"), Strategy(name="b", values={"step_s": 0.0})], "step_s", {"a": found, "b": found}
    )
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
    assert [text.get_text() for text in axis.texts] == ["not measured", "0 s"]
    assert axis.get_xlim()[1] > 0


def test_a_bound_widens_the_view_a_little_and_not_much(axis):
    axis.set_xlim(0, 10)
    canvas.bound_in_view(axis, 15.0, canvas.DASHED)
    assert axis.get_xlim()[1] == pytest.approx(15.6)
    assert canvas.note_out_of_view(axis, 15.0) == ""
    canvas.bound_in_view(axis, 150.0, canvas.DASHED)
    assert axis.get_xlim()[1] == pytest.approx(15.6)
    assert canvas.note_out_of_view(axis, 150.0) == " (out of view)"


def test_a_long_legend_takes_rows():
    assert [canvas.legend_rows(count) for count in (1, 6, 7, 18)] == [1, 1, 2, 3]
