"""The parts of a site without engines: arguments, files of its processes, protocol, faults, digests, and the end of everything."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.backends.memory import MemoryTransport
from rose.backends.remote import RemoteEngine
from rose.clocks import MonotonicClock
from rose.config import load
from rose.coserving.ledger import Ledger
from rose.coserving.processes import ProcessName, process_start
from rose.errors import (
    BlobNotFoundError,
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineLostError,
    LayoutMismatchError,
)
from rose.hosts.http.executor_config import load_config
from rose.hosts.http.executor_lease import LeaseGate
from rose.hosts.http.executor_rollout import RestartConfig, RolloutSupervisor
from rose.hosts.http.executor_service import RolloutService
from rose.hosts.http.lender_config import LenderConfig
from rose.hosts.http.server import bind, make_app, parse_place, served
from rose.policies.admission import Budget
from rose.testing import FakeEngine, FakeTrainer, PoolSite, fake_update
from rose.testing.pool_site.children import Reaper
from rose.testing.pool_site.client import engine_environment, engine_python
from rose.testing.pool_site.faults import FaultyEngine, Switches
from rose.testing.pool_site.front import fronted
from rose.testing.pool_site.options import executor_config, lender_config, parse
from rose.testing.pool_site.sums import held_sums, published_sums
from rose.transfer.layout import TargetLayout
from rose.transfer.publisher import Publisher
from rose.types import EngineId, EngineRequest, FinishReason, RequestId, Sampling, WeightVersion

PATIENCE_S = 10.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


# Arguments, and the files that are made of them.


def test_defaults(model: Path) -> None:
    options = parse(["--model", str(model)])
    assert (options.own_ids, options.lent_ids) == (("own0", "own1"), ("gpu0",))
    assert options.engine_options["dtype"] == "float32"
    assert "seed" not in options.engine_options, "engines of one seed may draw one answer"
    assert options.pool_config.stall_s == 2.0, "the pool's own default"


def test_every_option_arrives(model: Path) -> None:
    words = "--dedicated 1 --borrowed 0 --dtype bfloat16 --max-len 64 --max-seqs 3 --kv-bytes 2000000 --seed 5 --stall-s 7.5"
    options = parse(["--model", str(model), *words.split(), "--pool", '{"rejoin_s": 1.0}'])
    assert options.engine_options == {
        "dtype": "bfloat16",
        "max_model_len": 64,
        "max_num_seqs": 3,
        "kv_cache_bytes": 2_000_000,
        "seed": 5,
    }
    assert (options.dedicated, options.lent_ids) == (1, ())
    assert (options.pool_config.stall_s, options.pool_config.rejoin_s) == (7.5, 1.0)
    assert options.pool_config.routing.cap_per_engine == 3, "no more turns than it runs at once"
    more = parse(["--model", str(model), "--max-seqs", "3", "--pool", '{"routing": {"cap_per_engine": 9}}'])
    assert more.pool_config.routing.cap_per_engine == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dedicated 0", "--dedicated must be an integer >= 1, got 0"),
        ("--borrowed -1", "--borrowed must be an integer >= 0"),
        ("--dtype int8", "--dtype must be a string like float32"),
        ("--max-len 1", "--max-len must be an integer >= 8"),
        ("--stall-s 0", "--pool: .*stall_s"),
        ('--pool {"stahl_s":1}', "--pool: .*stahl_s"),
        ('--pool {"routing":3}', "--pool: .*routing"),
        ("--pool [1]", "--pool takes a JSON object"),
        ("--pool {", "--pool takes a JSON object"),
    ],
)
def test_wrong_options_are_named(model: Path, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["--model", str(model), *words.split()])


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--model {tmp_path}: there is no config.json"):
        parse(["--model", str(tmp_path)])


def test_a_wrong_command_line_ends_with_2_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rose.testing.pool_site", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=python_environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pool site: error: --model ")
    assert done.stderr.count("\n") == 1


def test_files_of_executor_and_lender_are_read_back(model: Path, tmp_path: Path) -> None:
    (tmp_path / "serving").mkdir()
    options = parse(["--model", str(model), "--borrowed", "2", "--max-seqs", "3"])
    path = tmp_path / "gpu1.toml"
    path.write_text(executor_config(options, "gpu1", tmp_path))
    executor = load_config(path)
    assert executor.rollout.engine_id == "gpu1"
    assert executor.rollout.options["max_num_seqs"] == 3
    assert executor.device.ledgers == (str(tmp_path / "gpu1.ledger"),)
    assert executor.listen.startswith("127.0.0.1:")
    path.write_text(lender_config(options, tmp_path))
    lender = load(LenderConfig, path)
    assert {name: device.ledger for name, device in lender.devices.items()} == {
        "gpu0": tmp_path / "gpu0.ledger",
        "gpu1": tmp_path / "gpu1.ledger",
    }


# Faults, above an engine in this process and before one behind an executor.


class FaultyFake(FaultyEngine, FakeEngine):
    """A fake engine with faults on command."""


@pytest.fixture
def faulty() -> FaultyFake:
    engine = FaultyFake(engine_id=EngineId("e0"), token_s=0.002)
    engine.switches = Switches("e0")
    return engine


@contextlib.asynccontextmanager
async def executor(folder: Path) -> AsyncIterator[str]:
    """Serve a fake engine as an executor does, on a device that is lent under token 7."""
    ledger, clock = Ledger.create(folder / "gpu0.ledger"), MonotonicClock()
    ledger.publish_budget(Budget(fencing_token=7, expires_s=math.inf, is_granted=True))

    async def start() -> FakeEngine:
        return FakeEngine(token_s=0.002, weight_version=WeightVersion("run", 3))

    async with RolloutSupervisor(start, RestartConfig(look_s=0.01), lambda _: None) as supervisor:
        await supervisor.wait_until_up()
        async with RolloutService(supervisor, LeaseGate([ledger], clock)) as service:
            listener = bind(parse_place("127.0.0.1:0"), ())
            async with served(make_app(service.routes()), listener) as url:
                yield url


@contextlib.asynccontextmanager
async def behind_a_front(folder: Path) -> AsyncIterator[tuple[str, RemoteEngine, Switches]]:
    switches = Switches("gpu0")
    async with executor(folder) as upstream, fronted(upstream, switches) as url:
        engine = RemoteEngine(url, engine_id="gpu0")
        engine.set_lease(7)
        try:
            yield upstream, engine, switches
        finally:
            await engine.close()


@contextlib.asynccontextmanager
async def engines(kind: str, folder: Path, faulty: FaultyFake) -> AsyncIterator[tuple[Any, Switches]]:
    if kind == "own":
        yield faulty, faulty.switches
    else:
        async with behind_a_front(folder) as (_, engine, switches):
            yield engine, switches


KINDS = pytest.mark.parametrize("kind", ["own", "lent"])


def request(name: str, max_tokens: int) -> EngineRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id=RequestId(name), prompt_ids=(1, 2, 3), sampling=sampling)


async def read(engine: Any, name: str = "r1", max_tokens: int = 8) -> tuple[list[int], FinishReason | None]:
    tokens: list[int] = []
    reason = None
    async for chunk in engine.generate(request(name, max_tokens)):
        tokens += chunk.token_ids
        reason = chunk.finish_reason
    return tokens, reason


@KINDS
async def test_without_faults_nothing_is_changed(kind: str, tmp_path: Path, faulty: FaultyFake) -> None:
    async with engines(kind, tmp_path, faulty) as (engine, switches):
        tokens, reason = await read(engine)
        assert (len(tokens), reason, switches.names) == (8, FinishReason.LENGTH, [])
        await engine.stage(fake_update(WeightVersion("run", 4)))
        assert (await engine.activate()).version == WeightVersion("run", 4)


@KINDS
async def test_fail_fast_fails_before_any_token_and_ends_with_its_switch(
    kind: str, tmp_path: Path, faulty: FaultyFake
) -> None:
    async with engines(kind, tmp_path, faulty) as (engine, switches):
        switches.fail_fast = True
        with pytest.raises(EngineError, match="fail_fast is on"):
            await read(engine)
        assert (await engine.snapshot()).num_running == 0, "the engine looks alive, and has no request"
        switches.fail_fast = False
        assert len((await read(engine, "r2"))[0]) == 8


@KINDS
async def test_hang_holds_streams_under_way_and_lets_them_go_on(kind: str, tmp_path: Path, faulty: FaultyFake) -> None:
    async with engines(kind, tmp_path, faulty) as (engine, switches):
        tokens: list[int] = []

        async def follow() -> None:
            async for chunk in engine.generate(request("r1", 400)):
                tokens.extend(chunk.token_ids)

        following = asyncio.create_task(follow())
        await eventually(lambda: len(tokens) > 3)
        switches.hang = True
        await asyncio.sleep(0.1)
        held = len(tokens)
        await asyncio.sleep(0.2)
        assert len(tokens) == held < 400
        assert (await engine.snapshot()).num_running == 1
        switches.hang = False
        await asyncio.wait_for(following, PATIENCE_S)
        assert len(tokens) == 400


@KINDS
async def test_a_stream_that_hangs_can_be_given_up(kind: str, tmp_path: Path, faulty: FaultyFake) -> None:
    async with engines(kind, tmp_path, faulty) as (engine, switches):
        switches.hang = True
        reading = asyncio.create_task(read(engine, max_tokens=4000))
        await asyncio.sleep(0.1)
        reading.cancel()
        await asyncio.wait({reading}, timeout=PATIENCE_S)
        assert reading.cancelled()
        async with asyncio.timeout(PATIENCE_S):
            while (await engine.snapshot()).num_running:
                await asyncio.sleep(0.01)


@KINDS
async def test_fail_updates_leaves_the_weights_alone(kind: str, tmp_path: Path, faulty: FaultyFake) -> None:
    async with engines(kind, tmp_path, faulty) as (engine, switches):
        before = (await engine.snapshot()).weight_version
        await engine.stage(fake_update(WeightVersion("run", 4)))
        switches.fail_updates = True
        with pytest.raises(EngineError, match="fail_updates is on"):
            await engine.activate()
        assert (await engine.snapshot()).weight_version == before
        switches.fail_updates = False
        assert (await engine.activate()).version == WeightVersion("run", 4)


async def test_the_front_passes_leases_and_refusals_on(tmp_path: Path) -> None:
    async with behind_a_front(tmp_path) as (upstream, engine, _):
        engine.set_lease(6)
        with pytest.raises(EngineError, match="fencing token"):
            await read(engine)
        url = dict(engine.address().options)["url"]
        assert url != upstream, "clients of the pool come through the front too"


async def test_behind_the_front_an_executor_that_is_gone_is_lost(tmp_path: Path) -> None:
    async with fronted("http://127.0.0.1:9", Switches("gpu0")) as url:
        engine = RemoteEngine(url)
        with pytest.raises(EngineLostError, match="does not answer"):
            await engine.snapshot()
        await engine.close()


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


# Digests of a published version.


def test_published_sums_are_those_of_the_bits(tmp_path: Path) -> None:
    import xxhash  # noqa: PLC0415 - here alone

    trainer, store = FakeTrainer(), MemoryTransport()
    layout = TargetLayout.whole("whole", tuple(trainer.tensors().values()))
    with contextlib.closing(Publisher(trainer, store, run="r")) as publisher:
        with pytest.raises(BlobNotFoundError, match="nothing is published"):
            published_sums(store, tmp_path / "none", layout)
        for _ in range(2):
            publisher.publish_sync()
            trainer.step()
        publisher.publish_sync()
        bits = {name: np.ascontiguousarray(values).tobytes() for name, values in trainer.shards().items()}
        version, sums = published_sums(store, tmp_path / "new", layout)
        assert version == WeightVersion("r", 2)
        assert sums == {name: xxhash.xxh3_128_hexdigest(data) for name, data in bits.items()}
        older, others = published_sums(store, tmp_path / "old", layout, WeightVersion("r", 1))
        assert older == WeightVersion("r", 1)
        assert others != sums


def test_a_tied_tensor_may_be_published_under_either_name() -> None:
    specs = tuple(FakeTrainer().tensors().values())[:1]
    embedding = specs[0].name
    layout = TargetLayout(layout_id="tied", tensors=specs, ranks=({},), aliases={"lm_head.weight": embedding})
    assert (
        held_sums({embedding: "a"}, layout)
        == held_sums({"lm_head.weight": "a", "more": "b"}, layout)
        == {embedding: "a"}
    )
    with pytest.raises(LayoutMismatchError, match=embedding):
        held_sums({"more": "b"}, layout)


# The end of everything.


def test_the_reaper_ends_what_was_named_and_removes_the_folder() -> None:
    reaper = Reaper()
    stopped, stranger = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    serving = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        reaper.name(stopped.pid)
        os.kill(stopped.pid, signal.SIGSTOP)
        assert reaper._process.stdin is not None
        reaper._process.stdin.write(f"{stranger.pid} {process_start(stranger.pid) + 1}\n")  # a pid that was given anew
        run_dir = reaper.folder / "gpu0"
        run_dir.mkdir()
        (run_dir / "serving.pid").write_text(Path(f"/proc/{serving.pid}/stat").read_text())
        reaper.close()
        assert stopped.wait(5) == -signal.SIGKILL
        assert serving.wait(5) == -signal.SIGKILL
        assert not reaper.folder.exists()
        assert stranger.poll() is None
    finally:
        for process in (stopped, stranger, serving):
            process.kill()
            process.wait()


def test_the_reaper_acts_when_its_site_is_killed(tmp_path: Path) -> None:
    script = """
        import subprocess, sys, time
        from rose.testing.pool_site.children import Reaper
        reaper = Reaper()
        child = subprocess.Popen(["sleep", "60"])
        reaper.name(child.pid)
        print(reaper.folder, child.pid, flush=True)
        time.sleep(60)
    """
    site = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, env=python_environment()
    )
    assert site.stdout is not None
    folder, pid = site.stdout.readline().split()
    child = ProcessName(int(pid), process_start(int(pid)))
    assert child.is_running()
    assert Path(folder).is_dir()
    site.kill()
    site.communicate()
    give_up_s = time.monotonic() + PATIENCE_S
    while (child.is_running() or Path(folder).exists()) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    assert not child.is_running()
    assert not Path(folder).exists()


# The client's side of the protocol, with a stand-in for the site.

STAND_IN = """\
#!{python}
import json, os, sys, time
READY = {{"url": "http://127.0.0.1:1", "engines": {{"own0": {{"pid": 1, "kind": "dedicated"}}}}, "store": {{"name": "memory"}}, "start_s": 1.5}}
def say(answer):
    print(json.dumps(answer), flush=True)
sys.stderr.write(" ".join(sys.argv[1:]) + f"\\npid {{os.getpid()}}\\n")
sys.stderr.flush()
{begin}
say(READY)
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "die":
        sys.stderr.write("it hurts\\n")
        sys.exit(3)
    if command["do"] == "sleep":
        time.sleep(60)
    say({{"error": "no such engine"}} if command.get("engine") == "own7" else {{"ok": True, "pid": 5, "command": command}})
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[..., Path]:
    def make(begin: str = "") -> Path:
        path = tmp_path / "python"
        path.write_text(STAND_IN.format(python=sys.executable, begin=begin))
        path.chmod(0o755)
        return path

    return make


def test_a_site_as_a_test_sees_it(stand_in: Callable[..., Path], tmp_path: Path) -> None:
    log = tmp_path / "site.log"
    with PoolSite.start(tmp_path, python=stand_in(), stall_s=3.0, pool={"rejoin_s": 1.0}, log=log) as site:
        assert (site.url, site.start_s, site.store) == ("http://127.0.0.1:1", 1.5, {"name": "memory"})
        assert site.engines["own0"]["kind"] == "dedicated"
        assert site.kill("own0") == 5
        assert site.call("fail_fast", engine="own0", on=True)["command"] == {
            "do": "fail_fast",
            "engine": "own0",
            "on": True,
        }
        with pytest.raises(EngineError, match="kill: no such engine"):
            site.kill("own7")
    assert site._process.returncode == 0, "the end of its input is the site's"
    said = log.read_text()
    assert said.startswith("-m rose.testing.pool_site --model ")
    assert '"stall_s": 3.0' in said
    assert '"rejoin_s": 1.0' in said


def test_a_log_of_its_own_goes_with_a_good_end_alone(stand_in: Callable[..., Path], tmp_path: Path) -> None:
    with PoolSite.start(tmp_path, python=stand_in()) as site:
        assert site.log.is_file()
    assert not site.log.exists()
    with pytest.raises(ZeroDivisionError), PoolSite.start(tmp_path, python=stand_in()) as site:
        raise ZeroDivisionError
    assert site.log.is_file()
    site.log.unlink()


def test_a_site_that_dies_is_lost(stand_in: Callable[..., Path], tmp_path: Path) -> None:
    with PoolSite.start(tmp_path, python=stand_in(), log=tmp_path / "log") as site:
        with pytest.raises(EngineLostError, match=r"ended with 3 before it answered die[\s\S]*it hurts"):
            site.call("die")
        with pytest.raises(EngineLostError):
            site.status()


def test_an_answer_that_comes_too_late_is_nobodys(stand_in: Callable[..., Path], tmp_path: Path) -> None:
    with PoolSite.start(tmp_path, python=stand_in(), log=tmp_path / "log") as site:
        with pytest.raises(DeadlineExceededError, match="did not answer sleep"):
            site.call("sleep", timeout_s=0.1)
        with pytest.raises(EngineLostError, match="not answered in time"):
            site.status()
        site._process.kill()


@pytest.mark.parametrize(
    ("begin", "error", "message"),
    [
        ('say({"error": "engine own0 did not start"}); sys.exit(2)', EngineError, "start: engine own0 did not start"),
        ('sys.exit("out of memory")', EngineLostError, "ended with 1 before it answered start[\\s\\S]*out of memory"),
        ("sys.stdin.read(); sys.exit(0)", DeadlineExceededError, "did not answer start within 0.5 s"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_no_process(
    stand_in: Callable[..., Path], tmp_path: Path, begin: str, error: type[Exception], message: str
) -> None:
    timeout_s = 0.5 if error is DeadlineExceededError else 60.0
    with pytest.raises(error, match=message):
        PoolSite.start(tmp_path, python=stand_in(begin), log=tmp_path / "log", timeout_s=timeout_s)
    pid = int((tmp_path / "log").read_text().partition("pid ")[2].split()[0])
    assert not process_start(pid), "it was ended, and waited for"


def test_where_the_engines_python_is(tmp_path: Path) -> None:
    given, named = (tmp_path / name for name in ("given", "named"))
    for path in (given, named):
        path.touch(mode=0o755)
    assert engine_python(given, {"ROSE_ENGINE_PYTHON": str(named)}) == given
    assert engine_python(None, {"ROSE_ENGINE_PYTHON": str(named)}) == named
    with pytest.raises(ConfigError, match="set ROSE_ENGINE_PYTHON"):
        engine_python(None, {"ROSE_ENGINE_PYTHON": str(tmp_path / "missing")})


def test_a_site_has_nothing_of_the_frameworks_environment() -> None:
    environ = {"PYTHONPATH": "/stubs", "VIRTUAL_ENV": "/verl", "HOME": "/root", "OMP_NUM_THREADS": "8"}
    found = engine_environment(environ, {"MORE": "1"}, Path("/checkout/src"))
    assert found["PYTHONPATH"] == "/checkout/src"
    assert (found["HOME"], found["MORE"], found["OMP_NUM_THREADS"]) == ("/root", "1", "1")
    assert "VIRTUAL_ENV" not in found
    installed = engine_environment(environ, {}, Path("/verl/lib/python3.11/site-packages"))
    assert "PYTHONPATH" not in installed, "it would bring the framework's libraries along"


def test_a_site_needs_no_library_where_the_test_runs() -> None:
    script = """
        import sys
        from rose.testing import PoolSite
        found = {"vllm", "torch", "aiohttp", "transformers", "ray"} & set(sys.modules)
        assert not found, found
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=python_environment())


def python_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
