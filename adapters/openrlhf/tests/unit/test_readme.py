"""The README says what is true; its commands are run by ``tests/stock``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import attrs

from harness import ADAPTER, SMALL, readme_commands
from rose_openrlhf.flags import Options, read_job, read_options
from rose_openrlhf.versions import TESTED

TEXT = (ADAPTER / "README.md").read_text()


def test_every_command_is_one_that_a_whole_run_gives():
    first, *others = readme_commands()
    assert re.findall(r"(\w+)=", first) == ["ROSE_POOL", "MODEL", "PROMPTS", "REWARD", "GPUS"]
    assert others[:2] == ["bash examples/grpo.sh", "bash examples/dapo.sh"]
    assert len(others) == 3
    assert all((ADAPTER / name).exists() for name in re.findall(r"\S+/\S+\.(?:sh|py)", " ".join(others)))


def test_the_table_of_flags_is_whole_and_its_defaults_are_true():
    rows = dict(re.findall(r"^\| `(--rose\.\w+)`(?:, `--rose\.\w+`)? \| (\S+)", TEXT, re.MULTILINE))
    for field in attrs.fields(Options):
        assert f"`--rose.{field.name}`" in TEXT
        if isinstance(field.default, float):
            row = rows.get(f"--rose.{field.name}", rows["--rose.publish_timeout_s"])
            assert row == f"{field.default:g}"


def test_the_examples_give_flags_that_are_read():
    for name in ("grpo.sh", "dapo.sh"):
        text = (ADAPTER / "examples" / name).read_text()
        assert subprocess.run(["bash", "-n", ADAPTER / "examples" / name], check=False).returncode == 0
        words = text.partition("rose_openrlhf")[2].replace("\\\n", " ").split()
        options, rest = read_options(words)
        assert options == Options()
        assert read_job(rest).num_engines == 1
        assert read_job(rest).async_enable == (name == "dapo.sh")


def test_the_tested_version_is_named():
    assert f"OpenRLHF {TESTED[-1]} " in TEXT
    assert f"openrlhf=={TESTED[-1]}" in (ADAPTER / "pyproject.toml").read_text()
    assert f"openrlhf=={TESTED[-1]}" in (ADAPTER / "tests/no-deps.txt").read_text()


def test_the_pool_of_the_readme_is_a_job_file(tmp_path):
    (job,) = re.findall(r"```toml\n# job\.toml\n(.*?)```", TEXT, re.DOTALL)
    from rose.hosts.job import JobConfig, load_job

    (tmp_path / "job.toml").write_text(job)
    assert load_job(JobConfig, tmp_path / "job.toml").transport.keeper == "pool"
    (nodes,) = re.findall(r"```toml\n(\[transport\].*?)```", TEXT, re.DOTALL)
    own_parts = job.partition("[transport]")[0]
    (tmp_path / "nodes.toml").write_text(own_parts + nodes.replace('"..."', f'"{"0" * 64}"'))
    on_nodes = load_job(JobConfig, tmp_path / "nodes.toml")
    assert on_nodes.service.listen == "10.0.0.5:7100"
    assert on_nodes.service.tokens[0].name == on_nodes.job.name


def test_the_way_to_try_it_without_a_gpu_makes_its_files_and_gives_its_flags(tmp_path):
    """The trainer's own command is left out: whole runs give the same one."""
    (block,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for name in ("tests", "examples"):
        (tmp_path / name).symlink_to(ADAPTER / name)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    told = 'bash() { printf "%s\n" "$@"; }\n'
    done = subprocess.run(
        ["bash", "-euc", told + block], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "config.json").exists()
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 6
    assert done.stdout.split()[:-2] == ["examples/grpo.sh", *SMALL]
