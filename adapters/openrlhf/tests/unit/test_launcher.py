"""What happens before OpenRLHF's command, and what keeps it from being run."""

import asyncio
import hashlib
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata

import pytest

from rose import RolloutPool
from rose.errors import ConfigError
from rose.hosts.http.auth import TokenConfig
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.testing import FakeEngine
from rose.types import EngineId
from rose_openrlhf import launcher
from rose_openrlhf.flags import Options
from rose_openrlhf.versions import TESTED, check_signature, check_version
from rose_openrlhf.workers import SETUP_HOOK, VLLM_VARIABLE

JOB = "--vllm.num_engines 1 --actor.model_name_or_path m --ds.attn_implementation sdpa --data.max_len 96".split()


@pytest.mark.parametrize(("arguments", "said"), [
    (JOB, "no pool was named: set --rose.pool"),
    ([*JOB, "--rose.pool", "nonsense"], "is no address of a pool"),
    ([*JOB, "--rose.pool", "http://127.0.0.1:9"], "127.0.0.1:9"),
    ([*JOB, "--vllm.num_engines", "2", "--rose.pool", "http://127.0.0.1:9"], "set it to 1"),
    ([*JOB, "--rose.nothing"], "is no flag of rose_openrlhf"),
])  # fmt: skip
def test_a_job_that_cannot_start_is_one_line_and_code_2(arguments, said, capsys, monkeypatch):
    monkeypatch.delenv("ROSE_POOL", raising=False)
    monkeypatch.setenv(VLLM_VARIABLE, "auto")
    assert launcher.main(arguments) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.startswith("rose_openrlhf: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(("given", "said"), [
    (None, "needs a bearer token"),
    ("wrong", "unknown token"),
])  # fmt: skip
async def test_a_pool_that_wants_a_token_says_where_it_goes(given, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(VLLM_VARIABLE, "auto")
    monkeypatch.delenv("ROSE_POOL_TOKEN_FILE", raising=False)
    known = TokenConfig(name="m", sha256=hashlib.sha256(b"secret").hexdigest())
    flags = []
    if given is not None:
        (tmp_path / "token").write_text(given)
        flags = ["--rose.pool_token_file", str(tmp_path / "token")]
    async with (
        RolloutPool([FakeEngine(engine_id=EngineId("e0"))]) as pool,
        serve_pool(PoolService(pool, name="m", tokens=[known]), "127.0.0.1:0") as url,
    ):
        assert await asyncio.to_thread(launcher.main, [*JOB, "--rose.pool", url, *flags]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert "name the file with its token where the address is given, or in ROSE_POOL_TOKEN_FILE" in errors


def test_something_that_is_no_pool(capsys, monkeypatch):
    monkeypatch.setenv(VLLM_VARIABLE, "auto")
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert launcher.main([*JOB, "--rose.pool", url]) == 2
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert f"no pool answers at {url}" in capsys.readouterr().err


def test_the_same_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "rose_openrlhf", "--rose.nothing"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--rose.nothing is no flag" in done.stderr


def test_a_pool_is_looked_at():
    launcher.check_pool({"snapshot": {"engines": [{"engine_id": "a"}]}})
    for empty in ({"snapshot": {"engines": []}}, {}):
        with pytest.raises(ConfigError, match="no engines"):
            launcher.check_pool(empty)


def test_workers_are_set_up_beside_what_openrlhf_says():
    seen = {}
    begin = launcher.with_setup(lambda *args, **named: seen.update(named, args=args), Options(vllm="stand-in"))
    begin(runtime_env={"env_vars": {"NCCL_DEBUG": "WARN"}}, num_gpus=1)
    assert seen == {
        "args": (),
        "num_gpus": 1,
        "runtime_env": {
            "env_vars": {"NCCL_DEBUG": "WARN", VLLM_VARIABLE: "stand-in"},
            "worker_process_setup_hook": SETUP_HOOK,
        },
    }
    begin("auto")
    assert seen["args"] == ("auto",)


def test_versions_outside_the_window_are_refused():
    assert check_version(lambda _: TESTED[0]) == TESTED[0]
    with pytest.raises(ConfigError, match=r"OpenRLHF 0\.12\.0 is installed"):
        check_version(lambda _: "0.12.0")

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    with pytest.raises(ConfigError, match="pip install openrlhf=="):
        check_version(missing)


def test_a_changed_function_is_refused():
    with pytest.raises(ConfigError, match="new_argument"):
        check_signature(lambda new_argument: None)
