"""The README's five minutes, by its own words: the pool of its ``job.toml``, then its trainer's command."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import threading
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import evidence
import jobs
import tiny
from rose.frameworks import watch
from rose.testing.pool_site.client import engine_environment, engine_python
from rose.testing.ports import free_ports

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
(PORT,) = free_ports(1)


def blocks(language):
    """The README's blocks, with a port that is free here in place of its own."""
    text = README.read_text(encoding="utf-8").replace("127.0.0.1:7100", f"127.0.0.1:{PORT}")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def command(start):
    """The words of the README's command that begins so."""
    (block,) = [one for one in blocks("bash") if one.lstrip().startswith(start)]
    return shlex.split(block, comments=True)


def test_what_the_readme_installs_has_all_that_verl_imports():
    """veRL's own dependencies lack what its V1 trainers import; the adapter's extra has them."""
    (line,) = re.findall(r"veRL's environment \(`pip install (.*?)`\)", README.read_text(encoding="utf-8"))
    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(one) for one in shlex.split(line)]
    assert {one.name for one in wanted} == {"rose-verl"}
    extras = {extra for one in wanted for extra in one.extras}
    installed = with_dependencies(
        project["dependencies"] + [x for e in extras for x in project["optional-dependencies"][e]]
    )
    lines = [x for name in ("requirements", "no-deps") for x in (HERE / f"{name}.txt").read_text().splitlines()]
    used = {canonicalize_name(Requirement(one).name) for one in lines if not one.startswith(("#", "pytest"))}
    assert not used - installed


def with_dependencies(requirements):
    """The names of distributions that these requirements bring, as the installed ones' metadata say."""
    found, waiting = set(), [Requirement(one) for one in requirements]
    while waiting:
        one = waiting.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key in found:
            continue
        found.add(key)
        try:
            needs = [Requirement(text) for text in metadata.requires(one.name) or ()]
        except metadata.PackageNotFoundError:
            continue  # services that no test uses
        for extra in one.extras or {""}:
            waiting += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


@pytest.fixture
def pool(tmp_path):
    """``rose pool job.toml``, in the engines' environment; only sizes are of this machine."""
    (text,) = blocks("toml")
    own = text.replace(
        "max_num_seqs = 64, max_model_len = 4096, kv_cache_bytes = 34359738368",
        'max_num_seqs = 8, max_model_len = 256, kv_cache_bytes = 33554432, dtype = "bfloat16"',
    )
    assert own != text
    (tmp_path / "job.toml").write_text(own)
    words = command("rose pool")
    assert words == ["rose", "pool", "job.toml"]
    with (tmp_path / "pool.log").open("w") as log:
        process = subprocess.Popen(
            [str(engine_python()), "-m", "rose.cli.main", *words[1:]],
            cwd=tmp_path,
            env=engine_environment(os.environ, {"TORCHDYNAMO_DISABLE": "1"}),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        killer = threading.Timer(300, process.kill)
        killer.start()
        try:
            line = process.stdout.readline()
            assert line, (tmp_path / "pool.log").read_text()[-3000:]
            yield json.loads(line)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                killer.cancel()


@pytest.mark.job
def test_the_five_minutes(tmp_path, request, record_property):
    tiny.make_policy(tmp_path / "policy", spread=0.02)
    tiny.make_task(tmp_path / "data")
    request.getfixturevalue("pool")
    words = command("python -m verl.trainer.main_ppo")
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    arguments = [one for one in words[3:] if one.strip()]
    separate = [one for one in command("trainer.v1.trainer_mode=separate_async") if one.strip()]
    machine = [one for one in jobs.cpu_overrides() if "actor.strategy" not in one]
    toy = [
        f"reward.custom_reward_function.path={jobs.HERE}/digits_reward.py",
        "actor_rollout_ref.actor.use_kl_loss=False",
    ]
    later = [
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
    ]
    witness = tmp_path / "witness"
    witness.mkdir()
    job = jobs.Job([*arguments, *separate, *later, *toy, *machine], jobs.environment(witness), tmp_path)
    try:
        assert job.end(300) == 0, job.tail()
    finally:
        (tmp_path / "job.log").write_text("\n".join(job.lines))
    assert any("step 2 is version" in line for line in job.lines), job.tail()
    found = evidence.samples(witness)
    assert len(found) >= 2 * 8
    for sample in found:
        evidence.check_fields(sample, 24)
    exact = evidence.Policies(tmp_path / "policy", witness, "bfloat16")
    record_property(
        "mean and P99 of log-prob errors, bfloat16", evidence.check_logprobs(found, exact, mean=5e-3, p99=3e-2)
    )


def configuration(name, folder):
    """What veRL makes of an example's command; it names each key that veRL does not know."""
    script = README.parent / "examples" / name
    (folder / "python").write_text(f'#!/bin/bash\nexec "{jobs.sys.executable}" "$@" --cfg job\n')
    (folder / "python").chmod(0o755)
    env = jobs.environment(POOL="http://127.0.0.1:7100", MODEL="m", DATA="d", PATH=f"{folder}:{os.environ['PATH']}")
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    from omegaconf import OmegaConf

    return OmegaConf.create(done.stdout[done.stdout.index("actor_rollout_ref:") :])


def test_the_way_without_an_accelerator_makes_its_files_and_is_a_configuration_of_verl(tmp_path):
    """Its job itself is that of the whole runs."""
    (block,) = blocks("sh")
    made, ran = (shlex.split(line) for line in block.splitlines())
    for words in (made, [*ran, "--cfg", "job"]):
        assert words[0] == "python"
        command_line = [jobs.sys.executable, str(README.parent / words[1]), *words[2:]]
        done = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "policy" / "config.json").exists()
    assert (tmp_path / "data" / "train.parquet").exists()
    assert f"pool: http://127.0.0.1:{PORT}" in done.stdout
    assert "total_training_steps: 2" in done.stdout


@pytest.mark.parametrize("name", ["grpo.sh", "dapo.sh"])
def test_the_examples_are_configurations_of_verl(name, tmp_path):
    """Every key is one that veRL knows, and what it makes of them is what the adapter accepts."""
    from omegaconf import OmegaConf

    from rose_verl.settings import Settings

    rollout = configuration(name, tmp_path).actor_rollout_ref.rollout
    rollout.prompt_length = rollout.response_length = 8
    settings = Settings.of(OmegaConf.to_container(OmegaConf.masked_copy(rollout, list(_SEEN))), {}, environ={})
    assert settings.place.url == "http://127.0.0.1:7100"


async def test_dapo_shapes_long_answers_down(tmp_path):
    """As the example's head says, in veRL's own reward manager."""
    import torch
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    config = configuration("dapo.sh", tmp_path)
    longest = config.data.max_response_length
    manager = DAPORewardManager(config, SimpleNamespace(decode=lambda *_, **__: ""), lambda **_: 1.0)

    async def reward(num_tokens):
        ids = torch.zeros(1, longest, dtype=torch.int64)
        data = DataProto.from_dict(
            tensors={"responses": ids, "attention_mask": torch.arange(longest)[None] < num_tokens},
            non_tensors={
                "data_source": np.array(["d"], object),
                "reward_model": np.array([{"ground_truth": ""}], object),
            },
        )
        return float((await manager.run_single(data))["reward_score"])

    assert await reward(longest // 2) == 1.0
    assert await reward(longest) == 0.0


_SEEN = (
    "engine_kwargs",
    "top_k",
    "top_p",
    "temperature",
    "prompt_length",
    "response_length",
    "dtype",
    "checkpoint_engine",
)


def test_the_faults_table_is_the_benchmarks():
    folder = README.parent / "benchmarks"
    rows = json.loads((folder / "faults.json").read_text())["rows"]
    spec = importlib.util.spec_from_file_location("faults", folder / "faults.py")
    environ = dict(os.environ)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        os.environ.clear()
        os.environ.update(environ)  # the bench sets its own
    assert module.table(rows) in README.read_text(encoding="utf-8")
    for row in rows:
        if row["side"] == "rose":
            assert (row["samples_lost"], row["groups_discarded"], row["is_alive"]) == (0, 0, True)


def test_the_table_of_refusals_says_what_is_said():
    """Each message of the README is one that the code has."""
    sources = " ".join(path.read_text() for path in (README.parent / "src" / "rose_verl").glob("*.py"))
    sources += Path(watch.__file__).read_text()
    text = README.read_text(encoding="utf-8")
    for told in (
        "engines of a pool take whole weights, no adapters; set model.lora.merge=True",
        "a turn of a pool is made of token ids alone",
        "weights are gathered by the trainer",
        "log-probs are then those of other weights unless the engines process them",
        "engines that share their devices may answer the same request differently",
        "a pool holds the policy's weights; run reward and teacher models with vllm or sglang",
        "only rose reaches the engines of a pool",
        "has lost the weights of this job",
    ):
        assert told in text, told
        assert told in sources, told
