from __future__ import annotations

import io
from copy import deepcopy

import attrs
import pytest
import simulator_standin
from rich.console import Console
from simulator_standin import TOY

from rose.cli.simulation_tables import StudyView, progress_line, study_table
from rose.simulation.axes import Sweep
from rose.simulation.cases import CaseMaker
from rose.simulation.results import build_result
from rose.simulation.study import Study, StudyProgress, run_study

CASE = CaseMaker().make(TOY, "spot", 2)


@pytest.fixture(scope="module")
def found():
    simulator = simulator_standin.simulator([], {})
    study = Study(
        scenario=TOY,
        strategies=("paper", "default", "spot"),
        seeds=(0, 1),
        sweep=Sweep(axis="borrowed", values=(0, 4, 8, 16, 32, 64)),
    )
    done = run_study(study, jobs=1, simulate=simulator.simulate, simulate_serving=simulator.simulate_serving)
    return build_result(done, simulator.strategies)


@pytest.fixture
def result(found):
    return deepcopy(found)


def shown(result, width=100, *, is_terminal=False):
    colors = "standard" if is_terminal else None
    console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=is_terminal, color_system=colors)
    console.print(study_table(result))
    return console.file.getvalue()


def row(text, name, after="strategy"):
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if after in line.split() or line == after)
    return next(line for line in lines[start:] if line.startswith(name)).split()


def test_each_strategy_has_a_row_and_serving_alone_too(result):
    text = shown(result)
    assert row(text, "fixed") == ["fixed", "505", "405", "1.00±0.00", "-", "-", "-", "0.0%", "4.5"]
    assert row(text, "default")[1:5] == ["353", "253", "1.43±0.00", "341"]
    assert row(text, "default")[5:] == ["122", "0.1%", "3.2%", "4.5"]
    assert row(text, "(alone)") == ["(alone)", "-", "-", "-", "310", "110", "0.1%", "-", "-"]


def test_head_and_bounds(result):
    text = shown(result)
    assert text.startswith("toy-8b-grpo: 8 + 8 GPUs, up to 16 borrowed; mean of 2 seeds\n")
    assert "fixed: rollout 80.2% of a step, P75 of trajectories done at 30.0% of it" in text
    assert "bounds of the gain: 1.68x with a rollout as short as its longest trajectory\n" in text
    assert "(200 s alone), 2.15x by Amdahl's law\n" in text


def test_the_result_fits_eighty_columns(result):
    for name, table in (("a-14-char-name", {"step_s": 98_765.0, "end_to_end_gain": 12.3, "cost_dollars": 12_345.0}),):
        result["strategies"].append(name)
        result[name] = {**result["spot"], **table, "ttft_p99_ms": 98_765.0, "violations_fraction": 0.25}
        for point in result["sweep"]["points"]:
            point[name] = result[name]
    text = shown(result, width=80)
    assert "…" not in text
    assert len(text.splitlines()) == len(shown(result, width=200).splitlines())


def test_a_sweep_is_a_column_a_value(result):
    text = shown(result)
    lines = text.splitlines()
    assert lines[lines.index("gain by borrowed") + 1].split() == ["strategy", "0", "4", "8", "16", "32", "64"]
    assert row(text, "default", "gain by borrowed")[1:] == ["1.43x"] * 6
    assert row(text, "spot", "over the SLO by borrowed")[1:] == ["-", *["0.1%"] * 5]
    del result["sweep"]
    assert "by borrowed" not in shown(result)


def test_what_was_not_measured_is_a_dash(result):
    result["serving_alone"] = None
    result["floor_gain"] = None
    result["paper"] = {**dict.fromkeys(result["paper"]), "spread": {}}
    text = shown(result)
    assert "(alone)" not in text
    assert row(text, "paper")[1:] == ["-"] * 8
    assert "bounds of the gain: - with a rollout" in text


def test_what_is_over_the_slo_is_red(result):
    result["spot"]["ttft_p99_ms"] = 501.0
    text = shown(result, is_terminal=True)
    assert "\x1b[31m 501\x1b[0m" in text
    assert "\x1b[31m 154\x1b[0m" in text
    assert text.count("\x1b[31m") == 2
    assert "\x1b[31m" not in shown(result)


def progress(num_done, **more):
    return StudyProgress(num_done=num_done, num_total=40, num_reused=0, **more)


def test_a_line_of_progress_says_what_there_is_to_say():
    assert progress_line(progress(0)) == "0 of 40 cases"
    state = attrs.evolve(progress(12, num_failed=1, last=CASE), num_reused=3)
    expected = "12 of 40 cases; 3 from an earlier run; 1 failed; last toy-8b-grpo, strategy spot, seed 2"
    assert progress_line(state) == expected


def test_a_file_gets_a_line_a_tenth():
    console = Console(file=io.StringIO(), width=40)
    with StudyView(console) as view:
        for num_done in range(41):
            view.update(progress(num_done, last=CASE))
    lines = console.file.getvalue().splitlines()
    assert [line.partition("] ")[2].partition(" of")[0] for line in lines] == [str(4 * tenth) for tenth in range(11)]


def test_nothing_to_do_is_a_line():
    console = Console(file=io.StringIO(), width=40)
    with StudyView(console) as view:
        view.update(StudyProgress(num_done=0, num_total=0, num_reused=0))
    assert "0 of 0 cases" in console.file.getvalue()


def test_a_terminal_gets_a_bar_that_goes_away():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with StudyView(console) as view:
        view.update(progress(0))
        view.update(progress(20, last=CASE))
    text = console.file.getvalue()
    assert "20/40" in text
    assert "strategy spot" in text
    assert text.endswith(("\x1b[2K", "\x1b[?25h"))


def test_a_line_that_stays():
    console = Console(file=io.StringIO(), width=20)
    StudyView(console).log("a line that is longer than the console")
    assert console.file.getvalue() == "a line that is longer than the console\n"


def test_what_users_saw_is_shown_next_to_serving_alone_in_the_same_phases(result):
    text = shown(result)
    default = row(text, "default", after="P50")
    assert default[:2] + default[4:6] + default[7:8] + default[10:11] == ["default", "30.0", "120", "->", "9.0", "14.0"]
    assert [default[place] for place in (3, 6, 9, 12)] == [
        f"{value:.1f}" if value < 100 else f"{value:.0f}"
        for value in (result["default"][f"{name}_ms"] for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"))
    ]
    for name in result["strategies"]:
        result[name]["alone_ttft_p99_ms"] = None
    assert "alone ->" not in shown(result)
