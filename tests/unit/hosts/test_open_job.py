"""From a job file to a pool: over HTTP, with a lender's service and executors in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import attrs
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from executor_parts import Parts, executor_parts

from rose import registry
from rose.config import load
from rose.errors import ConfigError, EngineLostError, TransportError
from rose.hosts.http.lender import serve_lender
from rose.hosts.http.lender_config import LenderConfig
from rose.hosts.job import JobConfig, open_job, open_pool, open_store
from rose.hosts.job.config import TransportConfig
from rose.hosts.job.opened import RelayedEngine
from rose.interfaces import Clock
from rose.pool import RolloutPool
from rose.testing import FakeEngine, fake_update
from rose.testing.contracts.streams import until
from rose.types import EngineKind, Sampling, TransportAddress, Turn, WeightVersion

TURN = Turn(trajectory_id="t", group_id="g", prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=5))


@attrs.define(eq=False, kw_only=True, slots=False)
class StartedEngine(FakeEngine):
    """An engine that reads options and must be started, as vLLM's."""

    made: ClassVar[list[StartedEngine]] = []
    model: str = ""
    fails: bool = False
    is_started: bool = False
    is_closed: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, clock: Clock) -> Self:
        if "colour" in options:
            message = "colour: unknown key"
            raise ConfigError(message)
        engine = cls(clock=clock, weight_version=WeightVersion("run", 3), **options)
        cls.made.append(engine)
        return engine

    async def start(self) -> None:
        if self.fails:
            message = "it did not start"
            raise EngineLostError(message)
        self.is_started = True

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    StartedEngine.made.clear()
    kinds, load_installed = {"started": StartedEngine, "plain": FakeEngine}, registry.load
    monkeypatch.setattr(registry, "load", lambda role, name: kinds.get(name) or load_installed(role, name))
    monkeypatch.setattr(registry, "check_name", lambda _role, name: kinds[name])


def job(**changes: Any) -> JobConfig:
    document = {
        "job": {"name": "math"},
        "resources": {"n_rl": 2, "training": 0, "rollout": 2},
        "model": {"path": "policy"},
        "engines": {"own": {"backend": "started", "count": 2, "options": {"vocab_size": 50}}},
    }
    return load(JobConfig, document | changes)


async def test_dedicated_engines_are_made_from_their_options_started_and_ended():
    async with open_job(job()) as opened:
        assert [(engine.engine_id, engine.model) for engine in StartedEngine.made] == [
            ("own0", "policy"),
            ("own1", "policy"),
        ]
        assert all(engine.is_started and engine.vocab_size == 50 for engine in StartedEngine.made)
        assert len((await opened.pool.generate(TURN)).token_ids) == 5
        assert opened.lender is None
    assert all(engine.is_closed for engine in StartedEngine.made)


async def test_engines_are_ended_when_one_of_them_does_not_start():
    engines = {"own": {"backend": "started"}, "bad": {"backend": "started", "options": {"fails": True}}}
    with pytest.raises(EngineLostError, match="did not start"):
        async with open_job(job(engines=engines)):
            pytest.fail("it opened")
    assert [engine.is_closed for engine in StartedEngine.made] == [True, True]


async def test_wrong_options_are_named_with_their_engine():
    engines = {"own": {"backend": "started", "options": {"colour": "red"}}}
    with pytest.raises(ConfigError, match=r"^engines\.own\.options: colour: unknown key$"):
        async with open_job(job(engines=engines)):
            pytest.fail("it opened")


async def test_a_backend_without_options_of_its_own_gets_keyword_arguments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "serving_engine", lambda _name, **options: FakeEngine(**options))
    async with open_pool(job(engines={"own": {"backend": "plain", "options": {"seed": 4}}})) as pool:
        assert [engine.engine_id for engine in pool.snapshot().engines] == ["own"]


async def test_rollout_pool_opens_a_file(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\nname = "j"\n[resources]\nn_rl = 1\ntraining = 0\nrollout = 1\n[model]\npath = "p"\n'
        '[engines.own]\nbackend = "started"\n'
    )
    async with RolloutPool.open(path) as pool:
        assert len((await pool.generate(TURN)).token_ids) == 5
    path.write_text(path.read_text() + "count = 9\n")
    with pytest.raises(ConfigError, match=r"job\.toml: engines: they take 9 devices"):
        RolloutPool.open(path)


@attrs.define
class Site:
    """A lender's service and two executors of borrowed devices."""

    url: str
    executors: list[Parts]

    def tables(self, **resources: int) -> dict[str, Any]:
        return {
            "resources": {"n_rl": 2, "training": 0, "rollout": 2, "n_serving": 1} | resources,
            "lender": {"url": self.url, "ask_again_s": 0.05, "demand": {"look_s": 0.02}},
            "executors": {f"gpu{i}": parts.url for i, parts in enumerate(self.executors)},
        }


@contextlib.asynccontextmanager
async def running_site(folder: Path) -> AsyncIterator[Site]:
    async with contextlib.AsyncExitStack() as stack:
        executors = []
        for index in range(2):
            (folder / f"e{index}").mkdir()
            executors.append(await stack.enter_async_context(executor_parts(folder / f"e{index}")))
        devices = {f"gpu{i}": {"ledger": str(parts.ledgers[0].path)} for i, parts in enumerate(executors)}
        lending = {"ttl_s": 5.0, "stale_after_s": 1e9, "rest_s": 0.0, "min_hold_s": 0.0}
        for parts in executors:
            parts.ledgers[0].beat(0.0)
        config = {"state": str(folder / "state"), "listen": "127.0.0.1:0", "devices": devices, "lending": lending}
        url = await stack.enter_async_context(serve_lender(load(LenderConfig, config)))
        yield Site(url, executors)


def kinds(pool: RolloutPool) -> list[EngineKind]:
    return [engine.kind for engine in pool.snapshot().engines]


async def test_borrowed_engines_come_through_lender_and_executors_and_never_more_than_n_serving(tmp_path: Path):
    async with running_site(tmp_path) as site:
        for num_most in (1, 2):
            async with open_job(job(**site.tables(n_serving=num_most))) as opened:
                opened.pool.expect(1000)
                await until(lambda: kinds(opened.pool).count(EngineKind.BORROWED) == num_most)  # noqa: B023
                assert kinds(opened.pool).count(EngineKind.DEDICATED) == 2
                assert opened.lender.most_held == num_most
        async with open_job(job(**site.tables(n_serving=2), engines={})) as alone:
            alone.pool.expect(1000)
            await until(lambda: kinds(alone.pool) == [EngineKind.BORROWED] * 2)
            assert len((await alone.pool.generate(TURN)).token_ids) == 5


async def test_a_lender_that_cannot_be_reached_is_told_and_nothing_is_left():
    tables = {
        "resources": {"n_rl": 2, "training": 0, "rollout": 2, "n_serving": 1},
        "lender": {"url": "http://127.0.0.1:9"},
        "executors": {"gpu0": "http://127.0.0.1:9"},
    }
    with pytest.raises(TransportError):
        async with open_job(job(**tables)):
            pytest.fail("it opened")
    assert all(engine.is_closed for engine in StartedEngine.made)


async def test_an_executors_engine_reads_from_its_own_relay(tmp_path: Path):
    relay = TransportAddress(name="memory", options=(("host", "127.0.0.1"), ("port", 1), ("token", "t")))
    async with executor_parts(tmp_path) as parts:
        engine = RelayedEngine(parts.url, relay=relay)
        engine.set_lease(7)
        await engine.snapshot()
        await engine.stage(fake_update(WeightVersion("run", 4)))
        await engine.activate()
        await engine.close()
        assert [update.address for update in parts.fake.updates] == [relay]


def test_a_store_is_served_under_a_token_that_is_kept(tmp_path: Path):
    path = tmp_path / "store.token"
    config = TransportConfig(listen="127.0.0.1:0", token_file=path)
    with open_store(config) as store:
        address = dict(store.address().options)
        store.put("k", b"v")
        with open_store(TransportConfig(address={"name": "memory", **address})) as client:
            assert client.get("k") == b"v"
    assert address["token"] == path.read_text()
    with open_store(config) as again:
        assert dict(again.address().options)["token"] == address["token"]
    assert path.stat().st_mode & 0o777 == 0o600
