"""The processes of an executor: a rollout engine that is kept running, a serving engine that outlives it, a configuration."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import pytest_asyncio

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from executor_parts import QUICK
from prometheus_client import CollectorRegistry, generate_latest

from rose.backends.step_settings import read_settings
from rose.cli import serve
from rose.cli.main import main
from rose.clocks import MonotonicClock
from rose.coserving.ledger import Ledger, RolloutState, UsageState
from rose.coserving.processes import ProcessName, process_start
from rose.errors import ConfigError, EngineLostError, TransportError
from rose.hosts.http import executor
from rose.hosts.http.executor_config import (
    load_config,
    rollout_options,
    serving_command,
    serving_environment,
    serving_settings,
)
from rose.hosts.http.executor_metrics import ExecutorCollector
from rose.hosts.http.executor_rollout import RestartConfig, RolloutSupervisor
from rose.hosts.http.executor_serving import ServingProcess, read_pid_file, stop
from rose.testing import FakeEngine
from rose.testing.contracts.streams import until

# The rollout engine.


async def test_an_engine_that_died_is_started_again():
    fakes: list[FakeEngine] = []
    said: list[str] = []

    async def start() -> FakeEngine:
        if len(fakes) == 1:
            fakes.append(FakeEngine())
            message = "no memory"
            raise EngineLostError(message)
        fakes.append(FakeEngine())
        return fakes[-1]

    async with RolloutSupervisor(start, QUICK, said.append) as supervisor:
        await supervisor.wait_until_up()
        first = supervisor.incarnation
        assert supervisor.engine(first) is fakes[0]
        fakes[0].die("it was killed")
        await until(lambda: len(fakes) == 3 and supervisor.problem is None)
        assert supervisor.incarnation not in {"", first}
        with pytest.raises(EngineLostError, match="started anew"):
            supervisor.engine(first)
    assert any("it was killed" in line for line in said)
    assert any("did not start: no memory" in line for line in said)
    with pytest.raises(EngineLostError):
        await fakes[2].snapshot()


async def test_an_engine_that_hangs_is_ended():
    children: list[subprocess.Popen[bytes]] = []

    async def start() -> FakeEngine:
        engine = FakeEngine()
        children.append(subprocess.Popen(["sleep", "60"]))  # noqa: ASYNC220 - its pid stands for the engine's
        engine.pid = children[-1].pid
        if len(children) == 1:
            engine.snapshot = lambda: asyncio.sleep(60)
        return engine

    async with RolloutSupervisor(start, QUICK) as supervisor:
        await until(lambda: len(children) == 2)
        assert children[0].wait(5) == -signal.SIGKILL
        await supervisor.wait_until_up()
    children[1].kill()
    children[1].wait()


async def test_what_no_restart_cures_ends_the_supervision():
    async def start() -> FakeEngine:
        message = "no such option"
        raise ConfigError(message)

    async with RolloutSupervisor(start, QUICK) as supervisor:
        for wait in (supervisor.wait_until_up, supervisor.run_forever):
            with pytest.raises(ConfigError, match="no such option"):
                await wait()


def test_waits_between_restarts_grow_up_to_a_bound():
    config = RestartConfig(first_s=0.5, longest_s=30.0)
    assert [config.wait_s(n) for n in (1, 2, 3, 7, 1000)] == [0.5, 1.0, 2.0, 30.0, 30.0]


# The serving engine.


@pytest_asyncio.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Any]:
    """A watch on a "serving engine" that sleeps and beats no heart, made anew with the ledger of the first."""
    ledger = Ledger.create(tmp_path / "gpu0.ledger")
    tasks, said = [], []

    def watch(*command: str) -> ServingProcess:
        made = ServingProcess(
            [ledger],
            MonotonicClock(),
            command=command,
            run_dir=tmp_path,
            restart=QUICK,
            environment={"WHO": "serving"},
            say=said.append,
        )
        tasks.append(asyncio.create_task(made.run()))
        return made

    watch.ledger, watch.folder, watch.tasks, watch.said = ledger, tmp_path, tasks, said
    yield watch
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    stop(tmp_path)


def process_of(folder: Path) -> ProcessName | None:
    return read_pid_file(folder / "serving.pid")


async def test_a_serving_engine_outlives_its_executor_and_is_found_again(serving: Any):
    first = serving("sh", "-c", "echo $WHO says hello; sleep 60")
    await until(lambda: process_of(serving.folder) is not None)
    process = process_of(serving.folder)
    assert process.is_running()
    assert os.getsid(process.pid) == process.pid, "it has a session of its own"
    await until(lambda: "serving says hello" in (serving.folder / "serving.log").read_text())
    serving.tasks[0].cancel()
    second = serving("sleep", "60")
    await asyncio.sleep(0.4)
    assert process_of(serving.folder) == process
    assert (first.num_starts, second.num_starts) == (1, 0)
    os.killpg(process.pid, signal.SIGKILL)  # now a zombie of this process, until somebody asks
    await until(lambda: second.num_starts == 1 and process_of(serving.folder) not in {None, process})
    assert process_of(serving.folder).is_running()
    serving.tasks[1].cancel()
    assert await asyncio.to_thread(stop, serving.folder)
    assert not await asyncio.to_thread(stop, serving.folder)


async def test_a_pid_that_is_anothers_by_now_is_nobody(serving: Any):
    own = Path("/proc/self/stat").read_text()
    (serving.folder / "serving.pid").write_text(own)
    assert process_of(serving.folder) == ProcessName(os.getpid(), process_of(serving.folder).start)
    assert process_of(serving.folder).is_running()
    head, _, rest = own.rpartition(")")
    fields = rest.split()
    fields[19] = str(int(fields[19]) - 1)
    (serving.folder / "serving.pid").write_text(f"{head}) {' '.join(fields)}")
    assert not process_of(serving.folder).is_running()
    assert not stop(serving.folder)
    made = serving("sleep", "60")
    await until(lambda: made.num_starts == 1)


@pytest.mark.parametrize("text", ["", "12", "x (y) z", "(", "1 (a) S 2 3"])
def test_other_texts_name_no_process(tmp_path: Path, text: str):
    (tmp_path / "serving.pid").write_text(text)
    assert read_pid_file(tmp_path / "serving.pid") is None


async def test_a_command_that_fails_is_tried_again_and_again(serving: Any):
    made = serving("/nowhere/engine")
    await until(lambda: made.num_starts >= 3)
    assert "not found" in (serving.folder / "serving.log").read_text()


async def test_what_keeps_serving_from_starting_is_told_until_it_passes(serving: Any):
    (serving.folder / "serving.log").mkdir()
    made = serving("sleep", "60")
    await until(lambda: len(serving.said) >= 3)
    assert all("cannot start the serving engine" in line and "serving.log" in line for line in serving.said)
    (serving.folder / "serving.log").rmdir()
    await until(lambda: made.num_starts == 1)


async def test_a_stale_heartbeat_is_told(serving: Any):
    made = serving()
    assert re.match("serving has no heartbeat", made.problem)
    serving.ledger.beat(MonotonicClock().now())
    assert made.problem is None
    await made.wait_until_heard()
    serving.ledger.beat(MonotonicClock().now() - 3)
    assert re.match(r"serving's heartbeat is 3\.\d s old", made.problem)
    serving.ledger.beat(MonotonicClock().now() + 1e6)
    assert "of another boot" in made.problem


# The configuration.

CONFIG = """
run_dir = "{folder}/run"
[device]
kind = "host"
paths = ["{folder}/gpu0.device"]
ledgers = ["{folder}/gpu0.ledger"]
[serving]
model = "{folder}"
args = ["--port", "8000"]
memory = {{pool_bytes = 4_000_000_000}}
[serving.admission.slo]
ttft_s = 0.4
tpot_s = 0.1
[rollout]
model = "{folder}"
options = {{max_num_seqs = 4}}
"""


def write(folder: Path, *changes: tuple[str, str]) -> Path:
    text = CONFIG.format(folder=folder)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "gpu0.toml"
    path.write_text(text)
    return path


def test_both_engines_get_the_same_slo_and_memory(tmp_path: Path):
    config = load_config(write(tmp_path))
    serving, rollout = read_settings(serving_settings(config)), read_settings(rollout_options(config).rose)
    assert (serving.role, rollout.role) == ("serving", "rollout")
    assert serving.admission == rollout.admission == config.serving.admission
    assert serving.memory == rollout.memory == config.serving.memory
    assert serving.device == rollout.device
    assert serving.ledger == rollout.ledger == f"{tmp_path}/gpu0.ledger"
    assert rollout_options(config).engine_id == "gpu0"
    assert rollout_options(config).max_num_seqs == 4
    command = serving_command(config)
    assert command[-2:] == ("--port", "8000")
    environment = serving_environment(
        load_config(write(tmp_path, ("args =", 'environment = {HF_HUB_OFFLINE = "0"}\nargs =')))
    )
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", (
        "KV pages are given back by a worker in the engine's process"
    )
    assert environment["HF_HUB_OFFLINE"] == "0"
    assert json.loads(command[command.index("--additional-config") + 1]) == {"rose": serving_settings(config)}


def test_a_gang_has_lists_of_paths(tmp_path: Path):
    names = "paths", "ledgers"
    changes = [
        (f'{name} = ["{tmp_path}/gpu0.', f'{name} = ["{tmp_path}/gpu1.{name}", "{tmp_path}/gpu0.') for name in names
    ]
    config = load_config(write(tmp_path, *changes))
    assert rollout_options(config).tensor_parallel_size == 2
    assert len(read_settings(rollout_options(config).rose).ledger) == 2


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("kind = ", "sort = ", "unknown key"),
        ('kind = "host"', 'kind = "paced"', "clock is for paced devices"),
        ("ledgers = [", 'ledgers = ["more", ', "1 paths and 2 ledgers"),
        ("gpu0.ledger", "gpu0.device", "gpu0.device is named twice; each device has a file and a ledger"),
        ("4_000_000_000", "2_300_000_000", "serving.memory: pool_bytes 2300000000 less headroom_bytes 2147483648 leaves no"),
        ("args = ", "attach = true\nargs = ", "exactly one of attach"),
        ("[device]", 'listen = "0.0.0.0:1"\n[device]', "configure [[tokens]]"),
        ("[device]", 'listen = "1"\n[device]', "gpu0.toml: listen: '1' is no place to listen"),
        ("[device]", 'tokens = [{name = "a", sha256 = "secret"}]\n[device]', "sha256"),
        ("max_num_seqs = 4", "max_num_sek = 4", "gpu0.toml: rollout.options.max_num_sek: unknown key; did you mean 'max_num_seqs'"),
        ("max_num_seqs = 4", "max_num_sek = 4, seed = 0.5", "rollout.options.seed: expected an integer"),
        ("[rollout]", '[rollout]\nengine_id = "a b"', "rollout.engine_id: a name is without spaces"),
        ('/gpu0.device"', '/none/gpu0.device"', "device.paths[0]: there is no folder"),
        ('/gpu0.device"', '"', "device.paths[0]: "),
        ('/gpu0.ledger"', '"', "no ROSE ledger but a folder"),
        ('/gpu0.ledger"', '/gpu0.toml"', "device.ledgers[0]: "),
        ('/run"', '/gpu0.toml/run"', "run_dir: "),
        ("max_num_seqs = 4", "max_num_seqs = 0", "max_num_seqs"),
        ("max_num_seqs = 4", 'rose = "x"', "set by the executor itself"),
        ("[rollout]", "[rollout]\ntiming = {poll = 1}", "timing.poll: unknown key"),
        ("[rollout]", '[rollout]\nprofile = "h100:qwen3-8b"', "rollout.profile is for paced devices"),
        ('[rollout]\nmodel = "', '[rollout]\nmodel = "/nowhere', "there is no folder /nowhere"),
        ("[rollout]", '[rollout]\ninitial_version = "12"', "written run:n"),
    ],
)  # fmt: skip
def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, complaint: str
):
    assert main(["serve", str(write(tmp_path, (old, new))), "--check"]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_check_shows_what_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", str(write(tmp_path)), "--check", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["event"] == "checked"
    assert checked["rollout_settings"]["role"] == "rollout"
    assert checked["serving_command"][0] == sys.executable
    assert main(["serve", str(write(tmp_path)), "--check"]) == 0
    assert "in order" in capsys.readouterr().out
    moved = write(tmp_path, ('[rollout]\nmodel = "', '[rollout]\nmodel = "/nowhere'))
    assert main(["serve", str(moved), "--stop-serving"]) == 0
    assert "no serving engine" in capsys.readouterr().err


# All of it, with a fake rollout engine.


def attached(folder: Path) -> Any:
    changes = ('model = "' + str(folder) + '"\nargs = ["--port", "8000"]', "attach = true")
    return load_config(write(folder, changes, ("[device]", "restart = {first_s = 0.01}\n[device]")))


async def fake() -> FakeEngine:
    return FakeEngine(engine_id="gpu0")


async def test_a_second_executor_of_a_folder_is_refused(tmp_path: Path):
    config = attached(tmp_path)
    async with executor.executing(config, start=fake, say=lambda _: None):
        with pytest.raises(ConfigError, match="an executor runs in"):
            async with executor.executing(config, start=fake, say=lambda _: None):
                pass
        with pytest.raises(ConfigError, match="end it first"):
            stop(config.run_dir)
    async with executor.executing(config, start=fake, say=lambda _: None) as (again, _):
        await again.supervisor.wait_until_up()


async def test_a_second_executor_of_a_device_is_refused_whatever_its_folder(tmp_path: Path):
    config = attached(tmp_path)
    other = attrs.evolve(config, run_dir=tmp_path / "another")
    async with executor.executing(config, start=fake, say=lambda _: None):
        with pytest.raises(ConfigError, match=r"another executor shares the device of ledger .*gpu0\.ledger; end it"):
            async with executor.executing(other, start=fake, say=lambda _: None):
                pass
    async with executor.executing(other, start=fake, say=lambda _: None) as (again, _):
        await again.supervisor.wait_until_up()


async def test_a_foreign_ledger_is_never_replaced(tmp_path: Path):
    (tmp_path / "gpu0.ledger").write_bytes(b"something else" * 500)
    with pytest.raises(ConfigError, match="no ROSE ledger"):
        async with executor.executing(attached(tmp_path), start=fake):
            pass
    assert (tmp_path / "gpu0.ledger").read_bytes() == b"something else" * 500


async def test_running_until_told_to_stop(tmp_path: Path):
    config, stopped, said, ready = attached(tmp_path), asyncio.Event(), [], []
    running = asyncio.create_task(executor.run(config, stopped, say=said.append, tell=ready.append, start=fake))
    await until(lambda: bool(ready))
    assert ready[0].url.startswith("http://127.0.0.1:")
    stopped.set()
    await running
    assert "the serving engine goes on" in said[-1]


async def test_an_engine_that_is_gone_before_it_was_told_of_ends_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, stopped, is_awaited, fakes = attached(tmp_path), asyncio.Event(), asyncio.Event(), []

    async def start() -> FakeEngine:
        await is_awaited.wait()
        fakes.append(await fake())
        if len(fakes) == 1:
            fakes[0].die("killed at once")
        return fakes[-1]

    report = serve._Report(is_json=True)
    running = asyncio.create_task(executor.run(config, stopped, say=report.say, tell=report.tell, start=start))
    await asyncio.sleep(0.2)
    is_awaited.set()
    await until(lambda: len(fakes) == 2 or running.done())
    stopped.set()
    await running
    assert '"event": "ready"' in capsys.readouterr().out


async def test_a_rollout_engine_of_an_executor_that_is_gone_is_ended_first(tmp_path: Path):
    ledger = Ledger.create(tmp_path / "ledger")
    with subprocess.Popen(["sleep", "60"]) as child:  # noqa: ASYNC220 - it stands for the engine
        ledger.publish_rollout(RolloutState(pid=child.pid, pid_start=process_start(child.pid) + 1))
        await executor.end_leftovers([ledger])
        assert child.poll() is None, "it is another process by now"
        ledger.publish_rollout(RolloutState(pid=child.pid, pid_start=process_start(child.pid)))
        await executor.end_leftovers([ledger])
        assert child.wait(5) == -signal.SIGKILL
    await executor.end_leftovers([ledger])


async def test_a_port_that_is_taken_is_said(tmp_path: Path):
    config = attached(tmp_path)
    async with executor.executing(config, start=fake, say=lambda _: None) as (running, _):
        port = running.url.rpartition(":")[2]
        path = write(tmp_path, ("[device]", f'listen = "127.0.0.1:{port}"\n[device]'), ("/run", "/run2"))
        with pytest.raises(TransportError, match="cannot listen"):
            async with executor.executing(load_config(path), start=fake):
                pass


async def test_metrics_show_what_the_ledger_says(tmp_path: Path):
    config = attached(tmp_path)
    async with executor.executing(config, start=fake, say=lambda _: None) as (running, _):
        await running.supervisor.wait_until_up()
        ledger = Ledger.attach(tmp_path / "gpu0.ledger")
        ledger.publish_usage(UsageState(busy_fraction=0.75, rollout_fraction=0.5, debt_s=1.5))
        (tmp_path / "more").mkdir()
        other = Ledger.create(tmp_path / "more" / "gpu0.ledger")

        def shown(*ledgers: Ledger) -> str:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(
                ExecutorCollector(
                    ledgers,
                    MonotonicClock(),
                    serving=running.serving,
                    supervisor=running.supervisor,
                    service=running.service,
                    holds=running.service._holds,
                )
            )
            return generate_latest(registry).decode()

        text = shown(ledger)
        both = shown(ledger, other).splitlines()
    for each in (ledger, other):
        assert f'rose_lease_granted{{device="{each.path}"}} 0.0' in both, "two ledgers of one name are two devices"
    for line in (
        'rose_device_busy_fraction{device="gpu0"} 0.75',
        'rose_device_rollout_fraction{device="gpu0"} 0.5',
        'rose_serving_slo_debt_seconds_total{device="gpu0"} 1.5',
        'rose_lease_granted{device="gpu0"} 0.0',
        'rose_rollout_held_seconds_total{reason="no_slack"} 0.0',
        "rose_rollout_engine_up 1.0",
        "rose_rollout_engine_starts_total 1.0",
        "rose_serving_heartbeat_age_seconds +Inf",
    ):
        assert line in text.splitlines()
