"""How a server is started, kept and ended: with scripts in its place."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from processes import is_running
from rose import registry
from rose.backends.sglang import LaunchedSglang, SglangOptions, keeper
from rose.clocks import MonotonicClock
from rose.errors import ConfigError, EngineLostError
from rose.testing.contracts.streams import until
from rose.types import WeightVersion

SLEEPER = """\
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
pathlib.Path({pids!r}).write_text(f"{{child.pid}}")
print("loading the model", flush=True)
time.sleep({alive_s})
print("no such model", flush=True)
sys.exit(3)
"""


def script(folder: Path, alive_s: float) -> str:
    """Write a stand-in for SGLang's Python: whatever it is asked to run, it starts a child and ends some time later."""
    path = folder / "python"
    text = SLEEPER.format(pids=str(folder / "pids"), alive_s=alive_s)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def options(folder: Path, alive_s: float = 100.0, **changes) -> SglangOptions:
    known = {"engine_id": "s", "model": "m", "python": script(folder, alive_s), "log_path": str(folder / "log")}
    return SglangOptions(**known | changes)


async def child_of(folder: Path) -> int:
    pids = folder / "pids"
    await until(lambda: pids.exists() and pids.read_text() != "")
    return int(pids.read_text())


async def test_it_is_lost_until_it_was_started(tmp_path):
    engine = LaunchedSglang(options(tmp_path))
    with pytest.raises(EngineLostError, match="not started"):
        await engine.snapshot()
    with pytest.raises(EngineLostError, match="not started"):
        _ = engine.pid
    await engine.close()
    await engine.close()


async def test_a_server_that_ends_while_it_starts_is_told_with_its_last_words(tmp_path):
    engine = LaunchedSglang(options(tmp_path, alive_s=0.2))
    with pytest.raises(EngineLostError, match=r"(?s)did not start: the end of .*loading the model\nno such model"):
        await engine.start()
    assert not is_running(await child_of(tmp_path))


async def test_a_server_that_takes_too_long_is_ended(tmp_path):
    engine = LaunchedSglang(options(tmp_path, start_timeout_s=1.0))
    with pytest.raises(EngineLostError, match=r"did not start within 1.0 s"):
        await engine.start()
    assert not is_running(await child_of(tmp_path))


async def test_a_cancelled_start_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = LaunchedSglang(options(tmp_path))
    start = asyncio.create_task(engine.start())
    child = await child_of(tmp_path)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not is_running(child)
    assert not list(tmp_path.glob("rose-sglang-*"))


async def test_no_python_is_told(tmp_path):
    engine = LaunchedSglang(options(tmp_path, python=str(tmp_path / "nothing")))
    with pytest.raises(EngineLostError, match="did not start"):
        await engine.start()


def test_the_keeper_ends_a_server_whose_client_was_killed(tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    client = f"import subprocess, time; subprocess.Popen({[sys.executable, '-I', keeper.__file__, str(folder), script(tmp_path, 100)]!r}, stdin=subprocess.PIPE); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", client])
    pids = tmp_path / "pids"
    deadline = time.monotonic() + 20
    while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    child = int(pids.read_text())
    assert is_running(child)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while (is_running(child) or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)
    assert not folder.exists()


def test_the_keeper_ends_with_the_servers_status(tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-I", keeper.__file__, str(folder), script(tmp_path, 0.0)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.wait(20) == 3
    assert not is_running(int((tmp_path / "pids").read_text()))


def test_options_become_a_command(tmp_path):
    given = options(
        tmp_path,
        is_on_cpu=True,
        initial_version=WeightVersion("grpo", 2),
        max_total_tokens=512,
        server_args=("--x", "1"),
    )
    command = " ".join(given.command(4711)[1:])
    assert command.startswith("-m sglang.launch_server --model-path m --host 127.0.0.1 --port 4711 ")
    for part in (
        "--weight-version grpo:2",
        "--max-total-tokens 512",
        "--incremental-streaming-output",
        "--disable-overlap-schedule",
        "--attention-backend torch_native",
    ):
        assert part in command
    assert command.endswith("--x 1")
    assert "--device" not in options(tmp_path, is_on_cpu=False).command(1)


def test_options_become_an_environment(tmp_path):
    given = options(
        tmp_path, is_on_cpu=True, tensor_parallel_size=2, python_path=("/shim",), environment={"OMP_NUM_THREADS": "7"}
    )
    found = given.server_environment({"PYTHONPATH": "/here", "HOME": "/root"})
    assert found["PYTHONPATH"] == "/shim:/here"
    assert found["SGLANG_USE_CPU_ENGINE"] == "1"
    assert len(found["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert found["OMP_NUM_THREADS"] == "7"
    assert found["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"
    assert "HF_HUB_OFFLINE" not in found
    assert "SGLANG_USE_CPU_ENGINE" not in options(tmp_path, is_on_cpu=False).server_environment({})


def test_seeds_reach_the_sampler_by_the_way_that_the_device_has(tmp_path):
    flag, variable = "--enable-deterministic-inference", "ROSE_SGLANG_SEEDS"
    on_cpu, on_gpu = (options(tmp_path, is_on_cpu=is_on_cpu, is_deterministic=True) for is_on_cpu in (True, False))
    assert flag not in on_cpu.command(1)
    assert on_cpu.server_environment({})[variable] == "1"
    assert flag in on_gpu.command(1)
    assert variable not in on_gpu.server_environment({})
    assert options(tmp_path, is_on_cpu=True).server_environment({variable: "1"})[variable] == "0"


def test_plain_data_becomes_options(tmp_path):
    given = {"engine_id": "s", "model": "m", "python": "p", "initial_version": {"run": "grpo", "n": 2}}
    engine = LaunchedSglang.from_options(given, clock=MonotonicClock())
    assert engine.weight_version == WeightVersion("grpo", 2)
    with pytest.raises(ConfigError, match="max_running_requests"):
        LaunchedSglang.from_options({**given, "max_running_requests": 0}, clock=MonotonicClock())
    assert registry.load("serving", "sglang-launched") is LaunchedSglang
