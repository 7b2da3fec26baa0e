"""What happens before OpenRLHF's command, and what keeps it from being run."""

import subprocess
import sys
from importlib import metadata

import pytest

from rose.errors import ConfigError
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
