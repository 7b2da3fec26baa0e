"""A small co-serving site: devices with an executor, a serving and a rollout engine each, and one lender, all as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import attrs

from rose import checks
from rose.backends.paced import PacedClock
from rose.backends.remote import wire
from rose.backends.remote.client import HttpClient
from rose.bench.chaos.processes import MARK, Kept, end_marked, marked
from rose.coserving.ledger import Ledger
from rose.errors import EngineLostError, RoseError
from rose.hosts.http.executor_serving import PID_FILE, read_pid_file
from rose.testing.models import make_qwen3
from rose.testing.ports import free_ports

SERVING_VOCAB, ROLLOUT_VOCAB = 512, 32
_SERVING_PROFILE, _ROLLOUT_PROFILE = "h100:qwen2.5-7b", "h100:qwen3-8b"
_TOKENS_PER_TOKEN = 8
_POOL_BYTES = 42_000_000_000
_ASK_S = 2.0
_STOP_S = 60.0
_LAST_S = 2.0  # children of what was ended are ending


@attrs.frozen(kw_only=True)
class SiteConfig:
    """What a site is made of.

    Attributes:
        folder: For all its files; made where missing.
        serving_script: Runs a serving engine: ``SCRIPT PORT OPTIONS`` answers ``POST /complete``.
        num_devices: Shared devices.
        k: Real seconds of one modelled second.
        ttl_s: Of leases, modelled.
    """

    folder: Path
    serving_script: Path
    num_devices: int = attrs.field(default=2, validator=checks.integer(1))
    k: float = attrs.field(default=1.0, validator=checks.number(above=0))
    ttl_s: float = attrs.field(default=6.0, validator=checks.number(above=0))


@attrs.define(eq=False)
class Device:
    """One shared device as its clients see it."""

    name: str
    folder: Path
    executor: Kept
    executor_url: str
    serving_url: str
    control: HttpClient

    @property
    def ledger(self) -> Ledger:
        """The device's ledger."""
        return Ledger.attach(self.folder / f"{self.name}.ledger")

    def serving_pid(self) -> int | None:
        """Return the pid of the serving process (the leader of its group), ``None`` while none runs."""
        process = read_pid_file(self.folder / self.name / PID_FILE)
        return process.pid if process is not None and process.is_running() else None

    async def incarnation(self) -> str | None:
        """Return the name of the rollout engine's present start, ``None`` while there is none."""
        try:
            _, headers = await self.control.exchange("GET", "/v1/snapshot")
        except RoseError:
            return None
        return headers.get(wire.ENGINE_HEADER)

    async def is_well(self) -> bool:
        """Return whether the executor says that all is well."""
        try:
            await self.control.call("GET", "/health")
        except RoseError:
            return False
        return True


@attrs.define(eq=False)
class Site:
    """A running site; see ``running``. ``left_over``: pids of its processes that were still there after it had ended."""

    config: SiteConfig
    clock: PacedClock
    lender: Kept
    lender_url: str
    lender_control: HttpClient
    devices: Mapping[str, Device]
    left_over: list[int] = attrs.field(factory=list)

    @property
    def state(self) -> Path:
        """The lender's state file, with the audit ledger."""
        return self.config.folder / "lender.sqlite"

    async def is_lender_well(self) -> bool:
        """Return whether the lender says that all is well."""
        try:
            await self.lender_control.call("GET", "/health")
        except RoseError:
            return False
        return True

    async def wait_until_well(self, timeout_s: float) -> list[str]:
        """Wait until every part is well; returns what is not after ``timeout_s``."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            ill = [name for name, device in self.devices.items() if not await device.is_well()]
            ill += [] if await self.is_lender_well() else ["lender"]
            if not ill or asyncio.get_running_loop().time() > deadline_s:
                return ill
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def running(config: SiteConfig, start_s: float = 600.0) -> AsyncIterator[Site]:
    """Run a site; whatever happens, nothing of it is left afterwards.

    Raises:
        EngineLostError: It is not up within ``start_s``.
    """
    folder = config.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[MARK] = str(folder)
    models = {
        "serving": make_qwen3(folder / "serving", layers=1, vocab=SERVING_VOCAB, max_positions=4096),
        "rollout": make_qwen3(
            folder / "rollout", layers=2, hidden=128, heads=4, kv_heads=2, vocab=ROLLOUT_VOCAB, max_positions=2048
        ),
    }
    names = [f"gpu{i}" for i in range(config.num_devices)]
    ports = iter(free_ports(1 + 2 * len(names)))
    try:
        async with contextlib.AsyncExitStack() as stack:
            clock = PacedClock.create(folder / "clock", k=config.k)
            lender_url = f"http://127.0.0.1:{next(ports)}"
            _write_lender(config, folder, names, lender_url)
            lender = Kept("lender", _rose("lend", str(folder / "lender.toml"), "--json"), folder)
            devices = {}
            for name in names:
                urls = [f"http://127.0.0.1:{next(ports)}" for _ in range(2)]
                path = _write_executor(config, folder, models, name, *urls)
                control = HttpClient(urls[0], timeout_s=_ASK_S)
                stack.push_async_callback(control.close)
                executor = Kept(f"executor-{name}", _rose("serve", str(path), "--json"), folder)
                devices[name] = Device(name, folder, executor, urls[0], urls[1], control)
            control = HttpClient(lender_url, timeout_s=_ASK_S)
            stack.push_async_callback(control.close)
            site = Site(attrs.evolve(config, folder=folder), clock, lender, lender_url, control, devices)
            stack.push_async_callback(asyncio.to_thread, _stop_serving, folder, names)
            for process in (lender, *(device.executor for device in devices.values())):
                await stack.enter_async_context(process)
            if ill := await site.wait_until_well(start_s):
                message = f"not well after {start_s:g} s: {', '.join(ill)}; see the logs in {folder}"
                raise EngineLostError(message)
            yield site
        await asyncio.sleep(_LAST_S)
        site.left_over += marked(folder)
    finally:
        end_marked(folder)
        os.environ.pop(MARK, None)


def _stop_serving(folder: Path, names: list[str]) -> None:
    for name in names:
        command = _rose("serve", str(folder / f"{name}.toml"), "--stop-serving")
        subprocess.run(command, check=False, timeout=_STOP_S, stderr=subprocess.DEVNULL)


def _rose(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rose.cli.main", *arguments]


def _write_lender(config: SiteConfig, folder: Path, names: list[str], url: str) -> None:
    lines = [
        f"state = {json.dumps(str(folder / 'lender.sqlite'))}",
        f'listen = "{url.removeprefix("http://")}"',
        f"clock = {json.dumps(str(folder / 'clock'))}",
        "tick_s = 0.1",
        f"[lending]\nttl_s = {config.ttl_s}\ngrace_s = 1.0\nmin_hold_s = 10.0\nrest_s = 1.0\nstale_after_s = 3.0",
        "audits_renewals = true",
    ]
    lines += [f"[devices.{name}]\nledger = {json.dumps(str(folder / f'{name}.ledger'))}" for name in names]
    (folder / "lender.toml").write_text("\n".join(lines), encoding="utf-8")


def _write_executor(
    config: SiteConfig, folder: Path, models: Mapping[str, Path], name: str, executor_url: str, serving_url: str
) -> Path:
    device, ledger, clock = (str(folder / each) for each in (f"{name}.device", f"{name}.ledger", "clock"))
    memory, timing = {"pool_bytes": _POOL_BYTES}, {"watchdog_s": 1.0}  # a busy machine is no frozen engine
    shared = {"kind": "paced", "path": device, "clock": clock, "profile": _SERVING_PROFILE}
    options = {
        "engine_id": f"serving-{name}",
        "model": str(models["serving"]),
        "dtype": "float32",
        "max_num_batched_tokens": 2048,
        "rose": {"role": "serving", "device": shared, "ledger": ledger, "memory": memory, "timing": timing},
    }
    port = serving_url.rpartition(":")[2]
    command = [sys.executable, str(config.serving_script.resolve()), port, json.dumps(options)]
    path = folder / f"{name}.toml"
    path.write_text(
        f"""
run_dir = {json.dumps(str(folder / name))}
listen = "{executor_url.removeprefix("http://")}"
restart = {{first_s = 0.2, longest_s = 5.0, well_s = 20.0, hang_s = 10.0}}
[device]
kind = "paced"
clock = {json.dumps(clock)}
paths = [{json.dumps(device)}]
ledgers = [{json.dumps(ledger)}]
[serving]
command = {json.dumps(command)}
memory = {{pool_bytes = {_POOL_BYTES}}}
[rollout]
model = {json.dumps(str(models["rollout"]))}
engine_id = "{name}"
profile = "{_ROLLOUT_PROFILE}"
tokens_per_token = {_TOKENS_PER_TOKEN}
options = {{dtype = "float32", max_num_seqs = 8, kv_cache_bytes = 33554432, max_num_batched_tokens = 2048}}
""",
        encoding="utf-8",
    )
    return path
