"""The demo's cluster: files, settings and engines, without an engine's library."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rose.backends.step_settings import read_settings
from rose.errors import ConfigError, EngineLostError, TransportError
from rose.policies.admission import Mode
from rose.reference import fleet as fleet_module
from rose.reference.demo_config import DemoConfig
from rose.reference.engines import EngineSpec
from rose.reference.fleet import Fleet, Models, check_profiles, pool_bytes_of

CONFIG = DemoConfig()
MODELS = Models(
    policy=Path("policy"), serving=Path("serving"), policy_max_len=448, policy_kv_bytes=512, serving_kv_bytes=128
)


class FakeEngine:
    """Starts and closes; one of them may fail to start."""

    made: ClassVar[list[FakeEngine]]
    failing: str | None = None

    def __init__(self, spec: EngineSpec, *, clock: Any) -> None:
        self.engine_id, self.spec, self.clock = spec.engine_id, spec, clock
        self.is_started = self.is_closed = False
        type(self).made.append(self)

    async def start(self) -> None:
        await asyncio.sleep(0.01 if self.engine_id.startswith("dedicated") else 0)
        if self.engine_id == self.failing:
            message = f"engine {self.engine_id} did not start"
            raise EngineLostError(message)
        self.is_started = True

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def shm(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(fleet_module, "_SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.fixture
def engines(monkeypatch) -> type[FakeEngine]:
    class Fake(FakeEngine):
        made: ClassVar[list[FakeEngine]] = []

    monkeypatch.setattr(fleet_module, "make_engine", Fake)
    return Fake


async def test_a_fleet_makes_its_shared_files_and_removes_them(shm):
    fleet = Fleet.prepare(CONFIG)
    try:
        assert sorted(path.name for path in fleet.root.iterdir()) == ["clock", "shared0.ledger", "shared1.ledger"]
        assert fleet.clock.is_frozen
        assert fleet.clock.k == CONFIG.stretch == 2.5
        assert fleet.lender.mode is Mode.SLO
        assert fleet.relay.address().options
    finally:
        await fleet.close()
    assert list(shm.iterdir()) == []


def test_a_port_that_is_taken_leaves_nothing_behind(shm):
    """Issue 2, must show 6: one clear line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=str(port)) as caught:
            Fleet.prepare(DemoConfig(port=port))
    assert "\n" not in str(caught.value)
    assert list(shm.iterdir()) == []


def test_a_ledger_that_cannot_be_made_leaves_nothing_behind(shm, monkeypatch):
    def fail(path: Path) -> None:
        message = f"no room for {path.name}"
        raise OSError(message)

    monkeypatch.setattr(fleet_module.Ledger, "create", fail)
    with pytest.raises(OSError, match=r"shared0\.ledger"):
        Fleet.prepare(CONFIG)
    assert list(shm.iterdir()) == []


async def test_engines_start_in_order_on_devices_of_their_own_or_beside_serving(shm, engines):
    fleet = Fleet.prepare(CONFIG)
    try:
        await fleet.start(CONFIG, MODELS)
        assert [engine.engine_id for engine in fleet.engines] == ["dedicated0", "dedicated1", "borrowed0", "borrowed1"]
        assert all(engine.is_started and engine.clock is fleet.clock for engine in engines.made)
        assert fleet.devices == {
            "dedicated0": "own0",
            "dedicated1": "own1",
            "borrowed0": "shared0",
            "borrowed1": "shared1",
            "serving0": "shared0",
            "serving1": "shared1",
        }
    finally:
        await fleet.close()
    assert all(engine.is_closed for engine in engines.made)


async def test_when_one_engine_does_not_start_those_that_did_are_ended(shm, engines):
    engines.failing = "borrowed1"
    fleet = Fleet.prepare(CONFIG)
    with pytest.raises(ExceptionGroup) as caught:
        await fleet.start(CONFIG, MODELS)
    assert caught.group_contains(EngineLostError, match="borrowed1")
    await fleet.close()
    assert engines.made
    assert all(engine.is_closed for engine in engines.made)


async def test_every_engines_settings_are_read_strictly_and_share_the_right_files(shm, engines):
    fleet = Fleet.prepare(CONFIG)
    try:
        await fleet.start(CONFIG, MODELS)
        serving = fleet.serving_specs(CONFIG, MODELS)
        settings = {spec.engine_id: read_settings(spec.rose) for spec in serving}
        settings |= {engine.engine_id: read_settings(engine.spec.rose) for engine in fleet.engines}
    finally:
        await fleet.close()
    roles = [settings[name].role for name in ("dedicated0", "serving0", "borrowed0")]
    assert roles == ["alone", "serving", "rollout"]
    assert settings["serving0"].device.path == settings["borrowed0"].device.path != settings["serving1"].device.path
    assert settings["serving0"].ledger == settings["borrowed0"].ledger
    assert settings["serving0"].admission.slo.tpot_s == pytest.approx(0.150)
    assert (settings["serving0"].device.tokens_per_token, settings["borrowed0"].device.tokens_per_token) == (1, 8)
    pool_bytes = pool_bytes_of(CONFIG)
    assert settings["borrowed0"].memory.pool_bytes == pool_bytes
    # as many real blocks as the modelled pool has modelled ones
    assert serving[0].kv_tokens // 32 == pool_bytes // (32 * 57_344)
    assert fleet.borrowed[0].spec.kv_tokens // 32 == pool_bytes // (32 * 147_456 * 8)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"serving_profile": "h100:gpt"}, r"serving_profile = 'h100:gpt' is no known profile; choose one of h100:"),
        ({"rollout_profile": "x"}, "rollout_profile = 'x'"),
        ({"slo_tpot_ms": 40.0}, r"slo_tpot_ms.*0\.04 s leaves no room for one serving prefill chunk"),
    ],
)
def test_what_no_engine_could_start_with_is_refused_at_once(fields, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        check_profiles(DemoConfig(**fields))
    assert "\n" not in str(caught.value)


def test_the_default_profiles_and_slo_are_fine():
    check_profiles(CONFIG)


async def test_each_side_runs_on_the_engine_that_it_is_given(shm, engines):
    config = DemoConfig(rollout_engine="sglang", sglang_python="/there/python")
    fleet = Fleet.prepare(config)
    try:
        await fleet.start(config, MODELS)
        serving = fleet.serving_specs(config, MODELS)
        assert fleet.clock.k == 6.0
    finally:
        await fleet.close()
    assert {engine.spec.kind for engine in fleet.engines} == {"sglang"}
    assert {spec.kind for spec in serving} == {"vllm"}
    assert {engine.spec.python for engine in fleet.engines} == {"/there/python"}
