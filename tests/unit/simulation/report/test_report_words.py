from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.simulation.report import words
from rose.simulation.report.data import Strategy


@pytest.mark.parametrize(
    ("figure", "value", "shown"),
    [
        ("end_to_end_gain", 1.314, "1.31x"),
        ("step_s", 1234.5, "1,234 s"),
        ("rollout_s", 49.63, "49.6 s"),
        ("sync_s", 1.234, "1.23 s"),
        ("ttft_p99_ms", 338.1, "338 ms"),
        ("overhead_fraction", 0.004, "0.4 %"),
        ("violations_fraction", 0.0002, "0.020 %"),
        ("violations_fraction", 0.0, "0.0 %"),
        ("rollout_share", 0.869, "86.9 %"),
        ("cost_dollars", 118.0, "$118.00"),
        ("borrowed_tokens", 4.1e6, "4,100,000 tokens"),
        ("borrowed_gpu_s", 7210.0, "7,210 GPU s"),
        ("num_turns", 3130.0, "3,130"),
        ("step_s", 0.0, "0 s"),
        ("step_s", None, "-"),
    ],
)
def test_the_end_of_a_name_gives_the_unit(figure, value, shown):
    assert words.show(figure, value) == shown


def test_names_of_figures_are_words():
    assert words.label("ttft_p99_ms") == "TTFT P99"
    assert words.head("ttft_p99_ms") == "TTFT P99 (ms)"
    assert words.head("borrowed_tokens") == "borrowed tokens"
    assert words.head("end_to_end_gain") == "end-to-end gain"
    assert words.head("warm_start_s") == "warm start (s)"


def test_known_axes_have_words_and_others_their_key_and_unit():
    assert words.axis_label("load", "") == words.axis_label("serving.load_fraction", "")
    assert words.axis_label("link.latency_s", "s") == "link.latency_s (s)"
    assert words.axis_title("link.latency_s") == "change with link.latency_s"
    assert words.axis_key("cluster.rollout_gpus") == words.axis_key("problem")


def test_ranges_and_lists():
    one = Strategy(name="a", values={"step_s": 10.0}, ranges={"step_s": (9.0, 12.0)})
    assert words.with_range(one, "step_s") == "10.0 s (9.00 to 12.0)"
    assert words.with_range(one, "rollout_s") == "-"
    assert [words.listed(items) for items in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "none",
        "a",
        "a and b",
        "a, b and c",
    ]
    assert words.value_text(10000.0, "GPUs") == "10,000 GPUs"
    assert words.value_text("pd", "GPUs") == "pd"
    assert [words.value_text(1.0, name) for name in ("GPUs", "s", "")] == ["1 GPU", "1 s", "1"]


@given(st.floats(min_value=0.11, max_value=1e7))
def test_a_written_number_is_within_half_a_percent(value):
    written = float(words.number(value).replace(",", ""))
    assert abs(written - value) <= 0.05 * max(1.0, value) * 0.1 + 1e-9
