from __future__ import annotations

import attrs
import pytest
from study_standins import SCENARIO, outcome, serving_outcome, simulate, simulate_serving

from rose.errors import ConfigError
from rose.simulation.axes import Sweep
from rose.simulation.cases import SERVING_ALONE, CaseMaker
from rose.simulation.study import CaseFailure, Study, default_jobs, failure_lines, run_study

STUDY = Study(scenario=SCENARIO, strategies=("paper",), seeds=(0, 1))


@pytest.fixture
def calls():
    return []


@pytest.fixture
def run(calls):
    """Run a study in this process; each call of the simulator is kept."""

    def counted(scenario, strategy, seed):
        calls.append((scenario.cluster.borrowed_gpus, strategy, seed))
        return simulate(scenario, strategy, seed)

    def alone(scenario, seed):
        calls.append((scenario.cluster.borrowed_gpus, SERVING_ALONE, seed))
        return simulate_serving(scenario, seed)

    def start(study=STUDY, **options):
        return run_study(study, **{"jobs": 1, "simulate": counted, "simulate_serving": alone, **options})

    return start


def found(done):
    """Return outcomes by label, strategy and seed."""
    listed = (case for point_cases in done.cases.values() for case in point_cases)
    return {
        (case.label, case.strategy, case.seed): done.outcomes[case.key] for case in listed if case.key in done.outcomes
    }


def test_fixed_and_serving_alone_are_always_there(run, calls):
    done = run()
    assert calls == [(16, name, seed) for name in ("fixed", "paper", SERVING_ALONE) for seed in (0, 1)]
    assert found(done)[("toy", "paper", 1)] == outcome(SCENARIO, "paper", 1)
    assert found(done)[("toy", SERVING_ALONE, 1)] == serving_outcome(16, 1)
    assert done.failures == ()


def test_fixed_comes_first_and_once():
    assert attrs.evolve(STUDY, strategies=("spot", "fixed", "spot")).strategies == ("fixed", "spot")


def test_a_sweep_runs_the_base_too_and_no_case_twice(run, calls):
    done = run(attrs.evolve(STUDY, seeds=(0,), sweep=Sweep(axis="borrowed", values=(8, 16))))
    assert [point.label for point in done.cases] == ["toy", "toy, borrowed=8", "toy, borrowed=16"]
    assert sorted(calls) == sorted((gpus, name, 0) for gpus in (8, 16) for name in ("fixed", "paper", SERVING_ALONE))
    assert found(done)[("toy, borrowed=8", "paper", 0)].borrowed_tokens == 8000
    assert found(done)[("toy, borrowed=16", "paper", 0)] == found(done)[("toy", "paper", 0)]


def test_a_refused_value_of_the_sweep_runs_nothing(run, calls):
    with pytest.raises(ConfigError, match=r"^cluster\.borrowed_gpus must be"):
        run(attrs.evolve(STUDY, sweep=Sweep(axis="borrowed", values=(8, -1))))
    assert calls == []


def test_processes_change_nothing(run, tmp_path):
    study = attrs.evolve(STUDY, strategies=("paper", "default", "spot"))
    alone = run(study, out=tmp_path / "alone")
    states = []
    many = run_study(
        study,
        jobs=2,
        out=tmp_path / "many",
        on_progress=states.append,
        simulate=simulate,
        simulate_serving=simulate_serving,
    )
    assert many == attrs.evolve(alone, outcomes=many.outcomes)
    assert dict(many.outcomes) == dict(alone.outcomes)
    assert [state.num_done for state in states] == list(range(11))
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "cases").iterdir()} for name in ("alone", "many")
    ]
    assert files[0] == files[1]


def test_a_second_run_reuses_every_case(run, calls, tmp_path):
    first = run(out=tmp_path)
    del calls[:]
    states = []
    second = run(out=tmp_path, on_progress=states.append)
    assert calls == []
    assert second == first
    assert [(state.num_done, state.num_reused, state.num_total) for state in states] == [(6, 6, 6)]


def test_only_what_is_new_or_damaged_runs(run, calls, tmp_path):
    run(out=tmp_path)
    del calls[:]
    case = CaseMaker().make(SCENARIO, "paper", 1)
    (tmp_path / "cases" / f"{case.key}.json").write_text("{")
    run(attrs.evolve(STUDY, strategies=("paper", "spot"), seeds=(1,)), out=tmp_path)
    assert calls == [(16, "paper", 1), (16, "spot", 1)]
    del calls[:]
    run(out=tmp_path)
    assert calls == []


def test_an_interrupt_leaves_finished_cases(run, calls, tmp_path):
    def interrupted(scenario, strategy, seed):
        if strategy == "paper":
            raise KeyboardInterrupt
        return simulate(scenario, strategy, seed)

    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path, simulate=interrupted)
    run(out=tmp_path)
    assert calls == [(16, name, seed) for name in ("paper", SERVING_ALONE) for seed in (0, 1)]


def test_an_error_of_the_one_who_watches_leaves_finished_cases(run, calls, tmp_path):
    def watch(progress):
        if progress.num_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path, on_progress=watch)
    assert len(calls) == len(list((tmp_path / "cases").iterdir())) == 2


def test_a_case_that_fails_loses_no_other(run, tmp_path):
    done = run(attrs.evolve(STUDY, strategies=("impossible", "buggy", "nan", "paper")), out=tmp_path)
    assert {name for _, name, _ in found(done)} == {"fixed", "paper", SERVING_ALONE}
    lines = [str(failure) for failure in done.failures]
    assert lines[0] == "toy, strategy impossible, seed 0: 8 GPUs are too few"
    assert lines[3] == "toy, strategy buggy, seed 1: ZeroDivisionError: integer division or modulo by zero"
    assert lines[4].startswith("toy, strategy nan, seed 0: ValueError: Out of range float values")
    assert [failure.is_bug for failure in done.failures] == [False, False, True, True, True, True]
    assert "1 // 0" in done.failures[2].trace
    assert len(list((tmp_path / "cases").iterdir())) == 6


def test_a_bug_beside_bad_input_is_a_bug(run):
    done = run(attrs.evolve(STUDY, strategies=("mixed",), seeds=(0,)))
    assert [failure.is_bug for failure in done.failures] == [True]
    assert "a bug" in done.failures[0].trace


def test_a_process_that_dies_is_a_failed_case():
    study = attrs.evolve(STUDY, strategies=("killed", "quitting"), seeds=(0,))
    done = run_study(study, jobs=2, simulate=simulate, simulate_serving=simulate_serving)
    assert {name for _, name, _ in found(done)} == {"fixed", SERVING_ALONE}
    assert [failure.case.strategy for failure in done.failures] == ["killed", "quitting"]
    assert [failure.is_bug for failure in done.failures] == [False, True]
    assert "fewer --jobs" in done.failures[0].message
    assert "exit code 3" in done.failures[1].message


def test_failed_cases_run_again(run, calls, tmp_path):
    study = attrs.evolve(STUDY, strategies=("impossible",))
    run(study, out=tmp_path)
    del calls[:]
    run(study, out=tmp_path)
    assert calls == [(16, "impossible", 0), (16, "impossible", 1)]


def test_progress_counts_failures(run):
    states = []
    run(attrs.evolve(STUDY, strategies=("impossible",), seeds=(0,)), on_progress=states.append)
    assert [(state.num_done, state.num_failed) for state in states] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert str(states[2].last) == "toy, strategy impossible, seed 0"


@pytest.mark.parametrize("place", ["/proc/self", "a-file", "a-file/below"])
def test_a_folder_of_no_use_is_told_before_anything_runs(run, calls, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    with pytest.raises(ConfigError, match=f"^cannot write into {place}: .*choose a folder"):
        run(out=type(tmp_path)(place))
    assert calls == []


def test_the_same_trouble_is_told_once():
    maker = CaseMaker()
    failures = [
        CaseFailure(case=maker.make(SCENARIO, name, seed), message=message)
        for name, seed, message in [("a", 0, "bad"), ("a", 1, "bad"), ("b", 0, "worse"), ("b", 1, "bad")]
    ]
    assert failure_lines(failures) == [
        "toy, strategy a, seed 0 (and 2 more cases): bad",
        "toy, strategy b, seed 0: worse",
    ]
    assert failure_lines(failures[:2]) == ["toy, strategy a, seed 0 (and 1 more case): bad"]


def test_there_is_a_core_to_run_on():
    assert default_jobs() >= 1
