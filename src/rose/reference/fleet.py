"""The demo's cluster on one machine: paced devices, ledgers, relay, and the engines on them.

Devices 0 to ``num_dedicated - 1`` belong to the job; the following ``num_borrowed`` are serving's, each with a serving engine
(in the serving host's process tree) and a rollout engine of another model beside it.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from rose.backends.memory import MemoryTransport
from rose.backends.paced import PROFILES, PacedClock
from rose.coserving.ledger import Ledger
from rose.coserving.lender import Lender
from rose.errors import ConfigError
from rose.interfaces.device import StepWork
from rose.policies.admission import AdmissionConfig, Mode, Slo, arrival_reserve_s
from rose.pool import Borrower, RolloutPool
from rose.reference.demo_config import DemoConfig
from rose.reference.engines import BLOCK_TOKENS, EngineSpec, make_engine
from rose.types import DeviceId, EngineId, JobId

if TYPE_CHECKING:
    from rose.reference.engines import FleetEngine

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a private folder in it
SERVING_MAX_MODEL_LEN = 32_768
SERVING_VOCAB = 512
SERVING_CHUNK_TOKENS = 2048
_DEVICE_BYTES = 80e9
_USABLE_FRACTION = 0.9
_JOB = JobId("demo")
_HEADROOM_BYTES = 2 << 30
_MIN_ROLLOUT_SEQS = 64
_SERVING_SEQS = 256
_WATCHDOG_S = 2.0  # the machine computes for all engines: a slow one is not taken for a frozen one


@attrs.frozen(kw_only=True)
class Models:
    """Checkpoints on disk and what an engine must know of them. KV bytes are those of the real tiny models."""

    policy: Path
    serving: Path
    policy_max_len: int
    policy_kv_bytes: int
    serving_kv_bytes: int


def check_profiles(config: DemoConfig) -> None:
    """Refuse profiles that are not known, and an SLO that the serving profile leaves no room in.

    Raises:
        ConfigError: Names the field and what to do.
    """
    for field in ("serving_profile", "rollout_profile"):
        if (name := getattr(config, field)) not in PROFILES:
            message = f"{field} = {name!r} is no known profile; choose one of {', '.join(sorted(PROFILES))}"
            raise ConfigError(message)
    slo = Slo(ttft_s=config.slo_ttft_ms / 1e3, tpot_s=config.slo_tpot_ms / 1e3)
    chunk = StepWork(num_prefill_tokens=SERVING_CHUNK_TOKENS, prefill_positions=SERVING_CHUNK_TOKENS**2 / 2)
    chunk_s = PROFILES[config.serving_profile].step_s(chunk)
    arrival_reserve_s(AdmissionConfig(slo=slo), chunk_s, SERVING_CHUNK_TOKENS, f"slo_tpot_ms = {config.slo_tpot_ms:g}")


@attrs.define
class Fleet:
    """Everything that runs engines; ``close`` ends it all and removes its shared-memory files."""

    root: Path
    clock: PacedClock
    relay: MemoryTransport
    ledgers: dict[DeviceId, Ledger]
    lender: Lender
    dedicated: list[FleetEngine] = attrs.field(factory=list)
    borrowed: list[FleetEngine] = attrs.field(factory=list)

    @classmethod
    def prepare(cls, config: DemoConfig) -> Self:
        """Make the clock (frozen), the ledgers and the relay; no engine yet.

        Raises:
            TransportError: The relay's port is taken.
        """
        root = Path(tempfile.mkdtemp(prefix="rose-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None))
        try:
            clock = PacedClock.create(root / "clock", k=config.stretch)
            clock.freeze()
            names = [DeviceId(f"shared{i}") for i in range(config.num_borrowed)]
            ledgers = {name: Ledger.create(root / f"{name}.ledger") for name in names}
            relay = MemoryTransport()
            relay.serve(port=config.port)
        except BaseException:
            shutil.rmtree(root)
            raise
        return cls(root, clock, relay, ledgers, Lender(ledgers, clock, mode=Mode(config.admission)))

    async def start(self, config: DemoConfig, models: Models) -> None:
        """Start the rollout engines, two at a time. When one does not start, ``close`` ends those that did."""

        def engine(name: str, device: DeviceId, role: str) -> FleetEngine:
            return make_engine(self._rollout_spec(config, models, name, device, role), clock=self.clock)

        self.dedicated = [engine(f"dedicated{i}", _own_device(i), "alone") for i in range(config.num_dedicated)]
        self.borrowed = [engine(f"borrowed{i}", device, "rollout") for i, device in enumerate(self.ledgers)]
        gate = asyncio.Semaphore(2)

        async def start_one(engine: FleetEngine) -> None:
            async with gate:
                await engine.start()

        async with asyncio.TaskGroup() as group:
            for each in self.engines:
                group.create_task(start_one(each))

    def serving_specs(self, config: DemoConfig, models: Models) -> list[EngineSpec]:
        """Return the serving engines, one a shared device."""
        profile = PROFILES[config.serving_profile]
        num_blocks = int(pool_bytes_of(config) / (profile.kv_bytes_per_token * BLOCK_TOKENS))
        return [
            EngineSpec(
                kind=config.serving_engine,
                engine_id=_serving_engine(i),
                model=str(models.serving),
                max_len=SERVING_MAX_MODEL_LEN,
                max_requests=_SERVING_SEQS,
                chunk_tokens=SERVING_CHUNK_TOKENS,
                kv_tokens=num_blocks * BLOCK_TOKENS,
                kv_token_bytes=models.serving_kv_bytes,
                seed=config.seed,
                rose=self._settings(config, device, "serving", config.serving_profile, 1),
                python=config.sglang_python,
            )
            for i, device in enumerate(self.ledgers)
        ]

    def _rollout_spec(self, config: DemoConfig, models: Models, name: str, device: DeviceId, role: str) -> EngineSpec:
        profile = PROFILES[config.rollout_profile]
        modelled_bytes = profile.kv_bytes_per_token * config.tokens_per_token * BLOCK_TOKENS
        return EngineSpec(
            kind=config.rollout_engine,
            engine_id=name,
            model=str(models.policy),
            max_len=models.policy_max_len,
            max_requests=max(_MIN_ROLLOUT_SEQS, -(-config.num_groups * config.group_size // config.num_dedicated)),
            kv_tokens=int(pool_bytes_of(config) / modelled_bytes) * BLOCK_TOKENS,
            kv_token_bytes=models.policy_kv_bytes,
            seed=config.seed,
            rose=self._settings(config, device, role, config.rollout_profile, config.tokens_per_token),
            python=config.sglang_python,
        )

    def _settings(
        self, config: DemoConfig, device: DeviceId, role: str, profile: str, tokens_per_token: int
    ) -> Mapping[str, Any]:
        settings: dict[str, Any] = {
            "role": role,
            "log_steps": True,
            "device": {
                "kind": "paced",
                "path": str(self.root / f"{device}.device"),
                "clock": self.clock.path,
                "profile": profile,
                "tokens_per_token": tokens_per_token,
            },
        }
        if role != "alone":
            settings["ledger"] = str(self.root / f"{device}.ledger")
            settings["admission"] = {"slo": {"ttft_s": config.slo_ttft_ms / 1e3, "tpot_s": config.slo_tpot_ms / 1e3}}
            settings["memory"] = {"pool_bytes": pool_bytes_of(config), "headroom_bytes": _HEADROOM_BYTES}
            settings["timing"] = {"watchdog_s": _WATCHDOG_S}
        return settings

    def lend_to(self, pool: RolloutPool) -> Borrower:
        """Return a context in which the pool borrows serving's devices."""
        engines = dict(zip(self.ledgers, self.borrowed, strict=True))
        return Borrower(self.lender, pool, engines, job=_JOB, clock=self.clock)

    @property
    def devices(self) -> dict[EngineId, DeviceId]:
        """Return on which device each engine runs."""
        own = {engine.engine_id: _own_device(i) for i, engine in enumerate(self.dedicated)}
        lent = dict(zip((engine.engine_id for engine in self.borrowed), self.ledgers, strict=True))
        serving = {_serving_engine(i): device for i, device in enumerate(self.ledgers)}
        return {**own, **lent, **serving}

    @property
    def engines(self) -> Sequence[FleetEngine]:
        """Return all rollout engines."""
        return [*self.dedicated, *self.borrowed]

    async def close(self) -> None:
        """End the engines and the relay, and remove the shared files."""
        try:
            await asyncio.gather(*(engine.close() for engine in self.engines))
        finally:
            self.relay.close()
            shutil.rmtree(self.root, ignore_errors=True)


def _own_device(number: int) -> DeviceId:
    return DeviceId(f"own{number}")


def _serving_engine(number: int) -> EngineId:
    return EngineId(f"serving{number}")


def pool_bytes_of(config: DemoConfig) -> int:
    """Return the KV pool of one modelled device that holds both models' weights, in bytes."""
    weights = PROFILES[config.serving_profile].weight_bytes + PROFILES[config.rollout_profile].weight_bytes
    return int(_DEVICE_BYTES * _USABLE_FRACTION - weights)
