from __future__ import annotations

import builtins
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import attrs
import pytest
from summary_example import SUMMARY

from rose.cli import demo
from rose.cli.main import main
from rose.errors import BackendUnavailableError, ConfigError, EngineLostError, TrainerError


@attrs.frozen
class Result:
    summary: dict


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """Put a scripted demo in place of the real one and run where it may write; calls are kept."""
    monkeypatch.chdir(tmp_path)
    calls = []

    def install(outcome=None):
        async def run_demo(config, *, view):
            calls.append(config)
            sys.stdout.write("noise of a library on the standard output\n")
            view.log("progress")
            if isinstance(outcome, BaseException):
                raise outcome
            return Result(SUMMARY)

        monkeypatch.setattr(demo, "_load_runner", lambda: run_demo)
        return calls

    return install


def complaint(capsys, argv):
    """Run a command line that must be refused; return its one line."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("rose: error: ")
    return lines[0].removeprefix("rose: error: ")


def test_options_reach_the_demo(runner, capsys):
    calls = runner()
    argv = [
        *("demo", "--steps", "4", "--seed", "7", "--rate", "6", "--slo-ttft-ms", "800", "--slo-tpot-ms", "90"),
        *("--env", "a.b:C", "--out", "there", "--port", "0"),
    ]
    assert main(argv) == 0
    (config,) = calls
    assert (config.steps, config.seed, config.rate_rps, config.slo_ttft_ms, config.slo_tpot_ms) == (
        4,
        7,
        6.0,
        800.0,
        90.0,
    )
    assert (config.env, config.out, config.json) == ("a.b:C", "there", False)
    assert "report.html" in capsys.readouterr().out


def test_json_is_one_object_in_the_last_line_and_progress_is_elsewhere(runner, capsys):
    runner()
    assert main(["demo", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == SUMMARY
    assert "progress" not in captured.out
    assert "progress" in captured.err


def test_the_table_shows_fixed_rose_and_ratio(runner, capsys):
    runner()
    main(["demo"])
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("rollout throughput (tokens/s)"))
    assert row.split()[-3:] == ["1,000", "1,400", "1.40x"]
    assert "valid run" in out


def test_options_go_over_the_file(runner, tmp_path):
    calls = runner()
    (tmp_path / "demo.toml").write_text("steps = 3\nseed = 9\n")
    assert main(["demo", "--config", "demo.toml", "--steps", "5"]) == 0
    assert (calls[0].steps, calls[0].seed) == (5, 9)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["COMMAND", "rose --help"]),
        (["--nope"], ["--nope", "rose --help"]),
        (["frob"], ["'frob'", "demo", "doctor"]),
        (["demo", "--bogus"], ["--bogus", "rose demo --help"]),
        (["demo", "--step", "3"], ["--step"]),
        (["demo", "--steps", "x"], ["--steps", "'x' is not a whole number"]),
        (["demo", "--steps", "0"], ["--steps must be", "got 0", "12"]),
        (["demo", "--steps", "10001"], ["--steps must be a whole number from 1 to 10000"]),
        (["demo", "--slo-ttft-ms", "0"], ["--slo-ttft-ms must be above 0", "got 0.0", "500"]),
        (["demo", "--slo-tpot-ms", "nan"], ["--slo-tpot-ms must be above 0", "got nan", "150"]),
        (["demo", "--rate", "fast"], ["--rate", "'fast' is not a number"]),
        (["demo", "--env", "FrozenLake"], ["--env must be written module:Class", "'FrozenLake'"]),
        (["demo", "--trace", "missing.csv"], ["--trace", "missing.csv", "No such file"]),
        (["demo", "--trace", "."], ["--trace", "directory"]),
        (["demo", "--port", "70000"], ["--port must be", "70000", "0 takes a free port"]),
        (["demo", "--config", "missing.toml"], ["missing.toml", "No such file"]),
        (["demo", "--out", "a-file"], ["--out", "a-file", "not a folder"]),
        (["demo", "--out", "a-file/below"], ["--out", "a-file/below", "choose a folder"]),
        (["demo", "--out", "/proc/self"], ["--out", "/proc/self", "choose a folder"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line_and_exit_code_2(runner, capsys, tmp_path, argv, parts):
    calls = runner()
    (tmp_path / "a-file").write_text("")
    line = complaint(capsys, argv)
    assert all(part in line for part in parts), line
    assert calls == []


def test_an_unknown_key_in_the_file_is_named_with_the_nearest_one(runner, capsys, tmp_path):
    runner()
    (tmp_path / "demo.toml").write_text("stepz = 3\n")
    assert "demo.toml: stepz: unknown key; did you mean 'steps'?" in complaint(
        capsys, ["demo", "--config", "demo.toml"]
    )


def test_each_problem_of_a_file_has_a_line(runner, capsys, tmp_path):
    runner()
    (tmp_path / "demo.toml").write_text('stepz = 3\nseed = "one"\n')
    assert main(["demo", "--config", "demo.toml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("rose: error: demo.toml: ") for line in lines)


def test_a_bad_value_of_the_file_is_not_blamed_on_an_option(runner, capsys, tmp_path):
    runner()
    (tmp_path / "demo.toml").write_text("slo_ttft_ms = 0\n")
    line = complaint(capsys, ["demo", "--config", "demo.toml", "--steps", "3"])
    assert line.startswith("demo.toml: slo_ttft_ms must be above 0")


@pytest.mark.parametrize("setting", ['trace = "missing.csv"', 'out = "/proc/self"'])
def test_a_file_or_folder_of_the_configuration_file_is_called_by_its_key(runner, capsys, tmp_path, setting):
    runner()
    (tmp_path / "demo.toml").write_text(setting + "\n")
    line = complaint(capsys, ["demo", "--config", "demo.toml"])
    assert line.startswith(f"{setting.split()[0]}: cannot ")


@pytest.mark.parametrize(
    "argv", [["--env", "no_such_module:C"], ["--trace", "empty.csv"], ["--config", "profile.toml"]]
)
def test_a_refused_run_leaves_no_folder(capsys, tmp_path, monkeypatch, argv):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "profile.toml").write_text('serving_profile = "abacus"\n')
    monkeypatch.setattr("rose.reference.demo.check_libraries", lambda _: None)
    complaint(capsys, ["demo", "--out", "results/here", *argv])
    assert not (tmp_path / "results").exists()


def test_a_taken_port_is_named(runner, capsys):
    runner()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = complaint(capsys, ["demo", "--port", str(port)])
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line


@pytest.mark.parametrize(
    "error",
    [ConfigError("row 3: bad"), EngineLostError("engine gone"), TrainerError("rank 1 died")],
)
def test_every_error_of_ours_is_a_line_even_out_of_a_task_group(runner, capsys, error):
    runner(error)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"rose: error: {error}"
    runner(ExceptionGroup("tasks", [ExceptionGroup("inner", [error]), type(error)(str(error))]))
    assert main(["demo"]) == 2
    err = capsys.readouterr().err
    assert err.count(f"rose: error: {error}") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "bug", [ZeroDivisionError("bug"), ExceptionGroup("tasks", [ConfigError("bad"), ZeroDivisionError("bug")])]
)
def test_a_bug_is_not_hidden(runner, bug):
    runner(bug)
    with pytest.raises(type(bug)):
        main(["demo"])


def test_an_interrupt_is_exit_code_130(runner, capsys):
    runner(KeyboardInterrupt())
    assert main(["demo"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "rose: interrupted"


def test_a_missing_library_names_the_extra(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    def absent(*_args, **_kwargs):
        message = "No module named 'vllm'"
        raise ModuleNotFoundError(message, name="vllm")

    monkeypatch.setattr("builtins.__import__", _import_or(absent))
    line = complaint(capsys, ["demo"])
    assert "the demo needs vllm" in line
    assert "pip install 'rose-rl[demo]'" in line


def test_a_broken_module_of_ours_is_a_bug(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def absent(*_args, **_kwargs):
        message = "No module named 'rose.nothing'"
        raise ModuleNotFoundError(message, name="rose.nothing")

    monkeypatch.setattr("builtins.__import__", _import_or(absent))
    with pytest.raises(ModuleNotFoundError) as caught:
        main(["demo"])
    assert not isinstance(caught.value, BackendUnavailableError)


def _import_or(absent):
    real = __import__

    def load(name, *args, **kwargs):
        return absent() if name == "rose.reference.demo" else real(name, *args, **kwargs)

    return load


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"], ["doctor", "--help"], ["--version"]])
def test_help_and_version_end_well(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    assert "rose" in capsys.readouterr().out


def test_the_demo_help_describes_every_option_and_exit_code(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    text = capsys.readouterr().out
    for part in (*demo._FLAGS.values(), "--config", "sparse phase", "exit codes", "130", "report.html", "examples:"):
        assert part in text


def test_the_command_loads_no_engine_library():
    code = (
        "import sys, rose.cli.main as m\n"
        "m.build_parser().parse_args(['demo'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'ray', 'mooncake', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("start", ["", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"])
def test_ctrl_c_in_a_real_process_gives_a_line_and_no_traceback(tmp_path, number, start):
    code = start + (
        "import asyncio, sys\nfrom rose.cli import demo, main\n"
        "async def run_demo(config, *, view):\n    print('up', flush=True)\n    await asyncio.sleep(60)\n"
        "demo._load_runner = lambda: run_demo\nsys.exit(main.main(['demo']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        time.sleep(0.05)
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "rose: interrupted\n"


def test_an_interrupt_while_modules_load_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = builtins.__import__

    def interrupted(name: str, *arguments: Any) -> Any:
        if name == "rose.cli":
            raise KeyboardInterrupt
        return load(name, *arguments)

    path = main.__code__.co_filename
    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit, match="130"):
        runpy.run_path(path, run_name="rose_main")
    assert capsys.readouterr().err == "rose: interrupted\n"
