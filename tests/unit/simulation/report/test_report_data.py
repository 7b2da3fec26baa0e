from __future__ import annotations

import pytest
from synthetic_study import problem_sweep, study_result, sweep

from rose.errors import ConfigError
from rose.simulation.report.data import join, read_study


def test_means_ranges_and_curves_are_read():
    study = read_study(study_result(["paper"]))
    paper = study.get("paper")
    assert [strategy.name for strategy in study.strategies] == ["fixed", "paper"]
    assert (paper.kind, paper.summary) == ("policy", "What paper does, in one line.")
    assert paper.get("ttft_p99_ms") == 338.1
    assert paper.ranges["ttft_p99_ms"] == pytest.approx((338.1 * 0.97, 338.1 * 1.03))
    assert len(paper.completion) == 64
    assert paper.completion[-1][1] == 1.0
    assert (study.num_seeds, study.num_turns, study.amdahl_gain) == (10, 412_000, 7.63)


def test_what_is_none_or_no_number_is_absent():
    result = study_result(["paper"])
    result["paper"].update(ttft_p99_ms=None, tpot_p99_ms=float("nan"), itl_p99_ms="fast", step_s=True)
    paper = read_study(result).get("paper")
    assert [paper.get(name) for name in ("ttft_p99_ms", "tpot_p99_ms", "itl_p99_ms", "step_s")] == [None] * 4


def test_seeds_that_agree_have_no_range():
    result = study_result(["paper"])
    result["paper"]["spread"] = {"step_s": {"min": 2.0, "max": 2.0, "sd": 0.0}, "rollout_s": {"min": 1.0, "max": None}}
    assert read_study(result).get("paper").ranges == {}


def test_fixed_is_shown_first_where_the_order_does_not_name_it():
    result = {**study_result(["paper"]), "strategies": ["paper"]}
    assert [strategy.name for strategy in read_study(result).strategies] == ["fixed", "paper"]


def test_a_strategy_without_an_entry_has_no_figures():
    result = study_result(["paper"])
    del result["paper"]
    assert read_study(result).get("paper").values == {}


def test_slo_and_settings_come_from_the_scenario():
    study = read_study(study_result([]))
    assert (study.slo_ms("ttft_p99_ms"), study.slo_ms("tpot_p99_ms")) == (500.0, 150.0)
    assert study.setting("cluster", "rollout_gpus") == 8
    assert study.setting("cluster", "nothing") is None
    assert study.setting("nowhere", "rollout_gpus") is None


def test_numeric_points_ascend_and_words_keep_their_order():
    rising = read_study({**study_result(["paper"]), "sweep": sweep("load", "", [0.5, 0.1, 0.9], ["paper"])}).sweeps[0]
    assert [point.value for point in rising.points] == [0.1, 0.5, 0.9]
    assert rising.is_numeric
    named = read_study(
        {**study_result(["paper"]), "sweep": sweep("layout", "", ["pd", "colocated"], ["paper"])}
    ).sweeps[0]
    assert [point.value for point in named.points] == ["pd", "colocated"]
    assert not named.is_numeric


def test_words_and_numbers_in_one_sweep_are_all_words():
    swept = read_study(
        {**study_result(["paper"]), "sweep": sweep("serving.rate_rps", "", [None, 2.5], ["paper"])}
    ).sweeps[0]
    assert [point.value for point in swept.points] == ["none", "2.5"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scenario": "x"}, "scenario of the result is str"),
        ({"strategies": "paper"}, "strategies of the result is str"),
        ({"paper": 3}, "paper of the result is int"),
        ({"sweep": [1]}, "sweep of the result is list"),
        ({"paper": {"completion": [[1.0]]}}, "paper.completion of the result has a point"),
        ({"paper": {"spread": {"step_s": 4}}}, "paper.spread.step_s of the result is int"),
    ],
)
def test_a_malformed_part_is_named(change, named):
    with pytest.raises(ConfigError, match=named):
        read_study({**study_result(["paper"]), **change})


def test_a_result_without_its_list_of_strategies_is_refused():
    result = study_result(["paper"])
    del result["strategies"]
    with pytest.raises(ConfigError, match="no 'strategies'"):
        read_study(result)


def test_results_of_one_scenario_are_joined_and_others_are_not():
    base = study_result(["paper"])
    first = {**base, "sweep": sweep("load", "", [0.1, 0.9], ["paper"]), "failures": ["a failed"]}
    second = {**study_result(["paper", "spot"]), "sweep": problem_sweep(), "assumptions": ["More."]}
    other = study_result(["paper"], name="alfworld-32b-grpo")
    joined = join(read_study(result) for result in (first, other, second))
    assert [study.name for study in joined] == ["frozenlake-8b-grpo", "alfworld-32b-grpo"]
    assert [swept.axis for swept in joined[0].sweeps] == ["load", "cluster.rollout_gpus"]
    assert [strategy.name for strategy in joined[0].strategies] == ["fixed", "paper", "spot"]
    assert joined[0].assumptions[-1] == "More."
    assert joined[0].failures == ("a failed",)
    changed = {**base, "scenario": {"name": "frozenlake-8b-grpo", "config": {"loop": {}}}}
    assert len(join([read_study(base), read_study(changed)])) == 2
