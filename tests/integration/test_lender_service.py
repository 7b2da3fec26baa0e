"""The lender as a process: HTTP, roles, kill -9, clocks that jump, borrowers that live through it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import attrs
import pytest

from rose.backends.remote.client import HttpClient
from rose.clocks import MonotonicClock
from rose.coserving.lease_sqlite import AuditReader
from rose.coserving.ledger import Ledger
from rose.coserving.lender_audit import check_audit
from rose.errors import ConfigError, LeaseError, TransportError
from rose.policies.admission import check_lease
from rose.pool import Borrower, EngineState, RolloutPool
from rose.pool.remote_lender import RemoteLender
from rose.testing import FakeEngine
from rose.types import DeviceId, EngineId, JobId

TTL_S = 2.5
NAMES = ("a", "b", "dash", "ann")
ACCESS = {"a": "job", "b": "job", "dash": "read", "ann": "control"}
START_S = 30.0


@attrs.define(eq=False)
class Service:
    """A lender process with six devices, and what its callers need."""

    root: Path
    process: subprocess.Popen[str] | None = None
    port: int = 0
    url: str = ""
    ledgers: dict[str, Ledger] = attrs.field(factory=dict)

    def prepare(self) -> None:
        self.ledgers = {f"d{i}": Ledger.create(self.root / f"d{i}.ledger") for i in range(6)}
        self.beat()
        (self.root / "offset").write_text("0")
        self.configure()

    def configure(self) -> None:
        lines = [
            f'state = "{self.root}/lender.sqlite"',
            f'listen = "127.0.0.1:{self.port}"',
            "tick_s = 0.05",
            f"[lending]\nttl_s = {TTL_S}\ngrace_s = 0.5\nmin_hold_s = 1.0\nrest_s = 0.0\nstale_after_s = 1e6",
        ]
        lines += [f'[devices.{name}]\nledger = "{ledger.path}"' for name, ledger in self.ledgers.items()]
        for name in NAMES:
            digest = hashlib.sha256(token(name).encode()).hexdigest()
            lines.append(f'[[tokens]]\nname = "{name}"\nsha256 = "{digest}"\naccess = "{ACCESS[name]}"')
        (self.root / "lender.toml").write_text("\n".join(lines))

    def beat(self) -> None:
        for ledger in self.ledgers.values():
            ledger.beat(time.monotonic())

    def command(self, *arguments: str) -> list[str]:
        worker = Path(__file__).with_name("lender_process.py")
        return [sys.executable, str(worker), str(self.root / "offset"), str(self.root / "lender.toml"), *arguments]

    def start(self) -> None:
        self.process = subprocess.Popen(self.command(), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.url = said["url"]
        if not self.port:  # from now on the same one, as in production
            self.port = int(self.url.rpartition(":")[2])
            self.configure()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "ROSE_LENDER_TOKEN": token("ann")}
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, check=False, env=environment, timeout=START_S
        )

    @contextlib.asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[HttpClient]:
        client = HttpClient(self.url, token=token(name), unreachable=TransportError)
        try:
            yield client
        finally:
            await client.close()

    def works(self, lease: dict) -> bool:
        """Whether an engine on the device would work under this lease."""
        budget = self.ledgers[lease["device_id"]].budget()
        return budget.fencing_token == lease["fencing_token"] and not check_lease(budget, 0, time.monotonic())

    def problems(self) -> list[str]:
        with AuditReader(self.root / "lender.sqlite") as reader:
            return check_audit(reader.entries())


def token(name: str) -> str:
    return f"token-of-{name}"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    made.prepare()
    made.start()
    yield made
    made.kill()


async def test_roles_and_routes(service: Service) -> None:
    async with (
        service.client("a") as a,
        service.client("b") as b,
        service.client("dash") as dash,
        service.client("ann") as ann,
    ):
        granted = (await a.call("POST", "/v1/grant", {"num_devices": 4}))["leases"]
        assert [lease["device_id"] for lease in granted] == ["d0", "d1", "d2", "d3"]
        assert all(service.works(lease) and 0 < lease["expires_in_s"] <= TTL_S for lease in granted)
        ids = [lease["lease_id"] for lease in granted]
        with pytest.raises(LeaseError, match="holds no lease"):
            await b.call("POST", "/v1/renew", {"lease_ids": ids})
        assert (await b.call("POST", "/v1/release", {"lease_ids": ids}))["leases"] == []
        assert (await b.call("GET", "/v1/leases"))["leases"] == []
        for client, path, body in (
            (a, "/v1/grant", {"num_devices": 1, "job": "b"}),
            (a, "/v1/switch", {"is_thrown": True}),
            (dash, "/v1/grant", {"num_devices": 1}),
            (dash, "/v1/revoke", {}),
        ):
            with pytest.raises(ConfigError, match="the token"):
                await client.call("POST", path, body)
        with pytest.raises(ConfigError, match="did you mean 'num_devices'"):
            await a.call("POST", "/v1/grant", {"num_device": 1})
        with pytest.raises(ConfigError, match="needs the name of the job"):
            await ann.call("POST", "/v1/grant", {"num_devices": 1})
        nobody = HttpClient(service.url, token=token("guess"), unreachable=TransportError)
        with pytest.raises(ConfigError, match="unknown token"):
            await nobody.call("GET", "/v1/devices")
        assert (await nobody.call("GET", "/health"))["status"] == "ok"
        await nobody.close()
        devices = await dash.call("GET", "/v1/devices")
        assert [row["lease"] is not None for row in devices["devices"]] == [True] * 4 + [False] * 2
        assert (await ann.call("POST", "/v1/mode", {"mode": "quiet"})) == {"mode": "quiet"}
        assert service.ledgers["d0"].budget().mode.value == "quiet"
        audit = await dash.call("GET", "/v1/audit?limit=3")
        assert [entry["change"] for entry in audit["entries"]] == ["started", "granted", "granted"]
        assert (await dash.call("GET", f"/v1/audit?after={10**30}"))["entries"] == []
        assert len((await dash.call("GET", f"/v1/audit?after={-(10**30)}&limit=2"))["entries"]) == 2
        back = (await ann.call("POST", "/v1/revoke", {"device_id": "d0", "grace_s": 0.2}))["leases"]
        assert [lease["is_revoking"] for lease in back] == [True]
        renewed = (await a.call("POST", "/v1/renew", {"lease_ids": ids}))["leases"]
        assert [lease["expires_in_s"] > 1.0 for lease in renewed] == [False, True, True, True]


async def test_case_o03_over_http_and_the_dead_jobs_calls_are_fenced(service: Service) -> None:
    async with service.client("a") as a, service.client("b") as b:
        answers = await asyncio.gather(*(each.call("POST", "/v1/grant", {"num_devices": 4}) for each in (a, b)))
        first, second = (answer["leases"] for answer in answers)
        assert sorted([len(first), len(second)]) == [2, 4]
        assert len({lease["device_id"] for lease in (*first, *second)}) == 6
        dead, alive, client = (first, second, b) if len(first) == 4 else (second, first, a)
        gone = a if client is b else b
        ids = [lease["lease_id"] for lease in alive]
        deadline_s = time.monotonic() + 2 * TTL_S
        while time.monotonic() < deadline_s:
            await client.call("POST", "/v1/renew", {"lease_ids": ids})
            await asyncio.sleep(TTL_S / 4)
        assert not any(service.works(lease) for lease in dead)
        more = (await client.call("POST", "/v1/grant", {"num_devices": 4}))["leases"]
        assert {lease["device_id"] for lease in more} == {lease["device_id"] for lease in dead}
        with pytest.raises(LeaseError, match="ask for a new one"):
            await gone.call("POST", "/v1/renew", {"lease_ids": [lease["lease_id"] for lease in dead]})


async def test_the_kill_switch_drains_at_once_and_outlives_the_lender(service: Service) -> None:
    async with service.client("a") as a:
        leases = (await a.call("POST", "/v1/grant", {"num_devices": 6}))["leases"]
        waiting = asyncio.create_task(a.call("POST", "/v1/changed", {"wait_s": 20.0}, timeout_s=30.0))
        await asyncio.sleep(0.2)
        async with service.client("ann") as ann:
            began_s = time.monotonic()
            await ann.call("POST", "/v1/switch", {"is_thrown": True, "reason": "incident"})
            assert time.monotonic() - began_s < 1.0
        assert not any(service.works(lease) for lease in leases)
        assert (await waiting)["leases"] == []
        assert time.monotonic() - began_s < 1.0, "the job heard of it too"
        service.kill()
        service.start()
        await a.close()  # its connection was to the one before
        assert (await a.call("POST", "/v1/grant", {"num_devices": 6}))["leases"] == []
        done = await asyncio.to_thread(service.run, "allow")
        assert (done.returncode, done.stdout) == (0, "kill switches: none thrown\n")
        done = await asyncio.to_thread(service.run, "mode", "--mode", "strict")
        assert (done.stdout, service.ledgers["d0"].budget().mode.value) == ("mode: strict\n", "strict")
        assert len((await a.call("POST", "/v1/grant", {"num_devices": 6}))["leases"]) == 6
        service.kill()
        service.beat()
        done = await asyncio.to_thread(service.run, "kill", "--device", "d2")
        assert done.stdout.startswith("no lender runs; done in the state file"), done
        assert not service.ledgers["d2"].budget().is_granted
    assert service.problems() == []


@attrs.define(eq=False)
class Job:
    """One job's client, and what it believes to hold."""

    client: HttpClient
    leases: dict[str, dict] = attrs.field(factory=dict)

    async def turn(self, rng: random.Random) -> None:
        """Grant, renew or release, as one that may be answered or not."""
        with contextlib.suppress(TransportError):
            if self.leases and rng.random() < 0.6:
                with contextlib.suppress(LeaseError):
                    answer = await self.client.call("POST", "/v1/renew", {"lease_ids": list(self.leases)})
                    self.leases = {lease["lease_id"]: lease for lease in answer["leases"]}
                    return
                self.leases = {}
            elif self.leases and rng.random() < 0.3:
                some = rng.sample(sorted(self.leases), 1)
                await self.client.call("POST", "/v1/release", {"lease_ids": some})
                self.leases.pop(some[0])
            else:
                answer = await self.client.call("POST", "/v1/grant", {"num_devices": rng.randint(1, 4)})
                self.leases |= {lease["lease_id"]: lease for lease in answer["leases"]}


async def test_a_hundred_rounds_with_kill_9_and_a_jumping_wall_clock_never_have_two_holders(service: Service) -> None:
    rng = random.Random(5)
    num_kills = 0
    async with service.client("a") as a, service.client("b") as b:
        jobs = [Job(a), Job(b)]
        for number in range(100):
            working = asyncio.gather(*(job.turn(rng) for job in jobs))
            if number % 12 == 6:  # in the middle of the calls
                await asyncio.sleep(rng.choice([0.0, 0.002, 0.01]))
                service.kill()
                num_kills += 1
                await working
                (service.root / "offset").write_text(str(rng.choice([-1e6, 0.0, 3e7])))
                await asyncio.to_thread(service.start)
            await working
            holders: dict[str, set[int]] = {}
            for index, job in enumerate(jobs):
                for lease in filter(service.works, job.leases.values()):
                    holders.setdefault(lease["device_id"], set()).add(index)
            assert all(len(who) == 1 for who in holders.values()), holders
    with AuditReader(service.root / "lender.sqlite") as reader:
        entries = list(reader.entries())
    assert check_audit(entries) == []
    assert sum(entry.change == "started" for entry in entries) == num_kills + 1 == 9
    assert sum(entry.change == "granted" for entry in entries) > 20
    assert max(entry.wall_s for entry in entries) - min(entry.wall_s for entry in entries) > 1e6, (
        "the wall clock jumped"
    )


async def test_a_borrower_lives_through_a_lender_restart_and_asks_again(service: Service) -> None:
    """Leases go on over the restart; devices that were another's join later; a revoked one leaves and comes back."""
    clock = MonotonicClock()
    engines = {DeviceId(name): FakeEngine(engine_id=EngineId(f"on-{name}"), clock=clock) for name in ("d0", "d1", "d2")}

    async def until(*names: str) -> None:
        async with asyncio.timeout(10.0):
            while ready() != set(names):
                await asyncio.sleep(0.02)

    def ready() -> set[str]:
        return {view.engine_id for view in pool.snapshot().engines if view.state is EngineState.READY}

    async with (
        service.client("b") as other,
        service.client("ann") as ann,
        RemoteLender(service.url, token=token("a")) as lender,
        RolloutPool(clock=clock) as pool,
    ):
        taken = (await other.call("POST", "/v1/grant", {"num_devices": 1}))["leases"]
        async with Borrower(lender, pool, engines, job=JobId("a"), clock=clock, ask_again_s=0.2):
            await until("on-d1", "on-d2")
            service.kill()
            await asyncio.sleep(0.3)
            service.start()
            await other.call("POST", "/v1/release", {"lease_ids": [taken[0]["lease_id"]]})
            await until("on-d0", "on-d1", "on-d2")
            await ann.call("POST", "/v1/switch", {"is_thrown": True, "kind": "device", "name": "d1"})
            await until("on-d0", "on-d2")
            await ann.call("POST", "/v1/switch", {"is_thrown": False, "kind": "device", "name": "d1"})
            await until("on-d0", "on-d1", "on-d2")
            await asyncio.sleep(1.5 * TTL_S)
            assert ready() == {"on-d0", "on-d1", "on-d2"}, "renewed"
        assert (await ann.call("GET", "/v1/leases"))["leases"] == []
    assert service.problems() == []


async def test_a_ledger_that_is_made_anew_is_written_again(service: Service) -> None:
    async with service.client("a") as a:
        (lease,) = (await a.call("POST", "/v1/grant", {"num_devices": 1}))["leases"]
        Path(service.ledgers["d0"].path).unlink()
        service.ledgers["d0"] = Ledger.create(service.ledgers["d0"].path)
        async with asyncio.timeout(5.0):
            while not service.works(lease):
                await a.call("POST", "/v1/renew", {"lease_ids": [lease["lease_id"]]})
                await asyncio.sleep(0.02)


def test_two_lenders_on_one_state_are_refused_and_sigterm_ends_well(service: Service) -> None:
    (service.root / "lender.toml").write_text(
        (service.root / "lender.toml").read_text().replace(f"127.0.0.1:{service.port}", "127.0.0.1:0")
    )
    done = service.run()
    assert done.returncode == 2
    assert "another lender uses the lender state" in done.stderr
    assert service.process is not None
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(10) == 0
