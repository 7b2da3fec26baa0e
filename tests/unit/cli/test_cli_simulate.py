from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import attrs
import pytest
import simulator_standin
from simulator_standin import SPEED, STRATEGIES

from rose.cli import simulate
from rose.cli.main import main
from rose.errors import ConfigError, SimulationError

RUN = ["simulate", "toy-8b-grpo", "--jobs", "1", "--seeds", "1"]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """Run where the command may write, and without drawing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulate, "_can_draw", lambda: False)
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    calls = []
    monkeypatch.setattr(simulate, "load_simulator", lambda: simulator_standin.simulator(calls, {}))
    return calls


@pytest.fixture
def troubled(monkeypatch):
    def install(**trouble):
        monkeypatch.setattr(simulate, "load_simulator", lambda: simulator_standin.simulator([], trouble))

    return install


@pytest.fixture
def drawn(monkeypatch):
    """Put a scripted report in place of the real one."""
    drawn = []
    report = types.ModuleType("rose.simulation.report")
    report.write_study_report = lambda path, result: drawn.append((path, dict(result)))
    monkeypatch.setitem(sys.modules, "rose.simulation.report", report)
    monkeypatch.setattr(simulate, "_can_draw", lambda: True)
    return drawn


def complaint(capsys, argv):
    """Run a command line that must be refused; return its one line."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("rose: error: ")
    return line.removeprefix("rose: error: ")


def document(capsys, argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_strategy_runs_with_every_seed(calls, capsys):
    result = document(capsys, ["simulate", "toy-8b-grpo", "--jobs", "1", "--seeds", "2", "--seed", "5"])
    assert [(strategy, seed) for _, strategy, seed in calls] == [
        (strategy, seed) for strategy in (*STRATEGIES, "alone") for seed in (5, 6)
    ]
    assert result["seeds"] == [5, 6]
    assert result["default"]["rollout_gain"] == SPEED["default"]
    assert (result["paper"]["kind"], result["paper"]["summary"]) == ("policy", "as published")
    assert result["wall_s"] >= 0


def test_three_seeds_from_zero_are_the_default(calls, capsys):
    assert document(capsys, ["simulate", "toy-8b-grpo", "--jobs", "1"])["seeds"] == [0, 1, 2]


def test_named_strategies_run_beside_fixed_alone(calls, capsys):
    result = document(capsys, [*RUN, "--policy", "paper", "--baseline", "spot", "--policy", "default"])
    assert result["strategies"] == ["fixed", "paper", "default", "spot"]
    assert document(capsys, [*RUN, "--policy", "default"])["strategies"] == ["fixed", "default"]
    assert document(capsys, [*RUN, "--baseline", "fixed"])["strategies"] == ["fixed"]


def test_standard_output_is_one_document_even_if_the_simulator_talks(monkeypatch, capsys):
    talking = simulator_standin.simulator([], {})

    def simulate_aloud(scenario, strategy, seed):
        sys.stdout.write("noise\n")
        return talking.simulate(scenario, strategy, seed)

    monkeypatch.setattr(simulate, "load_simulator", lambda: attrs.evolve(talking, simulate=simulate_aloud))
    assert main([*RUN, "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert json.loads(captured.out)["scenario"]["name"] == "toy-8b-grpo"
    assert "noise" in captured.err
    assert "5 of 5 cases" in captured.err


def test_settings_go_over_the_preset(calls, capsys, tmp_path):
    (tmp_path / "a.csv").write_text("")
    argv = [*RUN, "--set", "serving.max_seqs=64", "--set", "serving.layout=pd", "--trace", "a.csv"]
    config = document(capsys, argv)["scenario"]["config"]["serving"]
    assert (config["max_seqs"], config["layout"], config["trace"]) == (64, "pd", "a.csv")
    assert calls[0][0].serving.max_seqs == 64


def test_a_file_is_read_strictly(calls, capsys, tmp_path):
    (tmp_path / "own.toml").write_text(
        '[cluster]\nrollout_gpus = 4\ntraining_gpus = 4\nborrowed_gpus = 2\n[serving]\nprofile = "h100:qwen2.5-7b"\n'
        '[rollout]\nprofile = "h100:qwen3-8b"\n'
    )
    result = document(capsys, ["simulate", "--config", "own.toml", "--jobs", "1", "--seeds", "1"])
    assert result["scenario"]["name"] == "own"
    assert result["scenario"]["config"]["cluster"]["rollout_gpus"] == 4
    (tmp_path / "bad.toml").write_text("[cluster]\nrollout_gpu = 4\n")
    assert main(["simulate", "--config", "bad.toml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "rose: error: bad.toml: cluster.rollout_gpu: unknown key; did you mean 'rollout_gpus'?" in lines[0]
    assert all(line.startswith("rose: error: bad.toml: ") for line in lines)


def test_published_figures_stand_beside_those_of_the_same_set_up(calls, capsys):
    published = {"end_to_end_gain": 1.3, "serving_alone.ttft_p99_ms": 300.0}
    assert document(capsys, RUN)["published"] == published
    assert document(capsys, [*RUN, "--set", "rollout.sigma=0.5"])["published"] == published
    assert "published" not in document(capsys, [*RUN, "--set", "cluster.borrowed_gpus=8"])
    assert "published" not in document(capsys, ["simulate", "toy-32b-grpo", "--jobs", "1"])


def test_a_sweep_has_a_table_a_value(calls, capsys):
    result = document(capsys, [*RUN, "--sweep", "borrowed=4,8"])
    assert [point["value"] for point in result["sweep"]["points"]] == [4, 8]
    assert {scenario.cluster.borrowed_gpus for scenario, _, _ in calls} == {4, 8, 16}


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["preset", "--config", "--list"]),
        (["toy-8b-grpo", "--config", "x.toml"], ["not both"]),
        (["toy-8b-grp"], ["unknown preset 'toy-8b-grp'", "did you mean 'toy-8b-grpo'", "toy-32b-grpo"]),
        (["toy-8b-grpo", "--policy", "default7b"], ["--policy", "'default7b'", "did you mean 'default'", "known are paper"]),
        (["toy-8b-grpo", "--baseline", "spott"], ["--baseline", "did you mean 'spot'", "known are fixed, spot"]),
        (["toy-8b-grpo", "--policy", "spot"], ["--policy spot", "that is a baseline", "--baseline spot"]),
        (["--policy", "paper", "toy-8b-grpo"], ["that is a preset", "rose simulate toy-8b-grpo --policy NAME"]),
        (["toy-8b-grpo", "--seeds", "0"], ["--seeds", "'0' is not a whole number >= 1"]),
        (["toy-8b-grpo", "--seed", "-1"], ["--seed"]),
        (["toy-8b-grpo", "--seeds", "x"], ["--seeds", "'x'"]),
        (["toy-8b-grpo", "--jobs", "0"], ["--jobs", "'0' is not a whole number >= 1"]),
        (["toy-8b-grpo", "--sweep", "borowed=1"], ["--sweep: borowed", "did you mean 'borrowed'"]),
        (["toy-8b-grpo", "--sweep", "borrowed=x"], ["--sweep: cluster.borrowed_gpus", "'x' is not a whole number"]),
        (["toy-8b-grpo", "--sweep", "load=3"], ["--sweep: serving.load_fraction must be", "3.0"]),
        (["toy-8b-grpo", "--sweep", "scale=0.3"], ["--sweep: scale = 0.3", "whole"]),
        (["toy-8b-grpo", "--set", "serving.max_seq=1"], ["--set: serving.max_seq", "did you mean 'serving.max_seqs'"]),
        (["toy-8b-grpo", "--set", "serving.max_seqs=many"], ["--set: serving.max_seqs", "'many'"]),
        (["toy-8b-grpo", "--set", "serving.max_seqs"], ["--set", "KEY=VALUE"]),
        (["toy-8b-grpo", "--set", "serving.max_seqs=0"], ["--set: serving.max_seqs must be", "got 0"]),
        (["toy-8b-grpo", "--trace", "missing.csv"], ["serving.trace", "missing.csv", "No such file"]),
        (["--config", "missing.toml"], ["missing.toml", "No such file"]),
        (["toy-8b-grpo", "--out", "/proc/self"], ["/proc/self", "choose a folder"]),
        (["toy-8b-grpo", "--report"], ["--report", "--out DIR"]),
        (["toy-8b-grpo", "--report", "--out", "there"], ["matplotlib", "pip install 'rose-rl[demo]'"]),
        (["toy-8b-grpo", "--bogus"], ["--bogus", "rose simulate --help"]),
        (["toy-8b-grpo", "--calibrate", "runs"], ["--calibrate", "alone"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line_and_exit_code_2(calls, capsys, tmp_path, argv, parts):
    line = complaint(capsys, ["simulate", *argv])
    assert all(part in line for part in parts), line
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_scenario_is_told_before_anything_runs(troubled, capsys, tmp_path):
    troubled(check=ConfigError("cluster.borrowed_gpus = 3 is no multiple"), fixed=AssertionError())
    assert complaint(capsys, [*RUN, "--out", "there"]) == "cluster.borrowed_gpus = 3 is no multiple"
    assert not (tmp_path / "there").exists()


def test_the_results_of_a_folder_are_the_same_bytes_again(calls, capsys, tmp_path):
    argv = [*RUN, "--sweep", "load=0.1,0.5", "--out", "first"]
    printed = document(capsys, argv)
    argv[-1] = "second"
    document(capsys, argv)

    def files(name):
        return {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.json")}

    assert files("first") == files("second")
    assert len(files("first")) == 1 + 3 * 5
    kept = json.loads((tmp_path / "first" / "result.json").read_text())
    assert {**kept, "wall_s": printed["wall_s"]} == printed


def test_the_same_command_reuses_what_was_kept(calls, capsys):
    first = document(capsys, [*RUN, "--out", "there"])
    del calls[:]
    second = document(capsys, [*RUN, "--out", "there"])
    assert calls == []
    assert {**first, "wall_s": 0} == {**second, "wall_s": 0}


def test_tables_are_printed(calls, capsys, tmp_path):
    assert main([*RUN, "--sweep", "borrowed=4,8", "--out", "there"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "1.43x" in rows["default"] or "1.43x" in out
    assert "gain by borrowed" in out
    assert f"results in {tmp_path / 'there'}" in out.replace("\n", "")
    assert "turns simulated" in out


def test_the_report_is_drawn_where_it_can_be(calls, drawn, capsys, tmp_path):
    document(capsys, [*RUN, "--out", "there", "--report"])
    ((path, result),) = drawn
    assert path.resolve() == tmp_path / "there" / "report.html"
    assert result == json.loads((tmp_path / "there" / "result.json").read_text())
    document(capsys, [*RUN, "--out", "there"])
    assert len(drawn) == 2
    document(capsys, RUN)
    assert len(drawn) == 2


def test_without_matplotlib_a_line_says_what_to_install(calls, capsys):
    assert main([*RUN, "--out", "there"]) == 0
    err = capsys.readouterr().err
    assert (
        "rose: no report.html: the report's figures need matplotlib; install it with: pip install 'rose-rl[demo]'"
        in err
    )


def test_a_case_that_cannot_be_is_a_line_beside_the_results(troubled, capsys):
    troubled(spot=ConfigError("no spot here"))
    assert main([*RUN, "--json"]) == 2
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["failures"] == ["toy-8b-grpo, strategy spot, seed 0: no spot here"]
    assert result["default"]["end_to_end_gain"] > 1
    assert captured.err.splitlines()[-1] == "rose: error: toy-8b-grpo, strategy spot, seed 0: no spot here"
    assert "Traceback" not in captured.err


def test_if_nothing_could_run_there_is_one_line_and_no_result(troubled, capsys):
    bad = ConfigError("no such world")
    troubled(fixed=bad, paper=bad, default=bad, spot=bad, alone=bad)
    assert main([*RUN, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("rose: error")]
    assert errors == ["rose: error: toy-8b-grpo, strategy fixed, seed 0 (and 4 more cases): no such world"]


@pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), SimulationError("stuck")])
def test_a_bug_is_exit_code_1_with_a_traceback_and_the_other_results(troubled, capsys, bug):
    troubled(spot=bug, paper=ConfigError("not here"))
    assert main([*RUN, "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["default"]["end_to_end_gain"] > 1
    assert "Traceback" in captured.err
    last = captured.err.splitlines()[-2:]
    assert last[0] == "rose: error: toy-8b-grpo, strategy paper, seed 0: not here"
    assert last[1] == f"rose: error: toy-8b-grpo, strategy spot, seed 0: {type(bug).__name__}: {bug}"


def test_an_interrupt_says_where_to_go_on(troubled, calls, capsys, tmp_path):
    troubled(default=KeyboardInterrupt())
    assert main([*RUN, "--out", "there"]) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2] == "rose: finished cases are kept in there/cases; the same command goes on from there"
    assert lines[-1] == "rose: interrupted"
    assert len(list((tmp_path / "there" / "cases").iterdir())) == 2


def test_the_list_names_presets_strategies_and_settings(calls, capsys):
    assert main(["simulate", "--list"]) == 0
    out = capsys.readouterr().out
    for part in ("toy-8b-grpo", "toy-32b-grpo", "--policy", "as published", "scale", "cluster.borrowed_gpus"):
        assert part in out
    assert main(["simulate", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["presets"] == ["toy-8b-grpo", "toy-32b-grpo"]
    assert listed["strategies"][1] == {"name": "paper", "kind": "policy", "summary": "as published"}
    assert listed["axes"]["link"] == "link.gbps"
    assert "rollout.sigma" in listed["keys"]
    assert calls == []


@pytest.fixture
def calibrated(monkeypatch):
    """Put a scripted fit in place of the real one; runs are kept."""
    runs = []

    class Report:
        def rows(self):
            return [("alone", "TTFT P50", "80", "+1.0%")]

        def notes(self):
            return ["taken on a toy"]

        def to_json(self):
            return {"is_within": True}

    def calibrate(run_dir):
        runs.append(run_dir)
        sys.stdout.write("noise\n")
        if not run_dir.exists():
            message = f"{run_dir}: no run.json"
            raise ConfigError(message)
        return Report()

    module = types.ModuleType("rose.simulation.calibrate")
    module.calibrate, module.HEADS = calibrate, ("arm", "figure", "measured", "error")
    monkeypatch.setitem(sys.modules, "rose.simulation.calibrate", module)
    return runs


def test_a_fit_is_shown_as_a_table_with_notes(calibrated, capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    assert main(["simulate", "--calibrate", "runs"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["arm", "figure", "measured", "error"]
    assert out[1].split() == ["alone", "TTFT", "P50", "80", "+1.0%"]
    assert out[-1] == "taken on a toy"
    assert calibrated == [Path("runs")]


def test_a_fit_is_one_document(calibrated, capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    assert main(["simulate", "--calibrate", "runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"is_within": True}


def test_a_folder_without_a_run_is_told(calibrated, capsys):
    assert main(["simulate", "--calibrate", "nothing"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "rose: error: nothing: no run.json"


def test_the_command_line_loads_nothing_heavy():
    code = (
        "import sys, rose.cli.main as m\n"
        "m.build_parser().parse_args(['simulate', 'x'])\n"
        "heavy = ('numpy', 'matplotlib', 'torch', 'rose.simulation', 'rose.pool')\n"
        "loaded = [name for name in heavy if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_describes_options_and_exit_codes(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for part in ("--policy", "--sweep", "--calibrate", "--report", "exit codes", "examples:"):
        assert part in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_a_real_process_leaves_no_worker(tmp_path, number):
    (tmp_path / "slow_simulator.py").write_text(
        "import os, pathlib, time\n"
        "from simulator_standin import *\n"
        "def slow(scenario, strategy, seed):\n"
        "    pathlib.Path(f'{os.getpid()}.pid').touch()\n    time.sleep(60)\n"
        "def serving_slow(scenario, seed):\n    time.sleep(60)\n"
    )
    (tmp_path / "command.py").write_text(
        "import sys, attrs, simulator_standin, slow_simulator\nfrom rose.cli import main, simulate\n"
        "if __name__ == '__main__':\n"
        "    toy = attrs.evolve(simulator_standin.simulator([], {}), simulate=slow_simulator.slow,"
        " simulate_serving=slow_simulator.serving_slow)\n"
        "    simulate.load_simulator = lambda: toy\n"
        "    sys.exit(main.main(['simulate', 'toy-8b-grpo', '--jobs', '2', '--out', 'there']))\n"
    )
    folders = (tmp_path, Path(simulator_standin.__file__).parent)
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [sys.executable, "command.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        while len(workers := list(tmp_path.glob("*.pid"))) < 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        send = os.killpg if number == signal.SIGINT else os.kill  # the key reaches the workers too
        send(process.pid, number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-2:] == [
        "rose: finished cases are kept in there/cases; the same command goes on from there",
        "rose: interrupted",
    ]
    assert "Traceback" not in err
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(int(worker.stem), 0)
