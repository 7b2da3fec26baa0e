from __future__ import annotations

from synthetic_study import problem_sweep, study_result, sweep

from rose.simulation.report import sweep_data, sweep_texts, texts
from rose.simulation.report.data import read_study
from rose.simulation.report.texts import Missing


def study_of(names=None, **change):
    return read_study({**study_result(names), **change})


def test_the_gain_is_told_with_best_worst_bounds_and_spread():
    text = texts.gain(study_of())
    assert "default gains most, 1.57x; prism least, 0.97x." in text.caption
    assert "Slower than not borrowing: prism and fixed-uncapped." in text.caption
    assert "9 % of the way to the Amdahl bound, 7.63x and" in text.caption.replace("8.6", "9")
    assert "84.2 % of the way to the floor of the longest trajectory, 1.68x" in text.caption
    assert text.caption.endswith("Whiskers: least and greatest of 10 seeds.")
    assert "default 1.57x (1.52 to 1.62); " in text.alt.replace("1.52x to 1.62x", "1.52 to 1.62")


def test_the_gain_of_one_strategy_has_no_worst_and_no_whiskers_without_a_spread():
    result = study_result(["paper"])
    del result["paper"]["spread"]
    caption = texts.gain(read_study(result)).caption
    assert "paper gains most, 1.33x." in caption
    assert "least" not in caption
    assert "Whiskers" not in caption


def test_times_are_told_against_the_floor():
    caption = texts.time(study_of()).caption
    assert "Shortest rollout: default, 405 s; longest: prism, 718 s." in caption
    assert "The longest trajectory alone takes 372 s; default is at 1.09 times this floor." in caption
    assert "Under it" not in caption
    assert (
        "Under it, as a step there does not wait for its longest trajectory: default."
        in texts.time(study_of(floor_s=410.0)).caption
    )


def test_an_asynchronous_loop_is_said_to_have_no_floor():
    scenario = {"name": "own", "config": {"loop": {"algorithm": "async"}}}
    assert "The loop is asynchronous" in texts.time(study_of(scenario=scenario)).caption


def test_coserving_is_told_by_who_keeps_the_slo():
    text = texts.micro(study_of())
    assert "Within both SLOs: paper, default, quiet, lyra and ekya." in text.caption
    assert "Over the TTFT SLO: static, serverlessllm and prism." in text.caption
    assert "Over the TPOT SLO: static." in text.caption
    assert "No point, as it runs beside no serving engine: spot, serverless and fixed-uncapped." in text.caption
    assert "paper 497 s, 338 ms, 136 ms" in text.alt
    assert "serving alone 315 ms, 118 ms" in text.alt


def test_coserving_without_a_promise_or_serving_alone():
    text = texts.micro(study_of(scenario={"name": "own", "config": {}}, serving_alone=None))
    assert "SLO" not in text.caption
    assert "serving alone was not measured" in text.alt


def test_overhead_and_sync():
    result = study_result()
    result["paper"]["sync_by_version_s"] = [1.0, 3.0]
    caption = texts.overhead(read_study(result)).caption
    assert "from 0.2 % (static) to 20.6 % (serverless)" in caption
    assert "Weight sync of a version takes 2.00 s on average, under every strategy alike." in caption
    assert "Weight sync was not measured." in texts.overhead(study_of()).caption


def test_a_mean_sync_time_stands_in_for_missing_versions():
    result = study_result(["paper"])
    result["paper"]["sync_s"] = 2.5
    assert "takes 2.50 s on average" in texts.overhead(read_study(result)).caption


def test_completion_is_told_for_the_baseline_and_the_headline():
    result = study_result(["default", "spot"])
    result["fixed"]["completion"] = [[100.0, 0.74], [200.0, 0.75], [800.0, 1.0]]
    result["default"]["completion"] = [[50.0, 0.9], [400.0, 1.0]]
    text = texts.completion(read_study(result))
    assert (
        "fixed has 75 % done after 200 s and all after 800 s, so the last quarter takes 75.0 % of the time."
        in text.caption
    )
    assert "default has 75 % done after 50.0 s and all after 400 s" in text.caption
    assert "spot" not in text.caption
    assert "spot 75 % at" in text.alt


def test_trajectories_done_before_the_step_have_no_last_quarter():
    result = study_result(["spot"])
    result["fixed"]["completion"] = [[-40.0, 0.5], [-10.0, 0.8], [90.0, 1.0]]
    text = texts.completion(read_study(result))
    assert "fixed has" not in text.caption
    assert "fixed 75 % before the step began, all at 90.0 s" in text.alt


def test_cost_is_told_against_the_baseline():
    caption = texts.cost(study_of(["paper", "default", "serverless"])).caption
    assert "Cheapest: default, $104.00 a step; dearest: serverless, $164.00." in caption
    assert "Cheaper than fixed: default and paper." in caption


def test_without_data_the_missing_figure_is_named():
    study = study_of([], fixed={}, serving_alone=None)
    described = [texts.gain, texts.time, texts.micro, texts.overhead, texts.completion, texts.cost]
    found = [describe(study) for describe in described]
    assert all(isinstance(text, Missing) for text in found)
    assert [text.reason.partition(":")[0] for text in found] == [
        "end-to-end gain", "rollout time", "co-serving", "overhead", "completion", "cost",
    ]  # fmt: skip


def swept_study(swept, names=None):
    study = read_study({**study_result(names), "sweep": swept})
    return study, study.sweeps[0]


def test_a_sweep_is_told_by_the_headline_and_by_who_breaks_the_slo_where():
    text = sweep_texts.sweep(*swept_study(sweep("borrowed", "GPUs", [1, 4, 16])))
    assert "default: gain 1.20x at 1 GPU, 1.57x at 16 GPUs." in text.caption
    assert "Slower than fixed somewhere: prism and fixed-uncapped." in text.caption
    assert "serverlessllm everywhere" in text.caption
    assert "static at 16" in text.caption
    assert "end-to-end gain paper 1.11x to 1.33x" in text.alt


def test_a_peak_inside_a_sweep_is_told():
    swept = sweep("load", "", [0.1, 0.5, 0.9], ["paper"])
    swept["points"][1]["paper"]["end_to_end_gain"] = 1.9
    assert "most at 0.5: 1.90x" in sweep_texts.sweep(*swept_study(swept, ["paper"])).caption


def test_a_sweep_without_figures_says_so():
    swept = {"axis": "load", "unit": "", "points": [{"value": 0.1, "paper": {}}]}
    text = sweep_texts.sweep(*swept_study(swept, ["paper"]))
    assert isinstance(text, Missing)
    assert "sweep over load" in text.reason


def test_the_problem_is_told_as_a_trade():
    caption = sweep_texts.problem(*swept_study(problem_sweep(), [])).caption
    assert caption.startswith("From 4 to 32 dedicated GPUs")
    assert "no fixed number avoids both" in caption
    assert "follow from the completion curve" in caption


def test_no_trade_is_told_where_there_is_none():
    swept = {"axis": "cluster.rollout_gpus", "unit": "GPUs", "points": [
        {"value": n, "fixed": {"idle_fraction": 0.5, "queued_fraction": 0.2}} for n in (4, 8)
    ]}  # fmt: skip
    caption = sweep_texts.problem(*swept_study(swept, [])).caption
    assert "no fixed number" not in caption
    assert "At 4 dedicated GPUs 50.0 % of the slots' time is empty and 20.0 %" in caption
    assert "completion curve" not in caption


def test_a_multiple_of_the_job_says_of_what():
    study, swept = swept_study(sweep("scale", "", [1, 2], ["paper"]), ["paper"])
    assert sweep_data.axis_label(study, swept).endswith("times the scenario's 32 GPUs")
