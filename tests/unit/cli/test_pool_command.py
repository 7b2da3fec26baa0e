from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.cli.main import EXIT_OK, EXIT_USER_ERROR, main
from rose.pool import RolloutPool
from rose.types import Sampling, Turn

JOB = """
[job]
name = "lake"
[resources]
n_rl = 3
training = 1
rollout = 2
[model]
path = "policy"
[engines.own]
backend = "fake"
count = 2
"""
TURN = Turn(trajectory_id="t", group_id="g", prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=5))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_check_says_what_would_run(job: Path, capsys: pytest.CaptureFixture[str]):
    job.write_text(JOB.replace('"fake"', '"vllm"'))
    assert main(["pool", str(job), "--check"]) == EXIT_OK
    assert capsys.readouterr().out == (
        f"{job}: job lake: 2 dedicated engines on 2 of 3 devices, at most 0 of 0 executors, at 127.0.0.1:0\n"
    )


def test_what_is_wrong_is_one_line_each(job: Path, capsys: pytest.CaptureFixture[str]):
    job.write_text(JOB.replace("count = 2", "count = 4").replace('name = "lake"', 'namee = "lake"\nname = "lake"'))
    assert main(["pool", str(job)]) == EXIT_USER_ERROR
    assert capsys.readouterr().err.startswith(f"rose: error: {job}: job.namee: unknown key; did you mean 'name'?")
    job.write_text(JOB.replace("count = 2", "count = 4"))
    assert main(["pool", str(job)]) == EXIT_USER_ERROR
    assert "rose: error: " in (said := capsys.readouterr().err)
    assert "engines: they take 4 devices" in said
    assert "Traceback" not in said


def test_a_backend_that_is_not_installed_is_told(job: Path, capsys: pytest.CaptureFixture[str]):
    for arguments in (["pool", str(job)], ["pool", str(job), "--check"], ["run", str(job), "--check"]):
        assert main(arguments) == EXIT_USER_ERROR
        assert f"{job}: engines.own.backend: no serving backend is called 'fake'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("--check",)])
def test_a_tokenizer_that_cannot_be_read_is_told_before_engines_start(
    job: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'rose-rl[text]'")
    job.write_text(JOB.replace('"fake"', '"vllm"') + '[service]\ntokenizer = "nowhere"\n')
    assert main(["pool", str(job), *arguments]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith("rose: error: nowhere/tokenizer.json cannot be read as a tokenizer")
    assert said.count("\n") == 1


def start(*arguments: str) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("fake_backend.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_a_signal_comes(job: Path, number: signal.Signals):
    process = start("pool", str(job))
    try:
        assert process.stdout is not None
        up = json.loads(process.stdout.readline())
        assert (up["num_engines"], up["pid"]) == (2, process.pid)
        async with RolloutPool.connect(up["url"]) as pool:
            assert len((await pool.generate(TURN)).token_ids) == 5
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
        assert json.loads(out) == {"ended": True, "most_leases": 0}
    finally:
        process.kill()
        process.wait()
